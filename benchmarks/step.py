"""Time and memory of training steps, and time of a forward pass: Table 8 of the paper, for every head and backbone."""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor, nn

from benchmarks import measure
from benchmarks.measure import Advance, Clock, Row, ignore, synchronise
from eigengrain.environment import pick_device
from eigengrain.errors import ArgumentError
from eigengrain.heads import list_heads
from eigengrain.models import CovarianceNet, create_model
from eigengrain.models.create import check_backbone
from eigengrain.models.model import eval_mode
from eigengrain.training.loss import Loss

#: Table 8: head -> seconds and MiB for a mini-batch
PAPER = {"isqrt": (0.28, 4345), "mpncov": (0.30, 4298), "mpncov+seb": (0.31, 4501)}
PAPER_BACKBONE = "resnet50"
PAPER_SETTING = "Table 8 of the paper, ResNet-50 on a GTX 1080 Ti, with Cars in batches of 10 at 448 pixels"

AMP_DTYPES = {"none": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class StepBench(measure.Bench):
    """Measure training steps: by default in the setting of Table 8 on a GPU, and in a smaller one on the CPU.

    Args:
        backbones: such as [resnet50,vgg16]; resnet18 on the CPU and resnet50 elsewhere by default.
        heads: heads on each backbone.
        reference: head that times are divided by in the column of ratios, if it is among the heads.
        batch: images in a mini-batch; 4 on the CPU and 10 elsewhere by default.
        img_size: side of the images; 224 on the CPU and 448 elsewhere by default.
        last_stride: 1 for a feature map twice as large in each direction, 2 for the unchanged backbone, as ViTs need.
        class_token: beside joins the class token of a ViT with the vector of each head that does not read it itself.
        patch_stride: pixels between the patches of a ViT, such as 12 for patches of 16 that overlap.
        reduce: channels after the 1 × 1 convolution of heads whose vector grows with the square of the channels; auto is
            256 for maps with more than 512. 128 on the CPU and auto elsewhere by default.
        num_classes: classes of the classifier.
        amp: bf16 or fp16 for automatic mixed precision; the spectral part of a head stays in full precision.
        channels_last: memory format of images and convolutions.
        cpu_time: count the time that the CPU works for this process, not the time that passes, because other work runs on
            the machine; with OMP_NUM_THREADS=1, since the times of all threads are added.
    """

    backbones: list[str] | None = None
    heads: list[str] = field(default_factory=lambda: ["gap", "isqrt", "mpncov", "mpncov+seb"])
    reference: str = "isqrt"
    batch: int | None = None
    img_size: int | None = None
    last_stride: Literal[1, 2] = 1
    class_token: Literal["beside"] | None = None
    patch_stride: int | None = None
    reduce: int | Literal["auto"] | None = None
    num_classes: int = 200
    amp: Literal["none", "bf16", "fp16"] = "none"
    channels_last: bool = False
    cpu_time: bool = False

    @property
    def clock(self) -> Clock:
        return time.process_time if self.cpu_time else time.perf_counter

    def __post_init__(self) -> None:
        super().__post_init__()
        reduce = [] if self.reduce == "auto" else ["reduce"]
        measure.check_sizes(self, "batch", "img_size", "num_classes", *reduce, "backbones", "heads")


#: on the CPU and elsewhere
DEFAULTS = {"backbones": (["resnet18"], ["resnet50"]), "batch": (4, 10), "img_size": (224, 448), "reduce": (128, "auto")}


@contextmanager
def head_clock(module: nn.Module, device: torch.device, clock: Clock = time.perf_counter) -> Iterator[Callable[[], float]]:
    """Time a module inside a step by the clock of the device on CUDA; yields a function that returns the seconds.

    They are those of the last forward pass, with the backward pass if there was one, which must be finished on the device.
    The difference to the step of a cheaper head would be less exact, and would count the classifier too.

    Example:
        >>> layer = nn.Linear(3, 2)
        >>> with head_clock(layer, torch.device("cpu")) as seconds:
        ...     layer(torch.zeros(1, 3, requires_grad=True)).sum().backward()
        >>> 0 < seconds() < 1
        True
    """
    marks: dict[str, Any] = {}

    def mark(name: str) -> None:
        if device.type == "cuda":
            marks[name] = torch.cuda.Event(enable_timing=True)
            marks[name].record(torch.cuda.current_stream(device))
        else:
            synchronise(device)
            marks[name] = clock()

    def before(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        marks.clear()
        if args[0].requires_grad:
            args[0].register_hook(lambda grad: mark("backward end"))
        mark("forward start")

    def after(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        mark("forward end")
        if out.requires_grad:
            out.register_hook(lambda grad: mark("backward start"))

    def seconds() -> float:
        names = [name for name in ("forward", "backward") if f"{name} end" in marks]
        pairs = [(marks[f"{name} start"], marks[f"{name} end"]) for name in names]
        if device.type == "cuda":
            return sum(start.elapsed_time(end) for start, end in pairs) / 1e3
        return float(sum(end - start for start, end in pairs))

    with module.register_forward_pre_hook(before), module.register_forward_hook(after):
        yield seconds


class Trainee:
    """A model with its optimiser and one mini-batch."""

    def __init__(
        self,
        model: CovarianceNet,
        images: Tensor,
        targets: Tensor,
        amp: str = "none",
        clock: Clock = time.perf_counter,
    ):
        self.clock = clock
        self.model, self.images, self.targets, self.device = model, images, targets, images.device
        self.amp_dtype = AMP_DTYPES[amp]
        self.loss = Loss([1] * model.num_classes)
        # with a scale of 1 nothing overflows and no update is skipped; the work is that of any other scale
        self.scaler = torch.amp.GradScaler(self.device.type, init_scale=1.0, enabled=amp == "fp16")
        self.reset()

    def reset(self) -> None:
        """Free gradients and momentum."""
        self.model.zero_grad(set_to_none=True)
        self.optimiser = torch.optim.SGD(self.model.parameters(), lr=1e-4, momentum=0.9, weight_decay=1e-4)

    def step(self) -> None:
        """Forward, loss with the terms of the head, backward, update; autocast is around the model."""
        with torch.autocast(self.device.type, dtype=self.amp_dtype, enabled=self.amp_dtype is not None):
            scores, added = self.model.forward_training(self.model.forward_features(self.images), self.targets)
        loss = self.loss(scores.float(), self.targets, added)
        self.optimiser.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimiser)
        self.scaler.update()

    @torch.inference_mode()
    def answer(self) -> None:
        """Forward without gradients, in eval mode."""
        with eval_mode(self.model), torch.autocast(self.device.type, self.amp_dtype, enabled=self.amp_dtype is not None):
            self.model(self.images)

    def timed(self) -> tuple[float, ...]:
        """Seconds of a step and of the head within it, then of a forward pass without gradients and of the head in it."""
        with head_clock(self.model.head, self.device, self.clock) as head_seconds:
            step = measure.seconds(self.step, self.device, self.clock), head_seconds()
            return *step, measure.seconds(self.answer, self.device, self.clock), head_seconds()

    @torch.no_grad()
    def positions(self) -> int:
        """Positions of the feature map."""
        with eval_mode(self.model):
            return self.model.forward_features(self.images[:1])[0, 0].numel()

    def lasting_bytes(self) -> int:
        """Bytes that stay from step to step: weights, statistics, momentum, the mini-batch."""
        momentum = [v for state in self.optimiser.state.values() for v in state.values() if isinstance(v, Tensor)]
        tensors = [*self.model.parameters(), *self.model.buffers(), *momentum, self.images, self.targets]
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def build(config: StepBench, backbone: str, head: str, device: torch.device) -> Trainee:
    """The model of a config without open defaults, with random weights, and its random mini-batch."""
    assert config.batch is not None
    assert config.img_size is not None
    options = {"head": head, **measure.pick(config, "num_classes", "reduce", "last_stride", "patch_stride")}
    options["class_token"] = config.class_token if head in list_heads(any_backbone=True) else None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = create_model(backbone, **options)
        if not model.head.quadratic and config.reduce != "auto":  # the reduction is for heads that need it
            options["reduce"] = "auto"
            model = create_model(backbone, **options)
        fixed_size = model.config["img_size"]
        if fixed_size is not None and tuple(fixed_size) != (config.img_size, config.img_size):
            model = create_model(backbone, img_size=config.img_size, **options)
        images = torch.randn(config.batch, *model.pretrained_cfg["input_size"][:1], config.img_size, config.img_size)
        targets = torch.randint(config.num_classes, (config.batch,))
    layout = torch.channels_last if config.channels_last else torch.contiguous_format
    model = model.to(device, memory_format=layout).train()  # type: ignore[call-overload]
    return Trainee(model, images.to(device, memory_format=layout), targets.to(device), config.amp, config.clock)


#: bytes of a training step with weights and momentum: peak of the tensors, and what a CUDA device gives for them
Memory = tuple[int | None, int | None]


def with_memory(make: Callable[[], Trainee], device: torch.device) -> tuple[Trainee, Memory]:
    """A trainee, reset, and the memory of its steps while no other trainee takes any."""

    def allocated() -> tuple[int, int]:
        """Bytes of the tensors, and the least that the allocator holds for them."""
        gc.collect()
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)

    if device.type != "cuda":
        trainee = make()
        trainee.step()  # makes the momentum
        trainee.model.zero_grad(set_to_none=True)
        lasting, peak = trainee.lasting_bytes(), measure.peak_bytes(trainee.step, device)
        trainee.reset()
        return trainee, (None if peak is None else peak + lasting, None)
    before = allocated()
    trainee = make()
    made = allocated()
    trainee.step()  # loads libraries, once for all trainees, which does not count
    trainee.reset()
    start = allocated()
    torch.cuda.reset_peak_memory_stats(device)
    for _ in range(3):  # enough for CUDA graphs to be recorded, which keep memory of their own
        trainee.step()
    torch.cuda.synchronize(device)
    peak, held = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    # momentum lies in blocks of activations, whose rest the next trainee would find
    trainee.reset()
    return trainee, (peak - start[0] + made[0] - before[0], held - start[1] + made[1] - before[1])


def measure_steps(config: StepBench, backbone: str, device: torch.device, advance: Advance = ignore) -> list[Row]:
    """Measure training steps of every head on one backbone in turn, for options without open defaults."""
    assert config.batch is not None
    trainees: dict[str, Trainee] = {}
    memory: dict[str, Memory] = {}
    x = torch.ones(64, 64, device=device, requires_grad=True)
    (x @ x).sum().backward()  # allocates the workspaces of the matrix library before anything is counted
    synchronise(device)
    for head in config.heads:
        try:
            trainees[head], memory[head] = with_memory(lambda head=head: build(config, backbone, head, device), device)  # type: ignore[misc]
        except torch.OutOfMemoryError:
            memory[head] = None, None
        advance(head)
    works = {head: trainee.timed for head, trainee in trainees.items()}
    times = measure.take_turns(works, repeats=config.repeats, warmup=config.runs(device), advance=advance)
    steps, inside, answers, inside_answers = (
        {head: median(run[part] for run in runs) for head, runs in times.items() if runs} for part in range(4)
    )
    rows: list[Row] = []
    for head in config.heads:
        step, model = steps.get(head), trainees[head].model if head in trainees else None
        paper = PAPER.get(head, (None, None)) if backbone == PAPER_BACKBONE else (None, None)
        rows.append(
            {
                "backbone": backbone,
                "head": head,
                **measure.pick(config, "batch", "img_size", "last_stride", "patch_stride"),
                "class_token": config.class_token if model is None else model.config.get("class_token"),
                "amp": config.amp,
                "channels_last": int(config.channels_last),
                "positions": trainees[head].positions() if model else None,
                "channels": model.head.channels if model else None,
                "vector": model.head_hidden_size if model else None,
                "step_seconds": measure.ratio(step, digits=6),
                f"ratio_to_{config.reference}": measure.ratio(step, steps.get(config.reference)),
                "images_per_second": None if step is None else round(config.batch / step, 3),
                "head_seconds": measure.ratio(inside.get(head), digits=6),
                "head_share": measure.ratio(inside.get(head), step),
                "inference_seconds": measure.ratio(answers.get(head), digits=6),
                "inference_head_share": measure.ratio(inside_answers.get(head), answers.get(head)),
                "over_gap_seconds": None if step is None or "gap" not in steps else round(step - steps["gap"], 6),
                **dict(zip(("peak_mib", "held_mib"), (measure.ratio(count, 2**20) for count in memory[head]), strict=True)),
                **dict(zip(("paper_seconds", "paper_mib"), paper, strict=True)),
                **measure.pick(config, "num_classes", "repeats"),
                "cpu_time": int(config.cpu_time),
            }
        )
    return rows


def run(config: StepBench) -> None:
    """``python -m benchmarks step``."""
    device = pick_device(config.device)
    if config.cpu_time and device.type != "cpu":
        raise ArgumentError("cpu_time", "must be false on other devices than the CPU", True, "leave it out")
    heads, *_ = (measure.check_names("head", names, list_heads()) for names in (config.heads, [config.reference]))
    config = replace(measure.fill(config, DEFAULTS, device), heads=heads)
    backbones = list(dict.fromkeys(config.backbones or ()))
    for backbone in backbones:
        check_backbone(backbone)
    path = config.path("step", device)
    rows: list[Row] = []
    with measure.progress(len(backbones) * len(config.heads) * (1 + config.runs(device) + config.repeats)) as advance:
        for backbone in backbones:
            rows += measure_steps(config, backbone, device, advance)
            measure.save(path, rows, device)  # each time: the next backbone may refuse an option
    columns = ["backbone", "head", "step_seconds", f"ratio_to_{config.reference}", "images_per_second", "head_seconds"]
    columns += [
        "head_share",
        "inference_seconds",
        "inference_head_share",
        "peak_mib",
        "held_mib",
        "paper_seconds",
        "paper_mib",
    ]
    measure.finish({"rows": rows}, [path], device, measure.format_table(rows, columns), f"paper: {PAPER_SETTING}")
