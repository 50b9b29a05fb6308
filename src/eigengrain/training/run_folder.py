"""Open a trained model together with its training options, its preprocessing and its data set."""

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from PIL import Image
from torch import Tensor

from eigengrain.data import ImageSet, Transforms, build_transform, open_splits
from eigengrain.data.datasets.registry import find_entry
from eigengrain.errors import AnnotationError, ArgumentError, FileError, UnfinishedWarning, UnknownName, did_you_mean
from eigengrain.files import read_text
from eigengrain.models import CovarianceNet, create_model, from_pretrained, load_weights
from eigengrain.models.backbone import ImageSize, on_meta
from eigengrain.models.pretrained import CONFIG_FILE, WEIGHTS_FILE, rebuild
from eigengrain.names import SPLITS
from eigengrain.text import few, printable
from eigengrain.training.checkpoint import BEST, LAST, read_checkpoint, restoring
from eigengrain.training.config import Data, Train, from_mapping
from eigengrain.yaml_files import read_mapping

#: files with the options and the results of a run, and the folder with its model
ARGUMENTS, RESULTS, MODEL = "args.yaml", "results.json", "model"
#: files with the split of a run, if it was drawn, and with the images that could not be read
SPLIT, UNREADABLE = "split.csv", "unreadable.txt"


def names_below(root: str | None, paths: Sequence[Path]) -> list[str]:
    """Paths relative to the folder of a data set, or to that of its table; those of other places as they are."""
    place = Path(root or "").expanduser()
    place = place if place.is_dir() else place.parent
    return [(path.relative_to(place) if path.is_relative_to(place) else path).as_posix() for path in paths]


def read_unreadable(folder: Path) -> dict[str, str]:
    """The images that ``unreadable.txt`` in the folder of a run lists, each with the reason; none without the file."""
    listing = folder / UNREADABLE
    lines = read_text(listing).splitlines() if listing.is_file() else []
    return {path: reason for path, _, reason in (line.partition("\t") for line in lines)}


def leave_out_listed(dataset: ImageSet, folder: Path, root: str | None) -> ImageSet:
    """The samples of a data set that are not in :func:`read_unreadable`.

    The listing has paths relative to ``root``, which may have moved; those of older runs are complete.
    """
    listed = read_unreadable(folder).keys()
    if dataset.paths is None or not listed:
        return dataset
    names = zip(dataset.paths, names_below(root, dataset.paths), strict=True)
    return dataset.subset(
        [k for k, (path, name) in enumerate(names) if not {printable(str(path)), printable(name)} & listed]
    )


@dataclass(frozen=True)
class TrainedModel:
    """A trained model and what is needed to use it on images.

    Args:
        model: the network, in eval mode on the CPU.
        path: the path that was opened.
        folder: the run folder, or the model folder if there is no run around it; None for a model without a folder.
        kind: kind of transforms to use instead of the model's own, see :class:`eigengrain.data.Transforms`.
        img_size: size of the images to use instead of the model's own.

    Example:
        >>> trained = TrainedModel(create_model("resnet18", head="gap", num_classes=2))
        >>> trained.transforms.img_size, trained.with_transforms(img_size=64).transforms.img_size
        (224, 64)
        >>> tuple(trained.transform(Image.new("RGB", (300, 200))).shape)
        (3, 224, 224)
    """

    model: CovarianceNet
    path: Path | None = None
    folder: Path | None = None
    kind: str | None = None
    img_size: int | None = None

    @cached_property
    def config(self) -> Train | None:
        """Options of the training; None for a model folder without a run.

        Raises:
            FileError: if ``args.yaml`` cannot be read, or contains options that this version does not have.
        """
        if self.folder is None or not (self.folder / ARGUMENTS).is_file():
            return None
        file = self.folder / ARGUMENTS
        values = read_mapping(file)
        try:
            return from_mapping(values)
        except ValueError as error:
            raise FileError(file, str(error)) from error

    @property
    def precision(self) -> dict[str, Any]:
        """Arguments ``amp`` and ``channels_last`` with which :func:`evaluate` repeats the scores of the training."""
        return (self.config or Train()).precision

    @property
    def transforms(self) -> Transforms | None:
        """Test-time preprocessing: from the training options, else from the model's ``pretrained_cfg``.

        None if only timm can express it (images that are not square, unusual crop modes); ``transform`` works then too.
        """
        return self._adapted(self._own_transforms if self.config is None else self.config.data.transforms)

    @property
    def transform(self) -> Callable[[Image.Image], Tensor]:
        """Function from an RGB image to a normalised (3, H, W) tensor, as :meth:`dataset` uses it."""
        return self._build(self.transforms)

    @property
    def image_size(self) -> int:
        """Width of the images that the model receives."""
        transforms = self.transforms
        if transforms is None or transforms.kind == "none":
            return self.img_size or int(self.model.pretrained_cfg["input_size"][-1])
        return transforms.img_size

    @property
    def classes(self) -> list[str]:
        """Class names, or numbers if the model has no names."""
        return list(self.model.class_names or map(str, range(max(self.model.num_classes, 1))))

    def with_transforms(self, kind: str | None = None, img_size: int | None = None) -> "TrainedModel":
        """A copy that prepares images with another kind of transforms, or at another size.

        Raises:
            ArgumentError: if the model is built for another size.
        """
        built_for = self.model.config.get("img_size")
        if img_size is not None and built_for and tuple(built_for) != (img_size, img_size):
            height, width = built_for
            raise ArgumentError("img_size", f"must be that of the model, {height} × {width}", img_size, "leave it out")
        return replace(self, kind=kind or self.kind, img_size=img_size or self.img_size)

    def dataset(
        self,
        split: str = "test",
        *,
        name: str | None = None,
        root: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> ImageSet:
        """A split of the data set of the training, or of another one, with the labels of the model and its transform.

        Args:
            split: ``train``, ``val`` or ``test``; ``train`` is without the validation images of the training.
            name: name of another data set, which may have only some of the classes. A folder without a split is all test.
            root: folder of the data set; that of the training by default. Without ``name``, it has the same images.
            options: more keyword arguments of the data set ``name``.

        Raises:
            ArgumentError: if no data set is given, it has classes that the model does not have, or ``split`` is ``val`` and
                there are no validation images.
            LayoutError: if the folder does not have the layout of the data set.
        """
        if split not in SPLITS:
            raise UnknownName("split", split, SPLITS)
        table: Path | None = None
        if name is not None:
            everything = {"test_fraction": 1.0} if find_entry(name).custom and split == "test" else {}
            data = Data(name, root, options={**everything, **(options or {})})
        elif options:
            raise ArgumentError("options", "are for the data set {name}, which is not given", dict(options))
        elif self.config is None:
            raise ArgumentError("name", f"is required: {self.path} does not contain the options of a training")
        else:
            data = self.config.data if root is None else replace(self.config.data, root=root)
            table = self.folder / SPLIT if self.folder is not None and (self.folder / SPLIT).is_file() else None
        seed = self.config.seed if self.config is not None else 0
        choice: dict[str, Any] = {"val_fraction": data.val_fraction, "seed": seed, **data.reader_options}
        choice |= {"split_file": table} if table else {}
        try:
            opened = open_splits(data.name, data.root, [split], **choice)
        except AnnotationError as error:
            if table is None or root is None:
                raise
            remedy = "for other images, give {name} folder too"
            raise ArgumentError("root", f"must have the images of the training ({error.problem})", root, remedy) from error
        if split not in opened:
            raise ArgumentError("split", "is not available: there are no validation images", split, "use test")
        dataset = opened[split]
        if name is None and data.skip_unreadable and self.folder is not None:
            dataset = leave_out_listed(dataset, self.folder, data.root)
        if self.model.class_names is not None:
            dataset = dataset.with_classes(self.model.class_names)
        elif (expected := self.model.num_classes) != len(dataset.classes):
            problem = f"must be a data set with {expected} classes, like the model, not {len(dataset.classes)}"
            raise ArgumentError("name", problem, dataset.name)
        dataset.transform = self.transform
        return dataset

    def images(self, paths: Sequence[str | Path]) -> ImageSet:
        """Photographs as a data set with the transform set; all labels are 0.

        The preprocessing is that of the model's ``pretrained_cfg``, so photographs are resized even if the training
        images were not (kind ``none``).
        """
        transform = self._build(self._adapted(self._own_transforms))
        return ImageSet("images", "given", self.classes, [0] * len(paths), paths, transform)

    @property
    def _own_transforms(self) -> Transforms | None:
        self._timm_transform()  # first, because its error explains which setting is wrong
        return Transforms.from_pretrained_cfg(self.model.pretrained_cfg)

    def _adapted(self, own: Transforms | None) -> Transforms | None:
        """Apply ``kind`` and ``img_size``."""
        kind = self.kind or (own.kind if own is not None else None)
        if kind == "none" and self.img_size is not None:
            raise ArgumentError("img_size", "has no effect: images are not resized with {kind} none", remedy="set {kind}")
        if self.kind is not None:
            return Transforms(self.kind, self.img_size or int(self.model.pretrained_cfg["input_size"][-1]))  # type: ignore[arg-type]
        return own.at_size(self.img_size) if own is not None and self.img_size is not None else own

    def _build(self, transforms: Transforms | None) -> Callable[[Image.Image], Tensor]:
        if transforms is None:
            return self._timm_transform()
        return build_transform(transforms, False, self.model.pretrained_cfg["mean"], self.model.pretrained_cfg["std"])

    def _timm_transform(self) -> Callable[[Image.Image], Tensor]:
        """The transform of timm. Raises a ValueError if the model's ``pretrained_cfg`` is not valid."""
        from timm.data import create_transform, resolve_data_config

        try:
            settings = resolve_data_config({"img_size": self.img_size}, pretrained_cfg=self.model.pretrained_cfg)
            if not len(settings["input_size"]) == len(settings["mean"]) == len(settings["std"]) == 3:
                raise ValueError("input_size, mean and std must have 3 numbers each")
            if settings["input_size"][0] != 3:
                raise ValueError(f"the model takes images with {settings['input_size'][0]} channels, and images are RGB")
            return create_transform(**settings)
        except Exception as error:  # a JSON file can contain values of any type
            raise ValueError(f"the preprocessing in the model's pretrained_cfg is not valid: {error}") from error


def open_run(path: str | os.PathLike[str]) -> TrainedModel:
    """Open a trained model.

    Args:
        path: folder of ``eigengrain train``, its ``model`` folder, or a folder of :func:`eigengrain.save_pretrained`.
            A training that was stopped or is still running has a model too: that of its last checkpoint, or of the best
            one if it keeps the best epoch; an :class:`~eigengrain.errors.UnfinishedWarning` states which.

    Raises:
        FileError: if there is no such folder, it does not contain a model, or the training has no checkpoint yet.
        ValueError: if the files of the model do not fit together.

    Example:
        >>> import tempfile
        >>> from eigengrain.models import save_pretrained
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_pretrained(create_model("resnet18", head="gap", num_classes=2), folder, ["sparrow", "wren"])
        ...     open_run(folder).classes
        ['sparrow', 'wren']
    """
    path = Path(path)
    if not path.exists():
        raise FileError(path, _with_question("there is no such folder", similar_paths(str(path))))
    place = path.parent if path.name == WEIGHTS_FILE and (path.parent / CONFIG_FILE).is_file() else path
    if not place.is_dir():
        raise FileError(path, "it is a file, expected a folder of 'eigengrain train' or of save_pretrained")
    folder = place.parent if place.name == MODEL and (place.parent / ARGUMENTS).is_file() else place
    if not (folder / ARGUMENTS).is_file():
        if not (place / CONFIG_FILE).is_file():
            inside = sorted(str(file.parent) for name in (ARGUMENTS, CONFIG_FILE) for file in place.glob(f"*/{name}"))
            problem = f"it is not a folder of 'eigengrain train' or of save_pretrained: there is no {CONFIG_FILE}"
            raise FileError(path, _with_question(problem, inside[:3]))
        return TrainedModel(from_pretrained(place), path, folder)
    checkpoints = [file for file in (folder / BEST, folder / LAST) if file.is_file()]
    if (folder / MODEL).is_dir() and (place != folder or (folder / RESULTS).is_file() or not checkpoints):
        return TrainedModel(from_pretrained(folder / MODEL), path, folder)
    if not checkpoints:
        command = f"eigengrain train --config {folder / ARGUMENTS} --resume"
        raise FileError(path, f"the training has not written a checkpoint yet: start it again with '{command}'")
    return TrainedModel(_open_checkpoint(checkpoints), path, folder)


def _open_checkpoint(files: Sequence[Path]) -> CovarianceNet:
    """The model of an unfinished training: of ``best.pt``, the first of the files, if it keeps the best epoch."""
    state, file = read_checkpoint(files[-1]), files[-1]
    with restoring(file):
        keeps_best = state["config"]["select"] != "last"
    if keeps_best and file != files[0]:
        state, file = read_checkpoint(files[0]), files[0]
    with restoring(file):
        weights = state["model"] if state["ema"] is None else state["ema"]
        shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
        model = rebuild(file, state["architecture"], state["preparation"], state["class_names"], shapes)
        model.load_state_dict(weights)
        progress = state["progress"]
        warning = UnfinishedWarning(file, progress["epoch"], progress["batch"], state["config"]["epochs"])
    warnings.warn(warning, stacklevel=2)
    return model.eval()


def open_weights(
    file: str | os.PathLike[str],
    backbone: str | None = None,
    head: str | None = None,
    num_classes: int | None = None,
    reduce: int | Literal["auto"] | None = "auto",
    last_stride: int | None = None,
    img_size: ImageSize | None = None,
) -> CovarianceNet:
    """Create a model and fill it from a weights file, which does not describe its model.

    Args:
        file: weights of the whole model, as :func:`eigengrain.load_weights` reads them.
        backbone: name of the backbone.
        head: name of the head.
        num_classes: number of classes.
        reduce: number of channels after the head's reduction.
        last_stride: stride of the last stage, if it was changed.
        img_size: side, or (height, width), of the images; only used for networks that are built for one size.

    Raises:
        ArgumentError: if ``backbone``, ``head`` or ``num_classes`` is None.
        FileError: if there is no such file, or it leaves parameters of the model without weights.
        ValueError: if the file cannot be read.
    """
    path = Path(file)
    if not path.is_file():
        raise FileError(path, _with_question("there is no such file", similar_paths(str(path))))
    names = {"backbone": backbone, "head": head, "num_classes": num_classes}
    missing = [name for name, value in names.items() if value is None]
    if backbone is None or missing:
        others = "".join(f"and {{{name}}} " for name in missing[1:])
        raise ArgumentError(missing[0], f"{others}must be given: a weights file does not describe its model")
    arguments: dict[str, Any] = {"head": head, "num_classes": num_classes, "reduce": reduce, "last_stride": last_stride}
    if img_size is not None and on_meta(lambda: create_model(backbone, **arguments).config["img_size"]):
        arguments["img_size"] = img_size
    model = create_model(backbone, **arguments)
    report = load_weights(model, path)
    untrained = (*report.mismatched, *report.new)
    if untrained:
        problem = f"it does not contain {few(untrained, 3)} of the model: check backbone, head, num_classes and reduce"
        raise FileError(path, problem)
    return model.eval()


def similar_paths(path: str) -> list[str]:
    """Existing paths whose last part is similar to that of one that does not exist."""
    parent, name = os.path.split(path.rstrip(os.sep))
    folder = parent or "."
    names = os.listdir(folder) if os.path.isdir(folder) and os.access(folder, os.R_OK) else []
    return [os.path.join(parent, other) for other in get_close_matches(name, names, n=2)]


def _with_question(problem: str, suggestions: Sequence[str]) -> str:
    return ": ".join(filter(None, (problem, did_you_mean(suggestions))))
