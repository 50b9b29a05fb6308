"""A trained model as a file for other runtimes. Nothing heavy is imported before it runs."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from eigengrain.commands.checkpoint import fill, model_folder
from eigengrain.runtime import output

if TYPE_CHECKING:
    from eigengrain.models import CovarianceNet

#: options that say what is in a weights file, and what they are when not given
_OF_WEIGHTS = {"backbone": None, "head": None, "num_classes": None, "reduce": "auto", "last_stride": None}


@dataclass(frozen=True)
class Export:
    """Which model, in which form, and where the file goes.

    Args:
        checkpoint: a folder of 'eigengrain train' or of save_pretrained, or a weights file together with
            --backbone, --head and --num_classes.
        format: onnx for ONNX Runtime and others, pt2 for torch.export.load.
        out: the file; the checkpoint's name with .onnx or .pt2 in the current folder by default.
        img_size: side of the square images that the file takes, or [height,width]; as the checkpoint says by default.
        dynamic_batch: take any number of images at once; false for exactly one.
        opset: ONNX operator set, 18 to 25.
        verify: run the file and compare its scores with PyTorch's; it is written only if they agree to 1e-4.
        backbone: of a weights file; 'eigengrain models' lists them.
        head: of a weights file; 'eigengrain heads' lists them.
        num_classes: of a weights file.
        reduce: channels that a weights file's head reduces to.
        last_stride: 1 for a weights file of a model that was trained so.
    """

    checkpoint: str = ""
    format: Literal["onnx", "pt2"] = "onnx"
    out: str | None = None
    img_size: int | list[int] | None = None
    dynamic_batch: bool = True
    opset: int = 20
    verify: bool = True
    backbone: str | None = None
    head: str | None = None
    num_classes: int | None = None
    reduce: int | Literal["auto"] | None = "auto"
    last_stride: int | None = None

    def __post_init__(self) -> None:
        if not self.checkpoint:
            raise ValueError(
                "name the model: eigengrain export CHECKPOINT, a folder of 'eigengrain train' or of save_pretrained, or a "
                "weights file"
            )
        if isinstance(self.img_size, list) and len(self.img_size) != 2:
            raise ValueError(f"--img_size is one number or [height,width], got {self.img_size}")

    @property
    def size(self) -> int | tuple[int, int] | None:
        """``img_size`` as models take it."""
        return (self.img_size[0], self.img_size[1]) if isinstance(self.img_size, list) else self.img_size

    @property
    def file(self) -> Path:
        """Where the file goes.

        Example:
            >>> str(Export("runs/birds/", format="pt2").file), str(Export("birds.pth").file)
            ('birds.pt2', 'birds.onnx')
        """
        if self.out is not None:
            return Path(self.out)
        path = Path(self.checkpoint).resolve()
        return Path(f"{path.name if path.is_dir() else path.stem}.{self.format}")


def open_model(config: Export) -> "CovarianceNet":
    """The model of a checkpoint.

    Raises:
        ValueError: if there is none, or a weights file and the options do not make a whole one.
    """
    from eigengrain.models import from_pretrained

    path = Path(config.checkpoint)
    if not path.exists():
        raise ValueError(
            f"there is no checkpoint {config.checkpoint!r}: give a folder of save_pretrained or a weights file"
        )
    if path.name == "model.safetensors" and config.backbone is None and (path.parent / "config.json").is_file():
        path = path.parent  # the file that was named is a part of a folder that says the rest
    path = model_folder(path)
    if path.is_file():
        return _from_weights(path, config)
    given = [f"--{name}" for name, default in _OF_WEIGHTS.items() if getattr(config, name) != default]
    if given:
        raise ValueError(f"{', '.join(given)} is for a weights file: the folder {str(path)!r} says what its model is")
    return from_pretrained(path)


def _from_weights(path: Path, config: Export) -> "CovarianceNet":
    """A model by its names, filled from a file to the last parameter: an untrained part would be exported as well."""
    from eigengrain.models import create_model

    missing = [f"--{name}" for name in ("backbone", "head", "num_classes") if getattr(config, name) is None]
    if config.backbone is None or missing:
        raise ValueError(
            f"{str(path)!r} is a weights file, which does not say its model: give {', '.join(missing)} too, or the folder "
            "that save_pretrained wrote"
        )
    model = create_model(config.backbone, config.head, config.num_classes, config.reduce, config.last_stride)
    return fill(model, path)


def run(config: Export) -> None:
    """``eigengrain export``."""
    from eigengrain.models.export import export_onnx, export_pt2

    model = open_model(config)
    if config.format == "onnx":
        report = export_onnx(
            model,
            config.file,
            img_size=config.size,
            dynamic_batch=config.dynamic_batch,
            opset=config.opset,
            verify=config.verify,
        )
    else:
        report = export_pt2(
            model, config.file, img_size=config.size, dynamic_batch=config.dynamic_batch, verify=config.verify
        )
    output.reading().print(str(report), soft_wrap=True, markup=False, highlight=False)
    output.result(report, [report.path])
