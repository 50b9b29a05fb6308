"""``reduce="auto"``: fewer channels than the map has positions, where the size of the images is known."""

import json

import pytest
import torch

from eigengrain.data import Transforms
from eigengrain.models import create_model, from_pretrained, save_pretrained
from eigengrain.models.backbone import on_meta
from eigengrain.training.config import Data, Model
from eigengrain.training.setup import _model_options
from training.small_run import colours, small

#: a ViT with 64 channels and, at 48 pixels, 3 × 3 positions
VIT = {"backbone": "test_vit", "num_classes": 2, "img_size": 48}


@pytest.mark.parametrize(
    ("backbone", "head", "channels"),
    [
        ("vit_base_patch16_224", "mpncov", 192),  # 768 channels, 196 positions
        ("vit_small_patch16_224", "isqrt+seb", 192),  # 384 channels are not many, but more than the positions
        ("vit_tiny_patch16_224", "mpncov", 192),  # 192 channels of its own
        ("swin_tiny_patch4_window7_224", "mpncov", 48),  # 49 positions
        ("vit_base_patch16_224", "bcnn", 256),  # does not depend on the rank
        ("vit_base_patch16_224", "gap", 768),
        ("resnet50", "mpncov", 256),  # takes images of any size
    ],
)
def test_channels_of_a_model(backbone, head, channels):
    assert on_meta(lambda: create_model(backbone, head, 2)).head.channels == channels
    assert on_meta(lambda: create_model(backbone, head, 2, reduce=256)).head.channels == 256


SIZES = [(448, 1, "auto"), (448, None, 192), (224, 1, 192), (224, None, 48), (64, None, "auto")]


@pytest.mark.parametrize(("side", "last_stride", "expected"), SIZES)
def test_channels_of_a_training(tmp_path, side, last_stride, expected):
    """For ResNet-50: 784, 196, 196, 49 and 4 positions, of which the last are too few for any number of channels."""
    model = Model("resnet50", "mpncov", last_stride=last_stride)
    config = small(tmp_path, model=model, data=Data("colours", transforms=Transforms("scripts", img_size=side)))
    generator = torch.get_rng_state()
    assert _model_options(config, colours().train)["reduce"] == expected
    assert torch.equal(torch.get_rng_state(), generator)


def test_a_number_is_kept_and_stored(tmp_path):
    model = create_model(head="mpncov", **VIT)
    assert (model.head.channels, model.config["reduce"]) == (8, 8)
    save_pretrained(model, tmp_path)
    assert from_pretrained(tmp_path).head.channels == 8


@pytest.mark.filterwarnings("ignore::eigengrain.errors.ShortRankWarning")
@pytest.mark.parametrize("reduce", [16, None])
def test_folders_of_versions_that_used_more_channels_still_open(tmp_path, reduce):
    model = create_model(head="mpncov", reduce=reduce, **VIT).eval()
    save_pretrained(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["model"]["reduce"] = "auto"
    (tmp_path / "config.json").write_text(json.dumps(config))
    images = torch.rand(1, 3, 48, 48)
    torch.testing.assert_close(from_pretrained(tmp_path)(images), model(images))
