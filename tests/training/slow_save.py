"""One of several processes whose checkpoint takes a second to be written, stopped in its first epoch.

It prints whether the checkpoint that it is told of is there, in the folder of the first argument.
"""

import signal
import sys
import time
from pathlib import Path

import torch

from eigengrain.training import loop, train
from eigengrain.training.checkpoint import LAST, write_checkpoint
from eigengrain.training.signals import Interrupted
from training.small_run import colours, small


def slowly(path, state):
    time.sleep(1)
    write_checkpoint(path, state)


def stop(epoch, batch, loss):
    if batch == 2:
        signal.raise_signal(signal.SIGTERM)


if __name__ == "__main__":
    torch.set_num_threads(1)
    loop.write_checkpoint = slowly
    try:
        train(small(sys.argv[1]), colours(), stop)
    except Interrupted:
        sys.stdout.write(f"said {(Path(sys.argv[1]) / LAST).exists()}\n")
