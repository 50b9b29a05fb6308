r"""How much each position of the feature map contributes to the score of a class.

.. math:: M_p = \max\Big(0, \sum_c X_{cp}\, \frac{\partial y}{\partial X_{cp}}\Big)

X is the reduced feature map, the input of the pooling, and y the score. This is Grad-CAM with one weight per position, also
called HiResCAM (arXiv 2011.08891). Grad-CAM's own weights are means over the positions, and these are zero for every
covariance: it does not change when a number is added to a channel.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from eigengrain.models.model import CovarianceNet


def contributions(model: CovarianceNet, features: Tensor, classes: Tensor, size: Sequence[int]) -> Tensor:
    """The maps M (B, H, W) of images for one class each, without gradient, enlarged to ``size`` (H, W).

    Args:
        model: in eval mode, with a classifier.
        features: feature maps (B, num_features, h, w) of the images.
        classes: a class for each image (B,).
        size: height and width of the maps.

    Example:
        >>> from eigengrain.models import create_model
        >>> model = create_model("test_resnet", head="mpncov", num_classes=4, reduce=3).eval()
        >>> features = model.forward_features(torch.rand(2, 3, 64, 64))
        >>> contributions(model, features, torch.tensor([1, 3]), (64, 64)).shape
        torch.Size([2, 64, 64])
    """
    with torch.inference_mode(False):
        # tensors of an inference mode cannot be saved for a backward pass
        features, classes = (tensor.clone() if tensor.is_inference() else tensor for tensor in (features, classes))
        with torch.no_grad():
            pooled, beside = model.split_features(features)
            reduced = model.head.reduce(pooled)
        with torch.enable_grad():
            leaf = reduced.detach().requires_grad_()
            scores = model.forward_vector(model.head.pool(leaf), beside=beside)
            (gradient,) = torch.autograd.grad(scores.gather(1, classes[:, None]).sum(), leaf)
    positive = (reduced * gradient).sum(1, keepdim=True).clamp_min(0)
    return interpolate(positive, tuple(size), mode="bilinear", align_corners=False)[:, 0]
