"""What studies measure on a trained network: spectra of its covariances, accuracy with parts of them."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from eigengrain.functional import covariance, eigh
from eigengrain.functional.scaling import qs_and_slope
from eigengrain.models import CovarianceNet
from eigengrain.training.evaluation import MixedPrecision, evaluate

Batches = Iterable[tuple[Tensor, Tensor]]

#: of the distributions over images that records keep
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
#: edges of the histogram of log10 of the eigenvalues
EDGES = [-12 + 0.25 * k for k in range(65)]


@torch.inference_mode()
def spectrum(model: CovarianceNet, batches: Batches, amp: str = "none") -> dict[str, Any]:
    """Eigenvalues of the covariance of every image: quantiles of what they say, their mean logarithms, a histogram.

    Eigenvalues below d·eps·λ_1 are rounding and read as that.
    """
    net, model = MixedPrecision(model, amp), model.eval()
    device = next(model.parameters()).device
    spectra: list[Tensor] = []
    for images, _ in batches:
        layout = torch.channels_last if amp != "none" else torch.contiguous_format
        features = net.features(images.to(device, memory_format=layout))
        reduced = model.head.reduce(features) if hasattr(model.head, "reduce") else features
        spectra.append(eigh(covariance(reduced, dtype=torch.float64)).values.cpu())
    values = torch.cat(spectra)
    d = values.shape[-1]
    values = torch.maximum(values, d * torch.finfo(torch.float64).eps * values[:, :1])
    share = values / values.sum(-1, keepdim=True)
    last = 50 if d >= 100 else max(d // 5, 1)
    factor = qs_and_slope(values)[0]
    logs = values.log10()
    inside = logs.flatten().clamp(EDGES[0], EDGES[-1])  # the ends hold what is beyond them
    counts = torch.histogram(inside, torch.tensor(EDGES, dtype=logs.dtype)).hist
    return {
        "images": len(values),
        "channels": d,
        "quantiles": list(QUANTILES),
        "lambda_1": _quantiles(values[:, 0]),
        "log10_condition": _quantiles(logs[:, 0] - logs[:, -1]),
        "effective_rank": _quantiles(torch.exp(-(share * share.log()).sum(-1))),
        "energy_last": _quantiles(share[:, -last:].sum(-1)),
        "last": last,
        "s": _quantiles(factor),
        "q_norm": _quantiles(values.sum(-1).sqrt()),
        "mean_log10": [round(v, 4) for v in logs.mean(0).tolist()],
        "histogram_edges": EDGES,
        "histogram": [int(n) for n in counts.tolist()],
    }


def subsets_of(d: int) -> list[str]:
    """The subsets of Table 2, and what lies between them; for small d in the same proportions.

    Example:
        >>> subsets_of(256)[:4]
        ['all', 'top:206', 'top:1+last:50', 'last:50']
    """
    last = 50 if d >= 100 else max(d // 5, 1)
    top = [k for k in (128, 64, 32, 16, 8, 4, 2, 1) if k < d - last]
    return ["all", f"top:{d - last}", f"top:1+last:{last}", f"last:{last}", *(f"top:{k}" for k in top)]


def subset_accuracy(model: CovarianceNet, batches: Batches, amp: str = "none") -> dict[str, Any]:
    """Accuracy with parts of the spectrum, in inference only (Table 2)."""
    names = subsets_of(model.head.channels)
    scores = evaluate(model, batches, subsets=names, amp=amp, channels_last=amp != "none")
    return {score.subset: {"top1": score.top1, "top5": score.top5, "loss": score.loss} for score in scores}


def _quantiles(values: Tensor) -> list[float]:
    return [float(f"{v:.6g}") for v in values.quantile(torch.tensor(QUANTILES, dtype=values.dtype)).tolist()]


#: name → function of a trained network, its test images in batches, and the precision of its backbone
ANALYSES: dict[str, Callable[[CovarianceNet, Batches, str], dict[str, Any]]] = {
    "spectrum": spectrum,
    "subset-accuracy": subset_accuracy,
}
