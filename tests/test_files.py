"""Files for results: whether they can be written is known before the work."""

import tempfile

import pytest

from eigengrain.files import writable


def test_the_folder_is_made_and_nothing_else(tmp_path):
    assert writable(tmp_path / "a" / "b.csv") == tmp_path / "a" / "b.csv"
    assert list((tmp_path / "a").iterdir()) == []


def test_a_file_that_is_there_stays_as_it_is(tmp_path):
    (tmp_path / "b.csv").write_text("kept")
    assert writable(tmp_path / "b.csv").read_text() == "kept"


def test_what_cannot_be_written_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    for place in (tmp_path, tmp_path / "file" / "b.csv"):
        with pytest.raises(ValueError, match="with --out"):
            writable(place)

    def refuses(**_):
        raise PermissionError

    # a folder that says it can be written, as folders do to an administrator, and cannot
    monkeypatch.setattr(tempfile, "TemporaryFile", refuses)
    with pytest.raises(ValueError, match=r"cannot write the file .*b\.csv: choose another place with --out"):
        writable(tmp_path / "b.csv")
