"""Average and max pooling, by loops over the positions."""

import pytest
import torch

from eigengrain.heads import create_head


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name, reduce", [("gap", lambda values: sum(values) / len(values)), ("gmp", max)])
def test_pools_in_full_precision(name, reduce, dtype):
    x = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    pooled = create_head(name, 3)(x)
    assert pooled.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    expected = [[reduce(channel.flatten().tolist()) for channel in image] for image in x]
    torch.testing.assert_close(pooled.double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=1e-7)
