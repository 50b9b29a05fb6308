"""``python -m benchmarks NAME``: measure, print a table and write a CSV file."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import (
    compare_released,
    explain,
    explorer_load,
    functional,
    gradients,
    heads,
    loader,
    rank,
    solvers,
    step,
    unfamiliar,
)
from eigengrain.cli.main import Command, run_commands

PROGRAM = "python -m benchmarks"
#: name -> options, function, example
_TABLE: dict[str, tuple[type[Any], Callable[[Any], int | None], str]] = {
    "functional": (functional.FunctionalBench, functional.run, "--batch 1,10 --channels 64 --methods eigh"),
    "growth": (functional.GrowthBench, functional.run_growth, "--batch 1,2,4 --channels 64,128"),
    "solvers": (solvers.SolversBench, solvers.run, "--batch 4 --channels 64 --condition 1e6,1e10"),
    "gradients": (gradients.GradientsBench, gradients.run, "--channels 16 --positions 49 --samples 4"),
    "heads": (heads.HeadsBench, heads.run, "--heads gap,mpncov+seb --side 14 --repeats 3"),
    "step": (step.StepBench, step.run, "--heads isqrt,mpncov+seb --amp bf16 --channels_last"),
    "explain": (explain.ExplainBench, explain.run, "--backbone resnet18 --batch 4 --img_size 224"),
    "loader": (loader.LoaderBench, loader.run, "--images 64 --size 224 --workers 2"),
    "compare_released": (compare_released.CompareReleased, compare_released.run, "--fast-mpn-cov PATH --batch 10"),
    "unfamiliar": (unfamiliar.UnfamiliarBench, unfamiliar.run, "--checkpoint runs/mine --images photos"),
    "rank": (rank.RankBench, rank.run, "--checkpoint runs/mine --count 100"),
    "explorer_load": (explorer_load.ExplorerLoad, explorer_load.run, "--visitors 50 --seconds 60"),
}
COMMANDS = [
    Command(
        name,
        (config.__doc__ or "").splitlines()[0].rstrip("."),
        config,
        run,
        rewrite_words=compare_released.accept_dashes if name == "compare_released" else list,
        examples=(f"{PROGRAM} {name} {example}",),
    )
    for name, (config, run, example) in _TABLE.items()
]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a benchmark and return the exit code."""
    return run_commands(PROGRAM, COMMANDS, argv, "Time, memory and accuracy of eigengrain.")


if __name__ == "__main__":
    sys.exit(main())
