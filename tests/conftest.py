import os

import torch

# pytest-xdist runs one worker a core: more threads in each would only get in each other's way
if os.environ.get("PYTEST_XDIST_WORKER"):
    torch.set_num_threads(1)
