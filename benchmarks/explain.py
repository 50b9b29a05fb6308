"""Time of saliency maps of several subsets and rules beside the passes of the backbone, and of a perturbation."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from statistics import median

import torch
from torch import Tensor

from benchmarks import measure
from benchmarks.measure import Advance, Row, as_list, ignore
from eigengrain.environment import pick_device
from eigengrain.explain import EigenPerturbation, attribute_rules
from eigengrain.functional.subsets import small_part
from eigengrain.models import CovarianceNet, create_model


@dataclass(frozen=True)
class ExplainBench(measure.Bench):
    """Measure saliency maps, and optionally a perturbation.

    Args:
        backbone: backbone, with random weights.
        head: head with eigenvalues.
        subsets: subsets of the eigenvalues, such as [all,top:206,last:50].
        rules: rules at the ReLUs.
        batch: images that are explained together; several as [16,32].
        img_size: side of the images.
        last_stride: 1 for a feature map twice as large in each direction, 2 for the unchanged backbone.
        perturbation_steps: steps of a perturbation of the same images; 0 for none.
    """

    backbone: str = "resnet50"
    head: str = "mpncov"
    subsets: list[str] = field(default_factory=lambda: ["all", "top:206", "last:50"])
    rules: list[str] = field(default_factory=lambda: ["vanilla", "deconv"])
    batch: list[int] | int = 16
    img_size: int = 448
    last_stride: int = 1
    perturbation_steps: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        measure.check_sizes(self, "batch", "subsets", "rules")
        measure.check_least(self, img_size=32, perturbation_steps=0)


def backbone_passes(model: CovarianceNet, images: Tensor, backwards: int) -> None:
    """One forward pass of the backbone and several backward passes to the image, without the head."""
    with torch.enable_grad():
        x = images.detach().requires_grad_()
        features = model.forward_features(x)
        grad = torch.ones_like(features)
        for left in range(backwards - 1, -1, -1):
            torch.autograd.grad(features, x, grad, retain_graph=left > 0)


def measure_maps(config: ExplainBench, model: CovarianceNet, images: Tensor, advance: Advance = ignore) -> Row:
    """Seconds of the maps and of the passes they need at least, in turn, and of a perturbation; None without the memory."""
    passes, device = len(config.subsets) * len(config.rules), images.device
    warmup = 2 if config.warmup is None else config.warmup
    target = torch.zeros(len(images), dtype=torch.int64, device=device)

    maps = partial(attribute_rules, model, images, config.subsets, config.rules, target=target)
    works: dict[str, Callable[[], object]] = {"saliency": maps, "backbone": partial(backbone_passes, model, images, passes)}
    timed = {name: partial(measure.seconds, work, device) for name, work in works.items()}
    times = measure.take_turns(timed, repeats=config.repeats, warmup=warmup, advance=advance)
    saliency, backbone = (median(times[name]) if times[name] else None for name in works)
    row: Row = {
        **measure.pick(config, "backbone", "head"),
        "batch": len(images),
        "img_size": config.img_size,
        "subsets": " ".join(config.subsets),
        "rules": " ".join(config.rules),
        "saliency_seconds": measure.ratio(saliency, digits=5),
        "one_forward_and_backward_passes": passes,
        "passes_seconds": measure.ratio(backbone, digits=5),
        "ratio": measure.ratio(saliency, backbone),
    }
    if config.perturbation_steps:
        perturbation = EigenPerturbation(model, bounds=False)
        split = model.head.channels - small_part(model.head.channels)
        work = partial(perturbation.perturb, images, "small", split, steps=config.perturbation_steps, progress=False)
        clock = {"perturbation": partial(measure.seconds, work, device)}
        runs = measure.take_turns(clock, repeats=1, warmup=0, advance=advance)["perturbation"]
        row["perturbation_steps"] = config.perturbation_steps
        row["perturbation_seconds"] = round(runs[0], 3) if runs else None
    return row


def run(config: ExplainBench) -> None:
    """``python -m benchmarks explain``."""
    device = pick_device(config.device)
    path = config.path("explain", device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = create_model(config.backbone, head=config.head, num_classes=200, last_stride=config.last_stride)
    model.to(device).eval()
    generator = torch.Generator().manual_seed(config.seed)
    rows: list[Row] = []
    runs = 2 * (config.repeats + (config.warmup or 2)) + bool(config.perturbation_steps)
    with measure.progress(runs * len(as_list(config.batch))) as advance:
        for batch in as_list(config.batch):
            images = torch.randn(batch, 3, config.img_size, config.img_size, generator=generator).to(device)
            rows.append(measure_maps(config, model, images, advance))
            measure.save(path, rows, device)
    columns = ["batch", "subsets", "rules", "saliency_seconds", "passes_seconds", "ratio"]
    columns += ["perturbation_seconds"] if config.perturbation_steps else []
    measure.finish({"rows": rows}, [path], device, measure.format_table(rows, columns))
