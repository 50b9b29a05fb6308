"""``eigengrain train``. Nothing heavy is imported before it runs."""

import sys

from eigengrain import output
from eigengrain.training.config import Train


def run(config: Train) -> int:
    """Train; the exit code is 0, or 130 and 143 after Ctrl-C and SIGTERM, when the checkpoint is written."""
    from eigengrain.training.distributed import is_first
    from eigengrain.training.loop import train
    from eigengrain.training.signals import Interrupted

    try:
        result = train(config)
    except Interrupted as stop:
        if is_first():
            print(f"eigengrain: {stop}", file=sys.stderr)
        return stop.exit_code
    if result is not None and is_first():
        scores = ", ".join(f"{name} {value:.2f}" for name, value in result.scores.items() if not name.endswith("loss"))
        said = f"epoch {result.epoch} (select: {result.select}): {scores}; model: {result.model}"
        output.reading().print(said, soft_wrap=True, markup=False, highlight=False)
        output.result(result, [result.model])
    return 0
