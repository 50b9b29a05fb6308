"""CUDA graphs: training with them gives the same results as without; skipped without a CUDA device."""

import pytest
import torch

from eigengrain.models import create_model
from eigengrain.models.mixed_precision import MixedPrecision
from eigengrain.training.loss import Loss


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("amp", ["none", "bf16"])
@pytest.mark.parametrize("mid_level", [None, 4])
def test_training_is_the_same_with_and_without_graphs(amp, mid_level):
    images = torch.randn(7, 3, 64, 64, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    labels = torch.arange(7, device="cuda") % 3
    ends = []
    for recorded in (False, True):
        torch.manual_seed(0)
        model = create_model(
            "resnet18", head="mpncov+seb", num_classes=3, reduce=8, last_stride=1, mid_level=mid_level
        ).cuda()
        net = MixedPrecision(model, amp, cuda_graphs=recorded)
        optimiser = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
        for size in (7, 7, 5, 7):  # 5 has not been captured
            scores, added = net(images[:size], labels[:size])
            Loss([1, 1, 1])(scores, labels[:size], added).backward()
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        model.eval()
        assert net(images).isfinite().all()
        ends.append(model.state_dict())
    plain, recorded_state = ends
    for name, value in plain.items():
        assert torch.allclose(recorded_state[name], value, rtol=1e-5, atol=1e-6), name
        if "num_batches" in name:
            assert value == 4
