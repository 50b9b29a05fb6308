"""Program for torchrun with two processes; each writes what it saw to ``OUT/RANK.json``.

In this order: groups that are joined again and again with a different process late each time; a run with its losses; a run
with mixed images; a run with a frozen backbone; a run with sharpness-aware steps; runs with SnapMix; a run that is stopped
while its checkpoint is written slowly; gradients of heads that add to the loss and of SnapMix; a network that outlives its
process group.
"""

import json
import os
import signal
import sys
import time
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from eigengrain.errors import Interrupted
from eigengrain.models import create_model
from eigengrain.models.mixed_precision import MixedPrecision
from eigengrain.training import loop, setup, train
from eigengrain.training.checkpoint import LAST, write_checkpoint
from eigengrain.training.distributed import Process, join
from eigengrain.training.loss import Loss
from training.small_run import colours, small, without_batch_statistics

#: options of the run whose losses are compared with those of a single process
CHANGES = {"epochs": 4, "save_every": 2, "ema": 0.9}


def join_often() -> list[int]:
    """Sums over the ranks, in eight groups."""
    sums = []
    for late in (0, 1) * 4:
        with join("cpu") as process:
            sums.append(int(process.sum(torch.tensor([process.rank + 1]))))
        if process.rank == late:
            time.sleep(0.1)
    return sums


def losses(out: Path) -> list[float]:
    values = []
    train(without_batch_statistics(out, **CHANGES), colours(), lambda epoch, batch, loss: values.append(loss))
    return values


def frozen(out: Path) -> list[float]:
    """Losses of a run with a frozen backbone, whose features the processes share."""
    values = []
    changes = {"epochs": 2, "freeze": "backbone", "accumulate": 2}
    train(without_batch_statistics(out, **changes), colours(), lambda epoch, batch, loss: values.append(loss))
    return values


def mixed(out: Path) -> dict[str, float]:
    """Scores of a run with mixup, cutmix and class weights."""
    config = small(out, mixup=0.2, cutmix=1.0, label_smoothing=0.1, accumulate=2, ema=0.9, epochs=1)
    result = train(replace(config, data=replace(config.data, balance="weights")), colours())
    assert result is not None
    return result.scores


def sharp(out: Path) -> list[float]:
    """Losses of a run with sharpness-aware steps."""
    values = []
    config = without_batch_statistics(out, epochs=2)
    config = replace(config, optimiser=replace(config.optimiser, sam=0.05))
    train(config, colours(), lambda epoch, batch, loss: values.append(loss))
    return values


def snapmixed(out: Path) -> dict[str, float]:
    """Scores of a run with SnapMix, a mid-level branch and batch statistics, stopped within an epoch and resumed."""
    changes = {"snapmix": 5.0, "label_smoothing": 0.1, "epochs": 2, "save_every": 1}
    model = replace(small(out).model, mid_level=4)

    def stop(epoch, batch, loss):
        if (epoch, batch) == (0, 2):
            signal.raise_signal(signal.SIGTERM)

    with suppress(Interrupted):
        train(small(out / "parts", model=model, **changes), colours(), stop)
    result = train(small(out / "parts", model=model, resume=True, **changes), colours())
    whole = train(small(out / "whole", model=model, **changes), colours())
    assert result is not None
    assert whole is not None
    assert result.scores == whole.scores
    return result.scores


def snapmix_gradients(*shares: int, distributed: bool = False) -> dict[str, float]:
    """Norms of the gradients of SnapMix batches, each mixed within its share, averaged over the shares."""
    torch.manual_seed(0)
    model = create_model("test_convnext", "mpncov+seb", num_classes=3, reduce=None, last_stride=1, mid_level=4).double()
    for module in model.modules():  # of the branch
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
            module.train = lambda mode=True, module=module: module
    precise = MixedPrecision(model)
    net: nn.Module = DistributedDataParallel(precise) if distributed else precise
    maps = setup._maps(precise, Process(torch.device("cpu")))
    loss = Loss([1, 1, 1], snapmix=5.0, maps=maps, label_smoothing=0.1)
    for share in shares:
        images = torch.randn(4, 3, 64, 64, generator=torch.Generator().manual_seed(share), dtype=torch.float64)
        mixed, targets = loss.mix(images, torch.tensor([0, 1, 2, share]), 0, 1)
        scores, added = net(mixed, targets)
        (loss(scores, targets, added) / len(shares)).backward()
    return {name: float(p.grad.norm()) for name, p in model.named_parameters() if p.grad is not None}


def stop_during_a_slow_save(out: Path) -> bool:
    """Whether the checkpoint exists when ``train`` raises Interrupted in this process."""

    def write_slowly(path, state):
        time.sleep(1)
        write_checkpoint(path, state)

    def stop(epoch, batch, loss):
        if batch == 2:
            signal.raise_signal(signal.SIGTERM)

    loop.write_checkpoint = write_slowly
    try:
        train(small(out), colours(), stop)
    except Interrupted:
        return (out / LAST).exists()
    raise AssertionError("the run was not stopped")


def part_gradients(head: str, *shares: int, distributed: bool = False) -> dict[str, float]:
    """Norms of the gradients of a head that adds to the loss, averaged over shares of the images; two backward passes."""
    torch.manual_seed(0)
    model = create_model("test_vit", head, num_classes=3, img_size=32, patch_stride=8, depth=3).double().train()
    net: nn.Module = MixedPrecision(model)
    net = DistributedDataParallel(net) if distributed else net
    loss = Loss([1, 1, 1])
    for share in shares:
        images = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(share), dtype=torch.float64)
        labels = torch.tensor([0, 1, 2, 0, 0, 2, 1, 1])
        for part in (slice(0, 4), slice(4, 8)):  # accumulated
            with net.no_sync() if distributed and part.start == 0 else nullcontext():  # type: ignore[operator]
                scores, added = net(images[part], labels[part])
                (loss(scores, labels[part], added) / 2 / len(shares)).backward()
    return {name: float(p.grad.norm()) for name, p in model.named_parameters() if p.grad is not None}


def outlive_the_group() -> None:
    """Leave a network behind while a thread of gloo is still busy."""
    with join("cpu"):
        net = DistributedDataParallel(nn.Linear(2, 2))
        net(torch.ones(1, 2)).sum().backward()
        # the thread sleeps without the GIL and then needs it, long after this function has returned
        dist.all_reduce(torch.ones(1), async_op=True).get_future().then(lambda _: time.sleep(1))


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    seen = {"sums": join_often(), "losses": losses(folder / "run"), "mixed": mixed(folder / "mixed")}
    seen |= {"frozen": frozen(folder / "frozen"), "sharp": sharp(folder / "sharp")}
    seen |= {"snapmixed": snapmixed(folder / "snapmixed")}
    seen |= {"saved": stop_during_a_slow_save(folder / "stopped")}
    with join("cpu") as process:
        heads = ("transfg", "aftrans")
        seen["parts"] = {head: part_gradients(head, process.rank, distributed=True) for head in heads}
        seen["snapmix"] = snapmix_gradients(process.rank, distributed=True)
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(seen))
    outlive_the_group()
