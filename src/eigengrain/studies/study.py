"""What a study is: rows that are trained in one way or another, and what is made of their records."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from eigengrain.data.cache import Decoded
from eigengrain.errors import unknown_name
from eigengrain.runtime.page import TableData
from eigengrain.studies.comparison import REACH, best_rate, final_jobs, further_rate, rate_jobs, with_head
from eigengrain.studies.config import StudyRun
from eigengrain.studies.jobs import Job, Record, read_record
from eigengrain.studies.published import TITLES
from eigengrain.studies.settings import NETWORKS, SMOKE_CHANNELS, base, with_reduction
from eigengrain.training.config import Train

#: options of a record that a report, which may be made on another machine, need not share
_ELSEWHERE = ("compile", "model.backbone", "model.weights", "model.pretrained", "model.stride_on")
#: in the folder of a model
WEIGHTS = "model.safetensors"
#: seeds that a report looks for beside those that were asked for
_SEEDS = range(10)


@dataclass(frozen=True)
class Row:
    """A line of a table on one data set: what is trained, and what the paper has for it.

    Args:
        data: of the catalogue.
        backbone: one of :data:`eigengrain.studies.settings.NETWORKS`.
        method: as the table calls it.
        head: of the registry; None for a system that is not part of this package, which is never run.
        options: of the head.
        printed: the paper's number, or None.
        metric: of a run's scores.
        core: whether it is run at scale small without being asked for.
        rate_of: options of the head whose best rate is taken; its own by default.
        curve: whether every epoch is tested.
        clip_grad: largest norm of all gradients together; None for no limit.
        pretrain: head of a network that is trained on ImageNet first.
        analyses: made on the network of the first seed.
        search: whether only the runs are made by which a rate is chosen.
        more_rates: that are tried with them, and have no part in the choice.
        length: c, of the head's vector beside that of MPN-COV, about. A vector c times as long learns as if the rate were
            c² times as high.
    """

    data: str
    backbone: str
    method: str
    head: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    printed: float | None = None
    metric: str = "test_top1"
    core: bool = False
    rate_of: Mapping[str, Any] | None = None
    curve: bool = False
    clip_grad: float | None = None
    pretrain: str | None = None
    analyses: tuple[str, ...] = ()
    search: bool = False
    more_rates: tuple[float, ...] = ()
    length: float = 1.0


@dataclass(frozen=True)
class Score:
    """Accuracies of the seeds of one method under one protocol.

    Args:
        rate: of the classifier.
        chosen: whether the rate was chosen on validation images; None where the protocol does not choose.
        values: one a seed.
        diverged: runs without a value, since their loss was no number any more.
    """

    rate: float
    chosen: bool | None
    values: tuple[float, ...]
    diverged: int = 0

    @property
    def mean(self) -> float:
        """Of the runs that have a value; there must be one."""
        return sum(self.values) / len(self.values)


@dataclass(frozen=True)
class Setup:
    """The options of a study, with what follows from them.

    Args:
        options: of the command.
        seeds: of the runs that are tested.
        available: data sets that can be opened; None if nothing is going to be trained.
        deadline: on the clock of time.perf_counter.
        decoded: images that a device holds, shared by all runs.
        bases: options of a run by backbone and data set, read once.
    """

    options: StudyRun
    seeds: tuple[int, ...] = (0,)
    available: tuple[str, ...] | None = None
    deadline: float | None = None
    decoded: Decoded = field(default_factory=dict, repr=False, compare=False)
    bases: dict[tuple[str, str], Train] = field(default_factory=dict, repr=False, compare=False)

    @property
    def out(self) -> Path:
        return Path(self.options.out)

    @property
    def places(self) -> list[Path]:
        """Folders of records."""
        more = [Path(self.options.records).expanduser()] if self.options.records else []
        return [self.out / "records", *more]

    def rates(self, row: Row) -> list[float]:
        """The grid of a row: over c² where that is more than the steps beyond a grid can make up for."""
        grid = self.options.rates[:2] if self.options.scale == "smoke" else self.options.rates
        squared = row.length**2
        far = max(squared, 1 / squared) > REACH
        return [float(f"{rate / squared:.3g}") for rate in grid] if far else list(grid)

    @property
    def protocols(self) -> tuple[str, ...]:
        return ("fair", "paper") if self.options.protocol == "both" else (self.options.protocol,)

    @property
    def channels(self) -> int:
        """Of the covariances of ResNet-50."""
        return SMOKE_CHANNELS if self.options.scale == "smoke" else 256

    def seconds_left(self) -> float | None:
        return None if self.deadline is None else self.deadline - time.perf_counter()

    def record(self, job: Job) -> Record | None:
        """Of a job, if there is one."""
        return read_record(self.places, job, _ELSEWHERE if self.available is None else ())

    # --- from a row to runs -------------------------------------------------------------------------------------

    def runs(self, row: Row) -> bool:
        """Whether a row is trained if it is not yet."""
        options = self.options
        if row.head is None:
            return False
        if options.scale != "smoke" and row.data not in (self.available or ()):
            return False
        if row.pretrain and options.scale != "smoke" and "imagenet" not in (self.available or ()):
            return any(self.pretrained(row, protocol).is_file() for protocol in self.protocols)
        if options.backbones is None and options.heads is None and options.scale == "small" and not row.core:
            return False
        return row.backbone in (options.backbones or [row.backbone]) and row.head in (options.heads or [row.head])

    def config(self, row: Row, options: Mapping[str, Any] | None = None) -> Train:
        """The run of a row at the paper's rate, with other options of the head if they are given."""
        assert row.head is not None
        place = row.backbone, row.data
        if place not in self.bases:
            self.bases[place] = base(self.options, *place)
        run = with_head(self.bases[place], row.head)
        run = replace(run, model=replace(run.model, head_options=dict(row.options if options is None else options)))
        if options is None and row.clip_grad is not None:
            run = replace(run, clip_grad=row.clip_grad)
        return with_reduction(run)

    def pretraining(self, row: Row, protocol: str) -> list[Job]:
        """Runs on ImageNet that a row starts from; the last of them is the one."""
        first = Row("imagenet", row.backbone, row.method, row.pretrain)
        return self.jobs(first, protocol)

    def pretrained(self, row: Row, protocol: str) -> Path:
        """The file that the last of them leaves."""
        return self.out / "runs" / self.pretraining(row, protocol)[-1].name / "model" / WEIGHTS

    def jobs(self, row: Row, protocol: str) -> list[Job]:
        """The runs of a row that can be named by now: of the fair protocol the last ones follow from the first."""
        config, suffix = self.config(row), ""
        if row.pretrain is not None:
            weights = self.pretrained(row, protocol)
            if not weights.is_file():
                return self.pretraining(row, protocol)
            model = replace(config.model, weights=str(weights), pretrained=False)
            config, suffix = replace(config, model=model), "-gcp"
        if protocol == "paper":
            if row.search:  # one rate for all: there is nothing to choose
                return []
            config = replace(config, select="best-test", eval_every=1)
            return final_jobs(config, config.optimiser.classifier_lr_scale, self.seeds, row.analyses, suffix)
        tried = self.tried(row, suffix, config)
        rate = best_rate(tried, self._known(tried))
        search = [*tried, *rate_jobs(config, row.more_rates, suffix)]
        if rate is None or row.search:
            return search
        seeds = self.seeds[:1] if row.curve and config.eval_every > 1 else self.seeds
        return [*search, *self.finals(row, config, rate, seeds, suffix)]

    def tried(self, row: Row, suffix: str, config: Train) -> list[Job]:
        """Runs by which a rate is chosen, as far as they can be named by now."""
        if row.rate_of is not None:
            config = self.config(row, row.rate_of)
        grid = self.rates(row)
        jobs = rate_jobs(config, grid, suffix)
        if self.options.scale != "smoke":
            while (rate := further_rate(jobs, self._known(jobs), grid)) is not None:
                jobs += rate_jobs(config, [rate], suffix)
        return jobs

    def finals(self, row: Row, config: Train, rate: float, seeds: Sequence[int], suffix: str = "") -> list[Job]:
        """Runs on all images at a rate."""
        if row.curve and config.eval_every > 1:
            config, suffix = replace(config, eval_every=1), f"{suffix}-curve"
        return final_jobs(config, rate, seeds, row.analyses, suffix)

    def _known(self, jobs: Sequence[Job]) -> dict[str, Record]:
        found = {job.name: self.record(job) for job in jobs}
        return {name: record for name, record in found.items() if record is not None}

    # --- from records to a row ----------------------------------------------------------------------------------

    def results(self, row: Row, protocol: str, every_rate: bool = False) -> list[tuple[float, bool | None, list[Record]]]:
        """Of a row, by rate: the rate, whether it was chosen (see :class:`Score`), and the records of the seeds.

        Args:
            row: whose records are wanted.
            protocol: fair or paper.
            every_rate: whether those of other rates follow when one was chosen.
        """
        if row.head is None:
            return []
        config, suffix = self.config(row), "-gcp" if row.pretrain else ""
        if row.pretrain:  # which folder the weights were in is no matter now
            config = replace(config, model=replace(config.model, weights=WEIGHTS, pretrained=False))
        seeds = sorted({*self.seeds, *_SEEDS})
        if protocol == "paper":
            config = replace(config, select="best-test", eval_every=1)
            rate = config.optimiser.classifier_lr_scale
            records = list(self._known(final_jobs(config, rate, seeds, (), suffix)).values())
            return [(rate, None, records)] if records else []
        tried = self.tried(row, suffix, config)
        chosen = best_rate(tried, self._known(tried))
        found: list[tuple[float, bool | None, list[Record]]] = []
        rates = [job.config.optimiser.classifier_lr_scale for job in tried]
        if chosen is not None:
            rates = [chosen, *(rate for rate in rates if every_rate and rate != chosen)]
        for rate in rates:
            records = list(self._known(self.finals(row, config, rate, seeds, suffix)).values())
            found += [(rate, rate == chosen, records)] if records else []
        return found

    def scores(self, row: Row, protocol: str) -> list[Score]:
        """Accuracies of a row under a protocol; of several rates only while none is chosen."""
        found = []
        for rate, chosen, records in self.results(row, protocol):
            values = tuple(record["scores"][row.metric] for record in records if record["scores"])
            found.append(Score(rate, chosen, values, len(records) - len(values)))
        return found

    def analysis(self, row: Row, name: str) -> tuple[Record, dict[str, Any]] | None:
        """The record of a row with an analysis, and what that found; of the fair protocol if there are both.

        The network is that of the chosen rate, or of another one if that was not analysed.
        """
        for protocol in ("fair", "paper"):
            for _, _, records in self.results(row, protocol, every_rate=True):
                for record in records:
                    if name in record["analyses"]:
                        return record, record["analyses"][name]
        return None


@dataclass(frozen=True)
class Findings:
    """What a study comes to.

    Args:
        rows: for the CSV file, all with the same columns.
        tables: for reading.
        notes: sentences under them.
        draw: writes the figure; None if there is nothing to draw.
    """

    rows: list[dict[str, object]]
    tables: list[TableData]
    notes: list[str] = field(default_factory=list)
    draw: Callable[[Path], None] | None = None


@dataclass(frozen=True)
class Study:
    """One of the paper's tables or figures.

    Args:
        name: of the command.
        title: a few words.
        where: the table or figure.
        all_rows: what is trained, on all of its data sets.
        find: what the records of rows come to.
        thorough: whether the default is three seeds at scale small too.
        measure: what is measured without training, and whether that is still to do.
    """

    name: str
    title: str
    where: str
    all_rows: Callable[[Setup], list[Row]]
    find: Callable[[Setup, Sequence[Row]], Findings]
    thorough: bool = False
    measure: Callable[[Setup], None] | None = None

    def rows(self, setup: Setup) -> list[Row]:
        """Those of the data sets that were asked for."""
        datasets = setup.options.datasets
        return [row for row in self.all_rows(setup) if datasets is None or row.data in datasets]

    def findings(self, setup: Setup) -> Findings:
        """What the records come to."""
        return self.find(setup, self.rows(setup))

    def seeds(self, options: StudyRun) -> tuple[int, ...]:
        if options.seeds is not None:
            return tuple(options.seeds)
        one = options.scale == "smoke" or (options.scale == "small" and not self.thorough)
        return (0,) if one else (0, 1, 2)

    def plan(self, setup: Setup) -> list[Job]:
        """The runs that can be named by now, each once."""
        planned: dict[str, Job] = {}
        for row in self.rows(setup):
            if not setup.runs(row):
                continue
            for protocol in setup.protocols:
                for job in setup.jobs(row, protocol):
                    same = planned.get(job.name)
                    analyses = tuple(dict.fromkeys((*(same.analyses if same else ()), *job.analyses)))
                    planned[job.name] = replace(job, analyses=analyses)
        return list(planned.values())


def check_names(options: StudyRun, rows: Sequence[Row]) -> None:
    """Refuse data sets, backbones and heads that a study does not have.

    Raises:
        ValueError: with near names.
    """
    for kind, wanted, known in (
        ("data set", options.datasets, [row.data for row in rows]),
        ("backbone", options.backbones, [row.backbone for row in rows]),
        ("head", options.heads, [row.head for row in rows if row.head]),
    ):
        for name in wanted or ():
            if name not in known:
                raise unknown_name(f"{kind} of this study", name, dict.fromkeys(known))


def where_run(record: Record | None) -> dict[str, object]:
    """Columns that say where a run was made; empty without one."""
    environment = {} if record is None else record["environment"]
    return {name: environment.get(name, "") for name in ("eigengrain", "torch", "device_name", "date")}


def titled(row: Row) -> str:
    """A row's backbone and method for reading."""
    return f"{NETWORKS[row.backbone].title}, {row.method}"


def data_title(setup: Setup, name: str) -> str:
    """A data set for reading; at scale smoke drawn birds stand in for it."""
    return f"{TITLES[name]} (drawn)" if setup.options.scale == "smoke" else TITLES[name]
