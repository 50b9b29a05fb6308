"""What a study is: rows that are trained in one way or another, and what is made of their records."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from eigengrain.data.device_cache import Decoded
from eigengrain.errors import UnknownName
from eigengrain.pages import TableData
from eigengrain.training.config import Train
from studies.comparison import REACH, best_rate, final_jobs, further_rate, rate_jobs, with_head
from studies.config import StudyRun
from studies.jobs import Job, Record, read_record
from studies.published import TITLES
from studies.settings import NETWORKS, SMOKE_CHANNELS, base, network_name, with_reduction

#: options of a record that a report, which may be made on another machine, need not share
_ELSEWHERE = ("compile", "model.backbone", "model.weights", "model.pretrained", "model.stride_on")
#: in the folder of a model
WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class Row:
    """A line of a table on one data set: what is trained, and what the paper has for it.

    Args:
        data: of the catalogue.
        backbone: one of :data:`studies.settings.NETWORKS`.
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
        machines: where the runs were made whose records were read, in words.
    """

    options: StudyRun
    seeds: tuple[int, ...] = (0,)
    available: tuple[str, ...] | None = None
    deadline: float | None = None
    decoded: Decoded = field(default_factory=dict, repr=False, compare=False)
    bases: dict[tuple[str, str], Train] = field(default_factory=dict, repr=False, compare=False)
    machines: dict[str, None] = field(default_factory=dict, repr=False, compare=False)

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
        found = read_record(self.places, job, _elsewhere(job) if self.available is None else ())
        if found is not None:
            self.note_machine(found)
        return found

    def note_machine(self, record: Record) -> None:
        """Where a run of the studies was made."""
        where = where_run(record)
        self.machines["{device_name} with torch {torch} and eigengrain {eigengrain}".format(**where)] = None

    # --- from a row to runs -------------------------------------------------------------------------------------

    def runs(self, row: Row) -> bool:
        """Whether a row is trained if it is not yet."""
        options = self.options
        if row.head is None or not self._opens(row.data):
            return False
        if row.backbone not in (options.backbones or [row.backbone]) or row.head not in (options.heads or [row.head]):
            return False
        if row.pretrain:
            return self._may_pretrain(row) or any(self._first_weights(row, protocol) for protocol in self.protocols)
        return self._asked_for(row)

    def _opens(self, data: str) -> bool:
        return self.options.scale == "smoke" or data in (self.available or ())

    def _asked_for(self, row: Row) -> bool:
        """At scale small few rows are trained, unless backbones or heads are named."""
        options = self.options
        return row.core or options.scale != "small" or options.backbones is not None or options.heads is not None

    def _may_pretrain(self, row: Row) -> bool:
        return self._opens("imagenet") and self._asked_for(row)

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
        """Runs on ImageNet that a row starts from; when the last of them is one on all images, it is the one."""
        first = Row("imagenet", row.backbone, row.method, row.pretrain)
        *others, last = replace(self, seeds=self.seeds[:1]).jobs(first, protocol)
        return [*others, replace(last, kept=not last.config.data.val_fraction)]

    def pretrained(self, row: Row, protocol: str) -> Path | None:
        """The file that they leave; None while the run that leaves it cannot be named."""
        last = self.pretraining(row, protocol)[-1]
        return self.out / "runs" / last.name / "model" / WEIGHTS if last.kept else None

    def _first_weights(self, row: Row, protocol: str) -> Path | None:
        file = self.pretrained(row, protocol) if row.pretrain else None
        return file if file is not None and file.is_file() else None

    def _start(self, row: Row, weights: Path | None = None) -> tuple[Train, str]:
        """The run of a row at the paper's rate, and what its name has after that of the head.

        In which folder the weights of another run are is no matter to a record.
        """
        config = self.config(row)
        if row.pretrain is None:
            return config, ""
        first = self.config(Row("imagenet", row.backbone, row.method, row.pretrain)).model
        model = replace(config.model, weights=str(weights or WEIGHTS), pretrained=False, stride_on=first.stride_on)
        return replace(config, model=model), "-gcp"

    def jobs(self, row: Row, protocol: str) -> list[Job]:
        """The runs of a row that can be named by now: of the fair protocol the last ones follow from the first."""
        weights = self._first_weights(row, protocol)
        jobs = self._own_jobs(row, protocol, *self._start(row, weights))
        if row.pretrain is None or weights is not None or all(self.record(job) is not None for job in jobs):
            return jobs
        return self.pretraining(row, protocol) if self._may_pretrain(row) else []

    def _own_jobs(self, row: Row, protocol: str, config: Train, suffix: str) -> list[Job]:
        if protocol == "paper":
            if row.search:  # one rate for all: there is nothing to choose
                return []
            config = replace(config, select="best-test", eval_every=1)
            return final_jobs(config, config.optimiser.classifier_lr_scale, self.seeds, row.analyses, suffix)
        tried, rate = self._search(row, config, suffix)
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

    def _search(self, row: Row, config: Train, suffix: str) -> tuple[list[Job], float | None]:
        """Runs by which a rate is chosen, and the rate, if it is by now."""
        tried = self.tried(row, suffix, config)
        return tried, best_rate(tried, self._known(tried))

    def chosen_rate(self, row: Row) -> float | None:
        """Of the fair protocol, if it is chosen by now."""
        return self._search(row, *self._start(row))[1]

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
        config, suffix = self._start(row)
        seeds = sorted({*self.seeds, *self._recorded_seeds()})
        if protocol == "paper":
            config = replace(config, select="best-test", eval_every=1)
            rate = config.optimiser.classifier_lr_scale
            records = list(self._known(final_jobs(config, rate, seeds, (), suffix)).values())
            return [(rate, None, records)] if records else []
        tried, chosen = self._search(row, config, suffix)
        found: list[tuple[float, bool | None, list[Record]]] = []
        rates = [job.config.optimiser.classifier_lr_scale for job in tried]
        if chosen is not None:
            rates = [chosen, *(rate for rate in rates if every_rate and rate != chosen)]
        for rate in rates:
            records = list(self._known(self.finals(row, config, rate, seeds, suffix)).values())
            found += [(rate, rate == chosen, records)] if records else []
        return found

    def _recorded_seeds(self) -> set[int]:
        """Of all runs that have a record."""
        names = (file.stem for place in self.places for file in place.glob("*-s*.json"))
        return {int(name.rpartition("-s")[2]) for name in names if name.rpartition("-s")[2].isdecimal()}

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

    def datasets(self, setup: Setup) -> tuple[str, ...]:
        """Those of its rows; ImageNet too where networks are trained on it first, unless data sets are named."""
        rows = self.rows(setup)
        first = ["imagenet"] if setup.options.datasets is None and any(row.pretrain for row in rows) else []
        return tuple(dict.fromkeys([*(row.data for row in rows), *first]))

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
                    same = planned.get(job.name, job)
                    analyses = tuple(dict.fromkeys((*same.analyses, *job.analyses)))
                    planned[job.name] = replace(job, analyses=analyses, kept=job.kept or same.kept)
        return list(planned.values())


def _elsewhere(job: Job) -> tuple[str, ...]:
    """What a report need not share with a job; the rate of some networks follows from their weights."""
    network = NETWORKS.get(network_name(job.config.model.backbone))
    return (*_ELSEWHERE, "optimiser.lr") if network is not None and network.plain else _ELSEWHERE


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
            if not known:
                raise ValueError(f"this study has no {kind}s to choose from: leave --{kind.replace(' ', '')}s out")
            if name not in known:
                raise UnknownName(f"{kind} of this study", name, dict.fromkeys(known))
    backbones, heads = options.backbones or (), options.heads or ()
    if backbones and heads and not any(row.backbone in backbones and row.head in heads for row in rows):
        raise ValueError(f"this study has none of the heads {', '.join(heads)} with a backbone of {', '.join(backbones)}")


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
