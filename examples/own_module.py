"""Replace the average pooling of your own network with a covariance head: python examples/own_module.py

A head takes a feature map (B, C, H, W) and returns a vector (B, head.out_features), so it can replace any global pooling.
``eigengrain heads`` lists the names of the heads.
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from eigengrain.heads import create_head


class SmallNet(nn.Module):
    def __init__(self, num_classes: int, head: str = "mpncov"):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        )  # fmt: skip
        # replaces nn.AdaptiveAvgPool2d(1) and nn.Flatten(): 32 channels are reduced to 12, whose covariance has
        # 12 · 13 / 2 = 78 different entries
        self.pool = create_head(head, in_channels=32, reduce=12)
        # nn.Linear(self.pool.out_features, num_classes), except for heads with a classifier of their own
        self.classifier = self.pool.classifier(num_classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.pool(self.features(images)))


def train(steps: int = 40, head: str = "mpncov", batch_size: int = 32, classes: int = 4) -> list[float]:
    torch.manual_seed(0)
    model = SmallNet(classes, head)
    mixing = torch.randn(classes, 3, 3)  # classes have the same mean and differ in the covariance of their colours
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(steps):
        labels = torch.arange(batch_size) % classes
        images = torch.einsum("bij,bjhw->bihw", mixing[labels], torch.randn(batch_size, 3, 32, 32))
        loss = cross_entropy(model(images), labels)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
        if (step + 1) % 5 == 0:
            print(f"step {step + 1:3d}  loss {loss.item():.4f}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a small network with a covariance head on synthetic images.")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--head", default="mpncov")
    train(**vars(parser.parse_args()))
