"""Read the arrays of a NumPy ``.npz`` file without running code in it, and without more memory than the file has bytes."""

import math
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy

from eigengrain.errors import FileError
from eigengrain.files import check_file

#: readers of the header of an array by the version of its format
_HEADERS: dict[tuple[int, int], Any] = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


def read_arrays(file: Path) -> dict[str, np.ndarray[Any, np.dtype[Any]]]:
    """Read the named arrays of real numbers.

    The size of each array is compared with the file before memory is used for it.

    Raises:
        FileError: if it is not such a file or only a part of one, or its arrays are compressed or not of real numbers.
    """
    damaged = "it is not an .npz file, or only a part of one"
    try:
        with check_file(file).open("rb") as content, zipfile.ZipFile(content) as archive:
            entries = [entry for entry in archive.infolist() if not entry.is_dir()]
            if any(entry.compress_type for entry in entries):
                raise FileError(file, "its arrays are compressed: save them again with numpy.savez")
            if sum(entry.file_size for entry in entries) > file.stat().st_size:
                raise FileError(file, f"{damaged}: its arrays claim more bytes than the file has")
            return {entry.filename.removesuffix(".npy"): _read_array(archive, entry, file) for entry in entries}
    except FileError:
        raise
    except Exception as error:  # a damaged file can fail in any way
        raise FileError(file, f"{damaged} ({type(error).__name__})") from error


def _read_array(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, file: Path) -> np.ndarray[Any, np.dtype[Any]]:
    with archive.open(entry) as content:
        shape, columns_first, dtype = _HEADERS[npy.read_magic(content)](content)
        if dtype.kind not in "fiu" or dtype.itemsize > 8 or any(type(side) is not int or side < 0 for side in shape):
            raise FileError(file, f"its array {entry.filename[:100]!r} is not of real numbers ({dtype})")
        values = content.read()
        if len(values) != math.prod(shape) * dtype.itemsize:
            raise FileError(file, f"its array {entry.filename[:100]!r} claims another number of values than the file has")
    # a copy that can be written, in the byte order of this machine
    array = np.frombuffer(values, dtype).astype(dtype.newbyteorder("="))
    return array.reshape(shape, order="F" if columns_first else "C")
