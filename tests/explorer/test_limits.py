import os

import pytest
from PIL import Image

from eigengrain.data.decode import ImageError
from eigengrain.explorer.limits import MAX_BYTES, open_upload
from explorer.hostile import UPLOADS


@pytest.mark.parametrize("name", UPLOADS)
def test_hostile_uploads_are_refused(tmp_path, name):
    make, said = UPLOADS[name]
    with pytest.raises(ImageError, match=said) as caught:
        open_upload(make(tmp_path / name), tmp_path)
    assert str(tmp_path) not in str(caught.value)


def test_more_pixels_than_allowed_are_refused_before_they_are_unpacked(tmp_path, monkeypatch):
    Image.new("L", (8000, 6000)).save(tmp_path / "large.png")
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("unpacked"))
    with pytest.raises(ImageError, match="8000 × 6000 pixels, more than 40 million"):
        open_upload(tmp_path / "large.png", tmp_path)


def test_large_files_are_refused(tmp_path):
    with (tmp_path / "large.png").open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(ImageError, match="larger than 10 MB"):
        open_upload(tmp_path / "large.png", tmp_path)


def test_only_uploads_are_opened(tmp_path):
    folder = tmp_path / "uploads"
    folder.mkdir()
    outside = tmp_path / "private.png"
    Image.new("RGB", (10, 10)).save(outside)
    os.symlink(outside, folder / "link.png")
    for path in (outside, folder / "link.png", folder / ".." / "private.png", folder, folder / "none.png"):
        with pytest.raises(ImageError, match="not an uploaded file"):
            open_upload(path, folder)


def test_a_good_image_is_opened(tmp_path):
    Image.new("RGBA", (30, 20), (255, 0, 0, 128)).save(tmp_path / "a.png")
    image = open_upload(tmp_path / "a.png", tmp_path)
    assert (image.mode, image.size) == ("RGB", (30, 20))
