"""eigengrain explain: files and numbers against direct calls of the library, and the mistakes of users."""

import csv
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

import eigengrain as eg
from eigengrain.cli import explain as module
from eigengrain.cli import main as cli
from eigengrain.cli.explain import Explain, command_line, run
from eigengrain.data.plumage import open_plumage
from eigengrain.data.transforms import Pipeline, to_pixels
from eigengrain.errors import ArgumentError, FileError, MissingPackageError, ReLURuleError, ShortRankWarning, UnknownName
from eigengrain.explain import report
from eigengrain.explain.report import Report
from eigengrain.explain.survey import image_batches, survey
from eigengrain.models import from_pretrained, save_pretrained
from eigengrain.recipes import load_recipe
from eigengrain.training.config import to_mapping
from eigengrain.training.run_folder import open_run

BIRDS = {"classes": 2, "per_class": 3, "size": 32, "cache": False}
SIX = open_plumage("test", **BIRDS)
#: two processes get unequal shares of each batch
QUICK = {"data": "plumage", "data_options": BIRDS, "batch_size": 4, "device": "cpu"}


def network(backbone="plumage_net", head="mpncov", **options):
    torch.manual_seed(0)
    net = eg.create_model(backbone, head=head, num_classes=2, **{"reduce": 8} | options)
    net.pretrained_cfg |= {"input_size": (3, 32, 32), "crop_pct": 1.0, "interpolation": "bilinear"}
    images = torch.stack([to_pixels(SIX.image(number)) for number in range(6)]) / 255
    for layer in net.modules():
        if isinstance(layer, torch.nn.BatchNorm2d):
            layer.momentum = 1.0
    with torch.no_grad():
        net((images - 0.45) / 0.225)  # statistics that fit, so that no channel is dead
    return net.eval()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    save_pretrained(network(), folder, SIX.classes)
    return str(folder)


@pytest.fixture
def photos(tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(3):
        SIX.image(number).resize((48, 40)).save(folder / f"bird {number}.png")
    (folder / "broken.jpg").write_text("no image")
    return folder


def table(path):
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


# the files


def test_measures_are_those_of_a_survey_of_the_same_images(checkpoint, tmp_path, capsys):
    run(Explain(checkpoint, count=1, measure_count=5, rules=["vanilla", "guided"], out=str(tmp_path / "out"), **QUICK))
    rows = table(tmp_path / "out" / "measures-images.csv")
    numbers = list(dict.fromkeys(int(row["number"]) for row in rows))
    assert len(numbers) == 5
    net = from_pretrained(checkpoint)
    dataset = open_plumage("test", **BIRDS)
    dataset.transform = open_run(checkpoint).transform
    part = dataset.subset(sorted(numbers))
    expected = survey(net, image_batches(part, 5), ["all", "top:6", "last:2"], ["vanilla", "guided"], target="predicted")
    assert len(expected.rows) == len(rows) == 5 * 2 * 3
    by_key = {(sorted(numbers)[row["number"]], row["rule"], row["subset"]): row for row in expected.rows}
    for row in rows:
        reference = by_key[int(row["number"]), row["rule"], row["subset"]]
        assert row["image"] == f"test {row['number']}"
        assert int(row["label"]) == SIX.labels[int(row["number"])] == reference["label"]
        for measure in ("corr", "mae", "norm_ratio", "object_energy", "parts_over_area", "gap"):
            if reference[measure] is None:
                assert row[measure] == ""
            else:
                assert float(row[measure]) == pytest.approx(reference[measure], rel=2e-3, abs=1e-5)
    means = {(row["rule"], row["subset"], row["measure"]): row for row in table(tmp_path / "out" / "measures.csv")}
    for summary in expected.table:
        row = means[summary.rule, summary.subset, summary.measure]
        assert float(row["mean"]) == pytest.approx(summary.mean, rel=2e-3, abs=1e-5)
        assert float(row["standard_error"]) == pytest.approx(summary.standard_error, rel=2e-2, abs=1e-5)
        assert (int(row["n"]), int(row["n_undefined"])) == (summary.n, summary.n_undefined)
        assert (row["data"], row["split"], row["target"]) == ("plumage", "test", "predicted")
    assert "last:2" in capsys.readouterr().out


def test_panels_of_six_for_each_cut_and_a_page_that_has_them_all(checkpoint, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(report, "ROWS", 4)
    out = tmp_path / "out"
    run(Explain(checkpoint, count=6, measure_count=2, rules=["vanilla"], cut="both", out=str(out), **QUICK))
    panels = ["panel-exact-1.png", "panel-exact-2.png", "panel-projector-1.png", "panel-projector-2.png"]
    assert sorted(path.name for path in out.glob("*.png")) == panels
    heights = [Image.open(out / name).size[1] for name in panels]
    assert heights[0] == heights[2] > heights[1] == heights[3]  # four rows and two
    html = (out / "gallery.html").read_text(encoding="utf-8")
    assert html.count("data:image/png;base64,") == 4
    assert not re.search(r"<script|https?:", html)
    assert html.count("<table>") == 2  # one per cut
    assert f"eigengrain explain {checkpoint}" in html
    printed = capsys.readouterr().out
    for name in (*panels, "measures.csv", "measures-images.csv", "gallery.html"):
        assert str(out / name) in printed.replace("\n", "")
    assert {row["cut"] for row in table(out / "measures.csv")} == {"exact", "projector"}


def test_the_images_of_a_panel_are_the_first_of_those_measured_and_the_seed_chooses_them(checkpoint, tmp_path):
    trained = open_run(checkpoint)
    dataset = trained.dataset("test", name="plumage", options=BIRDS)
    first, again, other = (Report(trained.model, dataset, tmp_path, seed=seed, count=2) for seed in (0, 0, 1))
    assert first.indices == again.indices != other.indices
    assert sorted(first.indices) == list(range(6))
    assert first.shown == first.indices[:2]


def test_images_of_a_user(checkpoint, photos, tmp_path, capsys):
    out = tmp_path / "out"
    words = ["explain", checkpoint, "--images", str(photos), "nowhere.png", "--rules", "vanilla", "--count", "2"]
    assert cli.main([*words, "--out", str(out), "--device", "cpu"]) == 0
    rows = table(out / "measures-images.csv")
    assert list(dict.fromkeys(row["image"] for row in rows)) == [str(photos / f"bird {k}.png") for k in range(3)]
    assert {row["label"] for row in rows} == {""}  # unknown
    assert "object_energy" not in {row["measure"] for row in table(out / "measures.csv")}
    notes = capsys.readouterr().err
    assert "nowhere.png" in notes
    assert "broken.jpg" in notes
    assert (out / "panel-exact-1.png").is_file()


def test_images_are_prepared_as_the_checkpoint_declares(checkpoint, photos, tmp_path):
    from timm.data import create_transform, resolve_data_config

    for crop_mode, crop_pct in (("center", 1.0), ("center", 0.8), ("squash", 0.75), ("border", 1.0)):
        net = network()
        net.pretrained_cfg |= {"crop_mode": crop_mode, "crop_pct": crop_pct, "mean": (0.1, 0.2, 0.3)}
        save_pretrained(net, tmp_path / "model", SIX.classes)
        dataset = open_run(tmp_path / "model").images([photos / "bird 1.png"])
        theirs = create_transform(**resolve_data_config({}, pretrained_cfg=net.pretrained_cfg))
        image, _ = dataset[0]
        torch.testing.assert_close(image, theirs(Image.open(photos / "bird 1.png").convert("RGB")), rtol=0, atol=1e-6)
        assert isinstance(dataset.transform, Pipeline) == (crop_mode != "border")


def test_a_class_by_name_or_number_the_label_and_the_norm(checkpoint, tmp_path):
    for target in ("1", SIX.classes[1], "label", "norm"):
        out = tmp_path / "out"
        config = Explain(
            checkpoint, count=1, measure_count=4, rules=["vanilla"], target=target, measures=["corr"], out=str(out), **QUICK
        )
        run(config)
        rows = table(out / "measures-images.csv")
        explained = {(row["label"], row["target"]) for row in rows}
        if target == "label":
            assert all(label == which for label, which in explained)
        else:
            assert {which for _, which in explained} == ({"-1"} if target == "norm" else {"1"})
        assert {row["measure"] for row in table(out / "measures.csv")} == {"corr"}


def test_perturbed_images_as_a_panel_and_films(checkpoint, tmp_path, monkeypatch):
    out = tmp_path / "out"
    config = Explain(
        checkpoint, count=2, measure_count=0, rules=["vanilla"], subsets=["all"], perturb=4, out=str(out), **QUICK
    )
    run(config)
    assert not list(out.glob("*.csv"))
    films = sorted(out.glob("*.gif"))
    assert [film.name for film in films] == ["perturbed-1-large.gif", "perturbed-1-small.gif"]
    assert [Image.open(film).n_frames for film in films] == [5, 5]
    html = (out / "gallery.html").read_text(encoding="utf-8")
    assert html.count("data:image/gif") == 2
    assert html.count("data:image/png") == 2
    monkeypatch.setattr(report, "LIGHT", 100)
    one = tmp_path / "one"
    run(replace(config, toward="small", out=str(one)))
    assert [film.name for film in one.glob("*.gif")] == ["perturbed-1-small.gif"]
    assert "data:image/gif" not in (one / "gallery.html").read_text(encoding="utf-8")  # too heavy for the page


def test_files_of_an_earlier_call_are_kept_and_noted(checkpoint, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(report, "ROWS", 2)
    first = Explain(checkpoint, count=6, measure_count=2, rules=["vanilla"], out=str(tmp_path), **QUICK)
    run(first)
    assert capsys.readouterr().err == ""
    before = {path.name: path.read_bytes() for path in tmp_path.glob("*.*")}
    run(replace(first, count=1, measure_count=0))
    assert "panel-exact-2.png, panel-exact-3.png, measures-images.csv and 1 more" in capsys.readouterr().err
    for name in ("panel-exact-2.png", "panel-exact-3.png", "measures.csv"):
        assert (tmp_path / name).read_bytes() == before[name]


def test_a_training_folder_and_its_model_give_the_images_of_the_training(tmp_path):
    folder = tmp_path / "run"
    changes = {"data.options": BIRDS, "data.transforms.img_size": 32, "model.reduce": 8, "out": str(folder)}
    folder.mkdir()
    (folder / "args.yaml").write_text(yaml.safe_dump(to_mapping(load_recipe("plumage-demo", changes))))
    save_pretrained(network(), folder / "model", SIX.classes)
    for place in (folder, folder / "model"):
        dataset, notes = module._open_images(Explain(str(place), split="train"), open_run(place))
        assert (dataset.name, dataset.split, len(dataset)) == ("plumage", "train", 6)
        assert isinstance(dataset.transform, Pipeline)
        assert dataset.transform.size == [32]
        assert notes == []


def test_a_short_rank_is_noted_once(tmp_path, capsys, photos):
    save_pretrained(network(reduce=20), tmp_path / "model", SIX.classes)
    config = Explain(str(tmp_path / "model"), [str(photos)], count=1, rules=["vanilla"], out=str(tmp_path / "out"))
    run(config)
    with pytest.warns(ShortRankWarning) as caught, torch.no_grad():
        open_run(tmp_path / "model").model(torch.zeros(1, 3, 32, 32))
    message = " ".join(str(caught[0].message).split())
    assert capsys.readouterr().err.count(f"note: {message}\n") == 1
    rows = {(row["subset"], row["measure"]): row for row in table(tmp_path / "out" / "measures.csv")}
    assert rows["last:4", "corr"]["n_undefined"] == "3"
    html = (tmp_path / "out" / "gallery.html").read_text(encoding="utf-8")
    assert "n = 0,\n3 undefined" in html


def test_the_subset_that_a_model_keeps_is_explained_too(tmp_path, photos):
    save_pretrained(network(head_options={"subset": "top:5"}), tmp_path / "cut", SIX.classes)
    run(Explain(str(tmp_path / "cut"), images=[str(photos)], rules=["vanilla"], out=str(tmp_path / "out"), device="cpu"))
    subsets = dict.fromkeys(row["subset"] for row in table(tmp_path / "out" / "measures.csv"))
    assert list(subsets) == ["top:5", "top:6", "last:2"]  # each is compared with all


def test_two_processes_measure_what_one_does(checkpoint, tmp_path):
    def words(out):
        options = ["--data", "plumage", "--data_options", str(BIRDS).replace("False", "false"), "--rules", "vanilla"]
        return ["explain", checkpoint, *options, "--batch_size", "4", "--count", "1", "--device", "cpu", "--out", str(out)]

    two, one = tmp_path / "two", tmp_path / "one"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    done = subprocess.run(
        [*launcher, "eigengrain", *words(two)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(str(two / "gallery.html")) == 1  # only one process prints
    assert cli.main(words(one)) == 0
    together, alone = (table(out / "measures-images.csv") for out in (two, one))
    assert [row["image"] for row in together] == [row["image"] for row in alone]
    for mine, other in zip(together, alone, strict=True):
        for measure in ("mae", "object_energy", "gap"):
            if mine[measure]:
                assert float(mine[measure]) == pytest.approx(float(other[measure]), rel=2e-3, abs=1e-5)


# the command line


def test_odd_names_survive_the_command_line(checkpoint, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    names = ["[a].png", "b: c.png", "ö.png", "1e3", "null"]
    for name in names:
        Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(name, format="PNG")
    seen = []
    monkeypatch.setattr(module, "run", seen.append)
    for given in (names, names[:1]):
        assert cli.main(["explain", checkpoint, "--images", *given]) == 0
        assert seen.pop().images == given


def test_the_command_of_the_page_leads_back_to_the_same_options(checkpoint, monkeypatch):
    config = Explain(checkpoint, ["a b.png", "c.png"], count=3, measure_count="all", rules=["vanilla"], cut="both")
    config = replace(config, subsets=["all", "top:1+last:2"], target="2", perturb=5, perturb_lr=0.01, split_at=4)
    seen = []
    monkeypatch.setattr(module, "run", seen.append)
    for expected in (config, Explain(checkpoint, data="plumage", data_options=BIRDS, measures=["corr", "gap"])):
        assert cli.main(shlex.split(command_line(expected))[1:]) == 0
        assert seen.pop() == expected


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"checkpoint": ""}, "checkpoint"),
        ({"images": ["a.png"], "data": "plumage"}, "images"),
        ({"images": ["a.png"], "target": "label"}, "target"),
        ({"rules": []}, "rules"),
        ({"count": 0}, "count"),
        ({"measure_count": -1}, "measure_count"),
        ({"perturb": -1}, "perturb"),
        ({"data_options": BIRDS}, "data_options"),
        ({"images": ["a.png"], "data_options": BIRDS}, "data_options"),
    ],
)
def test_invalid_options(checkpoint, options, argument):
    with pytest.raises(ArgumentError) as error:
        Explain(**{"checkpoint": checkpoint, **options})
    assert error.value.argument == argument


@pytest.mark.parametrize(
    ("option", "value", "near"),
    [
        ("cut", "exat", "exact"),
        ("split", "tset", "test"),
        ("scale", "rows", "row"),
        ("toward", "smal", "small"),
        ("rules", ["vanila"], "vanilla"),
        ("measures", ["cor"], "corr"),
    ],
)
def test_misspelt_names(checkpoint, option, value, near):
    with pytest.raises(UnknownName) as error:
        Explain(checkpoint, **{option: value})
    assert error.value.kind == option
    assert near in error.value.suggestions


def test_a_checkpoint_that_does_not_exist():
    with pytest.raises(FileError) as error:
        Explain("no/such/folder")
    assert error.value.path == Path("no/such/folder")


@pytest.mark.parametrize(
    ("options", "kind", "facts"),
    [
        ({"subsets": ["top:9"]}, ArgumentError, {}),
        ({"subsets": ["most"]}, ValueError, {}),
        ({"split_at": 8}, ArgumentError, {"argument": "split_at", "value": 8}),
        ({"target": "2"}, ArgumentError, {"argument": "target"}),
        ({"target": "predict"}, UnknownName, {"name": "predict"}),
        ({"images": ["nowhere"]}, ArgumentError, {"argument": "images"}),
        ({"images": []}, ArgumentError, {"argument": "name"}),
    ],
)
def test_options_that_do_not_fit_the_model_or_the_images(checkpoint, photos, tmp_path, options, kind, facts):
    config = Explain(checkpoint, **{"images": [str(photos)], "out": str(tmp_path / "out"), "device": "cpu"} | options)
    with pytest.raises(kind) as error:
        run(config)
    assert {name: getattr(error.value, name) for name in facts} == facts


def test_an_invalid_perturbation_is_refused_before_anything_is_measured(checkpoint, photos, tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("nothing may be measured")

    monkeypatch.setattr(report, "survey", refuse)
    save_pretrained(network(head="gap", reduce=None), tmp_path / "gap", SIX.classes)
    common = {"images": [str(photos)], "subsets": ["all"], "perturb": 1, "device": "cpu", "out": str(tmp_path / "out")}
    with pytest.raises(ArgumentError):
        run(Explain(str(tmp_path / "gap"), **common))
    with pytest.raises(ArgumentError) as error:
        run(Explain(checkpoint, **common, perturb_lr=0.0))
    assert error.value.argument == "perturb_lr"


def test_heads_without_eigenvalues(photos, tmp_path):
    for head, options in (("gap", {"reduce": None}), ("isqrt", {})):
        save_pretrained(network(head=head, **options), tmp_path / head, SIX.classes)
        config = Explain(str(tmp_path / head), [str(photos)], rules=["vanilla"], out=str(tmp_path / "out"), device="cpu")
        with pytest.raises(ArgumentError) as error:
            run(config)
        assert error.value.argument == "subsets"
        run(replace(config, subsets=["all"]))
        assert (tmp_path / "out" / "gallery.html").is_file()
        assert not (tmp_path / "out" / "measures.csv").exists()  # there is nothing to compare the maps with


def test_a_network_without_relus_refuses_deconv(photos, tmp_path):
    save_pretrained(network("test_efficientnet", reduce=4), tmp_path / "model", SIX.classes)
    config = Explain(str(tmp_path / "model"), [str(photos)], out=str(tmp_path / "out"), count=1, device="cpu")
    with pytest.raises(ReLURuleError) as error:
        run(replace(config, rules=["vanilla", "deconv"]))
    assert "silu" in " ".join(error.value.calls).lower()
    run(replace(config, rules=["vanilla"]))


def test_missing_packages(checkpoint, photos, monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match=r"eigengrain\[explain\]"):
        run(Explain(checkpoint, [str(photos)]))


def test_a_folder_that_cannot_be_written_is_left_alone(checkpoint, photos, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(FileError):
        run(Explain(checkpoint, [str(photos)], out=str(tmp_path / "file")))
    assert Path(tmp_path / "file").read_text() == "in the way"
