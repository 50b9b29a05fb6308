import sys
from importlib.util import module_from_spec, spec_from_file_location

from spectral_cases import refused

from eigengrain import heads
from eigengrain.heads import Head, create_head, list_heads, register_head
from eigengrain.heads.registry import _FACTORIES

NAMES = [
    "gap",
    "gmp",
    "bcnn",
    "bcnn-improved",
    "cbp",
    "lrbp",
    "kp",
    "monet",
    "gp",
    "run",
    "svpn",
    "dropcov",
    "isice",
    "precision",
    "logchol",
    "logcov",
    "mpncov",
    "isqrt",
    "mpa",
    "mtp",
]


def test_published_heads_are_registered():
    assert set(NAMES) <= set(list_heads())
    assert {f"{n}+seb" for n in ("mpncov", "isqrt", "mpa", "mtp", "logcov")} <= set(list_heads())


def test_patterns():
    assert list_heads("*pncov*") == ["mpncov", "mpncov+seb"]
    assert list_heads("nothing*") == []


def test_registering_and_duplicates():
    @register_head("mine")
    class Mine(Head):
        def __init__(self, in_channels, reduce=None):
            super().__init__(in_channels, reduce)
            self.out_features = self.channels

        def pool(self, x):
            return x.amin((2, 3))

    try:
        assert create_head("mine", 3).out_features == 3
        assert refused(lambda: register_head("mine")(Mine)) == "name"
    finally:
        del _FACTORIES["mine"]


def test_a_new_file_in_the_folder_is_found(tmp_path, monkeypatch):
    """The package, executed with another folder, imports the module in it."""
    (tmp_path / "median.py").write_text(
        "from eigengrain.heads import Head, register_head\n\n\n"
        "@register_head('median')\nclass Median(Head):\n    out_features = 1\n"
    )
    monkeypatch.setattr("eigengrain.heads.registry._FACTORIES", dict(_FACTORIES))
    spec = spec_from_file_location("heads_elsewhere", heads.__file__, submodule_search_locations=[str(tmp_path)])
    package = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "heads_elsewhere", package)
    spec.loader.exec_module(package)
    assert sys.modules.pop("heads_elsewhere.median").Median(4).summary == "Median"
    assert "median" in package.list_heads()
