"""Save whole models to folders and load them: parameters as safetensors, everything else as JSON."""

import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import torch
from safetensors.torch import save_file
from torch import nn

import eigengrain
from eigengrain import options
from eigengrain.errors import ArgumentError, FileError, WeightsError, did_you_mean
from eigengrain.files import read_json
from eigengrain.functional import EigenSubset
from eigengrain.heads import SpectralHead
from eigengrain.models.backbone import ImageSize, on_meta
from eigengrain.models.calibration import Calibration, decode_subspace
from eigengrain.models.card import CARD_FILE, ModelCard, render_card
from eigengrain.models.create import FILE_OPTIONS, SOURCES, check_numbers, create_model, limit_size
from eigengrain.models.model import CovarianceNet, check_unwrapped
from eigengrain.models.weights import load_weights, read_shapes
from eigengrain.names import MAX_SIDE
from eigengrain.options import setting
from eigengrain.text import few

WEIGHTS_FILE, CONFIG_FILE = "model.safetensors", "config.json"

#: largest config.json in bytes; numbers and tensors that a model may have beyond a few times its weights, for layers
#: that are removed after the backbone is built
_MAX_CONFIG, _SPARE, _SPARE_TENSORS = 1 << 24, 1 << 27, 1000

#: largest side in pixels to which images are resized before they are cropped
_MAX_RESIZED = 4 * MAX_SIDE

#: arguments of networks and create_model that lead to other files or to a hub
_ELSEWHERE = (*FILE_OPTIONS, "weights", "pretrained", "cache_dir", "file", "url", "hf_hub_id", "source", "custom_load")

T = TypeVar("T")


@dataclass(frozen=True)
class _Arguments:
    """``model`` in ``config.json``, without the options of the backbone."""

    backbone: str
    head: str
    num_classes: int = setting(1000, least=0)
    reduce: int | Literal["auto"] | None = setting("auto", least=1)
    head_options: dict[str, Any] = field(default_factory=dict)
    drop_rate: float = setting(0.0, least=0, below=1)
    last_stride: int | None = None
    stride_on: str = "3x3"
    stages: int | None = setting(None, least=1)
    class_token: Literal["beside"] | bool | None = None
    token_norm: bool | None = None
    mid_level: int | None = setting(None, least=1)
    img_size: tuple[int, int] | None = setting(None, least=1, most=MAX_SIDE)


@dataclass(frozen=True)
class _Description:
    """``pretrained_cfg`` in ``config.json``."""

    architecture: str | None = None
    tag: str | None = None
    license: str | None = None
    input_size: tuple[int, int, int] | None = setting(None, least=1, most=MAX_SIDE)
    min_input_size: tuple[int, int, int] | None = setting(None, least=1, most=MAX_SIDE)
    test_input_size: tuple[int, int, int] | None = setting(None, least=1, most=MAX_SIDE)
    fixed_input_size: bool | None = None
    pool_size: tuple[int, int] | None = setting(None, least=1, most=MAX_SIDE)
    interpolation: str | None = None
    crop_pct: float | None = setting(None, above=0, below=10)
    test_crop_pct: float | None = setting(None, above=0, below=10)
    crop_mode: str | None = None
    mean: list[float] | None = setting(None, least=-1e6, below=1e6)
    std: list[float] | None = setting(None, above=0)
    num_classes: int | None = setting(None, least=0)
    classifier: str | None = None
    first_conv: str | list[str] | None = None


@dataclass(frozen=True)
class _Config:
    """``config.json``."""

    model: dict[str, Any]
    pretrained_cfg: dict[str, Any]
    label_names: list[str] | None = None
    subset: str | None = None
    calibration: dict[str, Any] | None = None
    eigengrain: str = ""
    architecture: str = ""
    num_classes: int = 0
    num_features: int = 0


def save_pretrained(
    model: nn.Module,
    folder: str | os.PathLike[str],
    class_names: Sequence[str] | None = None,
    img_size: ImageSize | None = None,
    card: ModelCard | None = None,
) -> None:
    """Write a model to a folder: its weights, a description and a model card, in the layout of the Hugging Face Hub.

    The files are ``model.safetensors``, ``config.json`` with architecture, classes and preprocessing, and ``README.md``.
    They replace earlier ones.

    Args:
        model: from :func:`create_model`, also inside DistributedDataParallel or torch.compile.
        folder: created if it does not exist.
        class_names: names of the classes in the order of the scores; the model's own if None.
        img_size: side, or (height, width), of the images that the model is for; by default that of the last images in
            training mode, unless you have set ``input_size`` in ``pretrained_cfg``. A compiled model or an averaged copy
            has not seen training images, so that it needs this argument.
        card: what the card states about data, accuracy and licence.

    Raises:
        ArgumentError: if there are more or fewer names than classes, the model is pruned, has options that JSON cannot
            store or a ``pretrained_cfg`` that is not valid, or it is wrapped in something else.
        FileError: if the folder cannot be created.

    Example:
        >>> import tempfile
        >>> from eigengrain.models import create_model
        >>> model = create_model("resnet18", head="gap", num_classes=2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_pretrained(model, folder, class_names=["sparrow", "wren"])
        ...     from_pretrained(folder).class_names
        ['sparrow', 'wren']
    """
    net = _unwrap(model)
    if net.pruned:
        problem = "has lost layers by prune_intermediate_layers, which config.json cannot describe"
        raise ArgumentError("model", problem, remedy="save its state_dict() instead")
    names = net.class_names if class_names is None else [str(name) for name in class_names]
    _check_names(names, net)
    config: dict[str, Any] = {
        "eigengrain": eigengrain.__version__,
        "architecture": net.config["backbone"],
        "num_classes": net.num_classes,
        "num_features": net.num_features,
        "model": current_config(net),
        "subset": own_subset(net),
        "pretrained_cfg": description_of(net, img_size),
        "label_names": names,
        "calibration": net.calibration,
    }
    try:
        text = json.dumps(config, indent=2)
    except TypeError as error:
        raise ArgumentError("model", f"has options that JSON cannot store ({error})") from error
    readme = render_card(net, config["pretrained_cfg"], names, card or ModelCard())
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise FileError(path, "a file with that name exists", "create the folder") from error
    # copies, because a shared module has several names, and the format refuses two tensors in the same memory
    contiguous = torch.contiguous_format
    state = {name: value.detach().cpu().clone(memory_format=contiguous) for name, value in net.state_dict().items()}
    save_file(state, path / WEIGHTS_FILE, metadata={"format": "pt"})
    (path / CONFIG_FILE).write_text(text + "\n")
    shutil.copymode(path / CONFIG_FILE, path / WEIGHTS_FILE)  # safetensors creates files that only their owner can read
    (path / CARD_FILE).write_text(readme, encoding="utf-8")


def _unwrap(model: nn.Module) -> CovarianceNet:
    """A model out of DistributedDataParallel or torch.compile."""
    inner: Any = model
    while inner is not None and not isinstance(inner, CovarianceNet):
        inner = getattr(inner, "module", getattr(inner, "_orig_mod", None))
    net: Any = model if inner is None else inner
    check_unwrapped(net)
    return cast(CovarianceNet, net)


def own_subset(model: CovarianceNet) -> str | None:
    """The subset of eigenvalues that the model's head keeps, None for all or a head without eigenvalues."""
    return model.head.own_subset if isinstance(model.head, SpectralHead) else None


def current_config(model: CovarianceNet) -> dict[str, Any]:
    """``model.config`` with the present subset of the head in place of the one the head was created with."""
    options = dict(model.config["head_options"])
    if "subset" in options and isinstance(model.head, SpectralHead):
        options["subset"] = str(model.head.subset)
    return {**model.config, "head_options": options}


def description_of(model: CovarianceNet, img_size: ImageSize | None = None) -> dict[str, Any]:
    """The entries of ``pretrained_cfg`` that a file may have, for images of the size that the model is for."""
    names = {each.name for each in fields(_Description)}
    description = {key: value for key, value in model.pretrained_cfg.items() if key in names}
    channels, *size = description["input_size"]
    if img_size is None and (channels, *size) == model.described_size:
        img_size = model.trained_size
    height, width = (img_size, img_size) if isinstance(img_size, int) else img_size or size
    if [height, width] != size:
        description = {key: value for key, value in description.items() if key not in ("test_input_size", "pool_size")}
    description["input_size"] = (channels, height, width)
    _build(_Description, description)
    return description


def from_pretrained(folder: str | os.PathLike[str]) -> CovarianceNet:
    """Load a model that :func:`save_pretrained` wrote, in eval mode; ``runs/NAME/model`` of a training is such a folder.

    Raises:
        ValueError: if the folder does not contain a model, or its parts do not fit each other.
    """
    path, weights = Path(folder) / CONFIG_FILE, Path(folder) / WEIGHTS_FILE
    try:
        content = read_json(path, _MAX_CONFIG)
    except FileError as error:
        inside = path.parent / "model"
        hint = did_you_mean([str(inside)]) if (inside / CONFIG_FILE).is_file() else f"({error.problem})"
        problem = f"it is not a folder of save_pretrained, {path.name} is missing or not as expected: {hint}"
        raise FileError(path.parent, problem) from error
    with _naming(path):
        config = _build(_Config, content)
        EigenSubset.parse(config.subset)
        calibration = None if config.calibration is None else asdict(_build(Calibration, config.calibration))
    model = rebuild(path, config.model, config.pretrained_cfg, config.label_names, read_shapes(weights))
    load_weights(model, weights, strict=True)
    if calibration is not None and calibration["subspace"] is not None:
        with _naming(path):
            decode_subspace(calibration["subspace"], model.num_features)
    model.calibration = calibration
    if config.subset is not None:
        if not isinstance(model.head, SpectralHead):
            raise FileError(path, f"it has a subset of eigenvalues, and head {model.config['head']!r} has no eigenvalues")
        with _naming(path):
            model.head.subset = config.subset
    return model.eval()


def rebuild(
    path: Path,
    config: Mapping[str, Any],
    description: Mapping[str, Any],
    class_names: list[str] | None,
    shapes: Mapping[str, Sequence[int]],
) -> CovarianceNet:
    """Create the model that a file describes by ``model.config``, ``pretrained_cfg`` and class names; without its weights.

    ``shapes`` are those of its weights. A description that needs more than them is refused before it is built, and so is
    one that leads to other files or to a hub.

    Raises:
        FileError: naming ``path``, if the options are not those of a model of this size.
        ArgumentError: if there are more or fewer names than classes.
    """
    own = [each.name for each in fields(_Arguments)]
    more = {key: value for key, value in config.items() if key not in own}
    total = sum(map(math.prod, shapes.values()))
    with _naming(path):
        arguments = _build(_Arguments, {key: value for key, value in config.items() if key in own})
        described = _build(_Description, description)
        if described.input_size and max(described.input_size) / (described.crop_pct or 1) > _MAX_RESIZED:
            problem = f"must be larger, so that images are resized to at most {_MAX_RESIZED} pixels"
            raise ArgumentError("crop_pct", problem, described.crop_pct)
        preprocessing = {key: value for key, value in vars(described).items() if key in description}
        if arguments.backbone.startswith(SOURCES):
            raise ArgumentError("backbone", "must not be in another folder or on a hub", arguments.backbone)
        _check_local(options.convert(more, dict[str, Any], "model"))  # plain values of bounded depth
        check_numbers(arguments.head_options, "head_options")
        if arguments.reduce == "auto" and arguments.img_size is not None:
            # older versions chose more channels for few positions
            arguments = replace(arguments, reduce=shapes.get("head.reduce.0.weight", [None])[0])
        for name in ("num_classes", "reduce", "mid_level"):  # each class and each channel has parameters of its own
            if isinstance(value := getattr(arguments, name), int) and value > total:
                raise ArgumentError(name, f"must be at most {total:,}, the size of the weights", value)
        # create_model refuses what only reset_classifier(0, "") leaves: no head, and still something beside it
        unpooled = not arguments.head and (arguments.class_token == "beside" or arguments.mid_level is not None)
        if unpooled:
            arguments = replace(arguments, head="gap")
        create = partial(create_model, **vars(arguments), **_with_tuples(more))
        with limit_size(2 * total + _SPARE, 3 * len(shapes) + _SPARE_TENSORS):
            if more:  # an option can make temporary tensors of any size, which need no memory on the meta device
                state = on_meta(create).state_dict()
                if other := [name for name, tensor in state.items() if name in shapes and tensor.shape != shapes[name]]:
                    raise WeightsError(path, f"the weights have other shapes of {few(other, 3)} than it describes")
            model = create()
        if unpooled:
            model.reset_classifier(model.num_classes, "")
    model.pretrained_cfg |= _with_tuples(preprocessing)
    model.described_size = model.pretrained_cfg["input_size"]
    _check_names(class_names, model)
    model.class_names = class_names
    return model


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Raise a FileError with a path for values in it that do not describe a model, whatever error they cause."""
    try:
        yield
    except FileError:
        raise
    except Exception as error:  # a library may refuse values of a file in any way
        reason = f"{error}" if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise FileError(path, f"it does not describe a model ({' '.join(reason.split())})") from error


def _build(kind: type[T], values: Any) -> T:
    built = options.build(kind, values)
    options.check(built)
    return built


def _check_local(value: Any) -> None:
    """Raise an ArgumentError if options of a backbone, at any depth, lead to other files or to a hub."""
    if isinstance(value, Mapping):
        for key in value:
            if key in _ELSEWHERE:
                raise ArgumentError(key, "is not an option of a saved model, which has its own weights")
    for item in value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ():
        _check_local(item)


def _check_names(names: object, model: CovarianceNet) -> None:
    if names is None:
        return
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ArgumentError("class_names", "must be a list of names", names)
    if len(names) != model.num_classes:
        raise ArgumentError("class_names", f"must have one name for each of the {model.num_classes} classes", len(names))


def _with_tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert lists, which is all that JSON has, to the tuples of sizes, means and standard deviations."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
