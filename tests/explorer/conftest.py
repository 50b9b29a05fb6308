from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("gradio")
pytest.importorskip("captum")
pytest.importorskip("matplotlib")

from eigengrain.data.plumage import Plumage, open_plumage
from eigengrain.explorer.server import Server
from eigengrain.explorer.session import Session
from eigengrain.functional import covariance, eigh, matrix_power, triu_vector
from eigengrain.heads import SpectralHead, register_head, registry
from explorer.hostile import UPLOADS
from explorer.small_model import bird_model, bird_session


@pytest.fixture(scope="session")
def birds() -> Plumage:
    return open_plumage("test", classes=3, per_class=3, cache=False)


@pytest.fixture(scope="session")
def session(birds: Plumage) -> Session:
    return bird_session("seb", bird_model(), birds)


@pytest.fixture(scope="session")
def plain_session(birds: Plumage, session: Session) -> Session:
    """Another model on the same images, which keeps a part of its eigenvalues."""
    model = bird_model("mpncov", seed=1)
    model.head.subset = "top:60"
    return bird_session("plain", model, birds, session.uploads)


@pytest.fixture(scope="session")
def hostile_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Uploads that must be refused."""
    folder = tmp_path_factory.mktemp("hostile")
    return {name: write(folder / name) for name, write in UPLOADS.items()}


@pytest.fixture(scope="session")
def server(session: Session, plain_session: Session) -> Iterator[Server]:
    with Server({"seb": session, "plain": plain_session}) as server:
        yield server


class CubeRoot(SpectralHead):
    """A head from outside the package, with the members that a SpectralHead needs and no other."""

    def __init__(self, in_channels: int, reduce: int | None = None):
        super().__init__(in_channels, reduce)
        self.out_features = self.channels * (self.channels + 1) // 2

    def eigenvalues(self, reduced: Tensor) -> Tensor:
        return eigh(covariance(reduced.detach(), dtype=torch.float64)).values

    def pool(self, x: Tensor) -> Tensor:
        root = matrix_power(covariance(x, dtype=torch.float64), 1 / 3, subset=self.subset)
        return triu_vector(root).to(x.dtype)


@pytest.fixture
def foreign_head(monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of a registered head that is not part of the package."""
    monkeypatch.setattr(registry, "_FACTORIES", dict(registry._FACTORIES))
    register_head("cube-root")(CubeRoot)
    return "cube-root"
