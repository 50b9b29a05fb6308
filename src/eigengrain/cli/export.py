"""A trained model as a file for other runtimes. Nothing heavy is imported before it runs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from eigengrain import output
from eigengrain.cli.checkpoint import open_model


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


def run(config: Export) -> None:
    """``eigengrain export``."""
    from eigengrain.models.export import export_onnx, export_pt2

    model = open_model(config, config.size)
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
