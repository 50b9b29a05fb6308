"""The benchmark of the loader: both loaders deliver the same images, and the results are written."""

import csv

import pytest
import torch
from benchmarks.loader import LoaderBench, make_ours, make_plain, measure_loaders, run, write_jpegs

from eigengrain.errors import ArgumentError

SMALL = {"images": 12, "size": 32, "batch_size": 5, "repeats": 1}


def test_both_loaders_deliver_the_same_images(tmp_path):
    write_jpegs(tmp_path, 12, 32)
    config = LoaderBench(**SMALL)

    def statistics(loader):
        images = torch.cat([images for images, _ in loader])
        # a flipped image has the same sum and deviation
        return torch.tensor(sorted((image.sum().item(), image.std().item()) for image in images.double()))

    ours, theirs = statistics(make_ours(tmp_path, config)), statistics(make_plain(tmp_path, config))
    assert len(ours) == 12
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)


@pytest.mark.parametrize("workers", [0, 1])
def test_rows(workers):
    ours, reference = measure_loaders(LoaderBench(**SMALL, workers=workers))
    assert (ours["loader"], reference["loader"]) == ("eigengrain", "torchvision")
    assert reference["ratio_to_torchvision"] == 1
    speeds = ours["images_per_second"] / reference["images_per_second"]
    assert ours["ratio_to_torchvision"] == pytest.approx(speeds, rel=1e-2)


def test_run_writes_the_environment(tmp_path):
    run(LoaderBench(**SMALL, out=str(tmp_path / "loader.csv")))
    with (tmp_path / "loader.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["loader"] for row in rows] == ["eigengrain", "torchvision"]
    assert rows[0]["torch"] == torch.__version__


def test_options_are_checked():
    with pytest.raises(ArgumentError) as error:
        LoaderBench(repeats=0)
    assert (error.value.argument, error.value.value) == ("repeats", 0)
