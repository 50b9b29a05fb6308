"""What the tests of studies share: where they run, and a count of what is really trained."""

import pytest
import torch

from studies import jobs


@pytest.fixture(scope="module")
def surroundings(tmp_path_factory):
    """One thread, drawings in a folder of their own, a wide terminal."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EIGENGRAIN_CACHE", str(tmp_path_factory.mktemp("drawn")))
        patch.setenv("COLUMNS", "200")
        yield
    torch.set_num_threads(threads)


@pytest.fixture
def trained_runs(monkeypatch):
    """Names of the runs of a study that a test trains."""
    names, real = [], jobs.train

    def train(config, sources):
        names.append(config.out.rsplit("/", 1)[-1])
        return real(config, sources)

    monkeypatch.setattr(jobs, "train", train)
    return names
