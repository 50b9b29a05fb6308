"""The loop of plain_loop.py on any number of devices with Accelerate: accelerate launch examples/accelerated_loop.py

A covariance model is an ordinary module, so only ``prepare`` and ``backward`` differ from plain_loop.py. Mixed precision
works without changes: the heads switch it off where they compute eigenvalues.
"""

import argparse
import sys

try:
    from accelerate import Accelerator
except ImportError:
    sys.exit("this example needs Accelerate: pip install accelerate")

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from eigengrain.models import create_model, parameter_groups


def train(epochs: int = 8, batch_size: int = 16, classes: int = 4, image_size: int = 64) -> list[float]:
    torch.manual_seed(0)
    labels = torch.arange(2 * batch_size) % classes
    mixing = torch.randn(classes, 3, 3)  # classes have the same mean and differ in the covariance of their colours
    images = torch.einsum("bij,bjhw->bihw", mixing[labels], torch.randn(2 * batch_size, 3, image_size, image_size))
    loader = DataLoader(TensorDataset(images, labels), batch_size, shuffle=True)

    model = create_model("resnet18", head="mpncov+seb", num_classes=classes, last_stride=1, reduce=8)
    optimiser = torch.optim.SGD(parameter_groups(model, lr=0.02, weight_decay=1e-4, classifier_lr_scale=10), momentum=0.9)

    accelerator = Accelerator()
    model, optimiser, loader = accelerator.prepare(model, optimiser, loader)
    losses = []
    for epoch in range(epochs):
        for images, labels in loader:
            loss = cross_entropy(model(images), labels)
            optimiser.zero_grad()
            accelerator.backward(loss)
            optimiser.step()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
        accelerator.print(f"epoch {epoch + 1:3d}  loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a covariance model on synthetic images with Accelerate.")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch_size", type=int, default=16)
    train(**vars(parser.parse_args()))
