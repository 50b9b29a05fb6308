"""``eigengrain study``: every table and figure at scale smoke, from nothing to one page, and on from where it stopped."""

import csv
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from rich.console import Console
from studies.accuracy import LENGTHS
from studies.catalogue import STUDIES
from studies.config import StudyRun
from studies.report import on_terminal
from studies.study import Setup

from benchmarks import step
from eigengrain.cli import main as cli
from eigengrain.pages import TableData
from studies import campaign, conclusions, jobs, speed

SMOKE = ["--scale", "smoke", "--device", "cpu"]
#: records of photographs, of one data set of three
BIRDS = Path(__file__).parents[2] / "benchmarks" / "birds" / "records"


pytestmark = pytest.mark.usefixtures("surroundings")


@pytest.fixture(scope="module")
def everything(surroundings, tmp_path_factory):
    """The folder of a whole campaign, and how often each run was trained in it."""
    out, trained, real = tmp_path_factory.mktemp("study"), [], jobs.train

    def train(config, sources):
        trained.append(config.out.rsplit("/", 1)[-1])
        return real(config, sources)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs, "train", train)
        assert cli.main(["study", "all", *SMOKE, "--out", str(out)]) == 0
    return out, trained


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


def test_what_was_run_is_what_the_records_say(everything):
    out, _ = everything
    for row in rows_of(out / "gcp-methods.csv"):
        assert row["scale"] == "smoke"
        assert (row["fair_protocol_n"], row["fair_protocol_rate_chosen"]) == ("1", "1")
        assert row["paper_protocol_mean"] == "not run"
        options = "-compact=True" if row["head"] == "run" else ""
        name = f"plumage-plumage_net-{row['head']}{options}-x{float(row['fair_protocol_rate']):g}-e1-all-s0"
        record = json.loads((out / "records" / f"{name}.json").read_text())
        assert float(row["fair_protocol_mean"]) == pytest.approx(record["scores"]["test_top1"], abs=1e-4)
        assert row["torch"] == torch.__version__
        tried = {
            rate: json.loads(
                (out / "records" / f"{name.replace('-all-', '-val-').split('-x')[0]}-x{rate}-e1-val-s0.json").read_text()
            )
            for rate in (("300", "1000") if LENGTHS.get(row["head"]) == 0.1 else ("3", "10"))
        }
        best = max(tried, key=lambda rate: (tried[rate]["scores"]["val_top1"], -float(rate)))
        assert float(row["fair_protocol_rate"]) == float(best)


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
def test_the_numbers_of_the_paper_stand_beside_ours(everything, name):
    out, _ = everything
    rows = rows_of(out / f"{name}.csv")
    for data, backbone, method, number in PRINTED[name]:
        found = [r["paper"] for r in rows if (r["data"], r["backbone"], r["method"]) == (data, backbone, method)]
        assert number in found
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


def test_systems_that_are_not_here_are_never_run(everything):
    out, _ = everything
    others = [row for row in rows_of(out / "sota.csv") if row["method"] in ("TransFG", "AFTrans")]
    assert len(others) == 6
    assert all(row["fair_protocol_mean"] == "not run" and row["fair_protocol_n"] == "0" for row in others)
    assert all(row["paper"] for row in others)


class Tags(HTMLParser):
    """The tags of a page with their attributes."""

    def __init__(self, text):
        super().__init__()
        self.found = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


def test_the_page_is_one_file_with_every_study_in_it(everything):
    text = (everything[0] / "report.html").read_text(encoding="utf-8")
    tags = Tags(text).found
    assert not {"script", "link", "iframe"} & {tag for tag, _ in tags}
    assert sum(tag == "img" for tag, _ in tags) == len(STUDIES)
    assert re.findall(r"<h2>(.*?):", text) == [study.where for study in STUDIES]
    assert "http" not in text


def test_a_second_start_trains_nothing(everything, trained_runs):
    out, _ = everything
    before = (out / "truncation.csv").read_bytes()
    assert cli.main(["study", "truncation", *SMOKE, "--out", str(out)]) == 0
    assert trained_runs == []
    assert (out / "truncation.csv").read_bytes() == before


def test_a_study_that_was_stopped_goes_on_without_repeating(trained_runs, tmp_path, monkeypatch, capsys):
    real = jobs.train

    def stopped(config, sources):
        if len(trained_runs) == 3:
            raise KeyboardInterrupt
        return real(config, sources)

    monkeypatch.setattr(jobs, "train", stopped)
    command = ["study", "paths", *SMOKE, "--out", str(tmp_path)]
    assert cli.main(command) == 130
    first = list(trained_runs)
    assert len(first) == 3
    monkeypatch.setattr(jobs, "train", real)
    assert cli.main(command) == 0
    assert trained_runs[:3] == first
    assert len(trained_runs) == len(set(trained_runs)) == 9  # three paths: two rates each, then the better one
    assert all(row["fair_protocol_n"] == "1" for row in rows_of(tmp_path / "paths.csv"))


def test_time_that_is_over_leaves_rows_that_say_so(trained_runs, tmp_path, capsys):
    assert cli.main(["study", "paths", *SMOKE, "--out", str(tmp_path), "--seconds", "0.001"]) == 0
    assert len(trained_runs) <= 1
    said, progress = capsys.readouterr()
    assert "stopped for lack of time" in progress
    assert all(row["fair_protocol_mean"] == "not run" for row in rows_of(tmp_path / "paths.csv"))
    assert "ResNet-50, ‖QSᵀ‖·Q + Q" in said
    assert not (tmp_path / "paths.png").exists()


def test_records_from_elsewhere_are_shown_and_not_made_again(everything, trained_runs, tmp_path, monkeypatch, capsys):
    records = tmp_path / "theirs"
    shutil.copytree(everything[0] / "records", records)
    out = tmp_path / "mine"
    options = [*SMOKE, "--out", str(out), "--records", str(records)]
    monkeypatch.setattr(conclusions, "find_spec", lambda name: None)  # as without matplotlib
    assert cli.main(["study", "factors", "--only_report", *options]) == 0
    assert rows_of(out / "factors.csv") == rows_of(everything[0] / "factors.csv")
    assert cli.main(["study", "factors", *options]) == 0
    assert trained_runs == []
    assert cli.main(["study", "report", *options]) == 0
    text = (out / "report.html").read_text(encoding="utf-8")
    assert "constant 100" in text
    assert "<img" not in text
    assert not list(out.glob("*.png"))


def test_a_page_sends_its_reader_to_files_that_are_there(tmp_path, monkeypatch):
    monkeypatch.setattr(conclusions, "find_spec", lambda name: None)  # its pictures are not looked at
    assert cli.main(["study", "report", "--records", str(BIRDS), "--out", str(tmp_path)]) == 0
    named = set(re.findall(r"[\w-]+\.md", (tmp_path / "report.html").read_text(encoding="utf-8")))
    assert {"spectrum.md", "similarity.md"} <= named
    assert all((tmp_path / name).is_file() for name in named)


def test_a_page_says_where_the_runs_on_it_were_made_and_no_others(everything, tmp_path, monkeypatch):
    monkeypatch.setattr(conclusions, "find_spec", lambda name: None)
    records = tmp_path / "records"
    shutil.copytree(everything[0] / "records", records)  # of drawn birds, on this machine
    (records / "notes.json").write_text("[1, 2]")
    (records / "half.json").write_text('{"name": "half", "epo')
    shutil.copy(BIRDS / "resnet50-gap-x3-e15-val-s0.json", records)

    def said(*options):
        assert cli.main(["study", "report", "--out", str(tmp_path), *options]) == 0
        return re.findall("<footer>(.*)</footer>", (tmp_path / "report.html").read_text(encoding="utf-8"))[0]

    assert re.fullmatch(r"runs on NVIDIA H200 with torch [^;]*", said())
    assert re.fullmatch(rf"runs on [^;]* with torch {re.escape(torch.__version__)} and [^;]*", said(*SMOKE))


def test_a_page_without_records_lists_what_could_be_run(tmp_path):
    assert cli.main(["study", "report", "--out", str(tmp_path)]) == 0
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert re.findall(r"<h2>(.*?)</h2>", text) == ["Not run"]
    assert all(f"eigengrain study {study.name} --data FOLDER" in text for study in STUDIES)


def test_the_papers_protocol_has_a_column_of_its_own(everything, trained_runs, tmp_path, capsys):
    out = tmp_path / "both"
    options = ["--out", str(out), "--records", str(everything[0] / "records"), "--protocol", "both"]
    assert cli.main(["study", "paths", *SMOKE, *options]) == 0
    assert all("-best-" in name for name in trained_runs)
    assert len(trained_runs) == 3
    for row in rows_of(out / "paths.csv"):
        assert (row["fair_protocol_n"], row["paper_protocol_n"]) == ("1", "1")
        assert row["paper_protocol_rate"] == "10.0"
        assert row["paper_protocol_rate_chosen"] == ""
    said = capsys.readouterr().out
    assert "ours, fair" in said
    assert "ours, paper's protocol" in said


def test_the_list_says_what_each_study_costs_and_how_that_is_known(capsys, tmp_path):
    assert cli.main(["study", "list", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    for study in STUDIES:
        assert study.name in said
        assert study.where in said
    assert "as stated for one NVIDIA H200" in said
    lines = {line.split()[0]: line for line in said.splitlines() if line.strip()}
    assert re.search(r"\b30\s+43 min", lines["gcp-methods"])  # 5 heads: 3 rates and 3 seeds of 15 epochs each
    assert said.splitlines()[0].strip() == "studies, scale small, fair protocol"
    assert cli.main(["study", "list", "--out", str(tmp_path), "--protocol", "both"]) == 0
    assert capsys.readouterr().out.splitlines()[0].strip() == "studies, scale small, both protocols"
    assert cli.main(["study", "list", "--out", str(tmp_path), "--json"]) == 0
    listed = {each["name"]: each for each in json.loads(capsys.readouterr().out)}
    assert listed["gcp-methods"]["runs"] == 30
    assert listed["rates"]["runs"] == 11 * 3 + 1  # no network beyond the search, and one rate beside the grid
    assert round(listed["rates"]["training_seconds"]) == round(34 * 0.9 * 5994 * 15 / 1000)


@pytest.mark.parametrize(
    ("options", "said"), [(SMOKE, ["training: a third of a second for each run"]), (["--datasets", "imagenet"], [])]
)
def test_the_list_speaks_of_speeds_only_where_it_takes_some(options, said, capsys, tmp_path):
    assert cli.main(["study", "list", *options, "--out", str(tmp_path)]) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("training:")] == said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["gcp-method"], "unknown study 'gcp-method': did you mean 'gcp-methods'"),
        (["gcp-methods"], "where are the images? --data FOLDER"),
        (["paths", "--scale", "smal"], "unknown --scale 'smal': did you mean 'small'"),
        (["paths", "--protocol", "fare"], "unknown --protocol 'fare': did you mean 'fair'"),
        (["paths", *SMOKE, "--heads", "[bcnn]"], "unknown head of this study 'bcnn'"),
        (["paths", *SMOKE, "--datasets", "[dogs]"], "unknown data set of this study 'dogs'"),
        (["speed", *SMOKE, "--datasets", "[cub]"], "this study has no data sets to choose from: leave --datasets out"),
        (["paths", "--seeds", "[0,0]"], "--seeds must be a list of one or more, each once"),
        (["paths", "--data", "no/such"], "holds none of the data sets of this study: cub (Birds), aircraft"),
        (["paths", *SMOKE, "--records", "no/such"], "there is no folder 'no/such': --records"),
        (["report", "--records", "no/such"], "there is no folder 'no/such': --records"),
        (["architectures", "--data", "no/such", "--weights", "no/such"], "there is no file or folder 'no/such': --weights"),
        (
            ["gcp-methods", *SMOKE, "--backbones", "vgg16", "--heads", "gap"],
            "none of the heads gap with a backbone of vgg16",
        ),
        (["list", "--heads", "mpn"], "unknown head of this study 'mpn': did you mean 'mpncov'"),
        (["list", "--datasets", "birds"], "unknown data set of this study 'birds'"),
    ],
)
def test_a_mistake_gets_one_line_and_code_2(words, said, capsys, tmp_path):
    assert cli.main(["study", *words, "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_signal_ends_a_study_with_its_code(monkeypatch, tmp_path, capsys):
    def interrupted(study, setup):
        raise campaign.Interrupted(15, "in epoch 1 after batch 2 of 3")

    monkeypatch.setattr(campaign, "carry_out", interrupted)
    assert cli.main(["study", "paths", *SMOKE, "--out", str(tmp_path)]) == 143
    assert "the same command goes on from there" in capsys.readouterr().err


@pytest.mark.parametrize("text", ['{"rows": [', '{"rows": []}', "[]"])
def test_a_part_of_a_record_of_speed_is_refused_by_its_name(text, capsys, tmp_path):
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "speed-small-cpu.json").write_text(text)
    assert cli.main(["study", "speed", "--only_report", "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "speed-small-cpu.json is not a record" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("lost", ["isqrt", "mpncov"])
def test_a_step_without_the_memory_for_it_has_no_number(lost, tmp_path, monkeypatch):
    """The others have theirs, and times over that of iSQRT-COV are drawn where that is known."""
    real = step.build

    def build(config, backbone, head, device):
        if head == lost:
            raise torch.OutOfMemoryError
        return real(config, backbone, head, device)

    monkeypatch.setattr(step, "build", build)
    setup = Setup(StudyRun(name="speed", scale="smoke", device="cpu", out=str(tmp_path)), available=())
    speed.measure(setup)
    found = speed.findings(setup, [])
    lines = {row["method"]: row for row in found.rows}
    assert lines[speed.METHODS[lost]]["ours_seconds"] == "–"
    assert all(line["ours_seconds"] > 0 for method, line in lines.items() if method != speed.METHODS[lost])
    assert any("memory" in note for note in found.notes)
    assert (found.draw is None) == (lost == "isqrt")
    if found.draw is not None:
        found.draw(tmp_path / "speed.png")


def test_brackets_in_the_name_of_a_device_are_shown():
    console = Console(width=60)
    with console.capture() as said:
        console.print(on_terminal(TableData("[gfx90a]", ["", "ours [s]"], [])))
    assert "[gfx90a]" in said.get()
    assert "ours [s]" in said.get()
