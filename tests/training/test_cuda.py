"""Training on a CUDA device: precision, the cache, NCCL, resuming and compiling; skipped elsewhere."""

import math
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from eigengrain.data import DeviceCache, build_transform, make_loader
from eigengrain.data.preprocessing import Transforms
from eigengrain.models import from_pretrained
from eigengrain.training import loop, train
from eigengrain.training.checkpoint import read_checkpoint
from eigengrain.training.config import Model
from eigengrain.training.distributed import Process
from eigengrain.training.setup import build
from training.small_run import SIZE, colours, small

DEVICE = "cuda"
pytestmark = pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def repeatable(monkeypatch):
    """Deterministic sums and convolutions in full float32, so that two runs can be compared."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def run_of(out, **changes):
    return small(out, **{"device": DEVICE, **changes})


def losses_of(config, **options):
    losses = []
    train(config, colours(**options), lambda e, b, loss: losses.append(loss))
    return losses


# precision


def test_fp16_skips_only_the_steps_that_overflow(tmp_path, monkeypatch):
    steps = []

    class Watched(torch.amp.GradScaler):
        """Starts with a scale at which the first gradients overflow, and records which steps move the parameters."""

        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options, init_scale=2.0**32)

        def step(self, optimiser, *arguments, **options):
            parameters = [p for group in optimiser.param_groups for p in group["params"]]
            before = [p.detach().clone() for p in parameters]
            overflowed = not all(p.grad.isfinite().all() for p in parameters if p.grad is not None)
            super().step(optimiser, *arguments, **options)
            moved = any(not torch.equal(a, b.detach()) for a, b in zip(before, parameters, strict=True))
            steps.append((self.get_scale(), overflowed, moved))

    monkeypatch.setattr(torch.amp, "GradScaler", Watched)
    result = train(run_of(tmp_path, amp="fp16", epochs=8), colours())
    assert len(steps) == 40
    assert all(moved != overflowed for _, overflowed, moved in steps)
    assert steps[0][1]
    assert sum(moved for _, _, moved in steps) >= 10
    for (scale, overflowed, _), (following, _, _) in pairwise(steps):
        assert following == (scale / 2 if overflowed else scale)
    scale, overflowed, _ = steps[-1]
    assert read_checkpoint(tmp_path / "last.pt")["scaler"]["scale"] == (scale / 2 if overflowed else scale)
    assert all(math.isfinite(value) for value in result.scores.values())
    kept = from_pretrained(tmp_path / "model").state_dict()
    assert all(tensor.isfinite().all() for tensor in kept.values())
    assert all(tensor.dtype in (torch.float32, torch.int64) for tensor in kept.values())


@pytest.mark.parametrize(("amp", "dtype"), [("none", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_half_precision_is_limited_to_the_backbone(tmp_path, amp, dtype):
    run = build(run_of(tmp_path, amp=amp), colours(), Process(torch.device(DEVICE)))
    seen = {}

    def note(name):
        def hook(module, inputs, output=None):
            value = inputs[0] if output is None else output
            seen[name] = value.dtype, torch.is_autocast_enabled(DEVICE)

        return hook

    convolution = next(m for m in run.model.backbone.modules() if isinstance(m, nn.Conv2d))
    convolution.register_forward_hook(note("convolution"))
    run.model.head.register_forward_pre_hook(note("head"))
    run.model.classifier.register_forward_pre_hook(note("classifier"))
    images, labels = next(iter(run.loaders.train))
    scores = run.net(images.to(DEVICE))
    assert seen["convolution"] == (dtype, amp != "none")
    assert seen["head"] == seen["classifier"] == (torch.float32, False)
    assert scores.dtype == torch.float32
    nn.functional.cross_entropy(scores, labels.to(DEVICE)).backward()
    assert {p.grad.dtype for p in run.model.parameters()} == {torch.float32}
    assert run.scaler.is_enabled() == (amp == "fp16")


def test_bf16_starts_where_float32_starts_and_learns(tmp_path):
    whole, half = (losses_of(run_of(tmp_path / amp, amp=amp, epochs=12)) for amp in ("none", "bf16"))
    assert half[0] != whole[0]
    assert half[0] == pytest.approx(whole[0], abs=0.03)  # the same weights and images, rounded
    for losses in (whole, half):
        assert sum(losses[-5:]) < 0.9 * sum(losses[:5])


# the cache


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("none", {}),
        ("paper", {}),
        ("scripts", {}),
        ("scripts", {"keep_aspect": False}),
        ("imagenet", {}),
        ("imagenet", {"keep_aspect": False}),
    ],
)
def test_cached_batches_equal_those_of_the_loader(kind, options, training):
    def images():
        dataset = colours().train
        size = SIZE if kind == "none" else 21
        dataset.transform = build_transform(
            Transforms(kind, size, **options), training, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
        )
        return dataset

    plain = make_loader(images(), 5, train=training, seed=7, pin_memory=DEVICE == "cuda")
    cached = DeviceCache(images(), 5, train=training, seed=7, device=DEVICE)
    assert len(cached) == len(plain)
    for epoch, start in ((0, 0), (2, 1)):
        plain.set_epoch(epoch, start)
        cached.set_epoch(epoch, start)
        batches = list(zip(plain, cached, strict=True))
        assert len(batches) == len(plain) - start
        for (x, y), (a, b) in batches:
            assert a.device.type == b.device.type == DEVICE
            # the device divides by 255 in its own way
            torch.testing.assert_close(a.cpu(), x, rtol=0, atol=1e-6)
            assert torch.equal(b.cpu(), y)


def test_the_cache_trains_as_the_loader_does(tmp_path):
    plain, cached = (losses_of(run_of(tmp_path / cache, cache=cache, epochs=1)) for cache in ("none", "device"))
    assert cached == pytest.approx(plain, abs=1e-3)


# process groups, with one device


class OneOfMany(Process):
    """A process that communicates although it is the only one."""

    @property
    def distributed(self) -> bool:
        return True


@pytest.fixture
def in_a_group(tmp_path, monkeypatch):
    """Let a single process communicate through NCCL; returns a list of what was built for each training."""
    built = []

    @contextmanager
    def join(device):
        yield OneOfMany(torch.device(DEVICE, 0) if DEVICE == "cuda" else torch.device(DEVICE))

    def noted(*arguments):
        run = build(*arguments)
        synchronised = any(isinstance(module, nn.SyncBatchNorm) for module in run.net.modules())
        built.append((isinstance(run.net, DistributedDataParallel), synchronised))
        return run

    if DEVICE == "cuda":
        torch.cuda.set_device(0)
    store = f"file://{tmp_path / 'store'}"
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo", init_method=store, rank=0, world_size=1)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "join", join)
        patch.setattr(loop, "build", noted)
        yield built
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Function from a backbone to the losses of a plain run; it must first be called outside of a process group."""
    return cache(lambda backbone: losses_of(with_backbone(tmp_path_factory.mktemp("alone"), backbone)))


def with_backbone(out, backbone, **changes):
    return run_of(out, model=Model(backbone, head="mpncov+seb", reduce=3, last_stride=1), ema=0.9, **changes)


@pytest.mark.parametrize("backbone", ["test_resnet", "test_efficientnet"])
@pytest.mark.parametrize("sync_bn", [False, True] if DEVICE == "cuda" else [False])
def test_a_group_of_one_process_trains_like_no_group(alone, tmp_path, sync_bn, backbone, request):
    expected = alone(backbone)  # before there is a group
    built = request.getfixturevalue("in_a_group")
    assert losses_of(with_backbone(tmp_path / "run", backbone, sync_bn=sync_bn)) == pytest.approx(expected, abs=1e-3)
    assert built == [(True, sync_bn)]
    assert (tmp_path / "run/model/model.safetensors").is_file()


# resuming


def difference(one, other):
    """Largest difference between the tensors of two checkpoints: model, averages and optimiser."""
    a, b = (read_checkpoint(folder / "last.pt") for folder in (one, other))
    pairs = [(a[part][name], b[part][name]) for part in ("model", "ema") for name in a[part]]
    for number, state in a["optimiser"]["state"].items():
        pairs += [(value, b["optimiser"]["state"][number][name]) for name, value in state.items() if value is not None]
    generators = zip(a["generators"], b["generators"], strict=True)
    assert all(torch.equal(x[name], y[name]) for x, y in generators for name in x if name != "python")
    tensors = [(x.double(), y.double()) for x, y in pairs if isinstance(x, torch.Tensor)]
    assert len(tensors) > 20
    return max((x - y).abs().max().item() for x, y in tensors)


@pytest.mark.parametrize(("head", "amp"), [("gap", "none"), ("mpncov+seb", "fp16")])
def test_a_resumed_run_differs_no_more_than_a_repeated_one(tmp_path, head, amp):
    """It is identical if the device is deterministic."""
    base = run_of(tmp_path, amp=amp, ema=0.9, save_every=2)
    base = replace(base, model=replace(base.model, head=head))
    whole, again, parts = (replace(base, out=str(tmp_path / name)) for name in ("whole", "again", "parts"))
    first = losses_of(whole)
    losses_of(again)

    class Killed(BaseException):
        pass

    seen = []

    def killed(epoch, batch, loss):
        seen.append(loss)
        if (epoch, batch) == (1, 3):  # the last checkpoint is one batch old
            raise Killed

    with pytest.raises(Killed):
        train(parts, colours(), killed)
    rest = losses_of(replace(parts, resume=True))
    noise = difference(tmp_path / "whole", tmp_path / "again")
    assert [*seen[:7], *rest] == pytest.approx(first, abs=1e-3 if noise else 0)
    assert difference(tmp_path / "whole", tmp_path / "parts") <= 10 * noise


# compiling


def test_a_compiled_backbone_gives_the_same_losses(tmp_path):
    plain, compiled = (losses_of(run_of(tmp_path / str(c), compile=c, epochs=1)) for c in (False, True))
    assert compiled == pytest.approx(plain, abs=2e-3)
    names = from_pretrained(tmp_path / "True/model").state_dict().keys()
    assert names == from_pretrained(tmp_path / "False/model").state_dict().keys()
