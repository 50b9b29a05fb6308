"""Several processes on one study, each on a GPU of its own: a run belongs to the one that holds its lock."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def claimed(folder: Path, name: str) -> Iterator[bool]:
    """Whether this process has a run for itself, for as long as the block lasts.

    The lock is the operating system's: it goes with the process, however that ends. Without such locks (on Windows, and on
    some file systems that machines share), and in processes that ``torchrun`` started to share every run, nothing is
    claimed.

    Args:
        folder: of the study, which all of its processes write to.
        name: of the run.

    Example:
        >>> from tempfile import mkdtemp
        >>> folder = Path(mkdtemp())
        >>> with claimed(folder, "run") as first, claimed(folder, "run") as second:
        ...     print(first, second)
        True False
    """
    try:
        import fcntl
    except ImportError:
        yield True
        return
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        yield True
        return
    locks = folder / "locks"
    locks.mkdir(parents=True, exist_ok=True)
    with open(locks / name, "w") as file:
        mine = True
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            mine = False
        except OSError:
            pass  # the file system has no locks
        yield mine
