"""As a program under torchrun: a network outlives the group of its processes while a thread of gloo is still at work."""

import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import eigengrain.training.loop  # noqa: F401  (what a training imports, it imports before the processes join)
from eigengrain.training.distributed import join


def main() -> None:
    with join("cpu"):
        net = DistributedDataParallel(nn.Linear(2, 2))
        net(torch.ones(1, 2)).sum().backward()
        # the thread sleeps without Python's lock and then wants it back, when this function is long over
        dist.all_reduce(torch.ones(1), async_op=True).get_future().then(lambda _: time.sleep(1))


if __name__ == "__main__":
    main()
    sys.stdout.write("said over\n")
