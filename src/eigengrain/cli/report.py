"""``eigengrain report``: one page about a training: its accuracy, what the model gets wrong, and how far to trust it."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eigengrain import names, output
from eigengrain.cli.evaluate import check_checkpoint, check_data_options
from eigengrain.data.datasets.registry import list_datasets
from eigengrain.options import check, setting
from eigengrain.text import describe_accuracy

if TYPE_CHECKING:
    from eigengrain.training.config import Train


@dataclass(frozen=True)
class Report:
    """Which training, and what the page shows.

    Args:
        checkpoint: folder of 'eigengrain train', also of a stopped run, or of save_pretrained together with --data.
        data: name of the data set; that of the training by default.
        root: folder of the data set; that of the training by default.
        data_options: more keyword arguments of the data set, for --data.
        split: images that are classified: test, val or train.
        mistakes: number of the worst mistakes that are shown with their maps.
        check_images: look for unreadable images, and for images that occur twice; this reads all of them.
        batch_size: number of images per batch.
        workers: processes that read images, at most one per core.
        device: auto (CUDA if available, else the CPU), cpu, cuda, cuda:1, mps.
        out: HTML file; report.html in the folder of the run by default.
    """

    checkpoint: str = ""
    data: str | None = setting(None, offers=list_datasets)
    root: str | None = None
    data_options: dict[str, Any] = setting({})
    split: str = setting("test", choices=names.SPLITS)
    mistakes: int = setting(12, least=0)
    check_images: bool = True
    batch_size: int = setting(32, least=1)
    workers: int = setting(4, least=0)
    device: str = setting("auto", offers=names.DEVICES)
    out: str | None = None

    def __post_init__(self) -> None:
        check_checkpoint(self.checkpoint)
        check(self)
        check_data_options(self.data, self.data_options)


def run(config: Report) -> None:
    """Classify the images, write the page, print its headline."""
    from eigengrain.environment import pick_device
    from eigengrain.files import writable
    from eigengrain.report import measure, render_page
    from eigengrain.training.run_folder import open_run

    trained = open_run(config.checkpoint)
    trained.model.to(pick_device(config.device))
    folder = trained.folder or Path(config.checkpoint)
    out = writable(config.out or folder / "report.html")
    images: dict[str, Any] = {"data": config.data, "root": config.root, "workers": config.workers}
    measured = measure(trained, config.split, **images, data_options=config.data_options, batch_size=config.batch_size)
    shown = render_page(folder, trained, measured, **images, mistakes=config.mistakes, check_images=config.check_images)
    out.write_text(shown, encoding="utf-8", errors="replace")
    output.say(f"{describe_accuracy(measured.right, len(measured.labels))}; report: {out}")
    output.result({**measured.summary(), "file": out}, [out])


def report_training(config: "Train", finished: bool) -> Path:
    """Write ``report.html`` of a training that has just ended; if it was stopped, without the images, which take time."""
    from eigengrain.environment import pick_device
    from eigengrain.files import writable
    from eigengrain.report import measure, render_page
    from eigengrain.training.run_folder import open_run

    folder, workers = Path(config.out), config.workers
    out = writable(folder / "report.html")
    trained = measured = None
    if finished:
        trained = open_run(folder)
        trained.model.to(pick_device(config.device))
        measured = measure(trained, batch_size=max(config.batch_size, 32), workers=workers)
    shown = render_page(folder, trained, measured, check_images=config.check_images, workers=workers)
    out.write_text(shown, encoding="utf-8", errors="replace")
    return out
