"""``eigengrain demo``: train a few heads on drawn birds, compare them, and write one page about it.

Every run uses the loop of ``eigengrain train`` with the recipe ``plumage-demo``. The difficulty of the birds was chosen
with the head ``gap`` alone, so that no other head is favoured; see ``benchmarks/plumage-difficulty.csv``.
"""

import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eigengrain import names, output
from eigengrain.errors import ArgumentError, FileError, UnknownName
from eigengrain.options import as_words, check, setting

if TYPE_CHECKING:
    from eigengrain.training.config import Train

HEADS = ("gap", "isqrt", "mpncov", "mpncov+seb")
RECIPE = "plumage-demo"
RESULTS = "results.json"


@dataclass(frozen=True)
class Demo:
    """Which heads are trained on drawn birds, and for how long.

    Args:
        heads: heads to train, such as [gap,mpncov]; 'eigengrain heads' lists them.
        seeds: seeds; each head is trained once with each of them, such as [0,1,2].
        epochs: passes over the training images; those of the recipe plumage-demo by default.
        per_class: images per class, for a quick try; by default 200 for training and 100 for testing.
        device: auto (CUDA if available, else the CPU), cpu, cuda, cuda:1, mps.
        out: folder for report.html, demo.csv and one folder per run with its model.
        fresh: delete the runs in the folder and start again, instead of continuing them.
    """

    heads: list[str] = setting(list(HEADS), offers=names.HEADS)
    seeds: list[int] = setting([0], least=0)
    epochs: int | None = setting(None, least=1)
    per_class: int | None = setting(None, least=1)
    device: str = setting("auto", offers=names.DEVICES)
    out: str = "runs/demo"
    fresh: bool = False

    def __post_init__(self) -> None:
        check(self)
        for name in ("heads", "seeds"):
            values = getattr(self, name)
            if not values or len(set(values)) != len(values):
                raise ArgumentError(name, "must be a list of at least one value without repetitions", values)


def run(demo: Demo) -> int:
    """Train the runs that are not finished, then compare; 130 or 143 after Ctrl-C or SIGTERM, with everything saved."""
    from eigengrain.environment import describe, pick_device
    from eigengrain.errors import Interrupted
    from eigengrain.files import writable, write_csv
    from eigengrain.report import comparison
    from eigengrain.training import loop
    from eigengrain.training.sources import open_sources

    start = time.perf_counter()
    folder = Path(demo.out)
    html, table = writable(folder / "report.html"), writable(folder / "demo.csv")
    runs = plan(demo)
    prepare(runs, demo.fresh)
    sources = open_sources(runs[0].data, runs[0].seed)
    try:
        for number, config in enumerate(runs, start=1):
            name = f"{config.model.head}, seed {config.seed}   ({number} of {len(runs)})"
            if (Path(config.out) / RESULTS).is_file() and (Path(config.out) / "model").is_dir():
                output.note(f"{name}   already trained")
                continue
            output.note(name)
            loop.train(config, sources)
    except Interrupted as stop:
        print(f"eigengrain: {stop}; run the same command to continue", file=sys.stderr)
        return stop.exit_code

    finished = [comparison.open_finished(config, sources) for config in runs]
    images = len(sources.train) // runs[0].batch_size * runs[0].batch_size or len(sources.train)
    rows = [each.row(images) for each in finished]
    environment = describe(pick_device(demo.device))
    write_csv(table, [row | environment for row in rows])
    pictures: Sequence[Path] = ()
    if find_spec("matplotlib"):
        curves = comparison.draw_curves(finished, folder / "curves.png")
        pictures = curves, comparison.draw_spectra(finished, folder / "spectra.png")
    else:
        output.say("no pictures without matplotlib: pip install 'eigengrain[explain]'")
    means = comparison.average(rows)
    page = comparison.render_page(finished, sources, means, pictures, page_commands(demo, runs), environment)
    html.write_text(page, encoding="utf-8")
    output.console().print(output.table(means.caption, means.heads, [[cell.text for cell in row] for row in means.rows]))
    output.say(f"{time.perf_counter() - start:.0f} s in all", f"report: {html}")
    output.say(*(f"{'    or:' if number else '  next:'} {command}" for number, command in enumerate(next_commands(demo))))
    output.result({"rows": rows, "environment": environment, "files": [table, *pictures, html]}, [html])
    return 0


def plan(demo: Demo) -> "list[Train]":
    """The configs of the runs, head by head."""
    from eigengrain.heads import list_heads
    from eigengrain.recipes import load_recipe

    for head in demo.heads:
        if head not in list_heads():
            raise UnknownName("head", head, list_heads())
    common: dict[str, Any] = {"device": demo.device, "resume": True}
    common |= {} if demo.epochs is None else {"epochs": demo.epochs}
    common |= {} if demo.per_class is None else {"data.options": {"per_class": demo.per_class}}
    return [
        load_recipe(RECIPE, {**common, "model.head": head, "seed": seed, "out": str(_folder(demo, head, seed))})
        for head in demo.heads
        for seed in demo.seeds
    ]


def _folder(demo: Demo, head: str, seed: int) -> Path:
    return Path(demo.out) / (f"{head}-seed{seed}" if seed else head)


def prepare(runs: "Sequence[Train]", fresh: bool) -> None:
    """Delete the folders of the runs if ``fresh``, else raise a FileError if one was started with other options."""
    from eigengrain.training.config import differences, to_mapping
    from eigengrain.training.run_folder import ARGUMENTS
    from eigengrain.yaml_files import read_mapping

    for run in runs:
        arguments = Path(run.out) / ARGUMENTS
        if fresh and arguments.is_file():
            shutil.rmtree(run.out)
        elif arguments.is_file() and (changed := differences(read_mapping(arguments), to_mapping(run))):
            problem = f"it was started with other options ({', '.join(changed[:3])})"
            raise FileError(run.out, f"{problem}: use --fresh to delete it, or another folder with --out", "continue")


def page_commands(demo: Demo, runs: "Sequence[Train]") -> list[str]:
    """The commands at the end of the page."""
    from eigengrain.training.run_folder import ARGUMENTS

    arguments = shlex.quote(f"{runs[0].out}/{ARGUMENTS}")
    commands = [f"eigengrain train --config {arguments} --out runs/again   # repeat one run"]
    if len(demo.seeds) == 1:
        words = shlex.join(["eigengrain", "demo", *as_words(demo, skip=["seeds", "fresh"]), "--seeds", "[0,1,2]"])
        commands.append(f"{words}   # train every head three times")
    return commands + next_commands(demo)


def next_commands(demo: Demo) -> list[str]:
    """Commands to try next; they can be run as they are, except that FOLDER is to be replaced."""
    example = next((head for head in ("mpncov", "mpncov+seb") if head in demo.heads), None)
    train = "eigengrain train FOLDER --out runs/mine"
    if example is None:
        return [train]
    folder = shlex.quote(str(_folder(demo, example, demo.seeds[0])))
    evaluate = f"eigengrain evaluate --checkpoint {folder} --subset all --subset top:32 --subset last:32 --workers 0"
    return [evaluate, f"eigengrain report {folder} --workers 0", train]
