"""Files for results are checked before the work."""

import errno
import tempfile

import pytest

from eigengrain.errors import FileError
from eigengrain.files import writable, write_csv


def test_only_the_folder_is_created(tmp_path):
    assert writable(tmp_path / "a" / "b.csv") == tmp_path / "a" / "b.csv"
    assert list((tmp_path / "a").iterdir()) == []


def test_an_existing_file_is_not_changed(tmp_path):
    (tmp_path / "b.csv").write_text("kept")
    assert writable(tmp_path / "b.csv").read_text() == "kept"


def test_what_cannot_be_written_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    for place in (tmp_path, tmp_path / "file" / "b.csv"):
        with pytest.raises(FileError) as error:
            writable(place)
        assert (error.value.path, error.value.verb) == (place, "write")

    def refuse(**_):
        raise PermissionError(errno.EACCES, "Permission denied")

    # a folder that claims to be writable, as all folders do to an administrator, and is not
    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    with pytest.raises(FileError) as error:
        writable(tmp_path / "b.csv")
    assert error.value.path == tmp_path / "b.csv"


def test_rows_are_written_with_the_keys_of_the_first(tmp_path):
    write_csv(tmp_path / "a.csv", [{"name": "a,b", "n": 1}, {"name": "c", "n": None}])
    assert (tmp_path / "a.csv").read_text() == 'name,n\n"a,b",1\nc,\n'
