"""Uploads that are dangerous to open."""

import io
import pickle
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

from PIL import Image


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def huge_png(path: Path, side: int = 20_000) -> Path:
    """A valid PNG with one bit per pixel: 50 kB as a file, 50 MB decoded, 1.2 GB as RGB."""
    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    line = b"\0" + bytes((side + 7) // 8)
    packer = zlib.compressobj(9)
    body = b"".join(packer.compress(line * 1000) for _ in range(side // 1000)) + packer.flush()
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", body) + _chunk(b"IEND", b""))
    return path


def truncated_jpeg(path: Path) -> Path:
    stream = io.BytesIO()
    Image.effect_noise((300, 300), 60).save(stream, "JPEG")
    path.write_bytes(stream.getvalue()[: len(stream.getvalue()) // 3])
    return path


def svg_with_script(path: Path) -> Path:
    path.write_text('<svg xmlns="http://www.w3.org/2000/svg"><script>document.title = "taken"</script></svg>')
    return path


def text_as_png(path: Path) -> Path:
    path.write_text("this is a letter, not a picture\n" * 20)
    return path


class Touch:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., None], tuple[Path]]:
        return Path.touch, (self.path,)


def pickled_weights(path: Path, touched: Path) -> Path:
    path.write_bytes(pickle.dumps(Touch(touched)))
    return path


#: name of the file → function that writes it
UPLOADS: dict[str, Callable[[Path], Path]] = {
    "huge.png": huge_png,
    "cut.jpg": truncated_jpeg,
    "script.svg": svg_with_script,
    "letter.png": text_as_png,
}
