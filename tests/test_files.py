"""Small files of a user are read within limits; files for results are checked before the work."""

import errno
import os
import tempfile

import pytest

from eigengrain.errors import FileError
from eigengrain.files import read_json, read_text, writable, write_csv


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
    for place in (tmp_path / "file" / "b.csv", tmp_path / "file" / "deep" / "b.csv"):
        with pytest.raises(FileError) as error:
            writable(place)
        assert error.value.problem.startswith(f"{tmp_path / 'file'} ")  # which name is in the way

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


def test_text_is_read_up_to_a_limit(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes("\ufeffZaunkönig".encode())
    assert read_text(file, limit=13) == "Zaunkönig"
    with pytest.raises(FileError) as error:
        read_text(file, limit=12)
    assert error.value.path == file


def test_only_regular_files_are_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")  # opening it would wait for ever
    (tmp_path / "link").symlink_to("/dev/zero")
    (tmp_path / "bytes").write_bytes(b"\xff\x00")
    for place in (tmp_path, tmp_path / "pipe", tmp_path / "link", tmp_path / "missing", tmp_path / "bytes", "null\0byte"):
        with pytest.raises(FileError):
            read_text(place)


def test_json_is_read_and_other_text_is_refused(tmp_path):
    file = tmp_path / "a.json"
    file.write_text('{"a": [1, null]}')
    assert read_json(file) == {"a": [1, None]}
    for text in ("{", "[" * 20_000 + "]" * 20_000, "9" * 10_000, ""):
        file.write_text(text)
        with pytest.raises(FileError) as error:
            read_json(file)
        assert error.value.path == file
