"""The batches of a DeviceCache are those of the loader, and resize_all gives what torch and Pillow give."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.functional import interpolate

from data.batches import COUNT, STD, images, same
from eigengrain.data import DeviceCache, ImageSet, make_loader
from eigengrain.data.device_cache import resize_all
from eigengrain.errors import ArgumentError, BatchError


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("paper", {}),
        ("scripts", {}),
        ("scripts", {"keep_aspect": False}),
        ("imagenet", {}),
        ("imagenet", {"keep_aspect": False}),
    ],
)
def test_batches_equal_those_of_the_loader(files, kind, options, train):
    plain = make_loader(images(files, kind, train, **options), 5, train=train, seed=7)
    cached = DeviceCache(images(files, kind, train, **options), 5, train=train, seed=7, device="cpu", workers=0)
    assert len(cached) == len(plain)
    for epoch, start in ((0, 0), (2, 1)):
        plain.set_epoch(epoch, start)
        cached.set_epoch(epoch, start)
        assert same(plain, cached)


@pytest.mark.parametrize("keep_aspect", [True, False])
def test_crops_of_random_size_equal_those_of_the_loader_up_to_rounding(files, keep_aspect):
    def cropped():
        return images(files, "imagenet", scale=(0.08, 1.0), keep_aspect=keep_aspect)

    plain = make_loader(cropped(), 5, train=True, seed=7)
    cached = DeviceCache(cropped(), 5, train=True, seed=7, device="cpu")
    for epoch in (0, 2):
        plain.set_epoch(epoch)
        cached.set_epoch(epoch)
        for (x, y), (a, b) in zip(plain, cached, strict=True):
            levels = ((a - x) * torch.tensor(STD).view(3, 1, 1) * 255).abs()
            assert levels.max() < 1.01
            assert (levels > 0.5).float().mean() < 0.2
            assert torch.equal(y, b)


def test_images_are_decoded_once(files, monkeypatch):
    opened = []
    original = ImageSet.image
    monkeypatch.setattr(ImageSet, "image", lambda self, index: opened.append(index) or original(self, index))
    cached = DeviceCache(images(files, "paper"), 5, train=True, device="cpu")
    assert cached.nbytes == COUNT * 3 * 21 * 21
    for epoch in range(3):
        cached.set_epoch(epoch)
        list(cached)
    assert sorted(opened) == list(range(COUNT))


def test_images_on_the_cpu_are_not_in_shared_memory(files):
    """Tensors from workers are: a cache of them would fill the 64 MB of a container, and keep one file open per batch."""
    cached = DeviceCache(images(files, "paper"), 5, train=True, device="cpu", workers=1)
    assert not any(image.is_shared() for image in cached._images.values())


def test_ranks_store_their_own_samples(files):
    parts = [
        DeviceCache(images(files, train=False), 5, train=False, device="cpu", rank=rank, world_size=2, workers=rank)
        for rank in (0, 1)
    ]
    whole = torch.cat([x for x, _ in make_loader(images(files, train=False), 5, train=False)])
    joined = torch.cat([x for part in parts for x, _ in part])
    assert joined.shape == whole.shape
    assert sorted(joined.flatten(1).sum(1).tolist()) == sorted(whole.flatten(1).sum(1).tolist())
    assert sum(part.nbytes for part in parts) < 1.2 * COUNT * 3 * 28 * 28


def test_unsupported_transforms_are_refused(files):
    bicubic = images(files, "imagenet", scale=(0.3, 1.0), interpolation="bicubic")
    different_sizes = images(files, "none", train=False)
    for dataset in (images(files, "timm"), bicubic):
        with pytest.raises(ArgumentError) as error:
            DeviceCache(dataset, 5, train=True, device="cpu")
        assert error.value.argument == "dataset"
    with pytest.raises(BatchError):
        next(iter(DeviceCache(different_sizes, 5, train=False, device="cpu")))


def test_caches_can_share_decoded_files(files, monkeypatch):
    decoded = {}
    DeviceCache(images(files, "paper").subset(range(20)), 5, train=True, device="cpu", decoded=decoded)
    opened = []
    original = ImageSet.image
    monkeypatch.setattr(ImageSet, "image", lambda self, index: opened.append(self.path(index)) or original(self, index))
    again = DeviceCache(images(files, "paper", train=False), 5, train=False, device="cpu", decoded=decoded)
    assert opened == files[20:]
    assert same(make_loader(images(files, "paper", train=False), 5, train=False), again)
    opened.clear()
    DeviceCache(images(files, "scripts"), 5, train=True, device="cpu", decoded=decoded)
    assert len(opened) == COUNT  # images of another preparation are decoded again


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_batches_on_a_gpu(files):
    cached = DeviceCache(images(files), 5, train=True, seed=7, device="cuda")
    plain = make_loader(images(files), 5, train=True, seed=7)
    for (x, y), (a, b) in zip(cached, plain, strict=True):
        assert x.is_cuda
        torch.testing.assert_close(x.cpu(), a, rtol=0, atol=1e-6)
        assert torch.equal(y.cpu(), b)


#: larger and smaller than the result, in both directions and in one, and equal
SIZES = [(50, 83), (11, 7), (28, 28), (1, 60), (29, 27), (200, 3)]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"))]


def random_images():
    generator = np.random.default_rng(0)
    return [torch.from_numpy(generator.integers(0, 256, (3, *size), dtype=np.uint8)) for size in SIZES]


@pytest.mark.parametrize("device", DEVICES)
def test_resize_all_equals_torch(device):
    images = [image.to(device) for image in random_images()]
    for image, resized in zip(images, resize_all(images, 28), strict=True):
        expected = interpolate(image[None].double(), (28, 28), mode="bilinear", antialias=True)[0]
        torch.testing.assert_close(resized.double(), expected, rtol=0, atol=0.501)


def test_resize_all_equals_pillow_up_to_rounding():
    for image, resized in zip(random_images(), resize_all(random_images(), 28), strict=True):
        expected = Image.fromarray(image.permute(1, 2, 0).numpy()).resize((28, 28), Image.Resampling.BILINEAR)
        assert np.abs(np.asarray(expected).transpose(2, 0, 1).astype(int) - resized.numpy()).max() <= 1


def test_resize_all_treats_images_independently():
    images = random_images()
    alone = [resize_all([image], 28)[0].int() for image in images]
    assert (resize_all(images, 28).int() - torch.stack(alone)).abs().max() <= 1  # the sums have another order
    constant = resize_all([torch.full((3, 5, 9), 255, dtype=torch.uint8), images[0]], 28)[0]
    assert (constant == 255).all()
