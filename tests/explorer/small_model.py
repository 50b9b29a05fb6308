"""A network of the demo's sizes that needs no training."""

import torch

from eigengrain.models import CovarianceNet, create_model


def bird_model(head: str = "mpncov+seb", seed: int = 0) -> CovarianceNet:
    """The network of the demo with random weights: sure of nothing, but with all its sizes."""
    torch.manual_seed(seed)
    model = create_model("plumage_net", head=head, num_classes=3, reduce=None)
    for module in model.modules():  # statistics as after training, so that classes differ
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.2)
            module.running_var.uniform_(0.3, 1.0)
    return model.eval()
