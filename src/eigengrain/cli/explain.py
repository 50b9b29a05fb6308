"""``eigengrain explain``: what large and small eigenvalues see in images. Nothing heavy is imported before it runs.

This is the door to the command; beside it are its options, images, plan, measures, pictures and page, each in a file.
"""

import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from eigengrain import output
from eigengrain.cli.explain_images import open_source
from eigengrain.cli.explain_options import CUTS, DIRECTIONS, SCALES, TARGETS, Explain, expand
from eigengrain.cli.explain_plan import make_plan, split_point
from eigengrain.text import few

__all__ = ["CUTS", "DIRECTIONS", "SCALES", "TARGETS", "Explain", "expand", "open_source", "run", "split_point"]


def run(config: Explain) -> None:
    """``eigengrain explain``: panels, measures and a page about them."""
    _check_installed()
    import torch

    from eigengrain.cli.explain_measures import measure, summaries, terminal_table, write_measures
    from eigengrain.cli.explain_page import write_page
    from eigengrain.cli.explain_pictures import draw
    from eigengrain.environment import describe
    from eigengrain.files import writable
    from eigengrain.progress import progress_bar
    from eigengrain.training.distributed import join

    page = writable(Path(config.out) / "gallery.html")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        warnings.filterwarnings("ignore", message="Glyph")  # a name in letters that the font lacks
        bar = progress_bar()
        try:
            with join(config.device) as process:
                plan = make_plan(config, process.device)
                bar.disable = bar.disable or not process.is_main
                with bar:
                    surveys = measure(plan, bar)
                if not process.is_main:
                    return
                environment = describe(process.device)
            with bar:
                pictures = draw(plan, bar)
        except torch.OutOfMemoryError as error:
            raise ValueError(f"out of memory with --batch_size {config.batch_size}: try a smaller one") from error
    files = write_measures(plan, surveys, environment)
    write_page(page, plan, pictures, surveys, environment)
    console = output.reading()
    if surveys:
        console.print(terminal_table(surveys))
    drawn = sorted((picture.path for picture in pictures), key=lambda path: path.suffix == ".gif")  # animations last
    written = [*drawn, *files, page]
    for path in written:
        console.print(str(path), soft_wrap=True, highlight=False, markup=False)
    notes = [
        *plan.source.problems,
        *dict.fromkeys(str(warning.message) for warning in told),
        *_earlier(page.parent, written),
    ]
    for note in notes:
        said = f"note: {' '.join(note.split())}"
        output.progress().print(said, soft_wrap=True, highlight=False, markup=False)
    output.result({"measures": summaries(surveys), "files": written, "notes": notes}, [page])


def _earlier(folder: Path, written: Sequence[Path]) -> list[str]:
    """A note on pictures and measures that an earlier call left in the folder, which the page does not speak of."""
    kinds = ("*.png", "*.gif", "measures*.csv")
    names = [path.name for kind in kinds for path in sorted(folder.glob(kind)) if path not in written]
    return [f"of an earlier call, and not on the page: {few(names, 3)}"] if names else []


def _check_installed() -> None:
    missing = [name for name in ("captum", "matplotlib") if find_spec(name) is None]
    if missing:
        raise ValueError(f"maps and pictures need {' and '.join(missing)}: pip install 'eigengrain[explain]'")
