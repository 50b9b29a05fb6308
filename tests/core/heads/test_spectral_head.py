"""The contract of spectral heads, tested on a head that a user registers in a separate file."""

from importlib.util import module_from_spec, spec_from_file_location

import pytest
import torch
from spectral_cases import refused

from eigengrain.errors import ArgumentError
from eigengrain.heads import CovarianceHead, Head, SpectralHead, create_head, list_heads
from eigengrain.heads.registry import _FACTORIES

SOURCE = '''
import torch

from eigengrain.heads import SpectralHead, register_head


@register_head("moment-spectrum")
class MomentSpectrum(SpectralHead):
    """Square roots of the eigenvalues of the second moment, :math:`\\sqrt{\\lambda}`; C numbers."""

    def __init__(self, in_channels, reduce=None):
        super().__init__(in_channels, reduce)
        self.out_features = self.channels

    def eigenvalues(self, x):
        x = x.detach().double().flatten(2)
        return torch.linalg.eigvalsh(x @ x.mT / x.shape[-1]).flip(-1).clamp_min(0)

    def pool(self, x):
        return (self.eigenvalues(x).sqrt() * self.subset.mask(self.channels)).float()
'''


@pytest.fixture
def head(tmp_path, monkeypatch):
    """The head of a user's file, on maps with 6 channels that it reduces to 4."""
    monkeypatch.setattr("eigengrain.heads.registry._FACTORIES", dict(_FACTORIES))
    path = tmp_path / "my_head.py"
    path.write_text(SOURCE)
    spec = spec_from_file_location("my_head", path)
    spec.loader.exec_module(module_from_spec(spec))
    torch.manual_seed(0)
    return create_head("moment-spectrum", 6, reduce=4).eval()


@pytest.fixture
def x():
    return torch.randn(3, 6, 5, 5, generator=torch.Generator().manual_seed(1))


def test_declared_members(head):
    assert isinstance(head, SpectralHead)
    assert head.rank_sensitive
    assert head.selectable
    assert (str(head.subset), head.own_subset, head.cut) == ("all", None, "exact")
    assert head.summary == "Square roots of the eigenvalues of the second moment"
    assert not create_head("gap", 4).rank_sensitive


def test_subset(head, x):
    whole = head(x)
    head.subset = "top:1+last:1"
    assert head.own_subset == "top:1+last:1"
    assert torch.equal(head(x), whole * torch.tensor([1.0, 0.0, 0.0, 1.0]))
    for bad in ("top:5", "~(all)", "middle", 3):
        assert refused(lambda bad=bad: setattr(head, "subset", bad)) == "subset"
    assert head.own_subset == "top:1+last:1"
    head.subset = "top:2+last:2"
    assert head.own_subset is None


def test_a_head_that_is_not_selectable_keeps_all_eigenvalues():
    class Fixed(CovarianceHead):
        @property
        def selectable(self):
            return False

    head = Fixed(4)
    head.subset = "top:4"
    assert refused(lambda: setattr(head, "subset", "top:3")) == "subset"


def test_pool_subsets(head, x):
    head.subset = "top:3"
    reduced = head.reduce(x)
    vectors, eigenvalues = head.pool_subsets(reduced, ["all", "last:1"])
    assert torch.equal(eigenvalues, head.eigenvalues(reduced))
    assert torch.equal(vectors[0], eigenvalues.sqrt().float())
    assert torch.equal(vectors[1], vectors[0] * torch.tensor([0.0, 0.0, 0.0, 1.0]))
    assert head.own_subset == "top:3"


def test_recording(head, x):
    head(x)
    assert head.last_spectrum is None
    with head.recording():
        vector = head(x)
    assert torch.equal(vector, head(x))
    assert torch.equal(head.last_spectrum.eigenvalues, head.eigenvalues(head.reduce(x)))
    assert head.last_spectrum.factor is None
    assert not head.record_spectrum
    assert not [key for key in head.state_dict() if "spectrum" in key]


def test_context_managers_restore_after_an_error(head):
    head.subset, head.record_spectrum = "top:2", True

    def fail():
        assert (head.own_subset, head.cut, head.record_spectrum) == ("last:1", "projector", True)
        raise KeyError

    with pytest.raises(KeyError), head.keeping("last:1", cut="projector"), head.recording():
        fail()
    assert (head.own_subset, head.cut, head.record_spectrum) == ("top:2", "exact", True)
    with pytest.raises(ArgumentError), head.keeping("top:9"):
        pass
    assert head.own_subset == "top:2"


@pytest.mark.parametrize("name", list_heads())
def test_every_head_has_a_summary_and_declares_its_spectrum(name):
    head = create_head(name, 8)
    assert 5 < len(head.summary) < 120
    assert isinstance(head, Head)
    assert isinstance(head, SpectralHead) == isinstance(head, CovarianceHead)
