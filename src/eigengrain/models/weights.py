"""Load weights from the files of several programs, without running code in them, and report what fitted."""

import logging
import os
import pickle
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from eigengrain.errors import FileError, WeightsError
from eigengrain.models.model import CovarianceNet

logger = logging.getLogger("eigengrain")

TORCH_SUFFIXES = (".pth", ".pt", ".bin", ".tar", ".ckpt")
BACKBONE = "backbone."

# keys under which training scripts save the parameters, in order of preference
_WRAPPERS = ("state_dict", "model", "model_state_dict", "model_ema", "state_dict_ema")

# errors of torch.load for files that are damaged or contain code
_READ_ERRORS = (pickle.UnpicklingError, RuntimeError, EOFError, OSError, KeyError, ValueError, AttributeError, TypeError)

#: name in the file -> name in the model
Renaming = Callable[[str], str]
#: name in the model -> name in the file, tensor
Reading = dict[str, tuple[str, Tensor]]


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
    return f"{len(names)} ({', '.join(names[:shown])}{', …' if len(names) > shown else ''})"


def load_weights(model: CovarianceNet, path: str | os.PathLike[str], strict: bool = False) -> LoadReport:
    """Load a local file into a model.

    The file can be a checkpoint of such a model, a state dict of the backbone alone from timm or torchvision, or an MPN-COV
    network of fast-MPN-COV or DifferentiableSVD. The naming that fits most tensors is used. A classifier of another size,
    or a head that the file does not have, stays as it is. The report is logged to ``eigengrain`` at INFO.

    Args:
        model: from :func:`create_model`; loaded in place.
        path: a ``.safetensors`` or PyTorch file, or a folder with ``model.safetensors``; no code in it is run.
        strict: raise an error unless file and model have the same tensors.

    Raises:
        FileError: if the file cannot be read.
        WeightsError: if nothing in the file fits the model, or ``strict`` is violated.
    """
    tensors = read_tensors(path)
    own = model.state_dict()
    readings = [_rename(tensors, renaming) for renaming in _renamings(model, tensors)]
    best = max((_Fit(reading, own) for reading in readings), key=_Fit.score)
    if best.backbone_missing:
        originals = (best.reading, _rename(tensors, _into_backbone))
        adapted = [_adapt(reading, model, as_timm) for reading in originals for as_timm in (True, False)]
        best = max((best, *(_Fit(reading, own) for reading in adapted)), key=_Fit.score)
    backbone = model.config["backbone"]
    if not best.loads_backbone:
        names = ", ".join(list(tensors)[:3])
        problem = f"nothing in it fits backbone {backbone!r}, its tensors are {names}, …: use another file"
        raise WeightsError(Path(path), problem)
    report = best.report(Path(path))
    if strict and (report.new or report.ignored or report.mismatched):
        raise WeightsError(Path(path), f"strict loading: {'; '.join(str(report).splitlines())}", report)
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
        # old files do not count batches, and nothing depends on the count
        needed = [name for name in own if not name.endswith("num_batches_tracked")]
        self.new = [name for name in needed if name not in reading]
        self.backbone_missing = [name for name in needed if name.startswith(BACKBONE) and name not in self.matched]
        self.loads_backbone = any(name.startswith(BACKBONE) for name in self.matched)
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

    def score(self) -> tuple[int, int]:
        """Readings with more matches are better; among equals, those with fewer mismatches."""
        return len(self.matched), -len(self.mismatched)

    def report(self, path: Path) -> LoadReport:
        return LoadReport(path.name, tuple(self.matched), tuple(self.new), tuple(self.ignored), tuple(self.mismatched))


def read_tensors(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Read the named tensors of a checkpoint, half precision as float32, without wrappers around them or in their names.

    Raises:
        FileError: if the file does not exist, is not a checkpoint or only a part of one, or contains code.
    """
    file = Path(path)
    if file.is_dir():
        file = file / "model.safetensors"
    if not file.is_file():
        raise FileError(file, "it does not exist")
    content: object
    if file.suffix.lower() in TORCH_SUFFIXES:
        content = _read_torch(file)
    elif file.suffix.lower() == ".safetensors":
        try:
            content = load_file(file, device="cpu")
        except (SafetensorError, OSError, ValueError) as error:
            raise FileError(file, f"it is not a safetensors file, or only a part of one: {error}") from error
    else:
        raise FileError(file, f"weights are read from .safetensors, {', '.join(TORCH_SUFFIXES)} files")
    half = (torch.float16, torch.bfloat16)
    tensors = _unwrap(content, file).items()
    return {_bare_name(name): tensor.float() if tensor.dtype in half else tensor for name, tensor in tensors}


def _read_torch(file: Path) -> object:
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except _READ_ERRORS as error:
        if isinstance(error, pickle.UnpicklingError) and "GLOBAL" in str(error):  # torch's word for an import
            problem = "it contains code, which is never run: save its state dict alone, preferably as .safetensors"
        else:
            problem = "it is not a PyTorch checkpoint, or only a part of one: download or save it again"
        raise FileError(file, problem) from error


def _unwrap(content: object, file: Path) -> dict[str, Tensor]:
    while isinstance(content, Mapping):
        inner = next((content[key] for key in _WRAPPERS if isinstance(content.get(key), Mapping)), None)
        if inner is None:
            break
        content = inner
    tensors = content.items() if isinstance(content, Mapping) else ()
    named = {name: tensor for name, tensor in tensors if isinstance(name, str) and isinstance(tensor, Tensor)}
    if not named:
        raise FileError(file, f"it has no named tensors; expected a state dict, plain or under {', '.join(_WRAPPERS)}")
    return named


def _bare_name(name: str) -> str:
    """Remove the prefixes of DataParallel and torch.compile, also of inner modules, and ``model.`` (Lightning)."""
    return ".".join(part for part in name.split(".") if part not in ("module", "_orig_mod")).removeprefix("model.")


# MPN-COV networks split into features, representation and classifier: a ResNet is a plain sequence there, with the
# reduction at its end if the network was pretrained with it
_RESNET_SEQUENCE = {
    "0": "backbone.conv1",
    "1": "backbone.bn1",
    "8": "head.reduce.0",
    "9": "head.reduce.1",
    **{str(stage + 3): f"backbone.layer{stage}" for stage in (1, 2, 3, 4)},
}
_REDUCTION = re.compile(r"representation\.conv_dr_block\.(\d+)\.")
# the same networks as a class of their own
_OWN_CLASS = {"layer_reduce": "head.reduce.0", "layer_reduce_bn": "head.reduce.1", "fc": "classifier"}


def _into_backbone(name: str) -> str:
    return BACKBONE + name


def _from_sequence(name: str) -> str:
    return BACKBONE + name if name.startswith("features.") else _REDUCTION.sub(r"head.reduce.\1.", name)


def _from_resnet_sequence(name: str) -> str:
    part, number, rest = (*name.split(".", 2), "", "")[:3]
    if part == "features":
        return f"{_RESNET_SEQUENCE[number]}.{rest}" if number in _RESNET_SEQUENCE else name
    return _from_sequence(name)


def _from_own_class(name: str) -> str:
    part, _, rest = name.partition(".")
    return f"{_OWN_CLASS[part]}.{rest}" if part in _OWN_CLASS else BACKBONE + name


def _renamings(model: CovarianceNet, names: Iterable[str]) -> Iterator[Renaming]:
    """Candidate namings for a file with these names, the likeliest first."""
    parts = {name.partition(".")[0] for name in names}
    yield from (str, _into_backbone)
    if "features" in parts:
        yield from (_from_resnet_sequence, _from_sequence)
    if "layer_reduce" in parts:
        yield _from_own_class
    # after average pooling the file's own classifier fits ours, if no layer between the two was cut off
    original = model.backbone_classifier
    others = {name.partition(".")[0] for name in names if name.rpartition(".")[0] != original}
    removed = {name for name, child in model.backbone.named_children() if isinstance(child, nn.Identity)}
    if model.config["head"] == "gap" and model.layout.kind == "NCHW" and original and others.isdisjoint(removed):

        def with_classifier(name: str) -> str:
            module, _, parameter = name.rpartition(".")
            return f"classifier.{parameter}" if module == original else BACKBONE + name

        yield with_classifier


def _rename(tensors: dict[str, Tensor], renaming: Renaming) -> Reading:
    return {renaming(name): (name, tensor) for name, tensor in tensors.items()}


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
    tensors = {name: tensor for name, (_, tensor) in inside.items()}
    try:
        adapted = dict(adapt({marker: torch.empty(0), **tensors} if marker else tensors, model.backbone))
    except (KeyError, AttributeError, IndexError, RuntimeError, ValueError, AssertionError):
        return reading  # the file is not of this network, which the report will show
    return outside | {
        BACKBONE + name: (inside.get(name, (name,))[0], tensor)
        for name, tensor in adapted.items()
        if name != marker or name in tensors
    }
