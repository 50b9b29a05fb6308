"""``torch.export`` programs as ONNX graphs, and ONNX files as functions."""

import logging
import math
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten


def convert(
    program: torch.export.ExportedProgram, input_name: str, output_name: str, opset: int, dynamic_batch: bool = True
) -> Any:
    """The program as PyTorch's ``ONNXProgram``, without traces of the machine that it was made on.

    Args:
        program: with one input and one output.
        input_name, output_name: in the graph.
        opset: ONNX operator set.
        dynamic_batch: whether the first dimension of the program's input is one of any length; it is named ``batch``.

    Raises:
        ValueError: if an operation has no form in ONNX, with its name.
    """
    from onnx_ir.passes.common import ClearMetadataAndDocStringPass, DeduplicateInitializersPass

    try:
        with _quiet():
            converted: Any = torch.onnx.export(
                program,
                input_names=[input_name],
                output_names=[output_name],
                opset_version=opset,
                dynamo=True,
                verbose=False,
                dynamic_shapes=({0: "batch"},) if dynamic_batch else None,
                custom_translation_table=_translations(),
            )
    except torch.onnx.OnnxExporterError as error:
        raise ValueError(first_line(error.__cause__ or error)) from error
    _restore_digits(converted.model, _numbers(program))
    ClearMetadataAndDocStringPass()(converted.model)  # stack traces with paths
    DeduplicateInitializersPass(size_limit=2**20)(converted.model)  # an identity matrix for each step of an iteration
    return converted


def _numbers(program: torch.export.ExportedProgram) -> set[float]:
    """The numbers that are written in a program's operations."""
    found: set[float] = set()
    for node in program.graph.nodes:
        values, _ = tree_flatten((node.args, node.kwargs))
        found.update(value for value in values if isinstance(value, float))
    return found


def _restore_digits(model: Any, numbers: set[float]) -> None:
    """Put the numbers of a program back to double precision, as the exporter rounds them to float32 on their way.

    With rounded coefficients the iterations for a square root lose half of their digits, and may diverge: one of them
    multiplies what lies beyond its interval by 13 in each step.
    """
    import onnx_ir

    exact = {float(np.float32(number)): number for number in numbers}

    def restored(tensor: Any) -> Any:
        values = tensor.numpy()
        if values.dtype != np.float64:
            return tensor
        kinds, places = np.unique(values, return_inverse=True)
        better = np.array([exact.get(float(kind), kind) for kind in kinds])
        return onnx_ir.tensor(better[places].reshape(values.shape), name=tensor.name)

    for value in model.graph.initializers.values():
        value.const_value = restored(value.const_value)
    for node in model.graph.all_nodes():
        if node.op_type == "Constant" and "value" in node.attributes:
            tensor = node.attributes["value"].as_tensor()
            node.attributes["value"] = onnx_ir.AttrTensor("value", restored(tensor))


def runner(path: str | os.PathLike[str]) -> Callable[[Tensor], Tensor]:
    """An ONNX file with one input and one output as a function, run by ONNX Runtime on the CPU.

    Raises:
        ValueError: if the runtime cannot open it.
    """
    import onnxruntime

    try:
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    except Exception as error:  # its errors have no class in common
        raise ValueError(f"ONNX Runtime cannot open the file: {first_line(error)}; try another opset") from error
    (image,) = session.get_inputs()
    return lambda images: torch.from_numpy(session.run(None, {image.name: images.numpy()})[0])


def first_line(error: BaseException) -> str:
    """The first line of an error that has something to say.

    Example:
        >>> first_line(ValueError("no such thing\\nsee the manual"))
        'no such thing'
    """
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what the exporter says about itself: its deprecations, constants it does not fold, rules it applies."""
    logger = logging.getLogger("onnxscript")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stdout(StringIO()):  # older ones print
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """What PyTorch's exporter lacks: writing to the diagonal of a matrix, and to strided places in general."""
    from onnxscript import opset18 as op

    def constant(values: Any) -> Any:
        import onnx

        return op.Constant(value=onnx.numpy_helper.from_array(np.asarray(values)))

    def diagonal_scatter(self: Any, src: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
        rank = len(self.shape)
        if offset != 0 or {dim1 % rank, dim2 % rank} != {rank - 2, rank - 1} or self.shape[-2] != self.shape[-1]:
            raise NotImplementedError("only the main diagonal of square matrices in the last two dimensions")
        on_diagonal = constant(np.eye(self.shape[-1], dtype=bool))
        return op.Where(on_diagonal, op.Unsqueeze(src, constant([-1])), self)

    def as_strided_scatter(self: Any, src: Any, size: Any, stride: Any, storage_offset: Any = None) -> Any:
        shape = [int(length) for length in self.shape]
        places = np.full((), storage_offset or 0, dtype=np.int64)
        for length, step in zip(size, stride, strict=True):
            places = places[..., None] + step * np.arange(length)
        flat = op.Reshape(self, constant([math.prod(shape)]))
        written = op.ScatterElements(flat, constant(places.reshape(-1)), op.Reshape(src, constant([-1])), axis=0)
        return op.Reshape(written, constant(shape))

    return {
        torch.ops.aten.diagonal_scatter.default: diagonal_scatter,
        torch.ops.aten.as_strided_scatter.default: as_strided_scatter,
    }
