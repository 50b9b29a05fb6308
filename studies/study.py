"""From the rows of a table to training runs, and from their records to results."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd

from eigengrain.data.device_cache import Decoded
from eigengrain.errors import ArgumentError, UnknownName
from eigengrain.training.config import Train, override
from studies import runs
from studies.runs import Job, Record, best_rate, final_jobs, rate_jobs, run_records
from studies.settings import (
    FIRST,
    NETWORKS,
    RATES,
    SETTINGS,
    SHORT,
    TITLES,
    UNREDUCED,
    StudyOptions,
    at_size,
    base_config,
    has_recipe,
    network_name,
)

#: options in which a record may differ from the run of a report, which may be made on another machine
_MACHINE = ("compile", "data.name", "model.backbone", "model.weights", "model.pretrained", "model.stride_on")
WEIGHTS = "model.safetensors"
NOT_RUN = "not run"
SMOKE_NOTE = (
    "Scale smoke: one small network on a few drawn birds replaces every backbone and data set. These numbers only show "
    "that the study runs."
)


@dataclass(frozen=True)
class Row:
    """A line of a table: what is trained, and the number of the paper."""

    data: str
    backbone: str  # key of settings.NETWORKS
    method: str  # name in the table
    head: str | None = None  # None for a system that is not part of this package and is never run
    options: Mapping[str, Any] = field(default_factory=dict)  # of the head
    paper: float | None = None
    metric: str = "test_top1"
    core: bool = False  # whether it is run at scale small by default
    rate_options: Mapping[str, Any] | None = None  # of the head whose best rate is used; its own by default
    curve: bool = False  # whether every epoch is tested
    clip_grad: float | None = None
    pretrain: str | None = None  # head with which the network is trained first, on ImageNet or on other drawn birds
    analyses: tuple[str, ...] = ()  # of the network of the first seed
    search_only: bool = False  # whether only the runs for the choice of a rate are made
    more_rates: tuple[float, ...] = ()  # without a part in the choice
    rates: tuple[float, ...] | None = None  # grid of its own instead of that of the options; a single rate is not tried
    calibrate: bool = False  # whether its vectors are calibrated
    model: Mapping[str, Any] = field(default_factory=dict)  # further options of the model
    img_size: int | None = None  # of a transformer; that of the scale by default
    rate_size: int | None = None  # size of the images at which its rate is chosen; img_size by default
    every_seed: bool = False  # whether the rates are tried with every seed
    changes: Mapping[str, Any] = field(default_factory=dict)  # dotted options of the training, for the study recipe
    tag: str = ""  # in the names of its runs
    #: c, the length of the vector relative to MPN-COV: a vector c times as long learns as if the rate were c² times as high
    length: float = 1.0

    @property
    def first(self) -> "Row":
        """What is trained first for a row with ``pretrain``."""
        return Row(FIRST if self.data == "plumage" else "imagenet", self.backbone, self.method, self.pretrain)

    @property
    def title(self) -> str:
        return f"{NETWORKS[self.backbone].title}, {self.method}"


@dataclass(frozen=True)
class Score:
    """Accuracies of a row under one protocol."""

    rate: float
    chosen: bool | None  # on validation images; None for a protocol that does not choose
    values: tuple[float, ...]  # one per seed
    diverged: int = 0  # number of runs
    record: Record | None = None  # the first

    @property
    def mean(self) -> float:
        """Mean of the values, of which there must be one."""
        return sum(self.values) / len(self.values)


@dataclass(frozen=True)
class Setup:
    """The options of a study and its records."""

    options: StudyOptions
    seeds: tuple[int, ...] = (0,)
    available: tuple[str, ...] | None = None  # data sets that can be opened; None if nothing is trained
    deadline: float | None = None  # end of the time budget by time.perf_counter
    simulated: Mapping[str, Record] | None = None  # records by name instead of those in folders
    decoded: Decoded = field(default_factory=dict, repr=False, compare=False)  # images on the device
    bases: dict[tuple[str, str], Train] = field(default_factory=dict, repr=False, compare=False)  # cache
    machines: dict[str, None] = field(default_factory=dict, repr=False, compare=False)  # of the records that were read

    @property
    def out(self) -> Path:
        return Path(self.options.out)

    @property
    def folders(self) -> list[Path]:
        """Folders of records."""
        return [self.out / "records", *([Path(self.options.records).expanduser()] if self.options.records else [])]

    @property
    def suffix(self) -> str:
        """In the names of all runs: the size of the images, if it is not that of the scale."""
        return "" if self.options.img_size is None else f"-{self.options.img_size}px"

    @property
    def protocols(self) -> tuple[str, ...]:
        return ("fair", "paper") if self.options.protocol == "both" else (self.options.protocol,)

    @property
    def channels(self) -> int:
        """Channels of the covariances of ResNet-50."""
        return int(SETTINGS["smoke"]["model"]["reduce"]) if self.options.scale == "smoke" else 256

    def title(self, data: str) -> str:
        """Name of a data set for reading; at scale smoke drawn birds replace it."""
        return f"{TITLES[data]} (drawn)" if self.options.scale == "smoke" and data != "plumage" else TITLES[data]

    def grid(self, row: Row) -> list[float]:
        """The rates of a row: divided by c² if that is more than the steps beyond a grid can make up for."""
        if row.rates is not None:
            return list(row.rates[:2] if self.options.scale == "smoke" else row.rates)
        rates: Sequence[float] = self.options.rates or RATES
        rates = rates[:2] if self.options.scale == "smoke" else rates
        squared = row.length**2
        far = max(squared, 1 / squared) > runs.REACH
        return [float(f"{rate / squared:.3g}") for rate in rates] if far else list(rates)

    def record(self, job: Job) -> Record | None:
        """The record of a job, if there is one."""
        if self.simulated is not None:
            return self.simulated.get(job.name)
        network = NETWORKS.get(network_name(job.config.model.backbone))
        # the learning rate of networks without batch normalisation follows from their weights
        ignored = (*_MACHINE, "optimiser.lr") if network is not None and network.plain else _MACHINE
        record = runs.read_record(self.folders, job, ignored if self.available is None else ())
        if record is not None:
            self.note_machine(record)
        return record

    def note_machine(self, record: Record) -> None:
        where = environment_columns(record)
        self.machines["{device_name} with torch {torch} and eigengrain {eigengrain}".format(**where)] = None

    def _complete(self, jobs: Sequence[Job]) -> dict[str, Record]:
        return {job.name: record for job in jobs if (record := self.record(job)) is not None}

    def trains(self, row: Row) -> bool:
        """Whether the runs of a row are made if they are missing."""
        if row.head is None or not self._opens(row.data):
            return False
        if row.pretrain:
            return self._may_pretrain(row) or any(self._imagenet_weights(row, protocol) for protocol in self.protocols)
        return self._selected(row)

    def _opens(self, data: str) -> bool:
        return self.options.scale == "smoke" or data in (self.available or ())

    def _selected(self, row: Row) -> bool:
        """At scale small few rows are trained, unless backbones or heads are named."""
        options = self.options
        return row.core or options.scale not in SHORT or options.backbones is not None or options.heads is not None

    def _may_pretrain(self, row: Row) -> bool:
        return self._opens("plumage" if row.data == "plumage" else "imagenet") and self._selected(row)

    def config(self, row: Row, options: Mapping[str, Any] | None = None) -> Train:
        """The training options of a row at the rate of the paper; ``options`` replaces those of the head."""
        assert row.head is not None
        place = row.backbone, row.data
        if place not in self.bases:
            self.bases[place] = base_config(self.options, *place)
        run = runs.with_head(self.bases[place], row.head)
        if row.img_size is not None and self.options.scale != "smoke":
            run = at_size(run, row.img_size)
        model = replace(run.model, head_options=dict(row.options if options is None else options), calibrate=row.calibrate)
        if row.head in UNREDUCED:
            model = replace(model, reduce="auto")
        own = {**model.backbone_options, **row.model.get("backbone_options", {})}
        model = replace(model, **{**row.model, "backbone_options": own})
        clip = row.clip_grad if options is None and row.clip_grad is not None else run.clip_grad
        return override(replace(run, model=model, clip_grad=clip), row.changes)

    def pretraining(self, row: Row, protocol: str) -> list[Job]:
        """The first runs that a row starts from; the model of the last one is kept if it is trained on all images."""
        if row.data == "plumage":
            config = self.config(row.first)
            return [Job(runs.job_name(config, f"{self.suffix}-first"), config, kept=True)]
        *others, last = replace(self, seeds=self.seeds[:1]).jobs(row.first, protocol)
        return [*others, replace(last, kept=not last.config.data.val_fraction)]

    def pretrained(self, row: Row, protocol: str) -> Path | None:
        """The weights file of these runs; None before the last run is planned."""
        last = self.pretraining(row, protocol)[-1]
        return self.out / "runs" / last.name / "model" / WEIGHTS if last.kept else None

    def _imagenet_weights(self, row: Row, protocol: str) -> Path | None:
        """The same, if the model exists."""
        file = self.pretrained(row, protocol) if row.pretrain else None
        if file is None:
            return None
        exists = file.is_file() if self.simulated is None else file.parent.parent.name in self.simulated
        return file if exists else None

    def _start(self, row: Row, weights: Path | None = None) -> tuple[Train, str]:
        """The training options of a row at the rate of the paper, and the suffix of the names of its runs."""
        config, suffix = self.config(row), self.suffix + (f"-{row.tag}" if row.tag else "")
        if row.pretrain is None:
            return config, suffix
        stride_on = self.config(row.first).model.stride_on
        model = replace(config.model, weights=str(weights or WEIGHTS), pretrained=False, stride_on=stride_on)
        return replace(config, model=model), f"{suffix}-gcp"

    def jobs(self, row: Row, protocol: str) -> list[Job]:
        """The runs of a row that can be planned so far: those at the chosen rate follow from the search."""
        weights = self._imagenet_weights(row, protocol)
        jobs = self._own_jobs(row, protocol, weights)
        if row.pretrain is None or weights is not None or all(self.record(job) is not None for job in jobs):
            return jobs
        return self.pretraining(row, protocol) if self._may_pretrain(row) else []

    def _own_jobs(self, row: Row, protocol: str, weights: Path | None) -> list[Job]:
        config, suffix = self._start(row, weights)
        if protocol == "paper":
            return [] if row.search_only else self.paper_jobs(row, self.seeds, weights)
        tried, rate = self.search(row, weights)
        search = [*tried, *rate_jobs(config, row.more_rates, suffix)]
        if row.every_seed:
            search += self.seeded(tried)
        if row.search_only:
            return [replace(job, analyses=row.analyses) for job in search]
        if rate is None:
            return search
        seeds = self.seeds[:1] if row.curve and config.eval_every > 1 else self.seeds
        return [*search, *self.finals(row, rate, seeds, weights)]

    def paper_jobs(self, row: Row, seeds: Sequence[int], weights: Path | None = None) -> list[Job]:
        """Runs under the protocol of the paper."""
        config, suffix = self._start(row, weights)
        config = replace(config, select="best-test", eval_every=1)
        return final_jobs(config, config.optimiser.classifier_lr_scale, seeds, row.analyses, suffix)

    def search(self, row: Row, weights: Path | None = None) -> tuple[list[Job], float | None]:
        """The runs for the choice of a rate that can be planned so far, and the rate, if it is chosen or the only one."""
        config, suffix = self._start(row, weights)
        if row.rate_options is not None:
            config = self.config(row, row.rate_options)
        if row.rate_size is not None and self.options.scale != "smoke":
            config = at_size(config, row.rate_size)
        if not row.search_only:
            config = replace(config, epochs=self.options.search_epochs or config.epochs)
        grid = self.grid(row)
        if len(grid) == 1 and not row.search_only:
            return [], grid[0]
        jobs = rate_jobs(config, grid, suffix)
        if self.options.scale != "smoke" and len(grid) > 1:
            while (rate := runs.further_rate(jobs, self._complete(jobs), grid)) is not None:
                jobs += rate_jobs(config, [rate], suffix)
        return jobs, best_rate(jobs, self._complete(jobs))

    def seeded(self, jobs: Sequence[Job]) -> list[Job]:
        """The same runs with the other seeds."""
        pairs = [(job, replace(job.config, seed=seed)) for seed in self.seeds for job in jobs if seed != job.config.seed]
        return [Job(job.name.removesuffix(f"s{job.config.seed}") + f"s{config.seed}", config) for job, config in pairs]

    def finals(self, row: Row, rate: float, seeds: Sequence[int], weights: Path | None = None) -> list[Job]:
        """Runs on all images at a rate."""
        config, suffix = self._start(row, weights)
        if row.curve and config.eval_every > 1:
            config, suffix = replace(config, eval_every=1), f"{suffix}-curve"
        return final_jobs(config, rate, seeds, row.analyses, suffix)

    def for_report(self) -> "Setup":
        """A copy with the seeds of the options, or all seeds with a record."""
        seeds = self.options.seeds or {*self.seeds, *(record["config"]["seed"] for record in run_records(self.folders))}
        return replace(self, seeds=tuple(sorted(seeds)))

    def results(self, row: Row, protocol: str, every_rate: bool = False) -> list[tuple[float, bool | None, list[Record]]]:
        """Rates, whether each was chosen, and records of the seeds: the chosen rate, then others with ``every_rate``.

        A rate that is the only one is not chosen (None).
        """
        if row.head is None:
            return []
        if protocol == "paper":
            jobs = self.paper_jobs(row, self.seeds)
            records = list(self._complete(jobs).values())
            return [(jobs[0].rate, None, records)] if records else []
        tried, chosen = self.search(row)
        rates = [job.rate for job in tried]
        if chosen is not None:
            rates = [chosen, *(rate for rate in rates if every_rate and rate != chosen)]
        by_rate = {rate: list(self._complete(self.finals(row, rate, self.seeds)).values()) for rate in rates}
        flags = {rate: rate == chosen if tried else None for rate in rates}
        return [(rate, flags[rate], records) for rate, records in by_rate.items() if records]

    def scores(self, row: Row, protocol: str) -> list[Score]:
        """Accuracies of a row; of several rates only while none is chosen."""
        scores = []
        for rate, chosen, records in self.results(row, protocol):
            values = tuple(record["scores"][row.metric] for record in records if record["scores"])
            scores.append(Score(rate, chosen, values, len(records) - len(values), records[0]))
        return scores

    def analysis(self, row: Row, name: str) -> tuple[Record | None, dict[str, Any]]:
        """The record of a row with an analysis, preferably at the chosen rate, and its result; None and {} without one."""
        for protocol in ("fair", "paper"):
            for _, _, records in self.results(row, protocol, every_rate=True):
                for record in records:
                    if name in record["analyses"]:
                        return record, record["analyses"][name]
        return None, {}


@dataclass(frozen=True)
class Table:
    """A table for reading."""

    name: str  # what it is about, such as a data set
    caption: str
    frame: pd.DataFrame  # texts; the first column names the rows
    paper: tuple[str, ...] = ("paper",)  # columns with numbers of the paper

    @property
    def is_empty(self) -> bool:
        """Whether it has only numbers of the paper."""
        return bool((self.frame.drop(columns=[*self.paper, self.frame.columns[0]]) == NOT_RUN).all(axis=None))


@dataclass(frozen=True)
class Report:
    """The result of a study."""

    rows: list[dict[str, Any]]  # of the CSV file, all with the same columns
    tables: list[Table]
    notes: list[str] = field(default_factory=list)
    draw: Callable[[Path], None] | None = None  # draws the figure; None if there is nothing to draw

    @property
    def is_empty(self) -> bool:
        return all(table.is_empty for table in self.tables)


MakeRows = Callable[[Setup], list[Row]]
MakeReport = Callable[[Setup, Sequence[Row]], Report]


@dataclass(frozen=True)
class Study:
    """A table or figure of the paper: texts and the functions that make it."""

    name: str
    title: str
    where: str
    all_rows: MakeRows
    make_report: MakeReport
    notes: Sequence[str] = ()
    seeds: int = 1  # their number at scale small
    measure: Callable[[Setup], None] | None = None  # measures something without training

    def rows(self, setup: Setup) -> list[Row]:
        """The rows with the data sets, backbones and heads of the options."""
        options, rows = setup.options, self.all_rows(setup)
        for attribute in ("data", "backbone", "head"):
            names = getattr(options, "datasets" if attribute == "data" else f"{attribute}s")
            rows = [row for row in rows if names is None or getattr(row, attribute) in names]
        rows = [row for row in rows if options.datasets is not None or has_recipe(options, row.data)]
        return [row for row in rows if row.pretrain is None or has_recipe(options, row.first.data)]

    def datasets(self, setup: Setup) -> tuple[str, ...]:
        """Data sets of the rows; also ImageNet if networks are trained on it first, unless data sets are named."""
        rows = self.rows(setup)
        pretrained = any(row.pretrain and row.data != "plumage" for row in rows)
        first = ["imagenet"] if setup.options.datasets is None and pretrained else []
        return tuple(dict.fromkeys([*(row.data for row in rows), *first]))

    def report(self, setup: Setup) -> Report:
        report = self.make_report(setup.for_report(), self.rows(setup))
        smoke = [SMOKE_NOTE] if setup.options.scale == "smoke" else []
        return replace(report, notes=[*self.notes, *report.notes, *smoke])

    def choose_seeds(self, options: StudyOptions) -> tuple[int, ...]:
        count = {"smoke": 1, "quick": 1, "paper": 3}.get(options.scale, self.seeds)
        return tuple(range(count) if options.seeds is None else options.seeds)

    def plan(self, setup: Setup) -> list[Job]:
        """The runs that can be planned so far, each once."""
        planned: dict[str, Job] = {}
        for row in filter(setup.trains, self.rows(setup)):
            for protocol in setup.protocols:
                for job in setup.jobs(row, protocol):
                    same = planned.get(job.name, job)
                    analyses = tuple(dict.fromkeys((*same.analyses, *job.analyses)))
                    planned[job.name] = replace(job, analyses=analyses, kept=job.kept or same.kept)
        return list(planned.values())


def check_names(options: StudyOptions, rows: Sequence[Row]) -> None:
    """Refuse data sets, backbones and heads that a study does not have."""
    choices = {
        "datasets": dict.fromkeys(row.data for row in rows),
        "backbones": dict.fromkeys(row.backbone for row in rows),
        "heads": dict.fromkeys(row.head for row in rows if row.head),
    }
    for argument, names in choices.items():
        for name in getattr(options, argument) or ():
            if not names:
                raise ArgumentError(argument, "cannot be chosen for this study", remedy="leave it out")
            if name not in names:
                raise UnknownName(f"{argument.removesuffix('s')} of this study", name, names)
    backbones, heads = options.backbones or choices["backbones"], options.heads
    if heads and not any(row.backbone in backbones and row.head in heads for row in rows):
        raise ArgumentError("heads", "must be heads that the study has for {backbones}", heads)


def environment_columns(record: Record | None) -> dict[str, Any]:
    """Columns with the environment of a run; empty without a record."""
    environment = {} if record is None else record["environment"]
    return {name: environment.get(name, "") for name in ("eigengrain", "torch", "device_name", "date")}
