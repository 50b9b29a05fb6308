"""What explaining costs: saliency of several subsets and rules beside the passes of the backbone, and a perturbation."""

import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from benchmarks.explain_config import ExplainBench
from benchmarks.functional import Row, in_turn, synchronise
from eigengrain import output
from eigengrain.environment import describe, pick_device
from eigengrain.explain import EigenPerturbation, attribute_rules
from eigengrain.files import writable, write_csv
from eigengrain.functional.subsets import small_part
from eigengrain.models import CovarianceNet, create_model
from eigengrain.progress import progress_bar


def backbone_passes(model: CovarianceNet, images: Tensor, backwards: int) -> None:
    """One forward pass of the backbone and so many backward passes to the image, with nothing of the head."""
    with torch.enable_grad():
        x = images.detach().requires_grad_()
        features = model.forward_features(x)
        grad = torch.ones_like(features)
        for left in range(backwards - 1, -1, -1):
            torch.autograd.grad(features, x, grad, retain_graph=left > 0)


def measure(config: ExplainBench, model: CovarianceNet, images: Tensor, advance: Callable[[str], None]) -> Row:
    """Seconds of the maps and of the passes that they cannot do without, in turn, and of a perturbation.

    Those are None for what needs more memory than the device has.
    """
    passes = len(config.subsets) * len(config.rules)
    target = torch.zeros(len(images), dtype=torch.int64, device=images.device)
    works: dict[str, Callable[[], object]] = {
        "saliency": lambda: attribute_rules(model, images, config.subsets, config.rules, target=target),
        "backbone": lambda: backbone_passes(model, images, passes),
    }

    def timed(work: Callable[[], object]) -> Callable[[], float]:
        def run() -> float:
            synchronise(images.device)
            start = time.perf_counter()
            work()
            synchronise(images.device)
            return time.perf_counter() - start

        return run

    times = in_turn({name: timed(work) for name, work in works.items()}, repeats=config.repeats, warmup=2, advance=advance)
    saliency, backbone = (median(times[name]) if times[name] else None for name in works)
    row: Row = {
        "backbone": config.backbone,
        "head": config.head,
        "batch": len(images),
        "img_size": config.img_size,
        "subsets": " ".join(config.subsets),
        "rules": " ".join(config.rules),
        "saliency_seconds": None if saliency is None else round(saliency, 5),
        "one_forward_and_backward_passes": passes,
        "passes_seconds": None if backbone is None else round(backbone, 5),
        "ratio": None if saliency is None or backbone is None else round(saliency / backbone, 4),
    }
    if config.perturbation_steps:
        perturbation = EigenPerturbation(model, bounds=False)
        split = model.head.channels - small_part(model.head.channels)
        work = timed(lambda: perturbation.perturb(images, "small", split, steps=config.perturbation_steps, progress=False))
        runs = in_turn({"perturbation": work}, repeats=1, warmup=0)["perturbation"]
        row |= {"perturbation_steps": config.perturbation_steps}
        row |= {"perturbation_seconds": round(runs[0], 3) if runs else None}
        advance("perturbation")
    return row


def _said(number: object) -> str:
    return f"{number:.3g}" if isinstance(number, float) else "–"


def run(config: ExplainBench) -> None:
    """``eigengrain bench explain``."""
    device = pick_device(config.device)
    path = writable(config.out or f"benchmarks/explain-{device.type}.csv")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = create_model(config.backbone, head=config.head, num_classes=200, last_stride=config.last_stride)
    model.to(device).eval()
    generator = torch.Generator().manual_seed(config.seed)
    console, rows = output.reading(), []
    with progress_bar() as progress:
        each = 2 * (config.repeats + 2) + bool(config.perturbation_steps)
        task = progress.add_task("measuring", total=each * len(config.batches))
        for batch in config.batches:
            images = torch.randn(batch, 3, config.img_size, config.img_size, generator=generator).to(device)
            row = measure(config, model, images, lambda name: progress.update(task, advance=1, description=name))
            rows.append({**row, **describe(device)})
            write_csv(path, rows)
    for row in rows:
        console.print(
            f"{row['batch']} images, {len(config.subsets)} subsets × {len(config.rules)} rules: "
            f"{_said(row['saliency_seconds'])} s, {_said(row['ratio'])} times one forward and "
            f"{row['one_forward_and_backward_passes']} backward passes of the backbone"
        )
        if config.perturbation_steps:
            console.print(f"{config.perturbation_steps} steps of perturbation: {_said(row['perturbation_seconds'])} s")
    if any(None in row.values() for row in rows):
        console.print("–: the device's memory is too small")
    console.print(f"written to {path}", soft_wrap=True, markup=False)
    output.result({"rows": rows, "files": [path]}, [path])
