"""A small network, drawn birds, and a survey of them: in one process, or as a program in each of several.

As a program: survey with the files of the first argument, ``rows.csv`` and ``table-<rank>.csv``.
"""

import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

import eigengrain as eg
from eigengrain.data import Transforms
from eigengrain.data.plumage import open_plumage
from eigengrain.data.transforms import Pipeline
from eigengrain.explain.survey import image_batches, survey

SUBSETS = ("all", "top:5", "last:3")
RULES = ("vanilla", "deconv")


class Double(Pipeline):
    """In float64, so that numbers may be compared whatever batch an image was in."""

    def __init__(self, transforms):
        super().__init__(transforms, False, (0.5,) * 3, (0.5,) * 3)

    def __call__(self, image):
        return super().__call__(image).double()


def birds(per_class=3):
    """Drawn images of two species; the last is left out, so that no batch size divides their number."""
    whole = open_plumage("test", classes=2, per_class=per_class, size=64, cache=False, transform=Double(Transforms("none")))
    return whole.subset(range(len(whole) - 1))


def network(**options):
    torch.manual_seed(0)
    net = eg.create_model(
        "test_resnet", **{"head": "mpncov", "num_classes": 2, "reduce": 8, "last_stride": 1} | options
    ).double()
    images = torch.stack([image for image, _ in birds(4)])
    for module in net.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = 1.0
    with torch.no_grad():
        net(images)  # statistics that fit, so that no channel is dead
    return net.eval()


def run(out: Path, batch_size: int, name: str = "table.csv"):
    batches = image_batches(birds(4), batch_size)
    result = survey(network(), batches, SUBSETS, RULES, csv=out / "rows.csv", collapse=("abs-max", "signed-sum"))
    result.write_table(out / name)
    return result


def main(out: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    try:
        run(Path(out), 3, f"table-{os.environ['RANK']}.csv")
        (Path(out) / f"numbers-{os.environ['RANK']}").write_text(
            " ".join(str(number) for batch in image_batches(birds(4), 3) for number in batch.numbers)
        )
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
