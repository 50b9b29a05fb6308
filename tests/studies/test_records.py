"""From rows to runs and back: names, scales, choices of rates, and what is shown of records that are not complete."""

import json
from dataclasses import replace

import pytest
import torch
from studies.accuracy import LENGTHS, accuracy_report, format_scores, gcp_methods_report
from studies.all_studies import STUDIES, find_study
from studies.analyses import list_subsets
from studies.cost import STATED, estimate_cost, recorded_speeds
from studies.learning import comparable_records
from studies.runs import Job, describe_run, job_name
from studies.settings import NETWORKS, TITLES, StudyOptions, base_config
from studies.study import Row, Setup

from eigengrain.errors import FileError
from eigengrain.heads import create_head
from eigengrain.recipes import load_recipe

BIRDS = Row("cub", "resnet50", "MPN-COV", "mpncov", paper=84.3, core=True)
BRANCH = replace(BIRDS, method="MPN-COV + SEB", head="mpncov+seb", paper=86.2)
EVERYTHING = ("cub", "aircraft", "cars", "dogs", "inat2017", "imagenet")


def texts(table):
    return table.frame.to_numpy().tolist()


def setup_of(tmp_path, **changes) -> Setup:
    return Setup(StudyOptions(out=str(tmp_path), data="images", **changes), (0, 1, 2), EVERYTHING)


def record(setup, job, top1, **more):
    """Write what a finished run of a job would leave."""
    folder = setup.out / "records"
    folder.mkdir(parents=True, exist_ok=True)
    split = "val" if job.config.data.val_fraction else "test"
    values = {
        "name": job.name,
        "config": describe_run(job.config),
        "scores": {"test_top1": top1, f"{split}_top1": top1},
        "seconds": 100.0,
        "epochs": [{"epoch": 1.0, "images_per_second": 500.0}],
        "environment": {"torch": "2", "device_name": "a device", "eigengrain": "0", "date": "today"},
        "analyses": {},
    }
    (folder / f"{job.name}.json").write_text(json.dumps(values | more))


def test_the_base_of_birds_at_scale_small_is_the_one_that_was_used(tmp_path):
    run = base_config(StudyOptions(weights="resnet50.safetensors"), "resnet50", "cub")
    assert (run.epochs, run.batch_size, run.amp, run.cache, run.eval_every) == (15, 20, "bf16", "device", 100)
    assert (run.optimiser.lr, run.optimiser.weight_decay, run.schedule.kind, run.schedule.warmup_epochs) == (
        *(6e-3, 1e-4),
        *("cosine", 1),
    )
    assert (run.model.reduce, run.model.last_stride, run.model.stride_on) == (256, 1, "1x1")
    assert (run.data.transforms.kind, run.data.transforms.img_size) == ("scripts", 448)
    ten = replace(run, optimiser=replace(run.optimiser, classifier_lr_scale=10.0))
    assert job_name(ten) == "resnet50-mpncov-x10-e15-all-s0"


def test_weights_may_be_a_file_or_a_folder(tmp_path):
    (tmp_path / "resnet101.safetensors").touch()
    options = StudyOptions(weights=str(tmp_path))
    assert base_config(options, "resnet101", "cub").model.weights == str(tmp_path / "resnet101.safetensors")
    assert base_config(options, "resnet50", "cub").model.pretrained
    (tmp_path / "resnet101.json").touch()  # what somebody has noted of them
    assert base_config(options, "resnet101", "cub").model.weights == str(tmp_path / "resnet101.safetensors")
    one = StudyOptions(weights="mine.pth")
    assert base_config(one, "resnet50", "cub").model.weights == "mine.pth"
    assert base_config(one, "vgg16", "cub").model.weights is None


def test_the_weights_file_decides_whether_a_vgg_has_batch_normalisation(tmp_path):
    """Its runs have the same names either way, so that records of one match the weights of the other."""
    usual = base_config(StudyOptions(weights=str(tmp_path)), "vgg16", "cub")
    assert usual.model.backbone == "vgg16_bn.tv_in1k"
    (tmp_path / "vgg16.safetensors").touch()
    plain = base_config(StudyOptions(weights=str(tmp_path)), "vgg16", "cub")
    assert (plain.model.backbone, plain.model.pretrained) == ("vgg16", False)
    assert plain.optimiser.lr < usual.optimiser.lr
    (tmp_path / "vgg16_bn.safetensors").touch()
    assert base_config(StudyOptions(weights=str(tmp_path)), "vgg16", "cub").model.backbone == "vgg16_bn"
    assert job_name(plain) == job_name(usual) == "vgg16-mpncov-x20-e15-all-s0"
    report = replace(setup_of(tmp_path), available=None)
    record(report, Job(job_name(plain), plain), 80.0)
    assert report.record(Job(job_name(usual), usual))["scores"]["test_top1"] == 80.0


@pytest.mark.parametrize("scale", ["small", "paper"])
def test_every_row_has_a_run_at_every_scale_and_no_two_share_a_name(scale, tmp_path):
    setup = setup_of(tmp_path, scale=scale)
    names: dict[str, dict[str, object]] = {}
    for study in STUDIES:
        for row in study.rows(setup):
            if row.head is None:
                continue
            assert row.backbone in NETWORKS
            for protocol in ("fair", "paper"):
                for job in setup.jobs(row, protocol):
                    assert names.setdefault(job.name, describe_run(job.config)) == describe_run(job.config), job.name


def test_the_papers_recipes_are_those_of_scale_paper():
    birds, planes = (base_config(StudyOptions(scale="paper"), "resnet152", data) for data in ("cub", "aircraft"))
    assert (birds.epochs, birds.batch_size, birds.schedule.drops, birds.optimiser.classifier_lr_scale) == (
        100,
        10,
        [50],
        20,
    )
    assert (planes.epochs, planes.batch_size, planes.optimiser.weight_decay) == (50, 8, 1e-3)
    assert birds.model.backbone == "resnet152.tv_in1k"
    assert base_config(StudyOptions(scale="paper"), "vgg16", "cars").epochs == 150
    assert base_config(StudyOptions(scale="paper"), "alexnet", "imagenet").model.backbone == "tv:alexnet"


def test_transformers_of_table_4_are_trained_as_the_paper_of_transfg_says(tmp_path):
    setup = setup_of(tmp_path, scale="paper", protocol="paper")
    rows = {(row.data, row.method): row for row in find_study("sota").rows(setup) if row.backbone == "vit"}
    recipe = load_recipe("birds-vit_base-transfg")
    for data, lr, size in (("cars", 3e-2, 448), ("dogs", 3e-3, 448), ("inat2017", 1e-2, 304)):
        for method, head, stride in (("ViT", "token", None), ("TransFG", "transfg", 12), ("AFTrans", "aftrans", None)):
            [first, _, _] = setup.jobs(rows[data, method], "paper")
            run = first.config
            assert (run.model.head, run.model.backbone_options.get("patch_stride")) == (head, stride)
            assert (run.data.name, run.optimiser.lr) == (data, lr)
            assert (run.model.img_size, run.data.transforms.img_size, run.data.transforms.resize) == (
                *(size, size),
                {448: 600, 304: 400}[size],
            )
            same = ("epochs", "batch_size", "clip_grad", "schedule", "select")
            assert [getattr(run, name) for name in same] == [getattr(recipe, name) for name in same]
            assert (run.model.backbone, run.model.pretrained) == (recipe.model.backbone, True)


def test_transformers_at_two_sizes_with_calibrated_vectors(tmp_path):
    """One run per seed on drawn birds; on photographs the runs at 224 pixels choose the rate of both sizes."""
    (tmp_path / "deit_tiny_patch16_224.safetensors").touch()
    setup = setup_of(tmp_path, scale="quick", weights=str(tmp_path))
    setup = replace(setup, available=("cub", "plumage"))
    rows = find_study("transformers").rows(setup)
    searches, finals = {}, []
    for row in rows:
        jobs = setup.jobs(row, "fair")
        run = jobs[0].config
        assert run.model.calibrate
        assert run.model.img_size == run.data.transforms.img_size == (row.rate_size or row.img_size)
        beside = row.head in ("mpncov+seb", "svpn")
        assert run.model.class_token == ("beside" if beside else None)
        if row.data == "plumage":
            assert [(job.rate, job.config.seed) for job in jobs] == [(1, seed) for seed in setup.seeds]
            assert not any(job.config.data.val_fraction for job in jobs)
            finals += [job.name for job in jobs]
            record(setup, jobs[0], 50.0)
            [score] = setup.scores(row, "fair")
            assert (score.rate, score.chosen, score.values) == (1, None, (50.0,))
        else:
            search, last = jobs[:3], jobs[3:]
            assert [(job.rate, job.config.data.val_fraction) for job in search] == [(rate, 0.1) for rate in (0.1, 0.3, 1)]
            assert {(job.config.model.img_size, job.config.data.transforms.resize) for job in search} == {(224, 256)}
            assert run.model.weights == str(tmp_path / "deit_tiny_patch16_224.safetensors")
            assert (run.epochs, run.amp, run.cache, run.clip_grad) == (7, "bf16", "device", 1.0)
            searches.setdefault(row.head, []).append(search)
            if row.img_size == 224:
                assert last == []  # before the rate is chosen
                for job, score in zip(search, (60.0, 62.0, 61.0), strict=True):
                    record(setup, job, score)
                last = setup.jobs(row, "fair")[3:]
            assert [(job.rate, job.config.seed) for job in last] == [(0.3, seed) for seed in setup.seeds]
            assert not any(job.config.data.val_fraction for job in last)
            sizes = {(job.config.model.img_size, job.config.data.transforms.img_size) for job in last}
            assert sizes == {(row.img_size, row.img_size)}
            assert {job.config.data.transforms.resize for job in last} == {{224: 256, 448: 512}[row.img_size]}
            finals += [job.name for job in last]
    assert [row.img_size for row in rows if row.data == "cub"] == [224] * 5 + [448] * 5
    assert len(searches) == 5
    assert all(small == large for small, large in searches.values())
    names = [job.name for search, _ in searches.values() for job in search] + finals
    assert len(set(names)) == len(names) == 5 * 3 + len(rows) * len(setup.seeds)


def test_the_last_runs_are_planned_when_the_rate_is_chosen(tmp_path):
    setup = setup_of(tmp_path)
    tried = setup.jobs(BIRDS, "fair")
    assert [job.config.optimiser.classifier_lr_scale for job in tried] == [3, 10, 20]
    for job, score in zip(tried, (70.0, 72.0, 71.0), strict=True):
        record(setup, job, score)
    planned = setup.jobs(BIRDS, "fair")
    assert [job.name for job in planned[3:]] == [f"resnet50-mpncov-x10-e15-all-s{seed}" for seed in (0, 1, 2)]
    for job, score in zip(planned[3:], (80.0, 82.0, 81.5), strict=True):
        record(setup, job, score)
    [score] = setup.scores(BIRDS, "fair")
    assert (score.rate, score.chosen, score.values) == (10, True, (80.0, 82.0, 81.5))
    assert format_scores([score]) == "81.2 (80.0 to 82.0, 3 runs, ×10)"


def test_the_grid_goes_on_while_its_edge_is_best(tmp_path):
    """Downwards and upwards by factors of three, until the best rate has worse ones on both sides."""
    for edge, values, beyond in (("low", (70.0, 60.0, 50.0), (1.0, 0.333)), ("high", (50.0, 60.0, 70.0), (60.0, 180.0))):
        setup = setup_of(tmp_path / edge)
        for job, top1 in zip(setup.jobs(BIRDS, "fair"), values, strict=True):
            record(setup, job, top1)
        assert setup.scores(BIRDS, "fair") == []
        for rate, top1 in zip(beyond, (75.0, 72.0), strict=True):
            further = setup.jobs(BIRDS, "fair")[-1]
            assert further.config.optimiser.classifier_lr_scale == pytest.approx(rate)
            assert further.config.data.val_fraction == 0.1
            record(setup, further, top1)
        finals = setup.jobs(BIRDS, "fair")[5:]
        assert [job.config.optimiser.classifier_lr_scale for job in finals] == [beyond[0]] * 3
        assert not any(job.config.data.val_fraction for job in finals)


def test_the_search_is_a_study_of_its_own(tmp_path):
    """It trains no network beyond the search, and shows its results so far."""
    setup = replace(setup_of(tmp_path, datasets=["cub"]), available=("cub",))
    study = find_study("rates")
    planned = study.plan(setup)
    assert all(job.config.data.val_fraction for job in planned)
    [plain] = [row for row in study.rows(setup) if row.data == "cub" and row.method == "MPN-COV"]
    for job, top1 in zip(setup.search(plain)[0], (70.0, 60.0, None), strict=True):
        scores = {"val_top1": top1, "test_top1": 1.0} if top1 else {}
        record(setup, job, top1, scores=scores)
    assert len(study.plan(setup)) == len(planned) + 1  # the lowest was best: a lower one
    outcome = study.report(setup)
    [table] = outcome.tables
    lines = {row[0]: row[1:] for row in texts(table)}
    assert lines["MPN-COV, ×1"] == ["not run", "not run"]
    assert lines["MPN-COV, ×3"] == ["70.0", "1.0"]
    assert lines["MPN-COV, ×20"] == ["diverged", "diverged"]
    [beside] = [job for job in planned if job.name == "resnet50-mpncov-x46-e15-val-s0"]
    record(setup, beside, 80.0, scores={"val_top1": 80.0, "test_top1": 3.0})  # better, and no part of the choice
    record(setup, setup.search(plain)[0][-1], 65.0, scores={"val_top1": 65.0, "test_top1": 2.0})
    outcome = study.report(setup)
    chosen = {row["rate"]: row["chosen"] for row in outcome.rows if row["method"] == "MPN-COV"}
    assert chosen == {1.0: 0, 3.0: 1, 10.0: 0, 20.0: 0, 46.0: 0}
    assert ["MPN-COV, ×3 (chosen)", "70.0", "1.0"] in texts(outcome.tables[0])
    outcome.draw(tmp_path / "rates.png")
    assert find_study("rates").plan(replace(setup, options=replace(setup.options, protocol="paper"))) == []


def chosen_at_ten(setup, row):
    """Records of the runs by which a rate is chosen, with ×10 as the best."""
    for job, top1 in zip(setup.jobs(row, "fair"), (60.0, 70.0, 65.0), strict=True):
        record(setup, job, top1)


def test_a_gain_is_that_of_one_protocol(tmp_path):
    setup = setup_of(tmp_path)
    chosen_at_ten(setup, BIRDS)
    for job in setup.jobs(BIRDS, "fair")[3:]:
        record(setup, job, 80.0)
    for job in setup.jobs(BRANCH, "paper"):
        record(setup, job, 86.0)
    assert "Birds +1.5 (ours: not run)" in gcp_methods_report(setup, [BIRDS, BRANCH]).notes[-1]
    for job in setup.jobs(BIRDS, "paper"):
        record(setup, job, 85.0)
    assert "(ours: +1.0 over 1 backbone)" in gcp_methods_report(setup, [BIRDS, BRANCH]).notes[-1]
    chosen_at_ten(setup, BRANCH)
    for job in setup.jobs(BRANCH, "fair")[3:]:
        record(setup, job, 80.5)
    assert "(ours: +0.5 over 1 backbone)" in gcp_methods_report(setup, [BIRDS, BRANCH]).notes[-1]


def test_a_report_finds_every_seed(tmp_path):
    """Whatever its number, also if the options do not name it."""
    setup = setup_of(tmp_path)
    chosen_at_ten(setup, BIRDS)
    for job in replace(setup, seeds=(3, 42)).jobs(BIRDS, "fair")[3:]:
        record(setup, job, float(job.config.seed))
    assert setup.for_report().scores(BIRDS, "fair")[0].values == (3.0, 42.0)


@pytest.mark.parametrize("study", [study for study in STUDIES if study.measure is None], ids=lambda study: study.name)
def test_a_study_of_some_of_its_data_sets_has_no_lines_of_the_others(study, tmp_path):
    everything = Setup(StudyOptions(out=str(tmp_path)))
    last = study.rows(everything)[-1].data
    some = Setup(StudyOptions(out=str(tmp_path), datasets=[last]))
    rows = [row for row in study.report(everything).rows if row["data"] == TITLES[last]]
    assert study.report(some).rows == rows
    assert len(study.report(some).tables) <= len(study.report(everything).tables)


def test_the_grid_does_not_go_on_for_ever(tmp_path):
    """Three rates beyond it at most, as where no rate works."""
    setup = setup_of(tmp_path)
    for _ in range(6):
        for job in setup.jobs(BIRDS, "fair"):
            record(setup, job, None, scores={})
    rates = [job.config.optimiser.classifier_lr_scale for job in setup.jobs(BIRDS, "fair")]
    assert rates == [3.0, 10.0, 20.0, 1.0, 0.333, 0.111, *[0.111] * 3]


@pytest.mark.parametrize("head", ["bcnn", "bcnn-improved", "cbp", "kp", "monet", "run"])
def test_heads_with_vectors_of_length_1_are_tried_at_higher_rates(head, tmp_path):
    vectors = create_head(head, in_channels=8)(torch.rand(2, 8, 4, 4))
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(2))
    setup = setup_of(tmp_path)
    [row] = [replace(BIRDS, head=head, length=LENGTHS[head])]
    assert setup.grid(row) == pytest.approx([300, 1000, 2000])


def test_a_factor_that_makes_vectors_longer_is_tried_at_lower_rates(tmp_path):
    setup = setup_of(tmp_path)
    grids = {row.method: setup.grid(row) for row in find_study("factors").rows(setup) if row.data == "cub"}
    assert grids["constant 100"] == pytest.approx([3e-4, 1e-3, 2e-3])
    assert grids["no factor"] == grids["‖QSᵀ‖"] == [3, 10, 20]  # its factor of 4 is within reach of the steps beyond
    assert grids["‖Q‖"][0] == pytest.approx(3 / 144, rel=1e-2)


def test_a_run_at_a_rate_that_nobody_chose_is_shown_as_that(tmp_path, monkeypatch):
    setup = setup_of(tmp_path)
    [job] = setup.finals(BIRDS, 10, (0,))
    record(setup, job, 79.46)
    report = replace(setup, available=None)
    outcome = accuracy_report(report, [BIRDS, replace(BIRDS, head="isqrt", method="iSQRT-COV", paper=84.7)])
    first, second = texts(outcome.tables[0])
    assert first == ["ResNet-50, MPN-COV", "84.3", "79.5 (1 run, ×10 not chosen)"]
    assert second == ["ResNet-50, iSQRT-COV", "84.7", "not run"]
    assert outcome.rows[0]["fair_protocol_rate_chosen"] == 0
    assert outcome.rows[0]["device_name"] == "a device"
    drawn = outcome.draw.args
    outcome.draw(tmp_path / "figure.png")
    assert [dots.ours for dots in drawn[0]["Birds"]] == [{"ours, fair, rate not chosen": [79.46]}, {}]


def test_a_network_at_another_rate_than_the_best_is_analysed_as_that(tmp_path):
    """What is best may turn out after a network was looked at; one at the best rate takes its place."""
    setup = setup_of(tmp_path)
    row = replace(BIRDS, analyses=("subset-accuracy",))
    for job, top1 in zip(setup.jobs(row, "fair"), (60.0, 70.0, 65.0), strict=True):
        record(setup, job, top1)
    [plain] = setup.finals(row, 10, (1,))
    record(setup, plain, 80.5)
    for rate, top1, printed in (
        (3, 79.0, "×3, 79.0 % after 15 epochs (its best rate is ×10)"),
        (10, 81.0, "×10, 81.0 % after 15 epochs."),
    ):
        [job] = setup.finals(row, rate, (0,))
        record(setup, job, top1, analyses={"subset-accuracy": {"all": {"top1": top1, "top5": 95.0, "loss": 1.0}}})
        outcome = find_study("subset-accuracy").report(setup)
        assert texts(outcome.tables[0])[0][2] == f"{top1}"
        assert f"Birds, MPN-COV: {printed}" in outcome.notes[-1]


def test_a_network_at_another_rate_is_marked_if_the_best_was_not_trained(tmp_path):
    setup = setup_of(tmp_path)
    chosen_at_ten(setup, BIRDS)
    [job] = setup.finals(BIRDS, 3, (0,))
    record(setup, job, 79.0, analyses={"subset-accuracy": {"all": {"top1": 79.0, "top5": 95.0, "loss": 1.0}}})
    assert "×3, 79.0 % after 15 epochs (its best rate is ×10)" in find_study("subset-accuracy").report(setup).notes[-1]


def test_runs_that_diverged_are_shown_as_that(tmp_path):
    """A rate that diverged is not chosen; a row whose runs all did has no number, and none is made up."""
    setup = setup_of(tmp_path)
    tried = setup.jobs(BIRDS, "fair")
    for job, top1 in zip(tried, (60.0, 70.0, None), strict=True):
        record(setup, job, top1, **({} if top1 else {"scores": {}, "diverged": "the loss is nan in epoch 1"}))
    finals = setup.jobs(BIRDS, "fair")[len(tried) :]
    assert [job.config.optimiser.classifier_lr_scale for job in finals] == [10.0] * 3
    record(setup, finals[0], None, scores={})
    outcome = accuracy_report(setup, [BIRDS])
    assert texts(outcome.tables[0])[0][2] == "diverged (1 run, ×10)"
    assert (outcome.rows[0]["fair_protocol_mean"], outcome.rows[0]["fair_protocol_n"]) == ("diverged", 0)
    assert outcome.draw is None
    record(setup, finals[1], 80.0)
    outcome = accuracy_report(setup, [BIRDS])
    assert texts(outcome.tables[0])[0][2] == "80.0 (1 run and 1 that diverged, ×10)"
    assert outcome.rows[0]["fair_protocol_mean"] == 80.0
    outcome.draw(tmp_path / "figure.png")


def test_a_report_takes_records_of_other_weights_and_a_study_that_trains_does_not(tmp_path):
    setup = setup_of(tmp_path)
    elsewhere = replace(setup, options=replace(setup.options, weights="resnet50.safetensors"), bases={})
    [job] = elsewhere.finals(BIRDS, 10, (0,))
    record(elsewhere, job, 79.46)
    assert replace(setup, available=None).scores(BIRDS, "fair")[0].values == (79.46,)
    with pytest.raises(FileError):
        setup.scores(BIRDS, "fair")


def test_curves_come_from_runs_that_are_tested_each_epoch(tmp_path):
    setup = setup_of(tmp_path)
    row = replace(BIRDS, curve=True)
    for job, top1 in zip(setup.jobs(row, "fair"), (60.0, 70.0, 70.0), strict=True):
        record(setup, job, top1)
    last = setup.jobs(row, "fair")[3:]
    assert [job.name for job in last] == ["resnet50-mpncov-curve-x10-e15-all-s0"]
    assert last[0].config.eval_every == 1
    best = setup.jobs(row, "paper")
    assert best[0].name == "resnet50-mpncov-x20-e15-all-best-s0"
    assert (best[0].config.select, best[0].config.eval_every) == ("best-test", 1)


def test_truncated_runs_are_made_at_the_rate_of_the_whole_spectrum(tmp_path):
    setup = setup_of(tmp_path)
    rows = [row for row in find_study("truncation").rows(setup) if row.data == "cub"]
    assert [row.options.get("subset") for row in rows[:6]] == [None, *(f"top:{d}" for d in (246, 236, 226, 216, 206))]
    released = {row.options.get("gradient") for row in rows if row.clip_grad == 5}
    assert released == {"topn", "pade"}
    assert {row.options.get("gradient") for row in rows if row.clip_grad is None} == {None}
    assert {job.name for row in rows for job in setup.jobs(row, "fair")} == {
        f"resnet50-mpncov-x{rate}-e15-val-s0" for rate in (3, 10, 20)
    }


def test_truncated_runs_that_all_diverged_are_shown_as_that(tmp_path):
    """Nothing is drawn of them but the loss of the last, if there is one."""
    setup = setup_of(tmp_path, datasets=["cub"])
    study = find_study("truncation")
    rows = study.rows(setup)
    chosen_at_ten(setup, rows[0])
    [job] = setup.jobs(rows[-1], "fair")[3:]
    record(setup, job, None, scores={}, epochs=[])
    outcome = study.report(setup)
    assert texts(outcome.tables[0])[-1][2] == "diverged (1 run, ×10)"
    assert outcome.draw is None
    record(setup, job, None, scores={}, epochs=[{"epoch": 1.0, "train_loss": 5.3}])
    study.report(setup).draw(tmp_path / "figure.png")


def test_the_lines_of_a_figure_are_of_one_protocol(tmp_path):
    setup = setup_of(tmp_path)
    curve, other = replace(BIRDS, curve=True), replace(BRANCH, curve=True)
    chosen_at_ten(setup, curve)
    tested = [{"epoch": 1.0, "test_top1": 70.0}]
    for job in setup.jobs(other, "paper"):
        record(setup, job, 70.0, epochs=tested)
    assert [len(records) for records in comparable_records(setup, [curve, other], tested=True)] == [0, 3]
    record(setup, setup.jobs(curve, "fair")[3], 70.0, epochs=tested)
    assert [len(records) for records in comparable_records(setup, [curve, other], tested=True)] == [1, 0]


@pytest.mark.parametrize("protocol", ["fair", "paper"])
def test_table_10_stands_under_the_protocol_of_its_network(protocol, tmp_path):
    setup = setup_of(tmp_path)
    study = find_study("imagenet")
    [row] = [row for row in study.rows(setup) if row.analyses and row.metric == "test_top1"]
    if protocol == "fair":
        chosen_at_ten(setup, row)
    job = setup.jobs(row, protocol)[3 if protocol == "fair" else 0]
    measured = [
        {"rule": "vanilla", "cut": cut, "subset": subset, "collapse": "abs-max", "measure": measure, "mean": 0.5, "n": 9}
        for cut in ("exact", "projector")
        for subset in ("top:206", "last:50")
        for measure in ("corr", "mae")
    ]
    scores = {"test_top1": 70.0, "test_top5": 90.0}
    record(setup, job, None, scores=scores, analyses={"similarity": {"images": 9, "rows": measured}})
    lines = [line for line in study.report(setup).rows if line["metric"] == "corr"]
    other = {"fair": "paper", "paper": "fair"}[protocol]
    assert {(line[f"{protocol}_protocol_mean"], line[f"{other}_protocol_mean"]) for line in lines} == {(0.5, "")}


def test_means_of_some_images_have_their_number(tmp_path):
    setup = setup_of(tmp_path)
    study = find_study("similarity")
    row = study.rows(setup)[0]
    chosen_at_ten(setup, row)
    about = {"rule": "vanilla", "cut": "exact", "collapse": "abs-max", "measure": "corr"}
    measured = [
        about | {"subset": "top:206", "mean": 0.9, "n": 9},
        about | {"subset": "last:50", "mean": 0.5, "n": 4},
        about | {"subset": "last:50", "cut": "projector", "mean": None, "n": 0},
    ]
    record(setup, setup.jobs(row, "fair")[3], 70.0, analyses={"similarity": {"images": 9, "rows": measured}})
    report = study.report(setup)
    lines = [each for each in report.rows if {**each, **about, "data": "Birds", "method": "MPN-COV"} == each]
    assert {line["eigenvalues"]: (line["ours"], line["images"]) for line in lines} == {"large": (0.9, 9), "small": (0.5, 4)}
    table = next(table for table in report.tables if not table.is_empty).frame
    assert table["Corr: exact cut"].tolist()[:2] == ["0.90", "0.50 (n = 4)"]
    assert table["Corr: projector"].tolist()[1] == "undefined"


def test_networks_after_imagenet_wait_for_it(tmp_path):
    rows = find_study("gcp-pretrained").rows(setup_of(tmp_path))
    row = next(row for row in rows if row.pretrain == "isqrt")
    setup = setup_of(tmp_path, protocol="paper", scale="paper")
    first = setup.jobs(row, "paper")
    assert all(job.config.data.name == "imagenet" for job in first)
    weights = setup.pretrained(row, "paper")
    weights.parent.mkdir(parents=True)
    weights.touch()
    second = setup.jobs(row, "paper")
    assert {(job.config.data.name, job.config.model.weights) for job in second} == {("cub", str(weights))}
    assert all("-gcp-" in job.name for job in second)
    weights.unlink()
    assert setup.trains(row)
    assert not replace(setup, available=("cub",)).trains(row)


def after_imagenet(tmp_path, **changes):
    """A study at scale small, and its line of iSQRT-COV on Birds after ImageNet."""
    setup = setup_of(tmp_path, **changes)
    [row] = [row for row in find_study("gcp-pretrained").rows(setup) if (row.data, row.pretrain) == ("cub", "isqrt")]
    return setup, row


def leave_model(setup, job):
    folder = setup.out / "runs" / job.name / "model"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").touch()


def test_a_network_of_the_search_on_imagenet_is_not_started_from(tmp_path):
    """The last rate of the grid may be there before the others, where several processes share a study."""
    setup, row = after_imagenet(tmp_path, heads=["isqrt"])
    search = setup.jobs(row, "fair")
    leave_model(setup, search[-1])
    record(setup, search[-1], 60.0)
    assert setup.jobs(row, "fair") == search
    for job, top1 in zip(search, (60.0, 70.0, 65.0), strict=True):
        record(setup, job, top1)
    [last] = setup.jobs(row, "fair")[3:]
    assert (last.kept, last.config.data.name, last.config.seed) == (True, "imagenet", 0)
    leave_model(setup, last)
    assert {job.config.model.weights for job in setup.jobs(row, "fair")} == {
        str(tmp_path / "runs" / last.name / "model/model.safetensors")
    }


def test_a_network_of_imagenet_strides_afterwards_where_it_did_there(tmp_path):
    """The weights of --weights are others, and may stride elsewhere."""
    setup, row = after_imagenet(tmp_path, heads=["isqrt"], weights="resnet50.safetensors", protocol="paper")
    assert setup.config(row).model.stride_on == "1x1"
    [first] = setup.jobs(row, "paper")
    leave_model(setup, first)
    assert {job.config.model.stride_on for job in setup.jobs(row, "paper")} == {first.config.model.stride_on} == {"3x3"}


def test_networks_after_imagenet_are_trained_without_imagenet_if_the_model_exists(tmp_path):
    setup, row = after_imagenet(tmp_path, heads=["isqrt"], protocol="both")
    leave_model(setup, setup.jobs(row, "paper")[0])
    here = replace(setup, available=("cub",))
    assert here.trains(row)
    assert all("-gcp-" in job.name for job in here.jobs(row, "paper"))
    assert here.jobs(row, "fair") == []  # ImageNet is not here to be trained on


def test_networks_of_imagenet_are_not_made_again_for_runs_that_are_recorded(tmp_path):
    setup, row = after_imagenet(tmp_path, heads=["isqrt"], protocol="paper")
    [first] = setup.jobs(row, "paper")
    leave_model(setup, first)
    finals = setup.jobs(row, "paper")
    for job in (first, *finals):
        record(setup, job, 80.0)
    (tmp_path / "runs" / first.name / "model/model.safetensors").unlink()
    assert [job.name for job in setup.jobs(row, "paper")] == [job.name for job in finals]
    (tmp_path / "records" / f"{finals[0].name}.json").unlink()
    assert setup.jobs(row, "paper") == [first]


def test_the_subsets_of_table_2_are_there():
    names = list_subsets(256)
    assert names[:6] == ["all", "top:206", "top:1+last:50", "top:1+last:40", "top:1+last:30", "last:50"]
    assert len(set(list_subsets(8))) == len(list_subsets(8))


def test_a_cost_is_images_times_epochs_over_speed(tmp_path):
    setup = replace(setup_of(tmp_path), available=("cub",), seeds=(0,))
    study = find_study("spectrum")
    runs, seconds, sources = estimate_cost(study, setup, recorded_speeds(setup))
    images = 2 * 15 * (3 * round(0.9 * 5994) + 5994)  # two heads, three rates without the validation images, one seed
    assert runs == 8
    assert sources == {"stated"}
    assert seconds == pytest.approx(images / STATED["small"], rel=1e-6)
    for job in setup.jobs(BIRDS, "fair")[:1]:
        record(setup, job, 70.0)
    (tmp_path / "records/half.json").write_text('{"name": "half", "epo')  # of which the list of studies does not speak
    (tmp_path / "records/others.json").write_text("[1, 2]")
    old = json.loads(next((tmp_path / "records").glob("*-s0.json")).read_text()) | {"config": {}}
    (tmp_path / "records/old.json").write_text(json.dumps(old))
    _, seconds, sources = estimate_cost(study, setup, recorded_speeds(setup))
    assert sources == {"records"}
    assert seconds == pytest.approx(images / 500, rel=1e-6)


def test_the_speed_of_a_backbone_is_that_of_its_records_whatever_its_weights(tmp_path):
    (tmp_path / "vgg16.safetensors").touch()
    row = replace(BIRDS, backbone="vgg16")
    setup = setup_of(tmp_path, weights=str(tmp_path))
    record(setup, setup.jobs(row, "fair")[0], 70.0)
    others = setup_of(tmp_path)
    assert [each.config(row).model.backbone for each in (setup, others)] == ["vgg16", "vgg16_bn.tv_in1k"]
    study = replace(find_study("gcp-methods"), all_rows=lambda setup: [row])
    for each in (setup, others):
        assert recorded_speeds(each) == {("vgg16", 448, "bf16"): 500.0}
        assert estimate_cost(
            study, replace(each, options=replace(each.options, backbones=["vgg16"])), recorded_speeds(each)
        )[2] == {"records"}


def test_a_report_shows_the_heads_and_seeds_of_the_options(tmp_path):
    setup = setup_of(tmp_path, datasets=["cub"])
    for row in (BIRDS, BRANCH):
        chosen_at_ten(setup, row)
        for job in setup.jobs(row, "fair")[3:]:
            record(setup, job, 80.0 + job.config.seed)
    study = find_study("paths")
    report = Setup(StudyOptions(out=str(tmp_path), datasets=["cub"]))
    assert [row["head"] for row in study.report(report).rows] == ["mpncov", "mpncov+seb", "mpncov+seb"]
    some = replace(report, options=replace(report.options, heads=["mpncov"], seeds=[1, 2]))
    [row] = study.report(some).rows
    assert (row["head"], row["fair_protocol_n"], row["fair_protocol_low"]) == ("mpncov", 2, 81.0)


def test_calibrated_vectors_have_runs_and_rates_of_their_own(tmp_path):
    setup = setup_of(tmp_path, datasets=["cub"], heads=["bcnn"])
    study = find_study("calibration")
    own, calibrated = study.rows(setup)
    assert (setup.grid(own), setup.grid(calibrated)) == ([300, 1000, 2000], [0.3, 1, 3])
    jobs = setup.jobs(calibrated, "fair")
    assert jobs[0].name == "resnet50-bcnn-calibrated-x0.3-e15-val-s0"
    assert all(job.config.model.calibrate for job in jobs)
    for job, top1 in zip([*setup.jobs(own, "fair"), *jobs], (70.0, 73.0, 72.0, 71.0, 74.0, 73.5), strict=True):
        record(setup, job, top1, scores={"test_top1": top1, "val_top1": top1})
    assert study.plan(setup) == [*setup.jobs(own, "fair"), *jobs]  # nothing is trained on all images
    report = study.report(replace(setup, available=None))
    assert texts(report.tables[0]) == [["bcnn", "×1000", "73.0", "not run", "×1", "74.0", "74.0"]]
    assert [(row["calibrated"], row["rate"], row["test_top1"]) for row in report.rows[-3:]] == [
        *((1, 0.3, 71.0), (1, 1.0, 74.0)),
        (1, 3.0, 73.5),
    ]


def test_the_backbone_of_drawn_birds_is_trained_first_and_every_seed_tries_all_rates(tmp_path):
    setup = replace(setup_of(tmp_path, datasets=["plumage"], heads=["gap"]), available=("plumage",))
    study = find_study("calibration")
    [first] = study.plan(setup)
    assert (first.name, first.kept) == ("plumage-plumage_net-gap-first-x1-e20-all-s0", True)
    model = setup.out / "runs" / first.name / "model" / "model.safetensors"
    model.parent.mkdir(parents=True)
    model.touch()
    jobs = study.plan(setup)
    assert len(jobs) == 3 * (6 + 5)
    assert {job.config.model.weights for job in jobs} == {str(model)}
    assert {job.config.seed for job in jobs} == {0, 1, 2}
