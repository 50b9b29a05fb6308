"""Load weights from the files of several programs, without running code in them, and report what fitted."""

import json
import logging
import math
import os
import pickletools
import re
import sys
import warnings
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from eigengrain.errors import FileError, WeightsError
from eigengrain.files import check_file
from eigengrain.models.layouts import BACKBONE, Reading, into_backbone, readings, rename
from eigengrain.models.model import VECTOR_FACTORS, CovarianceNet
from eigengrain.models.numpy_file import read_arrays
from eigengrain.text import printable

logger = logging.getLogger("eigengrain")

TORCH_SUFFIXES = (".pth", ".pt", ".bin", ".tar", ".ckpt")

# keys under which training scripts save the parameters, in order of preference
_WRAPPERS = ("state_dict", "model", "model_state_dict", "model_ema", "state_dict_ema", "teacher")

# tokens of a ViT beside those of the patches, which every other token depends on, and a backbone that has them
_TOKENS = {
    "cls_token": "one with a class token",
    "dist_token": "a distilled one, such as deit_tiny_distilled_patch16_224",
    "reg_token": "one with as many register tokens, such as vit_small_patch14_reg4_dinov2",
    "register_tokens": "one with as many register tokens, such as vit_small_patch14_reg4_dinov2",
}

# characters of a tensor's name that a message shows
_MAX_NAME = 100

# a state dict inside more wrappers than this refers to itself, or was made to look like it
_MAX_WRAPPERS = 8

# the imports in a checkpoint of tensors and plain values; torch.load also allows those of sparse, quantised and meta
# tensors, of tensors with attributes, and of arrays of any size
_GLOBALS = re.compile(
    r"collections (OrderedDict|Counter)|(__builtin__|builtins) (set|complex)|_codecs encode|torch (Size|device)"
    r"|torch(\.storage)? \w+Storage|torch (u?int|float|bfloat|complex|bool)\w*"
    r"|torch\._utils _rebuild_(tensor|tensor_v2|tensor_v3|parameter)|torch\.nn\.parameter Parameter"
)

# largest header of a safetensors file in bytes, and the sizes of its types in bits
_MAX_HEADER = 1 << 24
_BITS = {"BOOL": 8, "F4": 4, "BF16": 16, "C64": 64} | dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6)
_BITS |= dict.fromkeys(("F8_E5M2", "F8_E4M3", "F8_E8M0"), 8) | {f"{k}{n}": n for k in "FIU" for n in (8, 16, 32, 64)}


@dataclass(frozen=True)
class LoadReport:
    """Result of loading a file; three lines when printed.

    Names in the model are ``matched``, and loaded, or they keep their values: ``new`` ones are not in the file,
    ``mismatched`` ones have another shape there, and both shapes follow. ``ignored`` names are only in the file.
    """

    path: str
    matched: tuple[str, ...]
    new: tuple[str, ...]
    ignored: tuple[str, ...]
    mismatched: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"{self.path}: {len(self.matched)} tensors loaded\n"
            f"not in the file, or in another shape: {_shorten(self.new + self.mismatched)}\n"
            f"left over in the file: {_shorten(self.ignored)}"
        )


def _shorten(names: Sequence[str], shown: int = 4) -> str:
    if not names:
        return "none"
    return f"{len(names)} ({_first(names, shown)}{', …' if len(names) > shown else ''})"


def _first(names: Iterable[str], shown: int) -> str:
    """The first names, of which a file may have any number, of any length, with any characters."""
    short = (name if len(name) <= _MAX_NAME else f"{name[:_MAX_NAME]}…" for name in islice(names, shown))
    return printable(", ".join(short))


def load_weights(model: CovarianceNet, path: str | os.PathLike[str], strict: bool = False) -> LoadReport:
    """Load a local file into a model.

    The file can be a checkpoint of such a model; a state dict of the backbone alone from timm, torchvision or torch hub
    (DeiT, DINO, DINOv2); for a ViT of timm, also a ViT, DeiT or DINOv2 of Hugging Face transformers, or a ViT of Google
    (``.npz``); or an MPN-COV network of fast-MPN-COV or DifferentiableSVD. The layout that fits most tensors is used.
    Position embeddings are resampled to the grid of the model, as timm does. A classifier of another size, or a head that
    the file does not have, stays as it is. The report is logged to ``eigengrain`` at INFO.

    Args:
        model: from :func:`create_model`; loaded in place.
        path: a ``.safetensors``, ``.npz`` or PyTorch file, a folder with ``model.safetensors``, or that of a finished
            run; no code in it is run.
        strict: raise an error unless file and model have the same tensors.

    Raises:
        FileError: if the file cannot be read.
        WeightsError: if less than half of the backbone's tensors are in the file, it is of a network with other class,
            distillation or register tokens, a floating-point tensor has another type there, or ``strict`` is violated.
    """
    tensors = read_tensors(path)
    own = model.state_dict()
    best = max((_Fit(reading, own) for reading in readings(tensors, model)), key=_Fit.score)
    if best.backbone_missing:
        originals = (best.reading, rename(tensors, into_backbone))
        adapted = [_adapt(reading, model, as_timm) for reading in originals for as_timm in (True, False)]
        best = max((best, *(_Fit(reading, own) for reading in adapted)), key=_Fit.score)
    backbone, report = model.config["backbone"], best.report(Path(path))
    if not best.loads_backbone:
        problem = f"nothing in it fits backbone {backbone!r}, its tensors are {_first(tensors, 3)}, …: use another file"
        raise WeightsError(Path(path), problem)
    if strict and (report.new or report.ignored or report.mismatched):
        raise WeightsError(Path(path), f"strict loading: {'; '.join(str(report).splitlines())}", report)
    if 2 * best.backbone_matched < (needed := best.backbone_matched + len(best.backbone_missing)):
        problem = f"only {best.backbone_matched} of the {needed} tensors of backbone {backbone!r} are in it"
        raise WeightsError(Path(path), f"{problem}: it is of another network", report)
    if tokens := best.token_problem(own, backbone):
        raise WeightsError(Path(path), tokens, report)
    for name, tensor in best.matched.items():
        if own[name].is_floating_point() and not tensor.is_floating_point():
            kind = str(tensor.dtype).removeprefix("torch.")
            raise WeightsError(Path(path), f"its tensor {name} has type {kind} instead of a floating-point type", report)
    model.load_state_dict(best.matched, strict=False)
    if best.backbone_missing:
        missing = _shorten(best.backbone_missing, shown=2)
        logger.warning("%s lacks tensors of the backbone %s, %s: is it of another network?", path, backbone, missing)
    elif best.extra_blocks:
        extra = _shorten(best.extra_blocks, shown=2)
        logger.warning("%s has more blocks than %s, %s: is it of a deeper network?", path, backbone, extra)
    for line in str(report).splitlines():
        logger.info(line)
    return report


class _Fit:
    """One reading of a file, compared with the tensors of the model."""

    def __init__(self, reading: Reading, own: dict[str, Tensor]):
        self.reading = reading
        self.matched: dict[str, Tensor] = {}
        self.mismatched: list[str] = []
        for name, (_, tensor) in reading.items():
            if name not in own:
                continue
            if tensor.shape == own[name].shape:
                self.matched[name] = tensor
            else:
                self.mismatched.append(f"{name} {tuple(tensor.shape)} instead of {tuple(own[name].shape)}")
        # the factor of a vector belongs to the classifier that was trained with it
        for factor in [name for name in self.matched if name.endswith(VECTOR_FACTORS)]:
            classifier = factor[: factor.rfind(".") + 1] + "classifier."
            if any(name.startswith(classifier) and name not in self.matched for name in own):
                del self.matched[factor]
        # old files do not count batches, which nothing depends on, and have no factor of the vector, which is then 1
        needed = [name for name in own if not name.endswith(("num_batches_tracked", *VECTOR_FACTORS))]
        self.new = [name for name in needed if name not in reading]
        self.backbone_missing = [name for name in needed if name.startswith(BACKBONE) and name not in self.matched]
        self.loads_backbone = any(name.startswith(BACKBONE) for name in self.matched)
        self.backbone_matched = sum(name.startswith(BACKBONE) for name in needed if name in self.matched)
        self.ignored = sorted(old for name, (old, _) in reading.items() if name not in own)

    @property
    def extra_blocks(self) -> list[str]:
        """Blocks of the file with a number beyond those of the model, under the model's names."""
        has = {part for name in self.matched for part in accumulate(name.split("."), "{}.{}".format)}
        blocks: dict[str, None] = {}
        for name in self.reading:
            parts = list(accumulate(name.split("."), "{}.{}".format))
            first = next((part for part in parts if part not in has), "")
            parent, _, number = first.rpartition(".")
            if name.startswith(BACKBONE) and number.isdigit() and parent in has and first != name:
                blocks[first.removeprefix(BACKBONE)] = None
        return list(blocks)

    def token_problem(self, own: dict[str, Tensor], backbone: str) -> str | None:
        """Why a ViT does not have the tokens of the file, None if it has: its map would not be that of the file."""
        positions = f"{BACKBONE}pos_embed"
        if positions not in own:
            return None
        for token, remedy in _TOKENS.items():
            if (name := BACKBONE + token) in self.reading and name not in self.matched:
                shape = " × ".join(map(str, self.reading[name][1].shape))
                return f"its {token} ({shape}) does not fit backbone {backbone!r}: use {remedy}"
        if positions in self.reading and positions not in self.matched:
            old, new = (tuple(t.shape) for t in (self.reading[positions][1], own[positions]))
            remedy = "use one with the same class, distillation and register tokens, or square images"
            return f"its position embeddings {old} do not fit those of backbone {backbone!r}, {new}: {remedy}"
        return None

    def score(self) -> tuple[int, int]:
        """Readings with more matches are better; among equals, those with fewer mismatches."""
        return len(self.matched), -len(self.mismatched)

    def report(self, path: Path) -> LoadReport:
        return LoadReport(path.name, tuple(self.matched), tuple(self.new), tuple(self.ignored), tuple(self.mismatched))


def read_tensors(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Read the named tensors of a checkpoint, without wrappers around them or in their names.

    Raises:
        FileError: if the file does not exist, is not a checkpoint or only a part of one, contains code, or a tensor is not
            a dense array of numbers with all of its values in the file.
    """
    file = Path(path)
    if file.is_dir():
        run = (file / "model").is_dir()
        file = (file / "model" if run else file) / "model.safetensors"
    check_file(file)
    if file.suffix.lower() in TORCH_SUFFIXES:
        named = _unwrap(read_torch(file), file)
    elif file.suffix.lower() == ".npz":
        named = {name: torch.from_numpy(array) for name, array in read_arrays(file).items()}
    elif file.suffix.lower() == ".safetensors":
        read_shapes(file)
        try:
            named = load_file(file, device="cpu")
        except (SafetensorError, OSError, ValueError, KeyError) as error:
            raise FileError(file, f"it is not a safetensors file, or only a part of one: {error}") from error
    else:
        raise FileError(file, f"weights are read from .safetensors, .npz, {', '.join(TORCH_SUFFIXES)} files")
    if not named:
        raise FileError(file, "it has no tensors")
    _check_tensors(named, file)
    return {_bare_name(name): tensor for name, tensor in named.items()}


def read_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Read the shapes of the tensors from the header of a safetensors file, and check that the file has their values.

    Raises:
        FileError: if it is not such a file, or only a part of one.
    """
    with check_file(file).open("rb") as content:
        size = os.fstat(content.fileno()).st_size
        length = int.from_bytes(content.read(8), "little")
        text = content.read(length) if length <= min(size - 8, _MAX_HEADER) else b""
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        shapes = {name: tuple(entry["shape"]) for name, entry in header.items()}
        for name, shape in shapes.items():
            start, end = header[name]["data_offsets"]
            bits = math.prod(shape) * _BITS[header[name]["dtype"]]
            whole = all(type(number) is int and number >= 0 for number in (*shape, start, end))
            if not whole or bits != 8 * (end - start) or end > size - 8 - length:
                raise ValueError(f"the values of {_first([name], 1)} are not in the file")
        return shapes
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        problem = "it is not a safetensors file, or only a part of one: its header is not valid"
        raise FileError(file, f"{problem} ({type(error).__name__}: {error})") from error


def read_torch(file: Path) -> object:
    """Read a file of ``torch.save`` that contains tensors and plain values only; all tensors are on the CPU.

    Raises:
        FileError: if it is not such a file, only a part of one, or contains code.
    """
    damaged = "it is not a PyTorch checkpoint, or only a part of one: download or save it again"
    with check_file(file).open("rb") as content:
        try:
            names = _pickled_globals(content)
        except Exception as error:  # a damaged file can fail in any way
            raise FileError(file, damaged) from error
    if other := [name for name in names if not _GLOBALS.fullmatch(name)]:
        problem = f"it contains code, or tensors that are not plain ({_first(other, 1).replace(' ', '.')})"
        raise FileError(file, f"{problem}, which are never built: save its state dict alone, preferably as .safetensors")
    try:
        with warnings.catch_warnings(action="ignore"):
            return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise FileError(file, damaged) from error


def _pickled_globals(file: BinaryIO) -> list[str]:
    """The functions and classes that a file of torch.save names, as "module name", without building anything.

    Raises:
        ValueError: if it is an archive whose parts are compressed or overlap, which torch.save does not write.
    """
    is_archive = file.read(4) == b"PK\3\4"  # as torch.load recognises it
    file.seek(0)
    if not is_archive:  # magic number, version, system, content and keys, one pickle after the other
        return [name for _ in range(5) for name in _globals(file)]
    with zipfile.ZipFile(file) as archive:
        entries, size = archive.infolist(), os.fstat(file.fileno()).st_size
        if any(entry.compress_type for entry in entries) or sum(entry.file_size for entry in entries) > size:
            raise ValueError("the parts of the archive are compressed or overlap")
        pickles = [entry for entry in entries if entry.filename.lower().endswith(".pkl")]
        return [name for entry in pickles for name in _globals(archive.read(entry))]


def _globals(pickled: Any) -> list[str]:
    """Arguments of the imports in a pickle; empty if it takes them from its stack, which torch.load refuses."""
    imports = ("GLOBAL", "STACK_GLOBAL", "INST")
    return [str(argument or "") for opcode, argument, _ in pickletools.genops(pickled) if opcode.name in imports]


def _unwrap(content: object, file: Path) -> dict[str, Tensor]:
    for _ in range(_MAX_WRAPPERS):
        # methods of dict, because a file can give an OrderedDict attributes of any name
        inner = [dict.get(content, key) for key in _WRAPPERS] if isinstance(content, dict) else []
        wrapped = next((value for value in inner if isinstance(value, dict)), None)
        if wrapped is None:
            break
        content = wrapped
    else:
        raise FileError(file, f"its state dict is inside more than {_MAX_WRAPPERS} others, or refers to itself")
    items = dict.items(content) if isinstance(content, dict) else ()
    named = {name: tensor for name, tensor in items if isinstance(name, str) and isinstance(tensor, Tensor)}
    if not named:
        raise FileError(file, f"it has no named tensors; expected a state dict, plain or under {', '.join(_WRAPPERS)}")
    return named


def _check_tensors(named: dict[str, Tensor], file: Path) -> None:
    """Raise a FileError unless all tensors are dense arrays of numbers whose values are in the file."""
    stored: dict[int, int] = {}
    for name, tensor in named.items():
        dense = tensor.device.type == "cpu" and tensor.layout == torch.strided and not tensor.is_quantized
        packed = str(tensor.dtype).endswith("_x2")  # two numbers in a byte, which torch cannot convert
        if not dense or tensor.is_complex() or packed:
            kind = f"{tensor.device.type}, {tensor.layout}, {tensor.dtype}"
            raise FileError(file, f"its tensor {_first([name], 1)} is not a dense array of real numbers ({kind})")
        storage = tensor.untyped_storage()
        stored[storage.data_ptr()] = storage.nbytes()
        if tensor.numel() * tensor.element_size() > storage.nbytes():  # strides of 0
            shape = " × ".join(map(str, tensor.shape))
            raise FileError(file, f"its tensor {_first([name], 1)} claims {shape} values, and the file has fewer")
    if sum(stored.values()) > file.stat().st_size:
        raise FileError(file, "its tensors claim more values than the file has")


def _bare_name(name: str) -> str:
    """Remove the prefixes of DataParallel and torch.compile, also of inner modules, and ``model.`` (Lightning)."""
    return ".".join(part for part in name.split(".") if part not in ("module", "_orig_mod")).removeprefix("model.")


def _adapt(reading: Reading, model: CovarianceNet, as_timm: bool) -> Reading:
    """Apply timm's checkpoint filter of this network, if there is one, to the tensors of the backbone.

    The filter resizes position embeddings to the image size of the network and renames the tensors of original authors.
    With ``as_timm`` it also gets the classifier's name, by which some filters recognise timm's own names.
    """
    adapt = getattr(sys.modules.get(type(model.backbone).__module__), "checkpoint_filter_fn", None)
    if adapt is None:
        return reading
    inside = {name.removeprefix(BACKBONE): entry for name, entry in reading.items() if name.startswith(BACKBONE)}
    outside = {name: entry for name, entry in reading.items() if not name.startswith(BACKBONE)}
    marker = f"{model.backbone_classifier}.weight" if as_timm and model.backbone_classifier else ""
    own = model.backbone.state_dict()
    tensors = {name: tensor for name, (_, tensor) in inside.items()}
    for name in [name for name, tensor in tensors.items() if name in own and tensor.shape != own[name].shape]:
        tensor = tensors[name] = tensors[name].float()  # resized in float32
        if tensor.ndim == own[name].ndim in (2, 3) and tensor.shape[-1] != own[name].shape[-1]:
            return reading  # positions are resized, not their channels, of which a file can have any number
    try:
        adapted = dict(adapt({marker: torch.empty(0), **tensors} if marker else tensors, model.backbone))
    except (KeyError, AttributeError, IndexError, RuntimeError, ValueError, AssertionError):
        return reading  # the file is not of this network, which the report will show
    return outside | {
        BACKBONE + name: (inside.get(name, (name,))[0], tensor)
        for name, tensor in adapted.items()
        if name != marker or name in tensors
    }
