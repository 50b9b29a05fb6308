"""The device of a run, and columns for result files that describe where they were measured."""

import platform
from datetime import UTC, datetime
from pathlib import Path

import torch

from eigengrain import __version__
from eigengrain.errors import ArgumentError


def pick_device(name: str) -> torch.device:
    """The device of that name, or an ArgumentError; ``auto`` is CUDA if it is available, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    count = torch.cuda.device_count()
    if device.type not in ("cpu", "cuda", "mps"):
        raise ArgumentError("device", "must be auto, cpu, cuda, cuda:1, … or mps", name)
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ArgumentError("device", f"is not available: torch finds {count} CUDA devices", name, "use auto or cpu")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ArgumentError("device", "is not available", name, "use auto or cpu")
    return device


def cpu_name() -> str:
    """The name of the processor, as the system reports it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


def device_name(device: torch.device) -> str:
    """The name of a GPU, or of the processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def describe(device: torch.device) -> dict[str, str | int]:
    """Columns about versions, device and date."""
    return {
        "eigengrain": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": device.type,
        "device_name": device_name(device),
        "threads": torch.get_num_threads(),
        "date": datetime.now(UTC).date().isoformat(),
    }
