from collections.abc import Iterator

import pytest

from eigengrain.data.plumage import Plumage, open_plumage
from explorer.small_model import bird_model

pytest.importorskip("gradio")
pytest.importorskip("captum")
pytest.importorskip("matplotlib")

from eigengrain.cli.checkpoint import plain_transform
from eigengrain.explorer.server import Server
from eigengrain.explorer.session import Lens


@pytest.fixture(scope="session")
def birds() -> Plumage:
    return open_plumage("test", classes=3, per_class=3, cache=False)


@pytest.fixture(scope="session")
def lens(birds: Plumage) -> Lens:
    model = bird_model()
    model.class_names = list(birds.classes)
    part = birds.subset(range(len(birds)))
    part.transform = plain_transform(model)
    return Lens("seb", model, part)


@pytest.fixture(scope="session")
def plain_lens(birds: Plumage, lens: Lens) -> Lens:
    model = bird_model("mpncov", seed=1)
    model.class_names = list(birds.classes)
    part = birds.subset(range(len(birds)))
    part.transform = plain_transform(model)
    return Lens("plain", model, part, uploads=lens.uploads)


@pytest.fixture(scope="session")
def server(lens: Lens, plain_lens: Lens) -> Iterator[Server]:
    with Server({"seb": lens, "plain": plain_lens}) as server:
        yield server
