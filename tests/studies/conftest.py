"""Fixtures of the tests of studies: their environment, and a record of what is trained."""

import pytest
import torch

from studies import runs


@pytest.fixture(scope="module")
def surroundings(tmp_path_factory):
    """One thread, an own cache of drawn birds, a wide terminal."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EIGENGRAIN_CACHE", str(tmp_path_factory.mktemp("drawn")))
        patch.setenv("COLUMNS", "200")
        yield
    torch.set_num_threads(threads)


@pytest.fixture
def trained_runs(monkeypatch):
    """Names of the runs that a test trains."""
    names, real = [], runs.train

    def train(config, sources):
        names.append(config.out.rsplit("/", 1)[-1])
        return real(config, sources)

    monkeypatch.setattr(runs, "train", train)
    return names
