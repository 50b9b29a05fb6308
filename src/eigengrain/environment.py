"""Where a number was measured: the columns that every result file carries, and the choice of a device."""

import platform
from datetime import UTC, datetime
from pathlib import Path

import torch

from eigengrain import __version__


def pick_device(name: str) -> torch.device:
    """The device of that name; ``auto`` is CUDA where there is one and the CPU elsewhere.

    Raises:
        ValueError: for a name torch does not know or a device that is not here.

    Example:
        >>> pick_device("cpu")
        device(type='cpu')
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"unknown device {name!r}: use auto, cpu, cuda, cuda:1 or mps") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device {name!r} is not here: torch sees {torch.cuda.device_count()} CUDA devices; use auto or cpu"
        )
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ValueError("device 'mps' is not here: use auto or cpu")
    if device.type not in ("cpu", "cuda", "mps"):
        raise ValueError(f"device {name!r} is not supported: use auto, cpu, cuda, cuda:1 or mps")
    return device


def cpu_name() -> str:
    """The processor's name as the system gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def describe(device: torch.device) -> dict[str, str | int]:
    """Columns that say where and with what a result was measured.

    Example:
        >>> list(describe(torch.device("cpu")))
        ['eigengrain', 'torch', 'python', 'device', 'device_name', 'threads', 'date']
    """
    return {
        "eigengrain": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": device.type,
        "device_name": device_name(device),
        "threads": torch.get_num_threads(),
        "date": datetime.now(UTC).date().isoformat(),
    }
