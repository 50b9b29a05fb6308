import torch

# One thread in every test process: the matrices are small, so that more threads make the tests slower, and pytest-xdist
# already runs one process per core. With one thread, the results do not depend on the number of cores either.
torch.set_num_threads(1)
