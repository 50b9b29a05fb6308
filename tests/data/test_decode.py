"""Images are decoded upright and RGB; files that cannot be decoded raise an ImageError of one line."""

import os
import pickle
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from eigengrain.data import ImageSet, decode
from eigengrain.data.datasets.layout import images_below
from eigengrain.data.decode import open_image
from eigengrain.errors import ImageError
from eigengrain.text import printable


def photo(path, size=(60, 50), mode="RGB", **options):
    """Save a random picture of blocks, smooth enough for every format."""
    blocks = np.random.default_rng(0).integers(0, 256, (5, 6, 3), dtype=np.uint8)
    image = Image.fromarray(blocks).resize(size, Image.Resampling.NEAREST).convert(mode)
    image.save(path, **options)
    return image


#: position at which the stored pixel (row, column) of an H × W image is shown, by EXIF orientation
SEEN_AT = {
    1: lambda r, c, h, w: (r, c),
    2: lambda r, c, h, w: (r, w - 1 - c),
    3: lambda r, c, h, w: (h - 1 - r, w - 1 - c),
    4: lambda r, c, h, w: (h - 1 - r, c),
    5: lambda r, c, h, w: (c, r),
    6: lambda r, c, h, w: (c, h - 1 - r),
    7: lambda r, c, h, w: (w - 1 - c, h - 1 - r),
    8: lambda r, c, h, w: (w - 1 - c, r),
}


@pytest.mark.parametrize("name", ["turned.png", "turned.tif", "turned.jpg", "turned.webp"])
@pytest.mark.parametrize("orientation", list(SEEN_AT))
def test_every_exif_orientation(tmp_path, name, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"turned.jpg": {"quality": 95}, "turned.webp": {"lossless": True}}.get(name, {})
    stored = np.asarray(photo(tmp_path / name, exif=exif, **options)).astype(int)
    h, w = stored.shape[:2]
    expected = np.zeros((w, h, 3) if orientation > 4 else (h, w, 3), int)
    for r in range(h):
        for c in range(w):
            expected[SEEN_AT[orientation](r, c, h, w)] = stored[r, c]
    image = open_image(tmp_path / name)
    assert image.size == expected.shape[1::-1]
    assert np.abs(np.asarray(image) - expected).mean() <= (8 if name.endswith("jpg") else 0)


def test_damaged_metadata_of_an_intact_image(tmp_path):
    stored = photo(tmp_path / "a.png", exif=b"Exif\0\0MM\0*\0\0\0\x08\0\x05garbage")
    assert np.array_equal(np.asarray(open_image(tmp_path / "a.png")), np.asarray(stored))


@pytest.mark.parametrize(
    "mode, suffix", [("L", "png"), ("P", "png"), ("P", "gif"), ("1", "png"), ("CMYK", "jpg"), ("LA", "png"), ("L", "pgm")]
)
def test_other_modes_become_rgb(tmp_path, mode, suffix):
    path = tmp_path / f"image.{suffix}"
    stored = photo(path, mode=mode)
    image = open_image(str(path))
    assert image.mode == "RGB"
    assert image.size == (60, 50)
    difference = np.asarray(image).astype(int) - np.asarray(stored.convert("RGB")).astype(int)
    assert np.abs(difference).mean() < (10 if suffix == "jpg" else 1e-9)


def test_transparent_and_16_bit_images(tmp_path):
    colours = np.random.default_rng(0).integers(0, 256, (9, 8, 4), dtype=np.uint8)
    Image.fromarray(colours).save(tmp_path / "rgba.png")
    assert np.array_equal(np.asarray(open_image(tmp_path / "rgba.png")), colours[..., :3])
    deep = (np.arange(256, dtype=np.uint16) * 256 + 77).reshape(16, 16)  # the upper 8 bits count from 0 to 255
    for name in ("deep.png", "deep.tif", "deep.pgm"):
        Image.fromarray(deep).save(tmp_path / name)
        assert np.array_equal(np.asarray(open_image(tmp_path / name))[..., 0], np.arange(256).reshape(16, 16))


@pytest.mark.parametrize(
    "name, options", [("a.jpg", {"quality": 95}), ("a.png", {}), ("a.tif", {}), ("p.png", {"mode": "P"})]
)
@pytest.mark.parametrize("orientation", [1, 6])
def test_large_images_are_read_at_a_fraction_of_their_size(tmp_path, monkeypatch, name, options, orientation):
    monkeypatch.setattr(open_image, "__defaults__", (60 * 50,))  # pixels that are kept
    exif = Image.Exif()
    exif[0x0112] = orientation
    whole = photo(tmp_path / name, (239, 199), **options, exif=exif).convert("RGB")  # one pixel too small for 1/4
    expected = whole.reduce(2)
    expected = expected.transpose(Image.Transpose.ROTATE_270) if orientation == 6 else expected
    image = open_image(tmp_path / name)
    assert (image.mode, image.size) == ("RGB", expected.size)
    assert np.abs(np.asarray(image).astype(int) - np.asarray(expected)).mean() < 2
    photo(tmp_path / name, (240, 200), **options)
    assert open_image(tmp_path / name).size == (60, 50)
    photo(tmp_path / name, (119, 99), **options)
    assert open_image(tmp_path / name).size == (119, 99)


@pytest.mark.parametrize("orientation", list(SEEN_AT))
def test_heic_photographs(tmp_path, orientation):
    pytest.importorskip("pillow_heif")
    decode.supported_formats()  # registers the encoder too
    exif = Image.Exif()
    exif[0x0112] = orientation
    photo(tmp_path / "a.heic", exif=exif.tobytes(), quality=95)  # as bytes it is also stored as a turn of the image
    photo(tmp_path / "a.jpg", exif=exif, quality=95)
    image, expected = open_image(tmp_path / "a.heic"), open_image(tmp_path / "a.jpg")
    assert (image.mode, image.size) == ("RGB", expected.size)
    assert np.abs(np.asarray(image).astype(int) - np.asarray(expected)).mean() < 8
    (tmp_path / "a.heic").write_bytes((tmp_path / "a.heic").read_bytes()[:-200])
    with pytest.raises(ImageError):
        open_image(tmp_path / "a.heic")


def test_heic_without_its_decoder_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setattr(decode, "supported_formats", lambda: ["PNG"])
    (tmp_path / "a.heic").write_bytes(b"\0\0\0\x18ftypheic" + bytes(20))
    with pytest.raises(ImageError) as error:
        open_image(tmp_path / "a.heic")
    assert "eigengrain[heic]" in error.value.problem
    (tmp_path / "b.heic").write_bytes(bytes(40))
    with pytest.raises(ImageError) as error:
        open_image(tmp_path / "b.heic")
    assert "eigengrain[heic]" not in error.value.problem


def test_a_pillow_without_one_of_the_formats(tmp_path, monkeypatch):
    monkeypatch.setattr(decode, "FORMATS", ("NOT-BUILT-IN", "PNG"))
    photo(tmp_path / "a.png")
    assert open_image(tmp_path / "a.png").size == (60, 50)
    photo(tmp_path / "a.jpg")
    with pytest.raises(ImageError):
        open_image(tmp_path / "a.jpg")


def test_a_file_that_may_not_be_read(tmp_path, monkeypatch):
    photo(tmp_path / "a.png")

    def denied(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Image, "open", denied)
    with pytest.raises(ImageError):
        open_image(tmp_path / "a.png")


def write_header(path, width, height):
    """Write a PNG of a few bytes whose header claims many pixels."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b""))


def cut(path):
    photo(path)
    path.write_bytes(path.read_bytes()[:-200])


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("gone.png", lambda path: path.symlink_to("nowhere.png")),
        ("folder.png", lambda path: path.mkdir()),
        ("pipe.png", os.mkfifo),  # opening it would block for ever
        ("empty.jpg", lambda path: path.touch()),
        ("text.png", lambda path: path.write_text("no image")),
        ("cut.jpg", cut),
        ("cut.webp", cut),
        ("huge.png", lambda path: write_header(path, 50_000, 50_000)),
        ("narrow.png", lambda path: write_header(path, 20_000, 1)),
        ("float.tif", lambda path: Image.fromarray(np.zeros((8, 8), dtype=np.float32)).save(path)),
    ],
)
def test_files_that_cannot_be_decoded(tmp_path, name, make):
    path = tmp_path / name
    make(path)
    with pytest.raises(ImageError) as alone:
        open_image(path)
    assert str(alone.value) == alone.value.problem
    assert str(path) not in alone.value.problem
    assert alone.value.truncated == (name == "cut.jpg")
    with pytest.raises(ImageError) as named:  # in a data set, the message contains the path
        ImageSet("x", "train", ["a"], [0], [path])[0]
    assert (named.value.path, named.value.problem) == (path, alone.value.problem)
    assert "\n" not in str(named.value)
    again = pickle.loads(pickle.dumps(named.value))  # as worker processes send it
    assert (str(again), vars(again)) == (str(named.value), vars(named.value))


def test_reasons_are_specific(tmp_path):
    """The one place that fixes the words of these messages."""
    reasons = {
        "gone.png": "the file does not exist",
        "empty.jpg": "the file is empty",
        "narrow.png": "refused: 20000 × 1 pixels, one side is more than 100 times the other",
    }
    (tmp_path / "empty.jpg").touch()
    write_header(tmp_path / "narrow.png", 20_000, 1)
    for name, reason in reasons.items():
        with pytest.raises(ImageError) as error:
            open_image(tmp_path / name)
        assert error.value.problem == reason


def test_postscript_is_not_interpreted(tmp_path):
    (tmp_path / "a.jpg").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n")
    with pytest.raises(ImageError):
        open_image(tmp_path / "a.jpg")


def test_only_disturbing_characters_are_escaped():
    for name in ("Screenshot at 3.04\u202fPM.png", "می\u200cخواهم.png", "a\xa0b.png", "👩\u200d🔬.png", "鳥.png"):
        assert printable(name) == name
    assert printable("a\nb\x1b[31m\u2028\udce9\u202egnp.exe") == "a\\nb\\x1b[31m\\u2028\\udce9\\u202egnp.exe"


def test_images_below_a_folder(tmp_path):
    for name in ("b/2.JPG", "b/1.png", "a.webp", "notes.txt", ".hidden.png", "._a.jpg", ".cache/x.png", "c/d/e.jp2"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "b" / "round").symlink_to(tmp_path)
    paths = [os.path.relpath(path, tmp_path) for path in images_below(str(tmp_path))]
    assert paths == ["a.webp", "b/1.png", "b/2.JPG", "c/d/e.jp2"]
