import pytest

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
    "logcov",
    "mpncov",
    "isqrt",
    "mpa",
    "mtp",
]


def test_every_name_of_the_design_is_there():
    assert set(NAMES) <= set(list_heads())
    assert {f"{n}+seb" for n in ("mpncov", "isqrt", "mpa", "mtp", "logcov")} <= set(list_heads())


def test_patterns():
    assert list_heads("*cov*") == ["logcov", "logcov+seb", "mpncov", "mpncov+seb"]
    assert list_heads("nothing*") == []


def test_users_register_their_own_and_duplicates_are_refused():
    @register_head("mine")
    class Mine(Head):
        def __init__(self, in_channels, reduce=None):
            super().__init__(in_channels, reduce)
            self.out_features = self.channels

        def pool(self, x):
            return x.amin((2, 3))

    try:
        assert create_head("mine", 3).out_features == 3
        with pytest.raises(ValueError, match="a head named 'mine' is registered already"):
            register_head("mine")(Mine)
    finally:
        del _FACTORIES["mine"]
