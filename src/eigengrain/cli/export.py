"""``eigengrain export``: a trained model as a file for other runtimes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from eigengrain import names, output
from eigengrain.cli.evaluate import check_checkpoint
from eigengrain.cli.predict import open_model
from eigengrain.errors import ArgumentError
from eigengrain.options import check, setting


@dataclass(frozen=True)
class Export:
    """Which model, in which format, and where the file goes.

    Args:
        checkpoint: folder of 'eigengrain train' or of save_pretrained, or a weights file together with --backbone, --head
            and --num_classes.
        format: onnx for ONNX Runtime and others, pt2 for torch.export.load.
        out: file to write; by default the name of the checkpoint with .onnx or .pt2, in the current folder.
        img_size: size of the images that the file takes, or [height,width]; that of the model by default.
        dynamic_batch: accept any number of images at once; false for exactly one.
        dtype: precision of the square root of a covariance: float64, or float32 for a file without float64, which many
            runtimes for phones, browsers and accelerators lack.
        opset: ONNX operator set, 18 to 25.
        verify: run the file and compare its scores with those of PyTorch; it is only written if they agree to 1e-4.
        backbone: backbone of a weights file; 'eigengrain models' lists them.
        head: head of a weights file; 'eigengrain heads' lists them.
        num_classes: number of classes of a weights file.
        reduce: number of channels after the reduction, for a weights file.
        last_stride: 1 for a weights file of a model that was trained with it.
    """

    checkpoint: str = ""
    format: Literal["onnx", "pt2"] = "onnx"
    out: str | None = None
    img_size: int | list[int] | None = setting(None, least=1, most=names.MAX_SIDE)
    dynamic_batch: bool = True
    dtype: Literal["float64", "float32"] = "float64"
    opset: int = 20
    verify: bool = True
    backbone: str | None = setting(None, offers=names.BACKBONES)
    head: str | None = setting(None, offers=names.HEADS)
    num_classes: int | None = setting(None, least=1)
    reduce: int | Literal["auto"] | None = "auto"
    last_stride: int | None = None

    def __post_init__(self) -> None:
        check_checkpoint(self.checkpoint)
        check(self)
        if isinstance(self.img_size, list) and len(self.img_size) != 2:
            raise ArgumentError("img_size", "must be one number or [height,width]", self.img_size)

    @property
    def size(self) -> int | tuple[int, int] | None:
        """``img_size`` as models accept it."""
        return (self.img_size[0], self.img_size[1]) if isinstance(self.img_size, list) else self.img_size

    @property
    def file(self) -> Path:
        """Path of the file.

        Example:
            >>> str(Export("runs/birds/", format="pt2").file), str(Export("birds.pth").file)
            ('birds.pt2', 'birds.onnx')
        """
        if self.out is not None:
            return Path(self.out)
        path = Path(self.checkpoint).resolve()
        return Path(f"{path.name if path.is_dir() else path.stem}.{self.format}")


def run(config: Export) -> None:
    """Write the file and print its report."""
    from eigengrain.models.export import export_onnx, export_pt2

    model = open_model(config, config.size).model
    common: dict[str, Any] = {"img_size": config.size, "dynamic_batch": config.dynamic_batch}
    common |= {"dtype": config.dtype, "verify": config.verify}
    if config.format == "onnx":
        report = export_onnx(model, config.file, opset=config.opset, **common)
    else:
        report = export_pt2(model, config.file, **common)
    output.say(report)
    output.result(report, [report.path])
