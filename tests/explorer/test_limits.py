import os

import pytest
from PIL import Image

from eigengrain.data.decode import open_image
from eigengrain.errors import ArgumentError, ImageError
from eigengrain.explorer.limits import MAX_BYTES, BoundedCache, open_upload
from explorer.hostile import UPLOADS


@pytest.mark.parametrize("name", UPLOADS)
def test_hostile_uploads_are_refused_without_their_path(hostile_files, name):
    file = hostile_files[name]
    with pytest.raises(ImageError) as caught:
        open_upload(file, file.parent)
    assert str(file.parent) not in str(caught.value)


def test_too_many_pixels_are_refused_before_decoding(tmp_path, monkeypatch):
    Image.new("1", (13360, 13360)).save(tmp_path / "large.png")  # between our limit and Pillow's
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("decoded"))
    with pytest.raises(ImageError):
        open_upload(tmp_path / "large.png", tmp_path)


def test_a_photograph_of_48_million_pixels_is_opened_as_predict_opens_it(tmp_path):
    Image.new("L", (8000, 6000), 90).save(tmp_path / "large.jpg")
    image = open_upload(tmp_path / "large.jpg", tmp_path)
    assert (image.mode, image.size) == ("RGB", (4000, 3000))
    assert image == open_image(tmp_path / "large.jpg")


def test_large_files_are_refused(tmp_path):
    with (tmp_path / "large.png").open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(ArgumentError) as caught:
        open_upload(tmp_path / "large.png", tmp_path)
    assert caught.value.argument == "file"


def test_only_uploads_are_opened(tmp_path):
    folder = tmp_path / "uploads"
    folder.mkdir()
    outside = tmp_path / "private.png"
    Image.new("RGB", (10, 10)).save(outside)
    os.symlink(outside, folder / "link.png")
    for path in (outside, folder / "link.png", folder / ".." / "private.png", folder, folder / "none.png"):
        with pytest.raises(ArgumentError) as caught:
            open_upload(path, folder)
        assert caught.value.argument == "path"
        assert str(tmp_path) not in str(caught.value)


def test_a_valid_image_is_opened_as_rgb(tmp_path):
    Image.new("RGBA", (30, 20), (255, 0, 0, 128)).save(tmp_path / "a.png")
    image = open_upload(tmp_path / "a.png", tmp_path)
    assert (image.mode, image.size) == ("RGB", (30, 20))


def test_the_cache_drops_the_least_recently_used():
    cache = BoundedCache[bytes](10, len)
    cache.put("a", bytes(4))
    cache.put("b", bytes(4))
    cache.get("a")
    cache.put("c", bytes(4))
    assert cache.get("b") is None
    assert cache.get("a") == bytes(4)
    cache.put("a", bytes(1))  # replaced, not counted twice
    cache.put("d", bytes(5))
    assert cache.get("a") == bytes(1)
    assert cache.get("c") == bytes(4)
