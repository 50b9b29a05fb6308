"""Checkpoints: a failed write leaves the old file unchanged, and no code in a file is run."""

import pickle
import resource

import pytest
import torch

from eigengrain.errors import CheckpointError
from eigengrain.training import checkpoint
from eigengrain.training.checkpoint import copy_atomically, read_checkpoint, write_atomically, write_checkpoint


@pytest.fixture
def small_disk():
    """Limit files to 64 KiB: writing more fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_tensors_and_plain_values_come_back(tmp_path):
    state = {"x": torch.arange(3), "list": [1, 2.5, "three", None, True], "inf": float("inf"), 7: {"deep": (1, 2)}}
    write_checkpoint(tmp_path / "a.pt", state)
    back = read_checkpoint(tmp_path / "a.pt")
    assert torch.equal(back.pop("x"), state.pop("x"))
    assert back == {**state, "format": checkpoint.FORMAT}
    assert [file.name for file in tmp_path.iterdir()] == ["a.pt"]


def test_the_previous_checkpoint_survives_a_full_disk(tmp_path, small_disk):
    path = tmp_path / "last.pt"
    write_checkpoint(path, {"x": torch.zeros(10)})
    with pytest.raises(CheckpointError) as error:
        write_checkpoint(path, {"x": torch.zeros(100_000)})
    assert (error.value.path, error.value.verb) == (path, "write")
    assert "\n" not in str(error.value)
    assert read_checkpoint(path)["x"].shape == (10,)
    assert [file.name for file in tmp_path.iterdir()] == ["last.pt"]  # the failed one leaves nothing


def test_an_interrupted_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "file"
    write_atomically(path, lambda file: file.write(b"old"))

    def interrupted(file):
        file.write(b"ne")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, interrupted)
    assert path.read_bytes() == b"old"


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.999])
def test_an_incomplete_file_is_refused(tmp_path, share):
    path = tmp_path / "last.pt"
    write_checkpoint(path, {"x": torch.randn(1000)})
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(CheckpointError) as error:
        read_checkpoint(path)
    assert (error.value.path, error.value.verb) == (path, "read")


class Evil:
    def __reduce__(self):
        return (print, ("run",))


def test_code_in_a_file_is_not_run(tmp_path, capsys):
    path = tmp_path / "last.pt"
    torch.save({"format": 1, "x": Evil()}, path)
    with pytest.raises(CheckpointError):
        read_checkpoint(path)
    path.write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError):
        read_checkpoint(path)
    assert capsys.readouterr().out == ""


def test_other_and_missing_files_are_refused(tmp_path):
    torch.save({"state_dict": {}}, tmp_path / "other.pt")
    for name in ("other.pt", "missing.pt"):
        with pytest.raises(CheckpointError) as error:
            read_checkpoint(tmp_path / name)
        assert error.value.path == tmp_path / name


def test_a_copy_is_independent_of_its_source(tmp_path):
    last, best = tmp_path / "last.pt", tmp_path / "best.pt"
    for number in (1, 2):
        write_checkpoint(last, {"number": number})
        if number == 1:
            copy_atomically(last, best)
    assert (read_checkpoint(last)["number"], read_checkpoint(best)["number"]) == (2, 1)
    copy_atomically(last, best)
    with last.open("r+b") as file:
        file.truncate(100)
    assert read_checkpoint(best)["number"] == 2
