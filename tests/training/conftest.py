import pytest
import torch

import eigengrain._torchvision  # noqa: F401  (before any test module imports timm or torchvision)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """As many threads always, or sums come out in another order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
