"""Time and memory of whole training steps: Table 8 of the paper, for every head on every backbone."""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, Literal, NamedTuple

import torch
from rich import box
from rich.table import Table
from torch import Tensor, nn

from benchmarks.config import StepBench
from benchmarks.functional import Row, in_turn, mebibytes, short, synchronise
from benchmarks.heads import known_heads
from benchmarks.memory import LiveStorages
from eigengrain import output
from eigengrain.environment import describe, pick_device
from eigengrain.files import writable, write_csv
from eigengrain.models import CovarianceNet, create_model
from eigengrain.models.names import check_backbone
from eigengrain.progress import progress_bar

#: Table 8: head -> seconds and MiB for a mini-batch
PAPER = {"isqrt": (0.28, 4345), "mpncov": (0.30, 4298), "mpncov+seb": (0.31, 4501)}
PAPER_BACKBONE = "resnet50"
PAPER_SETTING = "Table 8 of the paper, ResNet-50 on a GTX 1080 Ti, where Cars are trained in batches of 10 at 448 pixels"

AMP_DTYPES = {"none": None, "bf16": torch.bfloat16, "fp16": torch.float16}


# --- the share of the head ---------------------------------------------------------------------------------------


class HeadClock:
    """How long a module takes inside a step, forward and backward, read off the device's own clock on CUDA.

    Marks are set where its input enters, its output leaves, the gradient of its output arrives and that of its input is
    complete. Subtracting the step of a cheaper head instead would be the difference of two long times, and count the
    classifier, whose size depends on the head.

    Example:
        >>> layer = nn.Linear(3, 2)
        >>> with HeadClock(layer, torch.device("cpu")) as clock:
        ...     layer(torch.zeros(1, 3, requires_grad=True)).sum().backward()
        >>> 0 < clock.seconds() < 1
        True
    """

    def __init__(self, module: nn.Module, device: torch.device):
        self.device = device
        self._module = module
        self._marks: dict[str, Any] = {}

    def __enter__(self) -> "HeadClock":
        def before(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            args[0].register_hook(lambda grad: self._mark("backward end"))
            self._mark("forward start")

        def after(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
            self._mark("forward end")
            out.register_hook(lambda grad: self._mark("backward start"))

        self._hooks = (self._module.register_forward_pre_hook(before), self._module.register_forward_hook(after))
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _mark(self, name: str) -> None:
        if self.device.type == "cuda":
            self._marks[name] = torch.cuda.Event(enable_timing=True)
            self._marks[name].record(torch.cuda.current_stream(self.device))
        else:
            synchronise(self.device)
            self._marks[name] = time.perf_counter()

    def _between(self, start: str, end: str) -> float:
        if self.device.type == "cuda":
            return float(self._marks[start].elapsed_time(self._marks[end])) / 1e3
        return float(self._marks[end] - self._marks[start])

    def seconds(self) -> float:
        """Of the last forward and backward pass, which must be finished on the device."""
        return self._between("forward start", "forward end") + self._between("backward start", "backward end")


# --- one model that trains ---------------------------------------------------------------------------------------


class StepTime(NamedTuple):
    """Seconds of a step, and of the head within it."""

    step: float
    head: float


class Memory(NamedTuple):
    """Bytes of a training step, weights and momentum included.

    Args:
        peak: of the tensors; None where it cannot be counted.
        held: what the allocator took from a CUDA device for them, which is what its monitor shows less the context.
    """

    peak: int | None
    held: int | None


@dataclass
class Trainee:
    """A model with its optimiser and one mini-batch, which takes training steps."""

    model: CovarianceNet
    images: Tensor
    targets: Tensor
    amp: Literal["none", "bf16", "fp16"] = "none"
    optimiser: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        self.device = self.images.device
        # a scale of 1 overflows nowhere, so that no update is skipped; the work is that of any other scale
        self.scaler = torch.amp.GradScaler(self.device.type, init_scale=1.0, enabled=self.amp == "fp16")
        self.forget()

    def forget(self) -> None:
        """Free everything but weights and images: gradients, momentum."""
        self.model.zero_grad(set_to_none=True)
        self.optimiser = torch.optim.SGD(self.model.parameters(), lr=1e-4, momentum=0.9, weight_decay=1e-4)

    def step(self) -> None:
        """Forward, loss, backward, update. Autocast is around the model, and heads leave it where they need to."""
        dtype = AMP_DTYPES[self.amp]
        with torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None):
            scores = self.model(self.images)
        loss = nn.functional.cross_entropy(scores.float(), self.targets)
        self.optimiser.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimiser)
        self.scaler.update()

    def timed(self) -> StepTime:
        with HeadClock(self.model.head, self.device) as clock:
            synchronise(self.device)
            start = time.perf_counter()
            self.step()
            synchronise(self.device)
            return StepTime(time.perf_counter() - start, clock.seconds())

    def lasting(self) -> list[Tensor]:
        """The tensors that stay from step to step: weights, statistics, momentum, the mini-batch."""
        momentum = [v for state in self.optimiser.state.values() for v in state.values() if isinstance(v, Tensor)]
        return [*self.model.parameters(), *self.model.buffers(), *momentum, self.images, self.targets]


def build(config: StepBench, backbone: str, head: str, device: torch.device) -> Trainee:
    """The model of a config that is filled in, with random weights, and its random mini-batch."""
    assert config.batch is not None
    assert config.img_size is not None
    options: dict[str, Any] = {
        "head": head,
        "num_classes": config.num_classes,
        "reduce": config.reduce,
        "last_stride": config.last_stride,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = create_model(backbone, **options)
        if not model.head.quadratic and config.reduce != "auto":  # the reduction is for those that need it
            options["reduce"] = "auto"
            model = create_model(backbone, **options)
        built_for = model.config["img_size"]
        if built_for is not None and tuple(built_for) != (config.img_size, config.img_size):
            model = create_model(backbone, img_size=config.img_size, **options)
        images = torch.randn(config.batch, *model.pretrained_cfg["input_size"][:1], config.img_size, config.img_size)
        targets = torch.randint(config.num_classes, (config.batch,))
    layout = torch.channels_last if config.channels_last else torch.contiguous_format
    model = model.to(device, memory_format=layout).train()  # type: ignore[call-overload]
    return Trainee(model, images.to(device, memory_format=layout), targets.to(device), config.amp)


# --- memory ------------------------------------------------------------------------------------------------------


def with_memory(make: Callable[[], Trainee], device: torch.device) -> tuple[Trainee, Memory]:
    """A trainee, and the memory of its steps while no other one takes any; it comes back with its weights alone."""
    if device.type == "cuda":
        return _with_cuda_memory(make, device)
    trainee = make()
    trainee.step()  # momentum is there from now on
    peak = None
    if device.type == "cpu":
        trainee.model.zero_grad(set_to_none=True)
        lasting = trainee.lasting()
        with LiveStorages(*lasting) as memory:
            trainee.step()
        peak = memory.peak + sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in lasting}.values())
    trainee.forget()
    return trainee, Memory(peak, None)


def _with_cuda_memory(make: Callable[[], Trainee], device: torch.device) -> tuple[Trainee, Memory]:
    def taken() -> tuple[int, int]:
        """Bytes of the tensors, and what the allocator holds for them at least."""
        gc.collect()
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)

    before = taken()
    trainee = make()
    made = taken()
    trainee.step()  # loads libraries and times solvers, once for all trainees: what that leaves is nobody's
    trainee.forget()
    start = taken()
    torch.cuda.reset_peak_memory_stats(device)
    for _ in range(3):  # long enough for CUDA graphs to be recorded, which keep memory of their own
        trainee.step()
    torch.cuda.synchronize(device)
    peak, held = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    # momentum lies in blocks that activations left: freed, or the next trainee would find the rest of those blocks
    trainee.forget()
    return trainee, Memory(peak - start[0] + made[0] - before[0], held - start[1] + made[1] - before[1])


def _wake(device: torch.device) -> None:
    """Workspaces of the matrix library, forward and backward, before anything is counted."""
    x = torch.ones(64, 64, device=device, requires_grad=True)
    (x @ x).sum().backward()
    synchronise(device)


# --- the benchmark -----------------------------------------------------------------------------------------------


def measure(
    config: StepBench,
    backbone: str,
    device: torch.device,
    advance: Callable[[str], None] = lambda head: None,
) -> list[Row]:
    """Training steps of every head on one backbone, in turn.

    Args:
        config: with nothing left open, see :meth:`StepBench.filled`.
        advance: called with the head's name after its memory has been measured and after each step that is timed.

    Returns:
        a row a head: seconds of a step, ratio to the reference, images a second, the head's share, MiB, Table 8.
    """
    assert config.batch is not None
    assert config.warmup is not None
    trainees: dict[str, Trainee] = {}
    memory: dict[str, Memory] = {}
    _wake(device)
    for head in config.heads:
        try:
            trainees[head], memory[head] = with_memory(lambda head=head: build(config, backbone, head, device), device)  # type: ignore[misc]
        except torch.OutOfMemoryError:
            memory[head] = Memory(None, None)
        advance(head)
    times = in_turn(
        {head: trainee.timed for head, trainee in trainees.items()},
        repeats=config.repeats,
        warmup=config.warmup,
        advance=advance,
    )
    step = {head: median(t.step for t in runs) for head, runs in times.items() if runs}
    inside = {head: median(t.head for t in runs) for head, runs in times.items() if runs}
    rows: list[Row] = []
    for head in config.heads:
        row: Row = {
            "backbone": backbone,
            "head": head,
            "batch": config.batch,
            "img_size": config.img_size,
            "last_stride": config.last_stride,
            "amp": config.amp,
            "channels_last": int(config.channels_last),
            "channels": trainees[head].model.head.channels if head in trainees else None,
            "vector": trainees[head].model.head_hidden_size if head in trainees else None,
        }
        if head in step:
            row |= {
                "step_seconds": round(step[head], 6),
                f"ratio_to_{config.reference}": _ratio(step[head], step.get(config.reference)),
                "images_per_second": round(config.batch / step[head], 3),
                "head_seconds": round(inside[head], 6),
                "head_share": round(inside[head] / step[head], 4),
                "over_gap_seconds": round(step[head] - step["gap"], 6) if "gap" in step else None,
            }
        else:
            empty = ("step_seconds", f"ratio_to_{config.reference}", "images_per_second", "head_seconds", "head_share")
            row |= dict.fromkeys((*empty, "over_gap_seconds"))
        paper = PAPER.get(head, (None, None)) if backbone == PAPER_BACKBONE else (None, None)
        row |= {
            "peak_mib": mebibytes(memory[head].peak),
            "held_mib": mebibytes(memory[head].held),
            "paper_seconds": paper[0],
            "paper_mib": paper[1],
            "num_classes": config.num_classes,
            "repeats": config.repeats,
        }
        rows.append(row)
    return rows


def _ratio(seconds: float, reference: float | None) -> float | None:
    return None if reference is None else round(seconds / reference, 4)


def table(rows: list[Row], reference: str) -> Table:
    """The rows of one backbone for reading, with the paper's numbers beside them."""
    first = rows[0]
    amp = "" if first["amp"] == "none" else f", {first['amp']}"
    held = all(row["held_mib"] is not None for row in rows)
    view = Table(
        title=f"a training step of {first['backbone']}: {first['batch']} images, {first['img_size']} pixels, "
        f"last stride {first['last_stride']}{amp}",
        caption=f"medians; ×: to {reference}; head: forward and backward, and its share of the step; MiB: with weights and "
        f"momentum, {'as taken from the device' if held else 'peak of the tensors'}; paper: {PAPER_SETTING}",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    view.add_column("head", no_wrap=True)
    for heading in ("s", "×", "img/s", "head\nms", "head\nshare", "MiB", "paper\ns", "paper\n×", "paper\nMiB"):
        view.add_column(heading, no_wrap=True, justify="right")
    for row in rows:
        seconds = row["paper_seconds"]
        share, inside = row["head_share"], row["head_seconds"]
        view.add_row(
            str(row["head"]),
            short(row["step_seconds"]),
            short(row[f"ratio_to_{reference}"]),
            short(row["images_per_second"]),
            short(None if inside is None else 1e3 * float(inside)),
            "–" if share is None else f"{float(share):.1%}",
            short(row["held_mib" if held else "peak_mib"]),
            short(seconds),
            short(None if seconds is None or reference not in PAPER else float(seconds) / PAPER[reference][0]),
            short(row["paper_mib"]),
        )
    return view


def run(config: StepBench) -> None:
    """``eigengrain bench step``."""
    device = pick_device(config.device)
    config = replace(config.filled(device.type), heads=known_heads(config.heads))
    known_heads([config.reference])
    backbones = list(dict.fromkeys(config.backbones or ()))
    for backbone in backbones:
        check_backbone(backbone)
    path = writable(config.out or f"benchmarks/step-{device.type}.csv")
    environment = describe(device)
    console = output.reading()
    rows: list[Row] = []
    with progress_bar() as progress:
        turns = 1 + (config.warmup or 0) + config.repeats
        task = progress.add_task("measuring", total=len(backbones) * len(config.heads) * turns)
        for backbone in backbones:
            rows += measure(
                config,
                backbone,
                device,
                lambda head, backbone=backbone: progress.update(  # type: ignore[misc]
                    task, advance=1, description=f"{backbone} {head}"
                ),
            )
            write_csv(path, [{**row, **environment} for row in rows])  # each time: the next backbone may refuse an option
    for backbone in backbones:
        console.print(table([row for row in rows if row["backbone"] == backbone], config.reference))
    console.print(", ".join(f"{key} {value}" for key, value in environment.items()), style="dim")
    console.print(f"written to {path}", soft_wrap=True, markup=False)
    output.result({"rows": rows, "environment": environment, "files": [path]}, [path])
