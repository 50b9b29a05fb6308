"""Heads on the stacked maps of several stages: each stage has its own reduction, and ``hcov`` pools them together."""

import pytest
import torch

from eigengrain.errors import ArgumentError
from eigengrain.functional import sqrt_covariance
from eigengrain.heads import create_head, list_heads
from eigengrain.heads.registry import default_stages


@pytest.fixture
def maps():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(3, channels, 5, 6, generator=generator, dtype=torch.float64) for channels in (6, 10)]


@pytest.mark.parametrize("seb", [False, True])
def test_hcov_is_the_root_of_one_covariance_with_blocks_within_and_between_the_stages(maps, seb):
    head = create_head("hcov+seb" if seb else "hcov", (6, 10), reduce=8).double()
    vector = head(torch.cat(maps, dim=1))

    parts = []
    for stage, part in zip(head.reduce.stages, maps, strict=True):
        conv, norm = stage[0], stage[1]
        mixed = torch.einsum("oc,bchw->bohw", conv.weight[:, :, 0, 0], part)
        mean, variance = mixed.mean((0, 2, 3)), mixed.var((0, 2, 3), correction=0)
        normalised = (mixed - mean[:, None, None]) / (variance + norm.eps).sqrt()[:, None, None]
        parts.append(normalised.clamp_min(0).flatten(2))
    centred = [part - part.mean(-1, keepdim=True) for part in parts]
    blocks = [[a @ b.mT / 30 for b in centred] for a in centred]  # 5 × 6 positions
    p = torch.cat([torch.cat(row, dim=-1) for row in blocks], dim=-2)
    values, vectors = torch.linalg.eigh(p)
    roots = values.clamp_min(0).sqrt()
    q = vectors @ torch.diag_embed(roots) @ vectors.mT
    if seb:
        s = (values.clamp_min(0) * torch.exp(-2 * values)).sum(-1).sqrt()
        q = (1 + s)[:, None, None] * q
    rows, columns = torch.triu_indices(8, 8)
    torch.testing.assert_close(vector, q[:, rows, columns], rtol=1e-10, atol=1e-12)


def test_gradient_reaches_every_stage_and_matches_differences(maps):
    head = create_head("hcov+seb", (6, 10), reduce=4).double().eval()
    for stage in head.reduce.stages:  # a generic point: no channel is 0 after its ReLU
        torch.nn.init.constant_(stage[1].bias, 4.0)
    inputs = torch.cat(maps, dim=1)[:1].requires_grad_()
    assert torch.autograd.gradcheck(head, (inputs,), rtol=1e-6, atol=1e-8)
    head.train()(torch.cat(maps, dim=1)).square().sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in head.parameters())


def test_without_reduction_the_stacked_map_is_pooled_as_it_is(maps):
    stacked = torch.cat(maps, dim=1)
    head = create_head("hcov", (6, 10))
    rows, columns = torch.triu_indices(16, 16)
    torch.testing.assert_close(head(stacked), sqrt_covariance(stacked)[:, rows, columns])


def test_reduce_is_divided_evenly_and_completely():
    head = create_head("hcov", (4, 6, 8), reduce=8)
    assert [stage[0].out_channels for stage in head.reduce.stages] == [2, 3, 3]
    assert (head.in_channels, head.channels, head.out_features) == (18, 8, 36)


def test_every_head_takes_the_maps_of_several_stages(maps):
    stacked = torch.cat(maps, dim=1).float()
    for name in list_heads():
        head = create_head(name, [6, 10], reduce=8)
        assert head(stacked).shape == (3, head.out_features), name


def test_only_hcov_pools_two_stages_by_default():
    assert {name for name in list_heads() if default_stages(name) == 2} == {"hcov", "hcov+seb"}
    assert {default_stages(name) for name in list_heads()} == {1, 2}


@pytest.mark.parametrize("channels", [(), (4, 0), (4, -1), (4, True), "46"])
def test_bad_channels_are_refused(channels):
    with pytest.raises(ArgumentError) as caught:
        create_head("hcov", channels, reduce=4)
    assert caught.value.argument == "in_channels"


def test_fewer_channels_than_stages_are_refused():
    with pytest.raises(ArgumentError) as caught:
        create_head("hcov", (4, 4, 4), reduce=2)
    assert caught.value.argument == "reduce"
