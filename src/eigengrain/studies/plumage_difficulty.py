"""How hard Plumage is: a small network with average pooling, trained from scratch.

The settings of the data set were chosen by this measurement alone, with the head ``gap`` and no other, so that they
favour no head that is compared on it later: ``python -m eigengrain.studies.plumage_difficulty --epochs 12``.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from eigengrain import _torchvision  # noqa: F401  (before timm)
from eigengrain.data.plumage import Plumage, open_plumage
from eigengrain.heads import create_head

CHANNELS = 64
_BATCH = 25


def small_backbone() -> nn.Module:
    """Three halvings and two residual blocks: 96 pixels become a map of 64 × 12 × 12, so N = 144 positions for d = 64."""
    from timm.models.byobnet import ByoBlockCfg, ByobNet, ByoModelCfg

    blocks = tuple(ByoBlockCfg(type="basic", d=1, c=channels, s=2, gs=0) for channels in (32, CHANNELS))
    config = ByoModelCfg(blocks, stem_type="3x3", stem_chs=16, stem_pool="")
    net: nn.Module = ByobNet(config, num_classes=0, global_pool="")
    return net


def measure(epochs: int = 12, rate: float = 0.006, seed: int = 0, every: int = 3, threads: int | None = None) -> float:
    """Trains on the default training split with mirror images, AdamW and one cycle of the learning rate.

    Args:
        epochs: passes over the 2000 training images.
        rate: highest learning rate.
        seed: of the weights and of the order of the images; the images are those of seed 0.
        every: epochs between two lines of output.
        threads: of torch; its own choice if None.

    Returns:
        the share of the 1000 test images that are right after the last epoch.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    (images, labels), test = _tensors(open_plumage("train")), _tensors(open_plumage("test"))
    torch.manual_seed(seed)
    backbone, head = small_backbone(), create_head("gap", in_channels=CHANNELS)
    model = nn.Sequential(backbone, head, nn.Linear(head.out_features, int(labels.max()) + 1))
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimiser = torch.optim.AdamW(model.parameters(), rate, weight_decay=0.05)
    steps = epochs * -(-len(images) // _BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, total_steps=steps, pct_start=0.1, cycle_momentum=False)
    right = 0.0
    for epoch in range(1, epochs + 1):
        model.train()
        total = 0.0
        for chosen in torch.randperm(len(images)).split(_BATCH):
            batch = images[chosen]
            mirrored = (torch.rand(len(chosen)) < 0.5).view(-1, 1, 1, 1)
            loss = cross_entropy(model(_normalise(torch.where(mirrored, batch.flip(3), batch))), labels[chosen])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
            total += float(loss.detach()) * len(chosen)
        if epoch % every == 0 or epoch == epochs:
            right = _accuracy(model, *test)
            print(f"epoch {epoch:3d}   loss {total / len(images):.3f}   test accuracy {100 * right:.1f} %", flush=True)
    return right


def _tensors(dataset: Plumage) -> tuple[Tensor, Tensor]:
    """All images, uint8 (n, 3, H, W), and labels (n)."""
    images = torch.stack(
        [torch.frombuffer(bytearray(dataset.image(k).tobytes()), dtype=torch.uint8) for k in range(len(dataset))]
    )
    side = dataset.image(0).width
    return images.view(-1, side, side, 3).permute(0, 3, 1, 2), torch.tensor(dataset.labels)


def _normalise(images: Tensor) -> Tensor:
    mean = torch.tensor((0.485, 0.456, 0.406)).view(1, 3, 1, 1) * 255
    std = torch.tensor((0.229, 0.224, 0.225)).view(1, 3, 1, 1) * 255
    return ((images.float() - mean) / std).contiguous(memory_format=torch.channels_last)


@torch.no_grad()
def _accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    model.eval()
    found = torch.cat([model(_normalise(part)).argmax(1) for part in images.split(200)])
    return float((found == labels).float().mean())


if __name__ == "__main__":
    from jsonargparse import auto_cli

    auto_cli(measure)
