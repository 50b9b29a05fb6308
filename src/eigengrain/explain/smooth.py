r"""A smooth map of an image: how much each position of the feature map contributes to the score of a class.

.. math:: M_p = \max\Big(0, \sum_c X_{cp}\, \frac{\partial y}{\partial X_{cp}}\Big)

X is the reduced feature map, the input of the pooling. This is Grad-CAM with one weight per position, also called HiResCAM
(arXiv 2011.08891). Grad-CAM's own weights are means over the positions, and these are zero for every covariance: it
does not change when a number is added to a channel.
"""

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from eigengrain.errors import MissingPackageError
from eigengrain.explain.targets import Classes, read_classes
from eigengrain.models import CovarianceNet
from eigengrain.models.model import check_unwrapped, eval_mode

try:
    from captum.attr import LayerGradientXActivation
except ImportError as error:
    raise MissingPackageError("maps need captum: pip install 'eigengrain[explain]'") from error


def smooth_maps(model: CovarianceNet, images: Tensor, target: Classes | None = None) -> Tensor:
    """Compute smooth maps of a batch, (B, H, W), at least 0, enlarged to the size of the images.

    Args:
        model: from :func:`create_model`, with a classifier; its mode is restored.
        images: (B, 3, H, W), normalised for the model.
        target: a class, one class per image, or None for the predicted ones.

    Example:
        >>> from eigengrain.models import create_model
        >>> model = create_model("test_resnet", head="mpncov", num_classes=4, reduce=3)
        >>> smooth_maps(model, torch.rand(2, 3, 64, 64), target=[1, 3]).shape
        torch.Size([2, 64, 64])
    """
    check_unwrapped(model)
    with eval_mode(model), torch.inference_mode(False), torch.enable_grad():
        if target is None:
            target = model(images).argmax(1)
        classes = read_classes(target, images, model.num_classes)
        products = LayerGradientXActivation(model, model.head.reduce).attribute(images.clone(), classes)
    assert isinstance(products, Tensor)
    positive = products.detach().sum(1, keepdim=True).clamp_min(0)
    return interpolate(positive, images.shape[-2:], mode="bilinear", align_corners=False)[:, 0]
