"""Boxes and masks follow the pixels: compared with images under the same transform."""

import copy

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.functional import max_pool2d

from eigengrain.data import Transforms, build_transform, open_dataset
from eigengrain.data.boxes import box_mask, mask_through, object_mask, part_mask
from eigengrain.data.plumage import open_plumage
from eigengrain.errors import ArgumentError

ZERO, ONE = (0.0,) * 3, (1.0,) * 3

CONFIGS = {
    "paper": Transforms("paper", 42),
    "birds": Transforms.of_scripts("cub", 42),
    "cars": Transforms.of_scripts("cars", 42),
    "imagenet": Transforms("imagenet", 56),
    "timm": Transforms("timm", 49, crop_pct=0.9),
    "short": Transforms("timm", 51, crop_pct=1.0),
    "none": Transforms("none"),
}
SIZES = [(83, 50), (50, 83), (61, 61), (200, 47), (31, 30)]


def evaluation(config):
    return build_transform(config, False, ZERO, ONE)


def borders(mask):
    """Pixels with both values within one step, also at the edge of the image."""
    wide = max_pool2d(mask[None, None].float(), 3, 1, 1)
    narrow = -max_pool2d(-mask[None, None].float(), 3, 1, 1)
    return (wide != narrow)[0, 0]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_box_follows_its_pixels(name, size):
    transform = evaluation(CONFIGS[name])
    width, height = size
    box = (round(0.2 * width), round(0.3 * height), round(0.7 * width), round(0.85 * height))
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[box[1] : box[3], box[0] : box[2]] = 255
    # the image's own interpolation: a pixel that is more than half white is inside
    expected = transform(Image.fromarray(pixels))[0] > 0.5
    ours = box_mask(box, size, transform)
    assert ours.dtype == torch.bool
    assert ours.shape == expected.shape
    assert ours.any()
    assert not ours.all()
    assert not ((ours != expected) & ~borders(expected)).any()
    nearest = mask_through(pixels[..., 0] > 0, transform)
    assert not ((nearest != expected) & ~borders(expected)).any()
    # the areas agree up to a part of the border
    assert abs(int(ours.sum()) - int(expected.sum())) <= 0.5 * borders(expected).sum()


def test_integer_boxes_are_exact():
    transform = evaluation(Transforms("none"))
    mask = box_mask((2, 1, 5, 4), (7, 6), transform)
    expected = torch.zeros(6, 7, dtype=torch.bool)
    expected[1:4, 2:5] = True
    assert torch.equal(mask, expected)
    assert torch.equal(mask_through(expected, transform), expected)


def test_a_crop_may_cut_a_box_or_remove_it():
    transform = evaluation(Transforms("paper", 8, resize=16))
    assert box_mask((0, 0, 16, 16), (16, 16), transform).all()
    assert not box_mask((0, 0, 4, 16), (16, 16), transform).any()
    cut = box_mask((0, 0, 8, 8), (16, 16), transform)
    assert cut.sum() == 16
    assert cut[:4, :4].all()


def test_arguments_are_checked():
    training, evaluating = build_transform(Transforms("paper", 8), True, ZERO, ONE), evaluation(Transforms("none"))
    cases = [
        (call, "pipeline")
        for transform in (training, None, str)
        for call in (
            lambda transform=transform: box_mask((0, 0, 1, 1), (4, 4), transform),
            lambda transform=transform: mask_through(np.ones((4, 4), bool), transform),
        )
    ]
    cases += [
        (lambda: box_mask((3, 0, 1, 1), (4, 4), evaluating), "box"),
        (lambda: mask_through(np.ones((4, 4)), evaluating), "mask"),
        (lambda: mask_through(torch.ones(1, 4, 4) > 0, evaluating), "mask"),
    ]
    for call, argument in cases:
        with pytest.raises(ArgumentError) as error:
            call()
        assert error.value.argument == argument


def test_plumage_has_masks_and_parts():
    birds = open_plumage("test", classes=2, per_class=1, size=48, cache=False)
    birds.transform = evaluation(Transforms("none"))
    assert torch.equal(object_mask(birds, 1, (48, 48)), torch.from_numpy(birds.mask(1)))
    assert torch.equal(part_mask(birds, 1), torch.from_numpy(birds.parts(1)))
    birds.transform = evaluation(Transforms("paper", 42))
    bird, parts = object_mask(birds, 1, (48, 48)), part_mask(birds, 1)
    assert bird.shape == parts.shape == (42, 42)
    assert (parts <= bird).all()
    assert parts.any()


def test_a_data_set_with_boxes_and_one_without(cub, folder):
    birds = open_dataset("cub", cub, "test")
    birds.transform = evaluation(Transforms("none"))
    image = birds.image(0)
    assert torch.equal(object_mask(birds, 0, image.size), box_mask(birds.boxes(0), image.size, birds.transform))
    assert part_mask(birds, 0) is None
    photos = open_dataset("folder", folder, "test")
    photos.transform = evaluation(Transforms("none"))
    assert object_mask(photos, 0, photos.image(0).size) is None


def test_real_boxes_cover_part_of_the_photograph(cub_mini):
    birds = open_dataset("cub", cub_mini, "test")
    birds.transform = evaluation(Transforms.of_scripts("cub", 112))
    shares = [object_mask(birds, i, birds.image(i).size).double().mean().item() for i in range(0, len(birds), 10)]
    assert min(shares) > 0.05
    assert 0.2 < sum(shares) / len(shares) < 0.7


@pytest.mark.parametrize("width", range(51, 83))
def test_the_long_side_is_the_one_that_torchvision_computes(width):
    """torchvision rounds the long side down; a side longer by one pixel would shift the crop or the box."""
    height, box = 50, (0.31 * width, 4, 0.83 * width, 33)
    transform = evaluation(Transforms("imagenet", 56))
    uncropped = copy.copy(transform)
    uncropped.crop = None
    resized = uncropped.prepare(Image.new("L", (width, height))).size
    before = [round((side - transform.crop) / 2) for side in resized]
    down, across = (
        [
            box[axis] <= (pixel + before[axis] + 0.5) * original / resized[axis] < box[axis + 2]
            for pixel in range(transform.crop)
        ]
        for axis, original in ((1, height), (0, width))
    )
    assert torch.equal(box_mask(box, (width, height), transform), torch.tensor(down)[:, None] & torch.tensor(across))


def test_a_pixel_centre_on_a_common_edge_belongs_to_one_of_two_boxes():
    transform = evaluation(Transforms("paper", 4, resize=4))
    left, right = (box_mask(box, (8, 8), transform) for box in ((0, 0, 5, 8), (5, 0, 8, 8)))
    top, bottom = (box_mask(box, (8, 8), transform) for box in ((0, 0, 8, 3), (0, 3, 8, 8)))
    assert torch.equal(left, ~right)
    assert torch.equal(top, ~bottom)
    assert (left.sum(), top.sum()) == (8, 4)
