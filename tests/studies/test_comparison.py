"""The studies branch and recipe: differences with their errors, settings as data, images in folders, other lengths."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from scipy import stats
from studies.__main__ import main
from studies.all_studies import find_study
from studies.comparison import Difference, difference_of_proportions, paired_difference
from studies.cost import estimate_cost
from studies.runs import Job, data_name, describe_run, job_name, run_jobs
from studies.settings import StudyOptions, base_config, find_images, has_recipe, modern_recipe
from studies.study import Setup

from eigengrain.data import Transforms
from eigengrain.errors import ArgumentError, FileError, UnknownName
from eigengrain.recipes import list_recipes, load_recipe
from eigengrain.training.config import Data, Train, override
from studies import runs
from training.small_run import small

SMOKE = ["--scale", "smoke", "--device", "cpu"]
pytestmark = pytest.mark.usefixtures("surroundings")


def setup_of(tmp_path, seeds=(0, 1, 2), **changes) -> Setup:
    options = {"scale": "modern", "data": "images", "datasets": ["cub"]} | changes
    return Setup(StudyOptions(out=str(tmp_path), **options), seeds, ("cub",))


def write(setup, job, top1, val=None, images=None, **more):
    """What a finished run of a job leaves."""
    folder = setup.out / "records"
    folder.mkdir(parents=True, exist_ok=True)
    scores = {} if top1 is None else {"test_top1": top1, "val_top1": top1 if val is None else val}
    parts = {"epochs": [], "environment": {}, "analyses": {}, "images": images or {}, "seconds": 1.0}
    values = {"name": job.name, "config": describe_run(job.config), "scores": scores} | parts
    (folder / f"{job.name}.json").write_text(json.dumps(values | more))


def test_a_paired_difference_is_the_mean_of_the_differences_with_its_error():
    draw = np.random.default_rng(0)
    ours, theirs = draw.normal(85, 1, 7), draw.normal(84, 1, 7)
    outcome = paired_difference(dict(enumerate(ours)), dict(enumerate(theirs)) | {99: 0.0})
    assert outcome.count == 7
    assert outcome.points == pytest.approx(np.mean(ours - theirs), rel=1e-12)
    assert outcome.error == pytest.approx(stats.sem(ours - theirs), rel=1e-12)
    assert outcome.points / outcome.error == pytest.approx(stats.ttest_rel(ours, theirs).statistic, rel=1e-12)
    assert paired_difference({0: 1.0}, {1: 1.0}) is None
    assert math.isnan(paired_difference({0: 2.0}, {0: 1.0}).error)


def test_the_error_of_two_proportions_is_that_of_drawn_ones():
    draw = np.random.default_rng(0)
    samples = 100 * (draw.binomial(599, 0.82, 200_000) - draw.binomial(599, 0.80, 200_000)) / 599
    outcome = difference_of_proportions(82.0, 80.0, 599)
    assert outcome.points == 2.0
    assert outcome.error == pytest.approx(samples.std(), rel=0.01)
    assert math.isnan(difference_of_proportions(82.0, 80.0, None).error)


@pytest.mark.parametrize(
    ("points", "distinguished"), [(0.0, False), (1.9, False), (-1.9, False), (2.1, True), (-2.1, True)]
)
def test_a_difference_is_distinguished_beyond_two_errors(points, distinguished):
    assert Difference(points, 1.0, 3).is_distinguished == distinguished
    assert not Difference(points, math.nan, 1).is_distinguished
    assert not Difference(0.0, 0.0, 3).is_distinguished


def test_the_branch_is_compared_over_seeds(tmp_path):
    setup, study = setup_of(tmp_path), find_study("branch")
    rows = {row.head: row for row in study.rows(setup)}
    assert all(row.calibrate and row.rates == (0.3, 1.0, 3.0) for row in rows.values())
    tests = {
        "mpncov": (85.0, 85.4, 85.2),
        "mpncov+seb": (86.0, 86.2, 86.4),
        "hcov": (84.0, 86.0, None),
        "hcov+seb": (85.0,),
    }
    for head, values in tests.items():
        for job, val in zip(setup.jobs(rows[head], "fair"), (70.0, 72.0, 71.0), strict=True):
            write(setup, job, 50.0, val)
        for job, top1 in zip(setup.jobs(rows[head], "fair")[3:], values, strict=False):
            assert (job.config.optimiser.classifier_lr_scale, job.config.data.val_fraction) == (1, 0)
            write(setup, job, top1)
    lines = {line["head"]: line for line in study.report(setup).rows}
    branch = lines["mpncov+seb"]
    assert (branch["mean"], branch["low"], branch["high"], branch["n"], branch["rate"]) == (86.2, 86.0, 86.4, 3, 1)
    for name in ("mpncov", "branch"):
        assert branch[f"difference_{name}"] == 1.0
        assert branch[f"error_{name}"] == pytest.approx(stats.sem([1.0, 0.8, 1.2]), abs=1e-4)
        assert branch[f"pairs_{name}"] == 3
    assert (lines["hcov"]["n"], lines["hcov"]["pairs_mpncov"], lines["hcov"]["pairs_branch"]) == (2, 2, 0)
    assert (lines["hcov+seb"]["difference_branch"], lines["hcov+seb"]["error_branch"]) == (1.0, "")
    assert (lines["isqrt"]["mean"], lines["isqrt"]["pairs_mpncov"]) == ("not run", 0)
    assert (lines["mpncov+seb"]["paper"], lines["hcov"]["paper"], lines["mpncov"]["reader"]) == (86.2, "", "cub")
    report = study.report(setup)
    assert len(report.notes) == len(study.notes) + 2  # one sentence per head with the branch
    report.draw(tmp_path / "branch.png")


def test_rates_of_the_command_replace_those_of_a_study(tmp_path):
    for name in ("branch", "transformers"):
        setup = setup_of(tmp_path, rates=[3.0, 10.0, 20.0])
        assert {row.rates for row in find_study(name).rows(setup)} == {(3.0, 10.0, 20.0)}


def test_a_run_that_diverged_was_run(tmp_path):
    setup = setup_of(tmp_path, seeds=(0,), rates=[1])
    [row] = [row for row in find_study("branch").rows(setup) if row.head == "mpncov"]
    [job] = setup.jobs(row, "fair")
    write(setup, job, None)
    [line] = [line for line in find_study("branch").report(setup).rows if line["head"] == "mpncov"]
    assert (line["mean"], line["n"], line["diverged"]) == ("diverged", 0, 1)
    rows = {row.method: row for row in find_study("recipe").rows(setup)}
    [job] = setup.jobs(rows["adamw"], "fair")
    write(setup, job, None)
    report = find_study("recipe").report(setup)
    lines = {line["setting"]: line for line in report.rows}
    assert (lines["adamw"]["val_top1"], lines["adamw"]["n"], lines["adamw"]["diverged"]) == ("diverged", 0, 1)
    assert (lines["ema"]["val_top1"], lines["ema"]["n"], lines["ema"]["diverged"]) == ("not run", 0, 0)
    [shown] = [line for line in report.tables[0].frame.to_dict("records") if line["setting"] == "adamw"]
    assert (shown["validation, %"], shown["validation: to the base"]) == ("diverged", "not run")


def test_a_single_rate_is_not_searched(tmp_path):
    setup = setup_of(tmp_path, seeds=(0, 1), rates=[1])
    [row] = [row for row in find_study("branch").rows(setup) if row.head == "hcov"]
    jobs = setup.jobs(row, "fair")
    assert [(job.rate, job.config.seed, job.config.data.val_fraction) for job in jobs] == [(1, 0, 0), (1, 1, 0)]


def test_rates_may_be_chosen_by_shorter_runs(tmp_path):
    setup = setup_of(tmp_path, seeds=(0,), search_epochs=5)
    [row] = [row for row in find_study("branch").rows(setup) if row.head == "mpncov"]
    for job, val in zip(setup.jobs(row, "fair"), (70.0, 72.0, 71.0), strict=True):
        assert (job.config.epochs, job.config.data.val_fraction) == (5, 0.1)
        write(setup, job, 50.0, val)
    [final] = setup.jobs(row, "fair")[3:]
    assert (final.rate, final.config.epochs, final.config.data.val_fraction) == (1, 40, 0)
    count, seconds, _ = estimate_cost(
        find_study("branch"), replace(setup, options=replace(setup.options, heads=["mpncov"])), {}
    )
    assert (count, round(seconds)) == (4, round((3 * 5 * round(0.9 * 5994) + 40 * 5994) / 1000))
    [base, *_] = find_study("recipe").rows(setup)
    assert setup.search(base)[0][0].config.epochs == 40


def test_scale_modern_is_the_recipe(tmp_path):
    run = base_config(StudyOptions(scale="modern", weights="resnet50.safetensors", device="cpu"), "resnet50", "cub")
    recipe = load_recipe("birds-resnet50-modern")
    assert (run.epochs, run.batch_size, run.optimiser, run.data.transforms) == (
        *(recipe.epochs, recipe.batch_size),
        *(recipe.optimiser, recipe.data.transforms),
    )
    assert (run.model.weights, run.model.stride_on, run.model.head) == ("resnet50.safetensors", "1x1", "mpncov")
    assert (run.compile, run.cuda_graphs, run.cache) == (False, False, "device")
    assert job_name(run) == f"modern-resnet50-mpncov-x1-e{recipe.epochs}-all-s0"


@pytest.mark.parametrize("data", ["cars", "dogs"])
def test_scale_modern_of_other_data_sets_needs_their_recipe(data, tmp_path):
    options = StudyOptions(scale="modern", out=str(tmp_path))
    there = data in {row.data for row in find_study("branch").rows(Setup(options))}
    assert there == has_recipe(options, data) == (modern_recipe(data) in list_recipes())
    if not there:
        with pytest.raises(UnknownName):
            base_config(options, "resnet50", data)
        pytest.skip(f"there is no recipe {modern_recipe(data)}")
    assert data_name(base_config(options, "resnet50", data).data) == data


def test_other_lengths_and_sizes_have_other_names(tmp_path):
    usual, short, small_images = (
        setup_of(tmp_path, seeds=(0,), scale="small", rates=[1], **changes)
        for changes in ({}, {"epochs": 3}, {"epochs": 3, "img_size": 224})
    )
    [row] = [row for row in find_study("branch").rows(usual) if row.head == "mpncov"]
    names = [setup.jobs(row, "fair")[0].name for setup in (usual, short, small_images)]
    assert names[0] == "resnet50-mpncov-calibrated-x1-e15-all-s0"
    assert names[1] == "resnet50-mpncov-calibrated-x1-e3-all-s0"
    assert names[2] == "resnet50-mpncov-calibrated-224px-x1-e3-all-s0"
    [job] = small_images.jobs(row, "fair")
    assert (job.config.epochs, job.config.data.transforms.img_size, job.config.data.transforms.resized) == (3, 224, 224)
    for name in ("epochs", "img_size", "search_epochs"):
        with pytest.raises(ArgumentError) as error:
            StudyOptions(**{name: 0})
        assert error.value.argument == name


@pytest.mark.parametrize("name", ["branch", "transformers", "calibration"])
@pytest.mark.parametrize("scale", ["smoke", "quick"])
def test_other_lengths_and_sizes_are_those_of_every_run(name, scale, tmp_path):
    setup = setup_of(tmp_path, scale=scale, datasets=None, epochs=3, img_size=96)
    rows = find_study(name).rows(setup)
    jobs = [
        job for row in rows for job in (*setup.jobs(row, "fair"), *(setup.pretraining(row, "fair") if row.pretrain else ()))
    ]
    assert {job.config.epochs for job in jobs} == {3}
    assert {job.config.data.transforms.img_size for job in jobs} == {96}
    assert {job.config.model.img_size for job in jobs} <= {None, 96}
    assert all("-96px" in job.name for job in jobs)


@pytest.fixture
def photographs(tmp_path):
    """A folder with the data sets cub and cars as train/CLASS and test/CLASS."""
    for place in ("cub", "cars"):
        for split, count in (("train", 4), ("test", 2)):
            for name, colour in (("a", "red"), ("b", "green")):
                folder = tmp_path / "images" / place / split / name
                folder.mkdir(parents=True)
                for k in range(count):
                    Image.new("RGB", (40, 32), colour).save(folder / f"{k}.png")
    return tmp_path / "images"


def test_data_sets_may_be_folders_of_classes(photographs, tmp_path):
    root = str(photographs)
    assert find_images(root, "cars") == ("folder", str(photographs / "cars"))
    assert find_images(root, "dogs") == ("dogs", root)
    assert find_images(None, "cars") == ("cars", None)
    (photographs / "dogs" / "train").mkdir(parents=True)
    assert find_images(root, "dogs") == ("dogs", root)
    tree, official = (base_config(StudyOptions(data=data), "resnet50", "cars") for data in (root, "elsewhere"))
    assert (tree.data.name, tree.data.root, data_name(tree.data)) == ("folder", str(photographs / "cars"), "cars")
    assert job_name(tree) == job_name(official) == "cars-resnet50-mpncov-x10-e15-all-s0"
    birds = base_config(StudyOptions(data=root), "resnet50", "cub")
    assert job_name(birds) == "resnet50-mpncov-x20-e15-all-s0"


def test_a_record_says_how_its_images_were_read(photographs, tmp_path):
    name, root = find_images(str(photographs), "cars")
    data = Data(name, root, val_fraction=0.25, transforms=Transforms("scripts", 32))
    config = replace(small("unused", epochs=1), data=data)
    job = Job(job_name(config), config, ("size-accuracy",))
    record = run_jobs(lambda: [job], tmp_path)[job.name]
    assert record["name"].startswith("cars-")
    assert (record["config"]["data"]["name"], record["config"]["data"]["root"]) == ("folder", None)
    assert record["images"] == {"train": 6, "val": 2, "test": 4}
    measured = record["analyses"]["size-accuracy"]
    assert [(size, set(each)) for size, each in measured.items()] == [(s, {"val_top1", "test_top1"}) for s in ("37", "41")]


def test_records_of_folders_are_shown_and_not_continued_with_another_layout(photographs, tmp_path):
    tree = setup_of(tmp_path, seeds=(0,), rates=[1], data=str(photographs))
    [row] = [row for row in find_study("branch").rows(tree) if row.head == "mpncov"]
    [job] = tree.jobs(row, "fair")
    write(tree, job, 85.0)
    other = setup_of(tmp_path, seeds=(0,), rates=[1])
    with pytest.raises(FileError):
        other.scores(row, "fair")
    shown = replace(other, available=None)
    assert shown.scores(row, "fair")[0].values == (85.0,)
    assert {line["head"]: line["reader"] for line in find_study("branch").report(shown).rows}["mpncov"] == "folder"


def test_an_option_is_replaced_by_its_dotted_name():
    run = override(Train(), {"optimiser.lr": 0.1, "data.transforms.kind": "imagenet", "data.transforms.scale": [0.3, 1.0]})
    assert (run.optimiser.lr, run.data.transforms.scale, run.epochs) == (0.1, (0.3, 1.0), Train().epochs)
    with pytest.raises(UnknownName) as error:
        override(Train(), {"model.mid_levle": True})
    assert error.value.name == "model.mid_levle"
    with pytest.raises(ArgumentError):
        override(Train(), {"epochs.more": 3})


def test_settings_are_data(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("double: {optimiser.lr: 0.012, cutmix: 1.0}\nsame: {label_smoothing: 0.1}\n")
    setup = setup_of(tmp_path, seeds=(0,), settings=str(file))
    rows = {row.method: row for row in find_study("recipe").rows(setup)}
    assert list(rows) == ["base", "double"]  # the recipe has this label smoothing already
    [base], [double] = (setup.jobs(rows[name], "fair") for name in ("base", "double"))
    assert (double.config.optimiser.lr, double.config.cutmix, double.config.data.val_fraction) == (0.012, 1.0, 0.1)
    assert override(double.config, {"optimiser.lr": base.config.optimiser.lr, "cutmix": 0}) == base.config
    assert (base.name, double.name) == (
        "modern-resnet50-mpncov-calibrated-base-x1-e40-val-s0",
        "modern-resnet50-mpncov-calibrated-double-x1-e40-val-s0",
    )
    assert (base.analyses, double.analyses) == (("size-accuracy",), ())


@pytest.mark.parametrize(
    "text",
    [
        "wild: {model.mid_levle: true}",
        "wild: {epochs: many}",
        "wild: 3",
        "a wild one: {epochs: 3}",
        "wild: {epochs.more: 3}",
        "wild: {model.head: nope}",
        "base: {epochs: 3}",
    ],
)
def test_a_wrong_setting_is_refused_before_anything_is_trained(text, trained_runs, capsys, tmp_path):
    (tmp_path / "wrong.yaml").write_text(text)
    assert main(["recipe", *SMOKE, "--settings", str(tmp_path / "wrong.yaml"), "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert trained_runs == []


def test_settings_of_another_study_are_refused(capsys, tmp_path):
    assert main(["paths", *SMOKE, "--settings", "any.yaml", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_settings_are_compared_with_the_base(tmp_path):
    setup, study = setup_of(tmp_path, seeds=(0, 1)), find_study("recipe")
    rows = {row.method: row for row in study.rows(setup)}
    images = {"train": 5395, "val": 599, "test": 5794}
    values = {
        "base": ((84.0, 80.0), (85.0, 82.0)),
        "cutmix": ((86.0, 86.0), (87.0, 88.0)),
        "ema": ((84.0, 80.5), (None, None)),
    }
    for name, each in values.items():
        for job, (top1, val) in zip(setup.jobs(rows[name], "fair"), each, strict=True):
            larger = {"s0": {"val_top1": 83.0, "test_top1": 85.5}, "s1": {"val_top1": 84.0, "test_top1": 86.5}}
            sizes = {"512": larger[job.name[-2:]]} if "-base-" in job.name else {}
            write(setup, job, top1, val, images, analyses={"size-accuracy": sizes} if sizes else {})
    report = study.report(setup)
    lines = {line["setting"]: line for line in report.rows}
    cutmix = lines["cutmix"]
    assert (cutmix["n"], cutmix["val_top1"], cutmix["test_top1"]) == (2, 87.0, 86.5)
    assert (cutmix["difference_val_top1"], cutmix["difference_test_top1"]) == (6.0, 2.0)
    expected = difference_of_proportions(87.0, 81.0, 599)
    assert cutmix["error_val_top1"] == pytest.approx(expected.error, abs=1e-4)
    assert (cutmix["pairs_val_top1"], cutmix["pairs_test_top1"]) == (599, 5794)
    assert (lines["ema"]["n"], lines["ema"]["difference_val_top1"]) == (1, -0.5)
    assert lines["mixup"]["val_top1"] == "not run"
    [larger] = [line for name, line in lines.items() if "512" in name]
    assert (larger["val_top1"], larger["difference_val_top1"], larger["n"]) == (83.5, 2.5, 2)
    report.draw(tmp_path / "recipe.png")


def test_both_studies_run_and_print_again_from_records(trained_runs, tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "POLL", 0.01)
    options = [*SMOKE, "--datasets", "cub", "--heads", "mpncov,mpncov+seb", "--seeds", "0,1", "--out"]
    tables = {}
    for name in ("branch", "recipe"):
        assert main([name, *options, str(tmp_path)]) == 0
        tables[name] = (tmp_path / f"{name}.csv").read_bytes()
    done = len(trained_runs)
    assert done == len(set(trained_runs))
    assert any("-cutmix-" in name for name in trained_runs)
    for name, table in tables.items():
        again = tmp_path / "again"
        assert main([name, "--only_report", *options, str(again), "--records", str(tmp_path / "records")]) == 0
        assert (again / f"{name}.csv").read_bytes() == table
    assert len(trained_runs) == done
