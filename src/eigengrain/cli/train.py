"""``eigengrain train``; its options are in :mod:`eigengrain.training.config`."""

import sys

from eigengrain import output
from eigengrain.errors import Interrupted
from eigengrain.training.config import Train


def run(config: Train) -> int:
    """Train; the exit code is 130 or 143 after Ctrl-C or SIGTERM, when the checkpoint is written."""
    from eigengrain.training.distributed import is_first
    from eigengrain.training.loop import train

    try:
        result = train(config)
    except Interrupted as stop:
        if is_first():
            print(f"eigengrain: {stop}; continue with --resume", file=sys.stderr)
        return stop.exit_code
    if result is not None and is_first():
        scores = ", ".join(f"{name} {value:.2f}" for name, value in result.scores.items() if not name.endswith("loss"))
        output.say(f"epoch {result.epoch} (select: {result.select}): {scores}; model: {result.model}")
        output.result(result, [result.model])
    return 0
