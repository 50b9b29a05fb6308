"""Train a covariance model in a plain PyTorch loop: python examples/plain_loop.py

The data are made up here, so that the example runs anywhere in seconds: noise whose three colours are mixed in one of four
ways. All classes have the same mean; their covariance tells them apart. With your own images, replace ``batch`` by a loader
of (images, labels), and give create_model ``pretrained=True`` or ``weights="file"``.
"""

import argparse

import torch
from torch.nn.functional import cross_entropy

from eigengrain.models import create_model, parameter_groups


def train(steps: int = 15, batch_size: int = 16, classes: int = 4, image_size: int = 64) -> list[float]:
    torch.manual_seed(0)
    mixing = torch.randn(classes, 3, 3)

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        labels = torch.arange(batch_size) % classes
        noise = torch.randn(batch_size, 3, image_size, image_size)
        return torch.einsum("bij,bjhw->bihw", mixing[labels], noise), labels

    # 64 × 64 pixels end as a map of 4 × 4 at last_stride=1: 16 positions are enough for the covariance of 8 channels
    model = create_model("resnet18", head="mpncov+seb", num_classes=classes, last_stride=1, reduce=8)
    # the classifier is new and learns faster than the backbone
    optimiser = torch.optim.SGD(parameter_groups(model, lr=0.02, weight_decay=1e-4, classifier_lr_scale=10), momentum=0.9)

    losses = []
    for step in range(steps):
        images, labels = batch()
        loss = cross_entropy(model(images), labels)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
        print(f"step {step + 1:3d}  loss {loss.item():.4f}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a covariance model on made-up images.")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--batch_size", type=int, default=16)
    train(**vars(parser.parse_args()))
