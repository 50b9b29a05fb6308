"""The loader's benchmark: it measures equal work, and writes what it measured."""

import csv
import subprocess
import sys

import pytest
import torch
from benchmarks.loader import LoaderBench, measure, our_loader, plain_loader, run, write_jpegs

SMALL = {"images": 12, "size": 32, "batch_size": 5, "repeats": 1}


def test_both_deliver_the_same_images(tmp_path):
    write_jpegs(tmp_path, 12, 32)
    config = LoaderBench(**SMALL)

    def unflipped(loader):
        images = torch.cat([images for images, _ in loader])
        # a mirrored image counts as the image itself
        return torch.tensor(sorted((image.sum().item(), image.std().item()) for image in images.double()))

    ours, theirs = unflipped(our_loader(tmp_path, config)), unflipped(plain_loader(tmp_path, config))
    assert len(ours) == 12
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)


@pytest.mark.parametrize("workers", [0, 1])
def test_rows(workers):
    ours, reference = measure(LoaderBench(**SMALL, workers=workers))
    assert (ours["loader"], reference["loader"]) == ("eigengrain", "torchvision")
    assert reference["ratio_to_torchvision"] == 1
    speeds = ours["images_per_second"] / reference["images_per_second"]
    assert ours["ratio_to_torchvision"] == pytest.approx(speeds, rel=1e-2)


def test_run_writes_the_environment(tmp_path, capsys):
    run(LoaderBench(**SMALL, out=str(tmp_path / "loader.csv")))
    with (tmp_path / "loader.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["loader"] for row in rows] == ["eigengrain", "torchvision"]
    assert rows[0]["torch"] == torch.__version__
    assert "images/s" in capsys.readouterr().out


def test_options():
    with pytest.raises(ValueError, match="--repeats must be at least 1, got 0"):
        LoaderBench(repeats=0)
    code = "import sys; import benchmarks.loader; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
