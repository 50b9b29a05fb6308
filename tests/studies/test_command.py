"""``python -m studies``: every table and figure at scale smoke, from nothing to one page, and continued after a stop."""

import csv
import io
import json
import re
import shutil
import sys
from contextlib import contextmanager, redirect_stdout
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from benchmarks.__main__ import main as benchmark
from matplotlib.figure import Figure
from rich.console import Console
from studies.__main__ import main
from studies.all_studies import STUDIES
from studies.report import terminal_table
from studies.settings import StudyOptions
from studies.study import Setup, Table, check_names

from eigengrain.errors import FileError, Interrupted, UnknownName
from studies import __main__ as program
from studies import charts, runs, speed

SMOKE = ["--scale", "smoke", "--device", "cpu"]
#: records of photographs, of one data set of three
BIRDS = Path(__file__).parents[2] / "benchmarks" / "birds" / "records"


pytestmark = pytest.mark.usefixtures("surroundings")


#: a head that nearly every study has, so that few runs exercise all of them, and one of the study of transformers
ONE_HEAD = ["--heads", "mpncov"]
TWO_HEADS = ["--heads", "mpncov,transfg"]


@pytest.fixture(scope="module")
def everything(surroundings, tmp_path_factory):
    """The folder of a campaign with one head, and the names of the runs that were trained in it."""
    out, trained, real = tmp_path_factory.mktemp("study"), [], runs.train

    def train(config, sources):
        trained.append(config.out.rsplit("/", 1)[-1])
        return real(config, sources)

    def in_this_process(command, **options):
        assert command[:3] == [sys.executable, "-m", "benchmarks"]
        with redirect_stdout(io.StringIO()) as printed:
            code = benchmark(command[3:])
        return SimpleNamespace(returncode=code, stdout=printed.getvalue(), stderr="")

    save = Figure.savefig
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "train", train)
        patch.setattr(speed, "subprocess", SimpleNamespace(run=in_this_process))
        patch.setattr(Figure, "savefig", lambda figure, path, **options: save(figure, path, dpi=20))  # in less time
        assert main(["all", *SMOKE, *TWO_HEADS, "--out", str(out)]) == 0
    return out, trained


@contextmanager
def pictures_not_drawn():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(charts, "_finish", lambda figure, path, across=4: path.write_bytes(b"\x89PNG"))
        yield


@pytest.fixture
def no_pictures():
    with pictures_not_drawn():
        yield


@pytest.fixture(scope="module")
def whole_tables(everything, tmp_path_factory):
    """The folder of a report with all rows."""
    out = tmp_path_factory.mktemp("report")
    with pictures_not_drawn():
        assert main(["all", "--only_report", *SMOKE, "--out", str(out), "--records", str(everything[0] / "records")]) == 0
    return out


def rows_of(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_every_study_writes_a_table_a_text_and_a_picture(everything):
    out, _ = everything
    for study in STUDIES:
        assert rows_of(out / f"{study.name}.csv"), study.name
        assert (out / f"{study.name}.md").read_text(encoding="utf-8").startswith(f"# {study.where}: {study.title}\n")
        assert (out / f"{study.name}.png").read_bytes().startswith(b"\x89PNG"), study.name


def test_studies_share_their_runs(everything):
    out, trained = everything
    assert len(set(trained)) == len(trained)
    records = {file.stem for file in (out / "records").glob("*.json")}
    assert records == {*trained, "speed-smoke-cpu"}
    # the run of Table 3 carries what Tables 1 and 2 and Figure 6 measured on it
    [name] = [n for n in trained if n.startswith("plumage-plumage_net-mpncov-x") and n.endswith("-all-s0")]
    record = json.loads((out / "records" / f"{name}.json").read_text())
    assert set(record["analyses"]) == {"spectrum", "subset-accuracy", "similarity"}


def test_the_table_contains_the_values_of_the_records(everything):
    out, _ = everything
    for row in rows_of(out / "gcp-methods.csv"):
        assert row["scale"] == "smoke"
        assert (row["fair_protocol_n"], row["fair_protocol_rate_chosen"]) == ("1", "1")
        assert row["paper_protocol_mean"] == "not run"
        stem, end = f"plumage-plumage_net-{row['head']}-x{{}}-e1", "-s0.json"
        name = stem.format(f"{float(row['fair_protocol_rate']):g}") + f"-all{end}"
        record = json.loads((out / "records" / name).read_text())
        assert float(row["fair_protocol_mean"]) == pytest.approx(record["scores"]["test_top1"], abs=1e-4)
        assert row["torch"] == torch.__version__
        tried = {rate: json.loads((out / "records" / f"{stem.format(rate)}-val{end}").read_text()) for rate in (3, 10)}
        best = max(tried, key=lambda rate: (tried[rate]["scores"]["val_top1"], -rate))
        assert float(row["fair_protocol_rate"]) == best


PRINTED = {
    "gcp-methods": [("Birds", "VGG-16", "MoNet", "86.4"), ("Cars", "ResNet-152", "MPN-COV + SEB", "94.1")],
    "sota": [("Dogs", "ViT", "TransFG", "92.3"), ("iNats", "EfficientNet-b5", "MPN-COV + SEB", "72.3")],
    "architectures": [("Aircrafts", "DenseNet-169", "MPN-COV", "90.8")],
    "paths": [("Birds", "ResNet-50", "‖QSᵀ‖·Q", "85.6")],
    "factors": [("Cars", "ResNet-50", "constant 100", "89.3"), ("Birds", "ResNet-50", "ReLU(MLP(Q)) + 1", "80.5")],
    "imagenet": [("ImageNet", "AlexNet", "MPN-COV + SEB", "56.68")],
    "gcp-pretrained": [("Birds", "ResNet-50", "MPN-COV, after ImageNet with it", "87.2")],
}


@pytest.mark.parametrize("name", PRINTED)
def test_the_numbers_of_the_paper_stand_beside_ours(whole_tables, name):
    out = whole_tables
    rows = rows_of(out / f"{name}.csv")
    for data, backbone, method, number in PRINTED[name]:
        outcome = [r["paper"] for r in rows if (r["data"], r["backbone"], r["method"]) == (data, backbone, method)]
        assert number in outcome
        assert number in (out / f"{name}.md").read_text(encoding="utf-8")


def test_tables_of_eigenvalues_have_the_papers_numbers_too(everything):
    out, _ = everything
    subsets = {(r["data"], r["method"], r["subset"]): r for r in rows_of(out / "subset-accuracy.csv")}
    assert subsets["Birds", "MPN-COV", "top:6"]["paper"] == "65.3"  # of 8 eigenvalues what top:206 is of 256
    assert subsets["Cars", "MPN-COV", "top:1+last:2"]["paper"] == "83.4"
    similar = [r for r in rows_of(out / "similarity.csv") if (r["data"], r["method"]) == ("Aircrafts", "MPN-COV")]
    assert {r["paper"] for r in similar if (r["rule"], r["eigenvalues"]) == ("vanilla", "large")} == {"0.23", "0.033"}
    assert {r["cut"] for r in similar} == {"exact", "projector"}
    assert all(-1 <= float(r["ours"]) <= 1 for r in similar if r["measure"] == "corr" and r["ours"] != "undefined")
    [first, second, third] = rows_of(out / "speed.csv")
    assert (first["paper_seconds"], second["paper_mib"], third["paper_seconds"]) == ("0.28", "4298", "0.31")
    assert all(float(r["ours_seconds"]) > 0 for r in (first, second, third))


def test_transformers_are_run_and_what_is_no_head_is_not(whole_tables):
    rows = {(row["data"], row["method"]): row for row in rows_of(whole_tables / "sota.csv") if row["backbone"] == "ViT"}
    assert len(rows) == 9
    assert {method: row["fair_protocol_n"] for (data, method), row in rows.items() if data == "Dogs"} == {
        "ViT": "0",
        "TransFG": "1",
        "AFTrans": "0",
    }
    drawn = [row for row in rows_of(whole_tables / "normalisation.csv") if row["method"] == "e^-P"]
    assert [row["fair_protocol_mean"] for row in drawn] == ["not run"] * 3


def test_transfg_learns_from_drawn_birds_and_photographs_at_two_sizes(everything):
    out, trained = everything
    rows = {(row["data"], row["method"]): row for row in rows_of(out / "transformers.csv")}
    assert set(rows) == {
        ("drawn birds", "TransFG"),
        *(("Birds", f"TransFG, {size} px") for size in (224, 448)),
    }
    assert all(row["fair_protocol_n"] == "1" for row in rows.values())
    # one run at the only rate of the drawn birds, and on photographs two of the search and a last one
    assert sum("-transfg-calibrated-64px-" in name for name in trained) == 4
    record = json.loads((out / "records" / "plumage-test_vit-transfg-calibrated-64px-x1-e1-all-s0.json").read_text())
    mean = float(rows["drawn birds", "TransFG"]["fair_protocol_mean"])
    assert mean == pytest.approx(record["scores"]["test_top1"], abs=1e-4)


class Tags(HTMLParser):
    """The tags of a page with their attributes."""

    def __init__(self, text):
        super().__init__()
        self.outcome = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.outcome.append((tag, dict(attrs)))


def test_the_page_is_one_file_with_every_study_in_it(everything):
    text = (everything[0] / "report.html").read_text(encoding="utf-8")
    tags = Tags(text).outcome
    assert not {"script", "link", "iframe"} & {tag for tag, _ in tags}
    assert sum(tag == "img" for tag, _ in tags) == len(STUDIES)
    assert re.findall(r"<h2>(.*?):", text) == [study.where for study in STUDIES]
    assert "http" not in text


def test_a_second_start_trains_nothing(everything, trained_runs, no_pictures, capsys):
    out, _ = everything
    before = (out / "truncation.csv").read_bytes()
    assert main(["truncation", *SMOKE, *ONE_HEAD, "--out", str(out), "--quiet"]) == 0
    assert trained_runs == []
    assert (out / "truncation.csv").read_bytes() == before
    files = [str(out / f"truncation.{ending}") for ending in ("csv", "md", "png")]
    assert capsys.readouterr().out.splitlines() == files


def test_a_study_that_was_stopped_goes_on_without_repeating(trained_runs, tmp_path, monkeypatch, capsys):
    real = runs.train

    def stopped(config, sources):
        if len(trained_runs) == 3:
            raise KeyboardInterrupt
        return real(config, sources)

    monkeypatch.setattr(runs, "train", stopped)
    command = ["paths", *SMOKE, "--heads", "mpncov+seb", "--out", str(tmp_path)]
    assert main(command) == 130
    first = list(trained_runs)
    assert len(first) == 3
    monkeypatch.setattr(runs, "train", real)
    assert main(command) == 0
    assert trained_runs[:3] == first
    assert len(trained_runs) == len(set(trained_runs)) == 6  # two paths: two rates each, then the better one
    assert all(row["fair_protocol_n"] == "1" for row in rows_of(tmp_path / "paths.csv"))


def test_rows_beyond_the_time_budget_are_not_run(trained_runs, tmp_path, capsys):
    assert main(["paths", *SMOKE, "--out", str(tmp_path), "--seconds", "0.001", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [study["name"] for study in document["studies"]] == ["paths"]
    assert document["files"] == [str(tmp_path / "paths.csv"), str(tmp_path / "paths.md")]
    assert len(trained_runs) <= 1
    assert all(row["fair_protocol_mean"] == "not run" for row in rows_of(tmp_path / "paths.csv"))
    assert not (tmp_path / "paths.png").exists()


def test_records_from_elsewhere_are_shown_and_not_made_again(everything, trained_runs, no_pictures, tmp_path):
    records = tmp_path / "theirs"
    shutil.copytree(everything[0] / "records", records)
    out = tmp_path / "mine"
    options = [*SMOKE, *ONE_HEAD, "--out", str(out), "--records", str(records)]
    assert main(["factors", "--only_report", *options]) == 0
    assert rows_of(out / "factors.csv") == rows_of(everything[0] / "factors.csv")
    assert main(["factors", *options]) == 0
    assert trained_runs == []
    assert main(["report", *options]) == 0
    assert "no factor" in (out / "report.html").read_text(encoding="utf-8")


def test_a_page_refers_to_files_that_exist(no_pictures, tmp_path):
    assert main(["report", "--records", str(BIRDS), "--out", str(tmp_path)]) == 0
    named = set(re.findall(r"[\w-]+\.md", (tmp_path / "report.html").read_text(encoding="utf-8")))
    assert {"spectrum.md", "similarity.md"} <= named
    assert all((tmp_path / name).is_file() for name in named)


@pytest.mark.parametrize(
    ("table", "records", "options"),
    [
        ("birds/studies/gcp-methods.csv", "birds/records", "--datasets cub --protocol both"),
        ("birds/studies/calibration.csv", "quick", "--datasets cub --scale quick --seeds 0"),
        (
            "birds/studies/transformers.csv",
            "birds/transformers",
            "--datasets cub --scale quick --seeds 0,1 --search_epochs 3",
        ),
        (
            "branch.csv",
            "quick",
            "--datasets cub,cars --scale quick --seeds 0,1,2 --heads gap,isqrt,mpncov,mpncov+seb,hcov,hcov+seb",
        ),
    ],
)
def test_committed_tables_are_those_of_the_records(no_pictures, tmp_path, table, records, options):
    benchmarks, name = BIRDS.parents[1], Path(table).name
    command = [Path(table).stem, "--only_report", *options.split(), "--records", str(benchmarks / records)]
    assert main([*command, "--out", str(tmp_path)]) == 0
    assert (tmp_path / name).read_bytes() == (benchmarks / table).read_bytes()


def test_a_page_names_the_machines_of_its_runs_and_no_others(everything, no_pictures, tmp_path):
    records = tmp_path / "records"
    shutil.copytree(everything[0] / "records", records)  # of drawn birds, on this machine
    (records / "notes.json").write_text("[1, 2]")
    (records / "half.json").write_text('{"name": "half", "epo')
    shutil.copy(BIRDS / "resnet50-gap-x3-e15-val-s0.json", records)

    def footer(*options):
        assert main(["report", "--out", str(tmp_path), *options]) == 0
        return re.findall("<footer>(.*)</footer>", (tmp_path / "report.html").read_text(encoding="utf-8"))[0]

    assert re.fullmatch(r"runs on NVIDIA H200 with torch [^;]*", footer())
    assert re.fullmatch(rf"runs on [^;]* with torch {re.escape(torch.__version__)} and [^;]*", footer(*SMOKE))


def test_a_page_without_records_lists_what_could_be_run(tmp_path):
    assert main(["report", "--out", str(tmp_path)]) == 0
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert re.findall(r"<h2>(.*?)</h2>", text) == ["Not run"]
    assert all(f"python -m studies {study.name} --data FOLDER" in text for study in STUDIES)


def test_the_papers_protocol_has_a_column_of_its_own(everything, trained_runs, tmp_path):
    out = tmp_path / "both"
    options = ["--out", str(out), "--records", str(everything[0] / "records"), "--protocol", "both"]
    assert main(["paths", *SMOKE, *ONE_HEAD, *options]) == 0
    assert all("-best-" in name for name in trained_runs)
    assert len(trained_runs) == 1
    for row in rows_of(out / "paths.csv"):
        assert (row["fair_protocol_n"], row["paper_protocol_n"]) == ("1", "1")
        assert row["paper_protocol_rate"] == "10.0"
        assert row["paper_protocol_rate_chosen"] == ""


def test_the_list_shows_the_cost_of_each_study(capsys, tmp_path):
    assert main(["list", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    for study in STUDIES:
        assert study.name in printed
        assert study.where in printed
    lines = {line.split()[0]: line for line in printed.splitlines() if line.strip()}
    assert re.search(r"\b30\s+43 min", lines["gcp-methods"])  # 5 heads: 3 rates and 3 seeds of 15 epochs each
    assert printed.splitlines()[0].strip() == "studies, scale small, fair protocol"
    assert main(["list", "--out", str(tmp_path), "--protocol", "both"]) == 0
    assert capsys.readouterr().out.splitlines()[0].strip() == "studies, scale small, both protocols"
    assert main(["list", "--out", str(tmp_path), "--json"]) == 0
    listed = {each["name"]: each for each in json.loads(capsys.readouterr().out)}
    assert listed["gcp-methods"]["runs"] == 30
    assert listed["rates"]["runs"] == 11 * 3 + 1  # no network beyond the search, and one rate beside the grid
    assert round(listed["rates"]["training_seconds"]) == round(34 * round(0.9 * 5994) * 15 / 1000)


@pytest.mark.parametrize(
    "words",
    [
        ["gcp-method"],
        ["gcp-methods"],
        ["paths", "--scale", "smal"],
        ["paths", "--protocol", "fare"],
        ["speed", *SMOKE, "--datasets", "[cub]"],
        ["paths", "--seeds", "[0,0]"],
        ["paths", "--data", "no/such"],
        ["report", "--records", "no/such"],
        ["architectures", "--data", "no/such", "--weights", "no/such"],
        ["gcp-methods", *SMOKE, "--backbones", "vgg16", "--heads", "gap"],
        ["list", "--heads", "mpn"],
    ],
)
def test_a_mistake_gets_one_line_and_code_2(words, capsys, tmp_path):
    assert main([*words, "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(("argument", "name"), [("heads", "bcnn"), ("datasets", "dogs"), ("backbones", "vgg")])
def test_names_that_a_study_does_not_have_are_refused(argument, name):
    options = StudyOptions(**{argument: [name]})
    study = next(study for study in STUDIES if study.name == "paths")
    with pytest.raises(UnknownName) as error:
        check_names(options, study.all_rows(Setup(options)))
    assert error.value.name == name


def test_a_signal_ends_a_study_with_its_code(monkeypatch, tmp_path):
    def interrupted(study, setup):
        raise Interrupted(15, "in epoch 1 after batch 2 of 3")

    monkeypatch.setattr(program, "run_study", interrupted)
    assert program.run(StudyOptions(name="paths", scale="smoke", device="cpu", out=str(tmp_path))) == 143


@pytest.mark.parametrize("text", ['{"rows": [', '{"rows": []}', "[]"])
def test_a_part_of_a_record_of_speed_is_refused(text, tmp_path):
    (tmp_path / "records").mkdir()
    path = tmp_path / "records" / "speed-small-cpu.json"
    path.write_text(text)
    with pytest.raises(FileError) as error:
        speed.speed_report(Setup(StudyOptions(name="speed", out=str(tmp_path))), [])
    assert error.value.path == path


@pytest.mark.parametrize("lost", ["isqrt", "mpncov"])
def test_a_step_without_the_memory_for_it_has_no_number(lost, tmp_path, monkeypatch):
    """The others have theirs, and times relative to iSQRT-COV are drawn if that has one."""

    def steps(**options):
        empty = dict.fromkeys(("step_seconds", "head_seconds", "held_mib", "peak_mib"))
        times = {"step_seconds": 0.2, "head_seconds": 0.1, "held_mib": None, "peak_mib": 3.0}
        size = {"backbone": "plumage_net", "batch": 2, "img_size": 32}
        rows = [{"head": head, **size, **(empty if head == lost else times)} for head in speed.METHODS]
        return {"rows": rows, "environment": {"device_name": "a device", "torch": "2", "eigengrain": "0"}}

    monkeypatch.setattr(speed, "time_steps", steps)
    setup = Setup(StudyOptions(name="speed", scale="smoke", device="cpu", out=str(tmp_path)), available=())
    speed.measure(setup)
    report = speed.speed_report(setup, [])
    lines = {row["method"]: row for row in report.rows}
    assert lines[speed.METHODS[lost]]["ours_seconds"] == "–"
    assert all(line["ours_seconds"] == 0.2 for method, line in lines.items() if method != speed.METHODS[lost])
    assert (report.draw is None) == (lost == "isqrt")
    if report.draw is not None:
        report.draw(tmp_path / "speed.png")


def test_brackets_in_the_name_of_a_device_are_shown():
    console = Console(width=60)
    with console.capture() as output:
        console.print(terminal_table(Table("", "[gfx90a]", pd.DataFrame({"": ["a"], "ours [s]": ["1"]}))))
    assert "[gfx90a]" in output.get()
    assert "ours [s]" in output.get()
