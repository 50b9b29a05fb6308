"""The network of the demo without training, and sessions on it."""

import torch

from eigengrain.data.plumage import Plumage
from eigengrain.explorer.limits import Uploads
from eigengrain.explorer.session import Session
from eigengrain.models import CovarianceNet, create_model
from eigengrain.training.run_folder import TrainedModel


def bird_model(head: str = "mpncov+seb", seed: int = 0) -> CovarianceNet:
    """The network of the demo with random weights."""
    torch.manual_seed(seed)
    model = create_model("plumage_net", head=head, num_classes=3, reduce=None)
    for module in model.modules():  # statistics as after a training, so that predictions differ
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.2)
            module.running_var.uniform_(0.3, 1.0)
    return model.eval()


def bird_session(name: str, model: CovarianceNet, birds: Plumage, uploads: Uploads | None = None) -> Session:
    """A session whose examples are drawn birds."""
    model.class_names = list(birds.classes)
    images = birds.subset(range(len(birds)))
    images.transform = TrainedModel(model).transform
    return Session(name, model, images, uploads=uploads)
