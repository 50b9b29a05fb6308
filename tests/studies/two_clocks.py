"""As a program under torchrun: a study; then two runs, and a limit that one process believes to be over after the first."""

import os
import sys
from dataclasses import replace
from pathlib import Path

from studies import __main__ as program
from studies import runs
from training.small_run import colours, small

if __name__ == "__main__":
    words = ["spectrum", "--scale", "smoke", "--device", "cpu", "--datasets", "cub", "--heads", "mpncov", "--drop_models"]
    assert program.main([*words, "--out", f"{sys.argv[1]}/study"]) == 0
    runs.open_sources = lambda data, seed: colours()
    planned = [runs.Job(f"seed{seed}", replace(small("unused", epochs=1), seed=seed)) for seed in (0, 1)]
    folder, clock, requests = Path(sys.argv[1]), runs.time.perf_counter, 0

    def plan() -> list[runs.Job]:
        global requests
        requests += 1
        if requests == 2 and os.environ["RANK"] == "1":
            runs.time.perf_counter = lambda: clock() + 1e6
        return planned

    outcome = runs.run_jobs(plan, folder, seconds=1e5)
    sys.stdout.write(f"ended with {sorted(outcome)}\n")
