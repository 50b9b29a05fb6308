r"""Models for use outside PyTorch, and outside this package: ``torch.export`` programs and ONNX files.

No runtime has an eigensolver, so what leaves is a copy of the model whose head computes by matrix products alone, in
float64 (:meth:`eigengrain.heads.Head.use_products`). It agrees with the eigensolver to about 1e-7 in the scores; the
rest of the difference to PyTorch is the runtime's own single precision in the backbone.
"""

import copy
import json
import os
import tempfile
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import eigengrain
from eigengrain.errors import FailedError
from eigengrain.heads import create_head, list_heads
from eigengrain.models import onnx_file
from eigengrain.models.backbone import ImageSize
from eigengrain.models.model import CovarianceNet, check_bare
from eigengrain.models.pretrained import current_config

#: the largest relative error of the scores that a written file may have
TOLERANCE = 1e-4
#: ONNX operator set of files, and those that can be written
OPSET, OPSETS = 20, range(18, 26)
#: name of the input of a file; the output is :func:`output_name`
INPUT_NAME = "image"
#: entry of a .pt2 archive that holds what :func:`metadata` says
_METADATA_FILE = "eigengrain.json"


@dataclass(frozen=True)
class ExportReport:
    """What was written, in two lines when printed.

    Args:
        path: of the file.
        bytes: its size, with the file of weights that ONNX puts beside models above 2 GB.
        opset: of an ONNX file, None otherwise.
        input_shape: (batch or "batch", 3, height, width).
        relative_error: largest ‖file − PyTorch‖/‖PyTorch‖ of the scores of an image, None if it was not measured.
    """

    path: Path
    bytes: int
    opset: int | None
    input_shape: tuple[int | str, ...]
    relative_error: float | None

    def __str__(self) -> str:
        form = "torch.export program" if self.opset is None else f"ONNX, opset {self.opset}"
        shape = " × ".join(map(str, self.input_shape))
        error = "not measured" if self.relative_error is None else f"{self.relative_error:.1e}"
        return f"{self.path}: {form}, {self.bytes / 1e6:.1f} MB, input {shape}\nrelative error against PyTorch: {error}"


@dataclass(frozen=True)
class _Images:
    """What an exported model takes: channels, (height, width), and the number of images, None for any."""

    channels: int
    size: tuple[int, int]
    batch: int | None

    @classmethod
    def of(
        cls, model: CovarianceNet, img_size: ImageSize | None, batch: int | None = None, dynamic_batch: bool = True
    ) -> "_Images":
        channels, *own_size = model.pretrained_cfg["input_size"]
        size = own_size if img_size is None else (img_size, img_size) if isinstance(img_size, int) else img_size
        for name, value in (("img_size", min(size)), ("batch", 1 if batch is None else batch)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        return cls(channels, (size[0], size[1]), None if dynamic_batch else batch or 1)

    @property
    def shape(self) -> tuple[int | str, ...]:
        return ("batch" if self.batch is None else self.batch, self.channels, *self.size)

    def noise(self, batch: int | None = None, seed: int = 0) -> Tensor:
        generator = torch.Generator("cpu").manual_seed(seed)
        shape = (batch or self.batch or 1, self.channels, *self.size)
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")  # whatever the defaults are


def exportable_heads() -> list[str]:
    """Names of the heads that can be exported, with their default options.

    Example:
        >>> "mpncov+seb" in exportable_heads(), "gp" in exportable_heads()
        (True, False)
    """

    def exportable(name: str) -> bool:
        try:
            create_head(name, in_channels=4).use_products()
        except ValueError:
            return False
        return True

    return [name for name in list_heads() if exportable(name)]


def deployable(model: CovarianceNet) -> CovarianceNet:
    """A copy of a model for inference alone: eval mode, float32, no gradients, a head of matrix products.

    The model itself is left as it is.

    Raises:
        ValueError: if its head, or a setting of it, needs an eigensolver, with the heads that do not.

    Example:
        >>> from eigengrain.models import create_model
        >>> model = create_model("resnet18", head="mpncov", num_classes=2, reduce=8)
        >>> deployable(model).head.solver, model.head.solver, model.training
        ('products', 'auto', True)
    """
    check_bare(model, "export")
    deployed = _for_inference(model)
    try:
        deployed.head.use_products()
    except ValueError as error:
        name, can = model.config["head"], exportable_heads()
        others = "" if name in can else f". Heads that can: {', '.join(can)}"
        raise ValueError(f"head {name!r} cannot be exported: {error}{others}") from error
    return deployed


def _for_inference(model: CovarianceNet) -> CovarianceNet:
    return copy.deepcopy(model).eval().float().requires_grad_(False)


def output_name(model: CovarianceNet) -> str:
    """``logits``, or ``vector`` for a model without a classifier."""
    return "logits" if model.num_classes else "vector"


def metadata(model: CovarianceNet, img_size: ImageSize | None = None) -> dict[str, str]:
    """What an exported file says about itself: architecture, classes and how images are prepared, lists as JSON.

    Example:
        >>> from eigengrain.models import create_model
        >>> written = metadata(create_model("resnet18", head="gap", num_classes=2), img_size=96)
        >>> written["backbone"], written["input_size"], written["mean"]
        ('resnet18', '[3, 96, 96]', '[0.485, 0.456, 0.406]')
    """
    preparation = model.pretrained_cfg
    entries: dict[str, Any] = {
        "eigengrain": eigengrain.__version__,
        "backbone": model.config["backbone"],
        "head": model.config["head"],
        "head_options": current_config(model)["head_options"],
        "num_classes": model.num_classes,
        "input_size": _Images.of(model, img_size).shape[1:],
        "class_names": model.class_names,
        **{key: preparation.get(key) for key in ("mean", "std", "interpolation", "crop_pct", "crop_mode")},
    }
    return {
        key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        for key, value in entries.items()
        if value is not None
    }


def export_program(
    model: CovarianceNet,
    example_input: Tensor | None = None,
    *,
    img_size: ImageSize | None = None,
    batch: int | None = None,
    dynamic_batch: bool = True,
) -> torch.export.ExportedProgram:
    """The model as a ``torch.export`` program of PyTorch's own operators, which runs without this package.

    Args:
        model: from :func:`create_model`; it is copied and left as it is, see :func:`deployable`.
        example_input: images (B, 3, H, W) that set shape and device; else noise of ``batch`` × ``img_size``.
        img_size: side, or (height, width), of the images; the model's own if None.
        batch: number of images, 1 if None; with ``dynamic_batch`` it does not matter.
        dynamic_batch: take any number of images. Height and width are fixed in any case.

    Raises:
        ValueError: if the head cannot be exported, with those that can, or PyTorch cannot trace the backbone.

    Example:
        >>> from eigengrain.models import create_model
        >>> model = create_model("resnet18", head="isqrt", num_classes=2, reduce=8)
        >>> export_program(model, img_size=64).module()(torch.zeros(3, 3, 64, 64)).shape
        torch.Size([3, 2])
    """
    deployed = deployable(model)
    if example_input is None:
        example_input = _Images.of(model, img_size, batch, dynamic_batch).noise().to(next(deployed.parameters()).device)
    return _trace(deployed, example_input, dynamic_batch)


def _trace(deployed: CovarianceNet, images: Tensor, dynamic_batch: bool) -> torch.export.ExportedProgram:
    if dynamic_batch:
        images = torch.cat([images[:1]] * 2)  # a batch of one would be taken for a constant
    try:
        _scores(deployed, images[:1])  # what does not run at all is told apart from what cannot be traced
    except (RuntimeError, AssertionError) as error:
        shape, reason = tuple(images.shape[1:]), onnx_file.first_line(error)
        raise ValueError(f"the model does not take images of shape {shape}: {reason}; choose another image size") from error
    try:
        with torch.no_grad():
            return torch.export.export(
                deployed, (images,), dynamic_shapes=({0: torch.export.Dim("batch")},) if dynamic_batch else None
            )
    except RuntimeError as error:
        remedy = f"try {'dynamic_batch=False or ' if dynamic_batch else ''}another backbone"
        raise ValueError(
            f"torch.export cannot trace backbone {deployed.config['backbone']!r}: {onnx_file.first_line(error)}; {remedy}"
        ) from error


def export_pt2(
    model: CovarianceNet,
    path: str | os.PathLike[str],
    *,
    img_size: ImageSize | None = None,
    batch: int | None = None,
    dynamic_batch: bool = True,
    verify: bool = True,
) -> ExportReport:
    """Write the program of :func:`export_program` to a ``.pt2`` file, for :func:`load_program` or ``torch.export.load``.

    Args:
        model, img_size, batch, dynamic_batch: as in :func:`export_program`.
        path: of the file, which gets its place only when it is complete and, with ``verify``, right.
        verify: open the file again and compare its scores with the model's.

    Raises:
        ValueError: as :func:`export_program`, or if the scores differ by more than 1e-4.
    """
    file = _destination(path, ".pt2")
    deployed = deployable(model).cpu()
    images = _Images.of(model, img_size, batch, dynamic_batch)
    program = _trace(deployed, images.noise(), dynamic_batch)

    def write(target: Path) -> None:
        torch.export.save(program, target, extra_files={_METADATA_FILE: json.dumps(metadata(model, img_size))})

    def measure(target: Path) -> float:
        return _relative_error(model, load_program(target).module(), images)

    size, relative_error = _place(file, write, measure if verify else None)
    return ExportReport(file, size, None, images.shape, relative_error)


def load_program(path: str | os.PathLike[str]) -> torch.export.ExportedProgram:
    """The program in a ``.pt2`` file; call ``.module()`` of it on images, and :func:`read_metadata` for their preparation.

    PyTorch can be made to run code by a ``.pt2`` file that was tampered with: open your own files only. An ONNX file is
    data alone.

    Raises:
        ValueError: if there is no such file, or it is not one that :func:`export_pt2` wrote.
    """
    read_metadata(path)  # refuses what is no archive, before PyTorch opens it
    return torch.export.load(Path(path))


def read_metadata(path: str | os.PathLike[str]) -> dict[str, str]:
    """What :func:`metadata` wrote to a ``.pt2`` file. In an ONNX file the runtime reads it, as the model's metadata.

    Raises:
        ValueError: if there is no such file, or it is not one that :func:`export_pt2` wrote.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            name = next(name for name in archive.namelist() if name.endswith(f"/{_METADATA_FILE}"))
            entries: dict[str, str] = json.loads(archive.read(name))
            return entries
    except (OSError, zipfile.BadZipFile, StopIteration, ValueError) as error:
        raise ValueError(f"{str(path)!r} is not a file of export_pt2, or only a part of one") from error


def export_onnx(
    model: CovarianceNet,
    path: str | os.PathLike[str],
    *,
    img_size: ImageSize | None = None,
    batch: int | None = None,
    dynamic_batch: bool = True,
    opset: int = OPSET,
    verify: bool = True,
) -> ExportReport:
    """Write a model to an ONNX file: input ``image`` (B, 3, H, W) in float32, output ``logits`` (B, classes).

    The spectral part runs in double inside the graph. The file says how images are prepared and what the classes are, see
    :func:`metadata`; ``onnxruntime.InferenceSession(path).get_modelmeta().custom_metadata_map`` reads it.

    Args:
        model, img_size, batch, dynamic_batch: as in :func:`export_program`.
        path: of the file, which gets its place only when it is complete and, with ``verify``, right.
        opset: ONNX operator set.
        verify: run the file in ONNX Runtime on noise and compare its scores with those of the model in PyTorch, on its
            ordinary route through the eigensolver.

    Returns:
        Size, opset and the largest relative error of the scores.

    Raises:
        ValueError: if the head or the backbone cannot be exported, a package is missing, the opset is not one that can be
            written, or the scores differ by more than 1e-4.
    """
    _require("onnx", "onnxscript", *(["onnxruntime"] if verify else []))
    if opset not in OPSETS:
        raise ValueError(
            f"opset must be from {OPSETS.start} to {OPSETS.stop - 1}, got {opset}: {OPSET} suits most runtimes"
        )
    file = _destination(path, ".onnx")
    deployed = deployable(model).cpu()
    images = _Images.of(model, img_size, batch, dynamic_batch)
    program = _trace(deployed, images.noise(), dynamic_batch)
    try:
        converted = onnx_file.convert(program, INPUT_NAME, output_name(model), opset, dynamic_batch)
    except ValueError as error:
        names = f"backbone {model.config['backbone']!r} or head {model.config['head']!r}"
        raise ValueError(
            f"an operation of {names} has no form in ONNX opset {opset}: {error}; try the format pt2"
        ) from error
    converted.model.producer_name, converted.model.producer_version = "eigengrain", eigengrain.__version__
    converted.model.metadata_props.update(metadata(model, img_size))

    def measure(target: Path) -> float:
        return _relative_error(model, onnx_file.runner(target), images)

    size, relative_error = _place(file, converted.save, measure if verify else None)
    return ExportReport(file, size, converted.model.opset_imports[""], images.shape, relative_error)


def _require(*packages: str) -> None:
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise ValueError(f"ONNX export needs {', '.join(missing)}: pip install 'eigengrain[export]'")


def _destination(path: str | os.PathLike[str], suffix: str) -> Path:
    file = Path(path)
    if file.suffix != suffix:
        raise ValueError(f"the file must be named *{suffix}, got {str(path)!r}")
    if file.is_dir():
        raise ValueError(f"{str(path)!r} is a folder: name a file in it")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot make the folder {str(file.parent)!r} ({error.strerror}): choose another place") from error
    return file


def _place(
    file: Path, write: Callable[[Path], object], measure: Callable[[Path], float] | None
) -> tuple[int, float | None]:
    """Write beside the destination, measure, and only then move there: (bytes, relative error)."""
    try:
        folder = tempfile.TemporaryDirectory(dir=file.parent)
    except OSError as error:
        raise ValueError(f"cannot write to {str(file.parent)!r} ({error.strerror}): choose another place") from error
    with folder:
        target = Path(folder.name) / file.name
        write(target)
        relative_error = measure(target) if measure else None
        parts = list(Path(folder.name).iterdir())
        size = sum(part.stat().st_size for part in parts)
        for part in parts:
            os.replace(part, file.parent / part.name)
    return size, relative_error


@torch.no_grad()
def _scores(model: CovarianceNet, images: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the covariance of")  # of a short rank: said in training
        scores: Tensor = model(images)
    return scores


@torch.no_grad()
def _relative_error(model: CovarianceNet, run: Callable[[Tensor], Tensor], images: _Images) -> float:
    """Largest ‖run(x) − model(x)‖/‖model(x)‖ over noise, the model in float32 on the CPU by its own solver."""
    reference = _for_inference(model).cpu()
    worst = 0.0
    for batch in (1, 3) if images.batch is None else (images.batch,):
        x = images.noise(batch, seed=batch)
        expected = _scores(reference, x).double()
        relative = (run(x).double() - expected).norm(dim=-1) / expected.norm(dim=-1)
        if not relative.max() <= TOLERANCE:  # NaN too
            raise FailedError(
                f"the exported scores differ from PyTorch's by {relative.max():.1e} on noise, more than {TOLERANCE:.0e}: "
                "no file was written; check that the model's scores are finite, or write it all the same with verify=False"
            )
        worst = max(worst, float(relative.max()))
    return worst
