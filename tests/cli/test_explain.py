"""eigengrain explain: files and numbers against the library called by hand, and every mistake a user can make."""

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
from eigengrain.cli import explain_measures, explain_page, explain_pictures
from eigengrain.cli import main as cli
from eigengrain.cli.explain import Explain, expand, open_source, run
from eigengrain.cli.explain_options import RULES, command_line
from eigengrain.cli.explain_plan import chosen_class
from eigengrain.data.plumage import open_plumage
from eigengrain.data.transforms import Pipeline, pixels_of
from eigengrain.explain.survey import image_batches, survey
from eigengrain.models import from_pretrained, save_pretrained
from eigengrain.recipes import load_recipe
from eigengrain.training.config import to_mapping

BIRDS = {"classes": 2, "per_class": 3, "size": 32, "cache": False}
SIX = open_plumage("test", **BIRDS)
#: one of two processes has a share of every batch, and neither the same
QUICK = {"data": "plumage", "data_options": BIRDS, "batch_size": 4, "device": "cpu"}


def network(backbone="plumage_net", head="mpncov", **options):
    torch.manual_seed(0)
    net = eg.create_model(backbone, head=head, num_classes=2, **{"reduce": 8} | options)
    net.pretrained_cfg |= {"input_size": (3, 32, 32), "crop_pct": 1.0, "interpolation": "bilinear"}
    images = torch.stack([pixels_of(SIX.image(number)) for number in range(6)]) / 255
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


# what is written


def test_measures_are_those_of_a_survey_of_the_same_images(checkpoint, tmp_path, capsys):
    run(Explain(checkpoint, count=1, measure_count=5, rules=["vanilla", "guided"], out=str(tmp_path / "out"), **QUICK))
    rows = table(tmp_path / "out" / "measures-images.csv")
    numbers = list(dict.fromkeys(int(row["number"]) for row in rows))
    assert len(numbers) == 5
    net = from_pretrained(checkpoint)
    dataset = open_plumage("test", **BIRDS)
    dataset.transform = open_source(Explain(checkpoint, **QUICK)).dataset.transform
    part = dataset.subset(sorted(numbers))
    expected = survey(net, image_batches(part, 5), ["all", "top:6", "last:2"], ["vanilla", "guided"], target="predicted")
    assert len(expected.rows) == len(rows) == 5 * 2 * 3
    by_key = {(sorted(numbers)[row["number"]], row["rule"], row["subset"]): row for row in expected.rows}
    for row in rows:
        known = by_key[int(row["number"]), row["rule"], row["subset"]]
        assert row["image"] == f"test {row['number']}"
        assert int(row["label"]) == SIX.labels[int(row["number"])] == known["label"]
        for measure in ("corr", "mae", "norm_ratio", "object_energy", "parts_over_area", "gap"):
            if known[measure] is None:
                assert row[measure] == ""
            else:
                assert float(row[measure]) == pytest.approx(known[measure], rel=2e-3, abs=1e-5)
    means = {(row["rule"], row["subset"], row["measure"]): row for row in table(tmp_path / "out" / "measures.csv")}
    for summary in expected.table:
        row = means[summary.rule, summary.subset, summary.measure]
        assert float(row["mean"]) == pytest.approx(summary.mean, rel=2e-3, abs=1e-5)
        assert float(row["standard_error"]) == pytest.approx(summary.standard_error, rel=2e-2, abs=1e-5)
        assert (int(row["n"]), int(row["n_undefined"])) == (summary.n, summary.n_undefined)
        assert (row["data"], row["split"], row["target"]) == ("plumage", "test", "predicted")
    out = capsys.readouterr().out
    assert "means over 5 images" in out
    assert "last:2" in out


def test_panels_of_six_for_each_cut_and_a_page_that_has_them_all(checkpoint, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(explain_pictures, "ROWS", 4)
    out = tmp_path / "out"
    run(Explain(checkpoint, count=6, measure_count=2, rules=["vanilla"], cut="both", out=str(out), **QUICK))
    panels = ["panel-exact-1.png", "panel-exact-2.png", "panel-projector-1.png", "panel-projector-2.png"]
    assert sorted(path.name for path in out.glob("*.png")) == panels
    heights = [Image.open(out / name).size[1] for name in panels]
    assert heights[0] == heights[2] > heights[1] == heights[3]  # four rows and two
    html = (out / "gallery.html").read_text(encoding="utf-8")
    assert html.count("data:image/png;base64,") == 4
    assert not re.search(r"<script|https?:", html)
    assert "cut: exact; mean" in html
    assert "cut: projector; mean" in html
    assert "6 shown, 2 measured, drawn by seed 0 from 6" in html
    assert "eigengrain explain" in html
    printed = capsys.readouterr().out
    for name in (*panels, "measures.csv", "measures-images.csv", "gallery.html"):
        assert str(out / name) in printed.replace("\n", "")
    assert {row["cut"] for row in table(out / "measures.csv")} == {"exact", "projector"}


def test_the_images_of_a_panel_are_the_first_of_those_measured_and_the_seed_chooses_them(checkpoint):
    config = Explain(checkpoint, count=2, measure_count=4, **QUICK)
    first, again, other = (open_source(replace(config, seed=seed)).numbers for seed in (0, 0, 1))
    assert first == again
    assert len(set(first)) == 4
    assert first != other
    assert len(open_source(replace(config, measure_count="all")).numbers) == 6
    assert open_source(replace(config, count=5, measure_count=0)).numbers == open_source(replace(config, count=5)).numbers


def test_images_of_ones_own(checkpoint, photos, tmp_path, capsys):
    out = tmp_path / "out"
    words = ["explain", checkpoint, "--images", str(photos), "nowhere.png", "--rules", "vanilla", "--count", "2"]
    assert cli.main([*words, "--out", str(out), "--device", "cpu"]) == 0
    rows = table(out / "measures-images.csv")
    assert list(dict.fromkeys(row["image"] for row in rows)) == [str(photos / f"bird {k}.png") for k in range(3)]
    assert {row["label"] for row in rows} == {""}  # not known
    assert "object_energy" not in {row["measure"] for row in table(out / "measures.csv")}
    err = capsys.readouterr().err
    assert "nowhere.png: there is no such file or folder" in err
    assert "broken.jpg: not an image" in err
    assert (out / "panel-exact-1.png").is_file()
    assert "2 shown, 3 measured, in the order they were given" in (out / "gallery.html").read_text(encoding="utf-8")


def test_images_are_prepared_as_the_checkpoint_says(checkpoint, photos, tmp_path):
    from timm.data import create_transform, resolve_data_config

    for crop_mode, crop_pct in (("center", 1.0), ("center", 0.8), ("squash", 0.75), ("border", 1.0)):
        net = network()
        net.pretrained_cfg |= {"crop_mode": crop_mode, "crop_pct": crop_pct, "mean": (0.1, 0.2, 0.3)}
        save_pretrained(net, tmp_path / "model", SIX.classes)
        source = open_source(Explain(str(tmp_path / "model"), [str(photos)]))
        theirs = create_transform(**resolve_data_config({}, pretrained_cfg=net.pretrained_cfg))
        image, _ = source.dataset[1]
        torch.testing.assert_close(image, theirs(Image.open(photos / "bird 1.png").convert("RGB")), rtol=0, atol=1e-6)
        assert isinstance(source.dataset.transform, Pipeline) == (crop_mode != "border")


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
    assert "4 steps of Adam at a rate of 0.1, split after 6" in html
    monkeypatch.setattr(explain_page, "LIGHT", 100)
    one = tmp_path / "one"
    run(replace(config, toward="small", out=str(one)))
    assert [film.name for film in one.glob("*.gif")] == ["perturbed-1-small.gif"]
    assert "data:image/gif" not in (one / "gallery.html").read_text(encoding="utf-8")  # too heavy for the page


def test_what_an_earlier_call_left_is_kept_and_said(checkpoint, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(explain_pictures, "ROWS", 2)
    first = Explain(checkpoint, count=6, measure_count=2, rules=["vanilla"], out=str(tmp_path), **QUICK)
    run(first)
    assert "earlier call" not in capsys.readouterr().err
    before = {path.name: path.read_bytes() for path in tmp_path.glob("*.*")}
    run(replace(first, count=1, measure_count=0))
    said = capsys.readouterr().err
    left = "panel-exact-2.png, panel-exact-3.png, measures-images.csv and 1 more"
    assert f"note: of an earlier call, and not on the page: {left}" in said
    for name in ("panel-exact-2.png", "panel-exact-3.png", "measures.csv"):
        assert (tmp_path / name).read_bytes() == before[name]


def test_a_training_folder_says_its_images_also_by_the_model_in_it(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    changes = {"data.options": BIRDS, "data.transforms.img_size": 32, "model.reduce": 8, "out": str(folder)}
    folder.mkdir()
    (folder / "args.yaml").write_text(yaml.safe_dump(to_mapping(load_recipe("plumage-demo", changes))))
    save_pretrained(network(), folder / "model", SIX.classes)
    for place in (folder, folder / "model"):
        source = open_source(Explain(str(place)))
        assert (source.dataset.name, source.dataset.split, len(source.dataset)) == ("plumage", "test", 6)
        assert source.located
        assert source.dataset.transform.size == [32]
    assert len(open_source(Explain(str(folder), split="train", measure_count="all")).numbers) == 6


def test_a_short_rank_is_told_in_a_line(tmp_path, capsys, photos):
    save_pretrained(network(reduce=20), tmp_path / "model", SIX.classes)
    config = Explain(str(tmp_path / "model"), [str(photos)], count=1, rules=["vanilla"], out=str(tmp_path / "out"))
    run(config)
    err = capsys.readouterr().err
    assert err.count("note: the covariance of 20 channels from 4 × 4 = 16 positions has rank 15 at most") == 1
    rows = {(row["subset"], row["measure"]): row for row in table(tmp_path / "out" / "measures.csv")}
    assert rows["last:4", "corr"]["n_undefined"] == "3"
    html = (tmp_path / "out" / "gallery.html").read_text(encoding="utf-8")
    assert "n = 0,<br>3 undefined" in html


def test_the_part_that_a_model_itself_keeps_is_among_the_subsets(tmp_path, photos):
    save_pretrained(network(head_options={"subset": "top:5"}), tmp_path / "cut", SIX.classes)
    run(Explain(str(tmp_path / "cut"), images=[str(photos)], rules=["vanilla"], out=str(tmp_path / "out"), device="cpu"))
    page = (tmp_path / "out" / "gallery.html").read_text(encoding="utf-8")
    assert "subsets all, top:5, top:6, last:2; the model itself keeps top:5" in page


def test_two_processes_measure_what_one_does(checkpoint, tmp_path):
    def words(out):
        options = ["--data", "plumage", "--data_options", str(BIRDS).replace("False", "false"), "--rules", "vanilla"]
        return ["explain", checkpoint, *options, "--batch_size", "4", "--count", "1", "--device", "cpu", "--out", str(out)]

    two, one = tmp_path / "two", tmp_path / "one"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    done = subprocess.run(
        [*launcher, "eigengrain.cli.main", *words(two)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("means over 6 images") == 1  # one process speaks
    assert cli.main(words(one)) == 0
    together, alone = (table(out / "measures-images.csv") for out in (two, one))
    assert [row["image"] for row in together] == [row["image"] for row in alone]
    for mine, other in zip(together, alone, strict=True):
        for measure in ("mae", "object_energy", "gap"):
            if mine[measure]:
                assert float(mine[measure]) == pytest.approx(float(other[measure]), rel=2e-3, abs=1e-5)


# the command line


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["c", "--images", "a.jpg"], ["c", '--images=["a.jpg"]']),
        (
            ["c", "--images=a.jpg", "--rules", "vanilla", "deconv"],
            ["c", '--images=["a.jpg"]', '--rules=["vanilla", "deconv"]'],
        ),
        (["c", "--subsets", "[all,top:5]", "--count", "3"], ["c", "--subsets", "[all,top:5]", "--count", "3"]),
        (["c", "--rules=[vanilla]"], ["c", "--rules=[vanilla]"]),
        (["c", "--images", "ö [1].jpg", "b: c.png"], ["c", '--images=["ö [1].jpg", "b: c.png"]']),
    ],
)
def test_several_words_become_a_list(words, expected):
    assert expand(words) == expected


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


def fails(capsys, *words):
    """What is said in the one line of a command that cannot do what is asked."""
    assert cli.main(["explain", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("eigengrain: error: ")
    assert err.count("\n") == 1
    return err


def test_without_a_checkpoint_it_says_how_to_get_one(capsys):
    for words in ([], ["no/such/folder"], ["--data", "plumage"]):
        said = fails(capsys, *words)
        assert "make demo" in said
        assert "runs/demo/mpncov/model" in said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"images": ["a.png"], "data": "plumage"}, "give one of them"),
        ({"images": ["a.png"], "target": "label"}, "not known"),
        ({"cut": "exat"}, "did you mean 'exact'"),
        ({"split": "tset"}, "did you mean 'test'"),
        ({"scale": "rows"}, "did you mean 'row'"),
        ({"toward": "smal"}, "did you mean 'small'"),
        ({"rules": []}, "--rules is empty"),
        ({"rules": ["vanila"]}, "did you mean 'vanilla'"),
        ({"count": 0}, "--count must be at least 1"),
        ({"measure_count": -1}, "--measure_count must be at least 0"),
        ({"perturb": -1}, "--perturb must be at least 0"),
        ({"data_options": BIRDS}, "--data_options are for the data set that --data names"),
        ({"images": ["a.png"], "data_options": BIRDS}, "there is no --data"),
    ],
)
def test_options_that_do_not_fit(checkpoint, options, said):
    assert RULES == eg.explain.RULES  # written down twice, so that a mistake is said before torch is there
    with pytest.raises(ValueError, match=re.escape(said)):
        Explain(checkpoint, **options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"measures": ["cor"]}, "did you mean 'corr'"),
        ({"subsets": ["top:9"]}, "asks for 9 of 8 eigenvalues"),
        ({"subsets": ["most"]}, "cannot read eigenvalue subset 'most'"),
        ({"split_at": 8}, "--split_at must be from 1 to 7"),
        ({"target": "2"}, "the model has 2 classes, counted from 0"),
        ({"target": "predict"}, "did you mean 'predicted'"),
        ({"images": ["nowhere"]}, "nowhere: there is no such file"),
        ({"images": []}, "does not say its images: give --images, or --data"),
    ],
)
def test_options_that_do_not_fit_the_model_or_the_images(checkpoint, photos, tmp_path, options, said):
    config = Explain(checkpoint, **{"images": [str(photos)], "out": str(tmp_path / "out"), "device": "cpu"} | options)
    with pytest.raises(ValueError, match=re.escape(said)):
        run(config)


def test_a_perturbation_that_cannot_be_is_refused_before_anything_is_measured(checkpoint, photos, tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("nothing may be measured")

    monkeypatch.setattr(explain_measures, "survey", refuse)
    save_pretrained(network(head="gap", reduce=None), tmp_path / "gap", SIX.classes)
    common = {"images": [str(photos)], "subsets": ["all"], "perturb": 1, "device": "cpu", "out": str(tmp_path / "out")}
    with pytest.raises(ValueError, match="needs a model with a covariance head"):
        run(Explain(str(tmp_path / "gap"), **common))
    with pytest.raises(ValueError, match="lr must be a number above 0"):
        run(Explain(checkpoint, **common, perturb_lr=0.0))


def test_a_misspelt_option_and_a_misspelt_rule_are_one_line_each(checkpoint, photos, capsys, tmp_path):
    assert "unknown option '--colour'" in fails(capsys, checkpoint, "--colour", "red")
    said = fails(capsys, checkpoint, "--images", str(photos), "--rules", "vanila", "--out", str(tmp_path / "out"))
    assert "did you mean 'vanilla'" in said


def test_heads_without_eigenvalues(photos, tmp_path, capsys):
    for head, options in (("gap", {"reduce": None}), ("isqrt", {})):
        save_pretrained(network(head=head, **options), tmp_path / head, SIX.classes)
        common = [str(tmp_path / head), "--images", str(photos), "--out", str(tmp_path / "out")]
        said = fails(capsys, *common)
        assert f"the head '{head}' has no eigenvalues to choose 'top:" in said
        assert "--subsets [all]" in said
        assert cli.main(["explain", *common, "--subsets", "[all]", "--rules", "vanilla"]) == 0
        assert (tmp_path / "out" / "gallery.html").is_file()
        assert not (tmp_path / "out" / "measures.csv").exists()  # nothing that the maps could be compared with
        capsys.readouterr()


def test_a_network_without_rectifiers_refuses_deconv_in_one_line(photos, tmp_path, capsys):
    net = network("test_efficientnet", reduce=4)
    save_pretrained(net, tmp_path / "model", SIX.classes)
    common = [str(tmp_path / "model"), "--images", str(photos), "--out", str(tmp_path / "out")]
    said = fails(capsys, *common, "--rules", "vanilla", "deconv")
    assert "rule='deconv' is defined at rectifiers (ReLU) alone" in said
    assert "silu" in said
    assert cli.main(["explain", *common, "--rules", "vanilla", "--count", "1"]) == 0


def test_missing_packages_are_named(checkpoint, photos, capsys, monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    said = fails(capsys, checkpoint, "--images", str(photos))
    assert "captum and matplotlib: pip install 'eigengrain[explain]'" in said


def test_classes_by_name_come_before_numbers():
    net = network()
    net.class_names = ["7", "0"]
    assert chosen_class(Explain(".", target="0"), net) == 1
    net.class_names = None
    assert chosen_class(Explain(".", target="0"), net) == 0


def test_nothing_is_left_of_a_folder_that_cannot_be_written(checkpoint, photos, tmp_path, capsys):
    (tmp_path / "file").write_text("in the way")
    said = fails(capsys, checkpoint, "--images", str(photos), "--out", str(tmp_path / "file"))
    assert "--out" in said
    assert Path(tmp_path / "file").read_text() == "in the way"
