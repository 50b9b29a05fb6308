"""Reading tensors from checkpoint files, without ever running code that is in them."""

import os
import pickle
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

TORCH_SUFFIXES = (".pth", ".pt", ".bin", ".tar", ".ckpt")

# where training scripts keep the parameters in what they save, in order of preference
_WRAPPERS = ("state_dict", "model", "model_state_dict", "model_ema", "state_dict_ema")


def read_tensors(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Named tensors of a checkpoint, half precision as float32, without wrappers around them or in their names.

    Args:
        path: a ``.safetensors`` file, a PyTorch file, or a folder with ``model.safetensors``.

    Raises:
        ValueError: if there is no such file, it is no checkpoint or a part of one, or it holds code.
    """
    file = Path(path)
    if file.is_dir():
        file = file / "model.safetensors"
    if not file.is_file():
        raise ValueError(f"there is no weights file {str(file)!r}")
    suffix = file.suffix.lower()
    if suffix == ".safetensors":
        content = _read_safetensors(file)
    elif suffix in TORCH_SUFFIXES:
        content = _read_torch(file)
    else:
        raise ValueError(f"weights are read from .safetensors or {', '.join(TORCH_SUFFIXES)} files, got {str(file)!r}")
    return {_bare_name(name): _single_precision(tensor) for name, tensor in _unwrapped(content, file).items()}


def _read_safetensors(file: Path) -> object:
    try:
        return load_file(file, device="cpu")
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"{str(file)!r} is not a safetensors file, or only a part of one: {error}") from error


def _read_torch(file: Path) -> object:
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if "GLOBAL" in str(error):  # torch's word for a name to be imported
            raise ValueError(
                f"{str(file)!r} holds more than tensors and would have to run code, which is refused: save its state dict "
                "alone, best as .safetensors"
            ) from error
        raise _damaged(file) from error
    except (RuntimeError, EOFError, OSError, KeyError, ValueError, AttributeError, TypeError) as error:
        raise _damaged(file) from error


def _damaged(file: Path) -> ValueError:
    return ValueError(f"{str(file)!r} is not a PyTorch checkpoint, or only a part of one: fetch or save it again")


def _unwrapped(content: object, file: Path) -> dict[str, Tensor]:
    while isinstance(content, Mapping):
        inner = next((content[key] for key in _WRAPPERS if isinstance(content.get(key), Mapping)), None)
        if inner is None:
            break
        content = inner
    tensors = content.items() if isinstance(content, Mapping) else ()
    named = {name: tensor for name, tensor in tensors if isinstance(name, str) and isinstance(tensor, Tensor)}
    if not named:
        raise ValueError(f"{str(file)!r} holds no named tensors: weights are a state dict, plain or under {_WRAPPERS}")
    return named


def _bare_name(name: str) -> str:
    """Without what DataParallel and torch.compile put around a module, also around an inner one, and ``model.`` in front.

    The latter is what a training module calls the network that it holds, as in Lightning.
    """
    return ".".join(part for part in name.split(".") if part not in ("module", "_orig_mod")).removeprefix("model.")


def _single_precision(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
