import pytest
import torch

import eigengrain._torchvision  # noqa: F401  (before any test module imports timm or torchvision)
from eigengrain.training import train
from eigengrain.training.config import from_mapping
from training.small_run import PLUMAGE


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """A fixed number of threads, because it determines the order of sums."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def plumage_run(tmp_path_factory):
    """Folder of a run on a registered data set, with validation images; tests must not change it."""
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("plumage") / "run"
    train(from_mapping({**PLUMAGE, "out": str(out)}))
    return out
