"""Convert ``torch.export`` programs to ONNX graphs, and run ONNX files."""

import logging
import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from eigengrain.errors import ArgumentError


def convert(
    program: torch.export.ExportedProgram, input_name: str, outputs: Sequence[str], opset: int, dynamic_batch: bool = True
) -> Any:
    """Convert a program to PyTorch's ``ONNXProgram``, without the paths of the machine that exports it.

    The program has one input; ``outputs`` are names for its outputs. With ``dynamic_batch`` the first dimension of the
    input is named ``batch``.

    Raises:
        ValueError: if ONNX lacks an operation, with its name.
    """
    from onnx_ir.passes.common import ClearMetadataAndDocStringPass, DeduplicateInitializersPass

    try:
        with _quiet():
            converted: Any = torch.onnx.export(
                program,
                input_names=[input_name],
                output_names=list(outputs),
                opset_version=opset,
                dynamo=True,
                verbose=False,
                dynamic_shapes=({0: "batch"},) if dynamic_batch else None,
                custom_translation_table=_translations(),
            )
    except torch.onnx.OnnxExporterError as error:
        raise ValueError(first_line(error.__cause__ or error)) from error
    arguments = [tree_flatten((node.args, node.kwargs))[0] for node in program.graph.nodes]
    _restore_digits(converted.model, {value for values in arguments for value in values if isinstance(value, float)})
    ClearMetadataAndDocStringPass()(converted.model)  # stack traces with paths
    DeduplicateInitializersPass(size_limit=2**20)(converted.model)  # each step of an iteration has an identity matrix
    return converted


def _restore_digits(model: Any, numbers: set[float]) -> None:
    """Restore the constants of a program to double precision, because the exporter rounds them to float32.

    With rounded coefficients the iterations for a square root lose half of their digits and can diverge: one of them
    multiplies values outside its interval by 13 in each step.
    """
    import onnx_ir

    exact = {float(np.float32(number)): number for number in numbers}

    def restore(tensor: Any) -> Any:
        values = tensor.numpy()
        if values.dtype != np.float64:
            return tensor
        kinds, indices = np.unique(values, return_inverse=True)
        better = np.array([exact.get(float(kind), kind) for kind in kinds])
        return onnx_ir.tensor(better[indices].reshape(values.shape), name=tensor.name)

    for value in model.graph.initializers.values():
        value.const_value = restore(value.const_value)
    for node in model.graph.all_nodes():
        if node.op_type == "Constant" and "value" in node.attributes:
            tensor = node.attributes["value"].as_tensor()
            node.attributes["value"] = onnx_ir.AttrTensor("value", restore(tensor))


def runner(path: str | os.PathLike[str]) -> Callable[[Tensor], Tensor]:
    """Open an ONNX file with one input as a function to its first output, run by ONNX Runtime on the CPU."""
    import onnxruntime

    try:
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    except Exception as error:  # its errors have no common base class
        raise ArgumentError("opset", f"is not one that ONNX Runtime opens ({first_line(error)})") from error
    (image,) = session.get_inputs()
    return lambda images: torch.from_numpy(session.run(None, {image.name: images.numpy()})[0])


def first_line(error: BaseException) -> str:
    """The first line of an error's message that is not empty, or else its class."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter's own messages: deprecations, constants that are not folded, rules that are applied."""
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
    """Operations that PyTorch's exporter lacks: writing to the diagonal of a matrix, and to strided positions."""
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
        indices = np.full((), storage_offset or 0, dtype=np.int64)
        for length, step in zip(size, stride, strict=True):
            indices = indices[..., None] + step * np.arange(length)
        flat = op.Reshape(self, constant([math.prod(shape)]))
        written = op.ScatterElements(flat, constant(indices.reshape(-1)), op.Reshape(src, constant([-1])), axis=0)
        return op.Reshape(written, constant(shape))

    return {
        torch.ops.aten.diagonal_scatter.default: diagonal_scatter,
        torch.ops.aten.as_strided_scatter.default: as_strided_scatter,
    }
