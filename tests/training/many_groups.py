"""As a program under torchrun: groups one after the other, for each of which another process is late."""

import sys
import time

import torch

from eigengrain.training.distributed import join

if __name__ == "__main__":
    sums = []
    for late in (0, 1) * 4:
        with join("cpu") as process:
            sums.append(int(process.sum(torch.tensor([process.rank + 1]))))
        if process.rank == late:
            time.sleep(0.1)
    sys.stdout.write(f"said {sums}\n")
