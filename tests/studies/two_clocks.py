"""As a program under torchrun: two runs, and a limit that one of the processes believes to be over after the first."""

import os
import sys
from dataclasses import replace
from pathlib import Path

from studies import jobs
from training.small_run import colours, small

if __name__ == "__main__":
    jobs.open_sources = lambda data, seed: colours()
    planned = [jobs.Job(f"seed{seed}", replace(small("unused", epochs=1), seed=seed)) for seed in (0, 1)]
    folder, clock, asked = Path(sys.argv[1]), jobs.time.perf_counter, 0

    def plan() -> list[jobs.Job]:
        global asked
        asked += 1
        if asked == 2 and os.environ["RANK"] == "1":
            jobs.time.perf_counter = lambda: clock() + 1e6
        return planned

    found = jobs.run_jobs(plan, folder, seconds=1e5)
    sys.stdout.write(f"said {sorted(found)}\n")
