"""Small synthetic images and a small network, so that a whole training takes a fraction of a second."""

from dataclasses import replace

import torch
from PIL import Image

import eigengrain._torchvision  # noqa: F401  (before timm)
from eigengrain.data import ImageSet, Transforms
from eigengrain.training.config import Data, Model, Optimiser, Train
from eigengrain.training.sources import Sources

CLASSES = ["red", "green", "blue"]
SIZE = 32


class Colours(ImageSet):
    """Noise in which one colour is stronger: the class. Generated from the index, without files."""

    def __init__(self, split: str, count: int):
        super().__init__("colours", split, CLASSES, [i % 3 for i in range(count)])
        self.numbers = list(range(count))

    def image(self, index: int) -> Image.Image:
        generator = torch.Generator().manual_seed(1000 * (self.split == "test") + self.numbers[index])
        pixels = torch.randint(0, 160, (SIZE, SIZE, 3), generator=generator)
        pixels[:, :, self.labels[index]] += 60
        return Image.fromarray(pixels.to(torch.uint8).numpy())

    def subset(self, indices):
        part = super().subset(indices)
        part.numbers = [self.numbers[i] for i in indices]
        return part


def colours(train: int = 22, test: int = 10, val: int = 0) -> Sources:
    whole = Colours("train", train + val)
    part = whole.subset(range(train))
    return Sources(part, Colours("test", test), whole.subset(range(train, train + val)) if val else None)


def small(out, **changes) -> Train:
    """A run of two epochs of five batches; with dropout, so that it depends on the state of the generators."""
    config = Train(
        data=Data("colours", transforms=Transforms("none", img_size=SIZE)),
        model=Model("test_resnet", head="mpncov+seb", reduce=3, last_stride=1, drop_rate=0.2),
        optimiser=Optimiser(lr=0.02, classifier_lr_scale=5),
        epochs=2,
        batch_size=4,
        workers=0,
        device="cpu",
        out=str(out),
    )
    return replace(config, **changes)


def without_batch_statistics(out, **changes) -> Train:
    """A run whose loss is a mean over single images, so that sharing a batch among processes does not change it."""
    model = Model("test_convnext", head="mpncov+seb", reduce=None, last_stride=1, calibrate=True)
    transforms = Transforms("paper", img_size=64)
    return small(out, model=model, data=Data("colours", transforms=transforms), optimiser=Optimiser(lr=1e-3), **changes)


#: options of a run of one epoch on 12 training, 3 validation and 15 test images of plumage, which are not resized
PLUMAGE = {
    "data": {
        "name": "plumage",
        "options": {"classes": 3, "per_class": 5, "size": SIZE, "cache": False},
        "transforms": {"kind": "none", "img_size": SIZE},
        "val_fraction": 0.2,
    },
    "model": {"backbone": "test_resnet", "reduce": 3, "last_stride": 1},
    "epochs": 1,
    "batch_size": 4,
    "workers": 0,
    "device": "cpu",
}
