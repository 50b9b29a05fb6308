"""Small drawn images and a small network, so that a whole training takes a second.

As a program: train in the folder of the first argument with the changes of the second (JSON), and end by SIGKILL at the
batch of the third (epoch,batch), if there is one. With a fourth, the network has no batch statistics and the loss of each
batch is appended to the file of that name and the number of the process.
"""

import json
import os
import signal
import sys
from dataclasses import replace

import torch
from PIL import Image

import eigengrain._torchvision  # noqa: F401  (before timm)
from eigengrain.data import ImageSet
from eigengrain.data.transforms_config import Transforms
from eigengrain.training.config import Data, Model, Optimiser, Train
from eigengrain.training.sources import Sources

CLASSES = ["red", "green", "blue"]
SIZE = 32


class Colours(ImageSet):
    """Noise in which one colour is stronger: the class. Drawn from the index, so that it needs no files."""

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
    """A run of two epochs of five batches; dropout makes it depend on the state of the generators."""
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
    """A run whose loss is a mean over single images, so that sharing a batch among processes cannot change it."""
    model = Model("test_convnext", head="mpncov+seb", reduce=None, last_stride=1)
    transforms = Transforms("paper", img_size=64)
    return small(out, model=model, data=Data("colours", transforms=transforms), **changes)


def main(out: str, changes: str, kill_at: str = "", losses: str = "") -> None:
    from eigengrain.training import train

    torch.set_num_threads(1)

    def on_step(epoch: int, batch: int, loss: float) -> None:
        if losses:
            with open(f"{losses}.{os.environ.get('RANK', '0')}", "a") as file:
                file.write(f"{loss!r}\n")
        if f"{epoch},{batch}" == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    base = without_batch_statistics if losses else small
    train(base(out, **json.loads(changes)), colours(), on_step)


if __name__ == "__main__":
    main(*sys.argv[1:])
