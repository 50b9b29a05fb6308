"""Checkpoints: the old one survives whatever happens to the new one, and nothing in a file is run."""

import pickle
import resource

import pytest
import torch

from eigengrain.training import checkpoint
from eigengrain.training.checkpoint import CheckpointError, keep_copy, read_checkpoint, write_atomically, write_checkpoint


@pytest.fixture
def small_disk():
    """Files may not grow beyond 64 KiB: writing more fails as on a full disk."""
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


def test_a_full_disk_is_one_line_and_the_previous_checkpoint_survives(tmp_path, small_disk):
    path = tmp_path / "last.pt"
    write_checkpoint(path, {"x": torch.zeros(10)})
    with pytest.raises(CheckpointError, match="the one before it is unharmed; free some space") as error:
        write_checkpoint(path, {"x": torch.zeros(100_000)})
    assert "\n" not in str(error.value)
    assert read_checkpoint(path)["x"].shape == (10,)
    assert [file.name for file in tmp_path.iterdir()] == ["last.pt"]  # no rest of the failed one


def test_a_write_that_dies_half_way_leaves_the_old_file(tmp_path):
    path = tmp_path / "file"
    write_atomically(path, lambda file: file.write(b"old"))

    def dies(file):
        file.write(b"ne")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, dies)
    assert path.read_bytes() == b"old"


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.999])
def test_a_part_of_a_file_is_refused(tmp_path, share):
    path = tmp_path / "last.pt"
    write_checkpoint(path, {"x": torch.randn(1000)})
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(CheckpointError, match="damaged or only a part"):
        read_checkpoint(path)


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


def test_other_files_and_none_are_refused(tmp_path):
    torch.save({"state_dict": {}}, tmp_path / "other.pt")
    with pytest.raises(CheckpointError, match="not a checkpoint of this version"):
        read_checkpoint(tmp_path / "other.pt")
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        read_checkpoint(tmp_path / "none.pt")


def test_a_copy_stays_when_its_source_is_replaced_or_damaged(tmp_path):
    last, best = tmp_path / "last.pt", tmp_path / "best.pt"
    for number in (1, 2):
        write_checkpoint(last, {"number": number})
        if number == 1:
            keep_copy(last, best)
    assert (read_checkpoint(last)["number"], read_checkpoint(best)["number"]) == (2, 1)
    keep_copy(last, best)
    with last.open("r+b") as file:
        file.truncate(100)
    assert read_checkpoint(best)["number"] == 2
