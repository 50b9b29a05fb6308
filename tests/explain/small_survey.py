"""A survey of drawn birds with a small network, in one process or, run as a program, in two.

As a program it writes ``rows.csv`` and ``table-<rank>.csv`` to the folder of its argument.
"""

import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing

import eigengrain as eg
from eigengrain.data import Transforms
from eigengrain.data.plumage import open_plumage
from eigengrain.data.transforms import Pipeline
from eigengrain.explain.survey import image_batches, survey

SUBSETS = ("all", "top:5", "last:3")
RULES = ("vanilla", "deconv")


class Double(Pipeline):
    """Float64 images, so that measures do not depend on the batch of an image."""

    def __init__(self, transforms):
        super().__init__(transforms, False, (0.5,) * 3, (0.5,) * 3)

    def __call__(self, image):
        return super().__call__(image).double()


def birds(per_class=3):
    """Drawn images of two species; without the last, so that no batch size divides their number."""
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
        net(images)  # running statistics of the data, so that no channel is dead
    return net.eval()


def run(out: Path, batch_size: int, name: str = "table.csv"):
    batches = image_batches(birds(4), batch_size)
    result = survey(network(), batches, SUBSETS, RULES, csv=out / "rows.csv", collapse=("abs-max", "signed-sum"))
    result.write_table(out / name)
    return result


def main(rank: int, out: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=rank, world_size=2)
    try:
        run(out, 3, f"table-{rank}.csv")
        numbers = [str(number) for batch in image_batches(birds(4), 3) for number in batch.numbers]
        (out / f"numbers-{rank}").write_text(" ".join(numbers))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    # forked after the imports, which take longer than the survey
    torch.multiprocessing.start_processes(main, (Path(sys.argv[1]),), nprocs=2, start_method="fork")
