r"""Export models for use outside PyTorch and outside this package: ``torch.export`` programs and ONNX files.

Runtimes have no eigensolver, so what is exported is a copy of the model whose head uses matrix products alone
(:meth:`eigengrain.heads.Head.use_products`), by default in float64. Its scores agree with the eigensolver's to about 1e-7;
the rest of the difference from PyTorch is the runtime's own float32 in the backbone. Many runtimes for phones, browsers and
accelerators have no float64: ``dtype="float32"`` writes a file without it, whose scores agree to about 1e-5.
"""

import copy
import json
import os
import tempfile
import warnings
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import eigengrain
from eigengrain.errors import ArgumentError, FailedError, FileError, MissingPackageError, ShortRankWarning, UnknownName
from eigengrain.files import writable
from eigengrain.heads import CovarianceHead, create_head, list_heads
from eigengrain.models import onnx_file
from eigengrain.models.backbone import ImageSize
from eigengrain.models.calibration import Judged
from eigengrain.models.model import CovarianceNet, check_unwrapped
from eigengrain.models.pretrained import current_config, own_subset

#: largest relative error of the scores that an exported file may have
TOLERANCE = 1e-4
#: precisions of the square root of a covariance in a file
PRECISIONS = ("float64", "float32")
#: default ONNX operator set, and those that can be written
OPSET, OPSETS = 20, range(18, 26)
#: entry of a .pt2 archive with the :func:`metadata`
_METADATA_FILE = "eigengrain.json"


#: shape of the input of an exported model, (batch or "batch", channels, height, width)
Shape = tuple[int | str, int, int, int]


@dataclass(frozen=True)
class ExportReport:
    """Result of an export; two lines when printed.

    ``bytes`` includes the separate file of weights that ONNX writes for models above 2 GB, and ``opset`` is None for a
    ``.pt2`` file. ``input_shape`` is (batch or "batch", 3, height, width). ``relative_error`` is the largest
    ‖file − PyTorch‖/‖PyTorch‖ of the scores of an image, None if it was not measured.
    """

    path: Path
    bytes: int
    opset: int | None
    input_shape: Shape
    relative_error: float | None

    def __str__(self) -> str:
        form = "torch.export program" if self.opset is None else f"ONNX, opset {self.opset}"
        shape = " × ".join(map(str, self.input_shape))
        error = "not measured" if self.relative_error is None else f"{self.relative_error:.1e}"
        return f"{self.path}: {form}, {self.bytes / 1e6:.1f} MB, input {shape}\nrelative error against PyTorch: {error}"


def _input_shape(
    model: CovarianceNet, img_size: ImageSize | None, batch: int | None = None, dynamic_batch: bool = True
) -> Shape:
    channels, *own_size = model.pretrained_cfg["input_size"]
    height, width = own_size if img_size is None else (img_size, img_size) if isinstance(img_size, int) else img_size
    for name, value in (("img_size", min(height, width)), ("batch", 1 if batch is None else batch)):
        if value < 1:
            raise ArgumentError(name, "must be at least 1", value)
    return "batch" if dynamic_batch else batch or 1, channels, height, width


def _noise(shape: Shape, batch: int | None = None) -> Tensor:
    """Random images, the same for any default device and dtype; ``batch`` also seeds them."""
    images = (batch or (1 if shape[0] == "batch" else int(shape[0])), *shape[1:])
    generator = torch.Generator("cpu").manual_seed(batch or 0)
    return torch.randn(images, generator=generator, dtype=torch.float32, device="cpu")


def exportable_heads() -> list[str]:
    """Names of the heads that can be exported with their default options.

    Example:
        >>> "mpncov+seb" in exportable_heads(), "gp" in exportable_heads()
        (True, False)
    """
    names = []
    for name in list_heads():
        with suppress(ValueError):
            create_head(name, in_channels=4).use_products()
            names.append(name)
    return names


def deployable(model: CovarianceNet, dtype: str = "float64") -> CovarianceNet:
    """Copy a model for inference: eval mode, float32, no gradients, a head of matrix products.

    Args:
        model: from :func:`create_model`.
        dtype: precision of the square root of a covariance, ``float64`` or ``float32``.

    Raises:
        ArgumentError: if the head, or one of its settings, needs an eigensolver.

    Example:
        >>> from eigengrain.models import create_model
        >>> model = create_model("resnet18", head="mpncov", num_classes=2, reduce=8)
        >>> deployable(model).head.solver, model.head.solver, model.training
        ('products', 'auto', True)
    """
    check_unwrapped(model)
    if dtype not in PRECISIONS:
        raise UnknownName("dtype", dtype, PRECISIONS)
    deployed = _copy_for_inference(model)
    try:
        deployed.head.use_products()
    except ValueError as error:
        name, heads = model.config["head"], exportable_heads()
        others = "" if name in heads else f"heads that can be exported: {', '.join(heads)}"
        raise ArgumentError("model", f"cannot be exported with head {name!r}: {error}", remedy=others) from error
    for part in deployed.head.modules():
        if isinstance(part, CovarianceHead):
            part.dtype = dtype
    return deployed


def _copy_for_inference(model: CovarianceNet) -> CovarianceNet:
    return copy.deepcopy(model).eval().float().requires_grad_(False)


def metadata(model: CovarianceNet, img_size: ImageSize | None = None) -> dict[str, str]:
    """Description that is written to exported files: architecture, classes, preprocessing and calibration, as JSON.

    Example:
        >>> from eigengrain.models import create_model
        >>> written = metadata(create_model("resnet18", head="gap", num_classes=2), img_size=96)
        >>> written["backbone"], written["input_size"], written["mean"]
        ('resnet18', '[3, 96, 96]', '[0.485, 0.456, 0.406]')
    """
    entries: dict[str, Any] = {
        "eigengrain": eigengrain.__version__,
        "backbone": model.config["backbone"],
        "head": model.config["head"],
        "head_options": current_config(model)["head_options"],
        "subset": own_subset(model),
        "num_classes": model.num_classes,
        "input_size": _input_shape(model, img_size)[1:],
        "class_names": model.class_names,
        "temperature": model.temperature,
        **{key: (model.calibration or {}).get(key) for key in ("familiarity_threshold", "accepted")},
        **{key: model.pretrained_cfg.get(key) for key in ("mean", "std", "interpolation", "crop_pct", "crop_mode")},
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
    dtype: str = "float64",
) -> torch.export.ExportedProgram:
    """Export a model as a ``torch.export`` program of PyTorch's own operators, which runs without this package.

    Args:
        model: from :func:`create_model`; it is copied and not changed, see :func:`deployable`.
        example_input: images (B, 3, H, W) with the shape and device to export; else noise of ``batch`` × ``img_size``.
        img_size: side, or (height, width), of the images; the model's own if None.
        batch: number of images, 1 if None; without effect if ``dynamic_batch``.
        dynamic_batch: accept any number of images. Height and width are fixed in any case.
        dtype: precision of the square root of a covariance. ``float32`` gives a program without any float64, for runtimes
            that lack it.

    Raises:
        ArgumentError: if the head cannot be exported, or not in float32, or PyTorch cannot trace the backbone.

    Example:
        >>> from eigengrain.models import create_model
        >>> model = create_model("resnet18", head="isqrt", num_classes=2, reduce=8)
        >>> export_program(model, img_size=64).module()(torch.zeros(3, 3, 64, 64)).shape
        torch.Size([3, 2])
    """
    deployed = deployable(model, dtype)
    if example_input is None:
        noise = _noise(_input_shape(model, img_size, batch, dynamic_batch))
        example_input = noise.to(next(deployed.parameters()).device)
    return _trace(deployed, example_input, dynamic_batch, dtype)


def _trace(
    deployed: CovarianceNet, images: Tensor, dynamic_batch: bool, dtype: str, judged: bool = False
) -> torch.export.ExportedProgram:
    if dynamic_batch:
        images = torch.cat([images[:1]] * 2)  # a batch of one would be taken for a constant
    try:
        _scores(deployed, images[:1])  # a model that does not run is another error than one that cannot be traced
    except (RuntimeError, AssertionError) as error:
        problem = f"does not fit the model ({onnx_file.first_line(error)})"
        raise ArgumentError("img_size", problem, tuple(images.shape[2:]), "choose another image size") from error
    try:
        with torch.no_grad():
            net = Judged(deployed) if judged else deployed
            shapes = ({0: torch.export.Dim("batch")},) if dynamic_batch else None
            program = torch.export.export(net, (images,), dynamic_shapes=shapes)
    except RuntimeError as error:
        problem = f"has a backbone that torch.export cannot trace ({onnx_file.first_line(error)})"
        remedy = f"try {'{dynamic_batch}=False or ' if dynamic_batch else ''}another backbone"
        raise ArgumentError("model", problem, deployed.config["backbone"], remedy) from error
    values = (node.meta.get("val") for node in program.graph.nodes)
    if dtype == "float32" and any(isinstance(value, Tensor) and value.dtype == torch.float64 for value in values):
        problem = f"must be float64 for head {deployed.config['head']!r}, which computes in it"
        raise ArgumentError("dtype", problem, dtype, "use a head such as 'mpncov' or 'isqrt', also with '+seb'")
    return program


def export_pt2(
    model: CovarianceNet,
    path: str | os.PathLike[str],
    *,
    img_size: ImageSize | None = None,
    batch: int | None = None,
    dynamic_batch: bool = True,
    dtype: str = "float64",
    verify: bool = True,
) -> ExportReport:
    """Write the program of :func:`export_program` to a ``.pt2`` file, for :func:`load_program` or ``torch.export.load``.

    Args:
        model, img_size, batch, dynamic_batch, dtype: as in :func:`export_program`.
        path: the file; it is replaced only when the new one is complete and, with ``verify``, right.
        verify: open the file again and compare its scores with the model's; :class:`~eigengrain.errors.FailedError` is
            raised if they differ by more than 1e-4.
    """
    file = _destination(path, ".pt2")
    shape = _input_shape(model, img_size, batch, dynamic_batch)
    program = _trace(deployable(model, dtype).cpu(), _noise(shape), dynamic_batch, dtype)

    def write(target: Path) -> None:
        torch.export.save(program, target, extra_files={_METADATA_FILE: json.dumps(metadata(model, img_size))})

    return _write(file, write, model, shape, (lambda target: load_program(target).module()) if verify else None)


def load_program(path: str | os.PathLike[str]) -> torch.export.ExportedProgram:
    """Load the program in a ``.pt2`` file; ``.module()`` of it runs on images prepared as in :func:`read_metadata`.

    PyTorch can be made to run code by a manipulated ``.pt2`` file: open only your own files. An ONNX file is only data.

    Raises:
        FileError: if there is no such file, or :func:`export_pt2` did not write it.
    """
    read_metadata(path)  # refuses files of another kind before PyTorch opens them
    return torch.export.load(Path(path))


def read_metadata(path: str | os.PathLike[str]) -> dict[str, str]:
    """Read the :func:`metadata` of a ``.pt2`` file, with the errors of :func:`load_program`."""
    try:
        with zipfile.ZipFile(path) as archive:
            name = next(name for name in archive.namelist() if name.endswith(f"/{_METADATA_FILE}"))
            return dict(json.loads(archive.read(name)))
    except Exception as error:  # a damaged file can fail in any way
        raise FileError(Path(path), "it is not a file of export_pt2, or only a part of one") from error


def export_onnx(
    model: CovarianceNet,
    path: str | os.PathLike[str],
    *,
    img_size: ImageSize | None = None,
    batch: int | None = None,
    dynamic_batch: bool = True,
    dtype: str = "float64",
    opset: int = OPSET,
    verify: bool = True,
) -> ExportReport:
    """Write a model to an ONNX file: input ``image`` (B, 3, H, W) in float32, output ``logits`` (B, classes).

    A second output ``probabilities`` is softmax(logits/T) with the temperature T of the model's calibration, or 1: those of
    ``eigengrain predict``. The logits are not divided by T. A calibrated model has a third output, ``familiarity``: below
    ``familiarity_threshold`` of the metadata the answer of ``predict`` is "none of these". A model without a classifier has
    the output ``vector`` alone.

    The square root of a covariance runs in double inside the graph, unless ``dtype`` is ``float32``. The file contains the
    :func:`metadata`, which ``onnxruntime.InferenceSession(path).get_modelmeta().custom_metadata_map`` reads.

    Args:
        model, img_size, batch, dynamic_batch, dtype: as in :func:`export_program`.
        path: the file; it is replaced only when the new one is complete and, with ``verify``, right.
        opset: ONNX operator set.
        verify: run the file in ONNX Runtime on noise and compare its scores with those of the model in PyTorch, which uses
            the eigensolver.

    Raises:
        ArgumentError: if the head or the backbone cannot be exported, or the opset cannot be written.
        FailedError: if the scores differ by more than 1e-4.
        MissingPackageError: if a package for ONNX is not installed.
    """
    packages = ("onnx", "onnxscript", "onnxruntime") if verify else ("onnx", "onnxscript")
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise MissingPackageError(
            f"ONNX export needs {', '.join(missing)}: pip install 'eigengrain[export]'", name=missing[0]
        )
    if opset not in OPSETS:
        problem = f"must be from {OPSETS.start} to {OPSETS.stop - 1}"
        raise ArgumentError("opset", problem, opset, f"{OPSET} suits most runtimes")
    file = _destination(path, ".onnx")
    shape = _input_shape(model, img_size, batch, dynamic_batch)
    familiar = ["familiarity"] if (model.calibration or {}).get("subspace") else []
    outputs = ["logits", "probabilities", *familiar] if model.num_classes else ["vector"]
    program = _trace(deployable(model, dtype).cpu(), _noise(shape), dynamic_batch, dtype, judged=model.num_classes > 0)
    try:
        converted = onnx_file.convert(program, "image", outputs, opset, dynamic_batch)
    except ValueError as error:
        names = f"backbone {model.config['backbone']!r} or head {model.config['head']!r}"
        problem = f"has an operation of {names} that ONNX opset {opset} lacks ({error})"
        raise ArgumentError("model", problem, remedy="try the format pt2") from error
    converted.model.producer_name, converted.model.producer_version = "eigengrain", eigengrain.__version__
    converted.model.metadata_props.update(metadata(model, img_size))
    written_opset = converted.model.opset_imports[""]
    return _write(file, converted.save, model, shape, onnx_file.runner if verify else None, written_opset)


def _destination(path: str | os.PathLike[str], suffix: str) -> Path:
    if Path(path).suffix != suffix:
        raise ArgumentError("path", f"must be a file named *{suffix}", str(path))
    return writable(Path(path))


def _write(
    file: Path,
    write: Callable[[Path], object],
    model: CovarianceNet,
    shape: Shape,
    load: Callable[[Path], Callable[[Tensor], Tensor]] | None,
    opset: int | None = None,
) -> ExportReport:
    """Write a file next to its destination, compare what ``load`` opens with the model, and move it."""
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        target = Path(folder) / file.name
        write(target)
        relative_error = _relative_error(model, load(target), shape) if load else None
        parts = list(Path(folder).iterdir())
        size = sum(part.stat().st_size for part in parts)
        for part in parts:
            os.replace(part, file.parent / part.name)
    return ExportReport(file, size, opset, shape, relative_error)


@torch.no_grad()
def _scores(model: CovarianceNet, images: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ShortRankWarning)  # reported in training
        scores: Tensor = model(images)
    return scores


@torch.no_grad()
def _relative_error(model: CovarianceNet, run: Callable[[Tensor], Tensor], shape: Shape) -> float:
    """Largest ‖run(x) − model(x)‖/‖model(x)‖ over noise, with the model in float32 on the CPU and its own solver."""
    reference = _copy_for_inference(model).cpu()
    worst = 0.0
    for batch in (1, 3) if shape[0] == "batch" else (int(shape[0]),):
        x = _noise(shape, batch)
        expected = _scores(reference, x).double()
        relative = (run(x).double() - expected).norm(dim=-1) / expected.norm(dim=-1)
        if not relative.max() <= TOLERANCE:  # also NaN
            raise FailedError(
                f"the exported scores differ from PyTorch's by {relative.max():.1e} on noise, more than {TOLERANCE:.0e}: "
                "no file was written; check that the model's scores are finite, or write it without a check (verify=False)"
            )
        worst = max(worst, float(relative.max()))
    return worst
