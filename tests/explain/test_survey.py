"""The survey: against the measures of single images, its counts and files, and two processes against one."""

import csv
import math
import os
import statistics
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

from eigengrain.data import ImageSet, Transforms
from eigengrain.data.boxes import object_mask, part_mask
from eigengrain.errors import ArgumentError, ShortRankWarning, UnknownName
from eigengrain.explain import measures as m
from eigengrain.explain.saliency import attribute_rules
from eigengrain.explain.sanity import deletion_curve, insertion_curve
from eigengrain.explain.survey import DEFAULT_MEASURES, MEASURES, Batch, image_batches, summarise, survey
from explain.small_survey import RULES, SUBSETS, Double, birds, network, run


@pytest.fixture(scope="module")
def net():
    return network()


@pytest.fixture(scope="module")
def dataset():
    return birds()


@pytest.fixture(scope="module")
def result(net, dataset):
    return survey(net, image_batches(dataset, 3), SUBSETS, RULES, measures=MEASURES, steps=2)


def fake(maps, gaps=None):
    """A replacement of attribute_rules that returns given maps (subset → maps of one batch) for every rule."""

    def attribute(model, inputs, subsets, rules, target=None, cut="exact"):
        targets = target if isinstance(target, torch.Tensor) else torch.zeros(len(inputs), dtype=torch.long)
        all_gaps = {name: (gaps or {}).get(name, torch.full((len(inputs),), math.inf)) for name in subsets}
        result = SimpleNamespace(maps={name: maps[name] for name in subsets}, gaps=all_gaps, targets=targets)
        return dict.fromkeys(rules, result)

    return attribute


def test_measures_agree_with_those_of_single_images(net, dataset, result):
    assert result.samples == len(dataset) == 5
    assert len(result.rows) == 5 * 2 * 3
    rows = {(row["number"], row["rule"], row["subset"]): row for row in result.rows}
    for i in (0, 2, 4):  # of both batches
        image, label = dataset[i]
        actual = attribute_rules(net, image[None], SUBSETS, RULES, target=torch.tensor([label]))
        objects, parts = (mask[None] for mask in (object_mask(dataset, i, (64, 64)), part_mask(dataset, i)))
        for rule in RULES:
            whole = actual[rule].maps["all"].abs().amax(1)
            for subset in SUBSETS:
                one, row = actual[rule].maps[subset].abs().amax(1), rows[i, rule, subset]
                assert (row["label"], row["target"], row["cut"], row["collapse"]) == (label, label, "exact", "abs-max")
                expected = {
                    "corr": m.correlation(one, whole),
                    "mae": m.mae(one, whole),
                    "norm_ratio": m.norm_ratio(one, whole),
                    "object_energy": m.energy_inside(one, objects),
                    "object_pointing": m.pointing_hit(one, objects),
                    "object_over_area": m.share_over_area(one, objects),
                    "parts_energy": m.energy_inside(one, parts),
                    "parts_pointing": m.pointing_hit(one, parts),
                    "parts_over_area": m.share_over_area(one, parts),
                    "gap": actual[rule].gaps[subset],
                    "deletion": deletion_curve(net, image[None], one, label, steps=2).area,
                    "insertion": insertion_curve(net, image[None], one, label, steps=2).area,
                }
                assert set(expected) == set(MEASURES)
                for name, value in expected.items():
                    if subset == "all" and name in ("corr", "mae", "norm_ratio", "gap"):
                        assert row[name] is None  # a map compared with itself, and no cut
                    else:
                        assert row[name] == pytest.approx(value.item(), rel=1e-9, abs=1e-9), (i, rule, subset, name)


def test_the_table_is_the_mean_over_images(result):
    for entry in result.table:
        values = [row[entry.measure] for row in result.rows if (row["rule"], row["subset"]) == (entry.rule, entry.subset)]
        assert entry.n == len(values) == 5
        assert entry.n_undefined == 0
        assert entry.mean == pytest.approx(statistics.fmean(values), rel=1e-12)
        assert entry.standard_error == pytest.approx(statistics.stdev(values) / math.sqrt(5), rel=1e-9)
    # 12 measures for two subsets and 8 for all eigenvalues, under two rules
    assert len(result.table) == 2 * (2 * 12 + 8)
    actual = result.find("corr", "deconv", "last:3")
    assert (actual.cut, actual.collapse) == ("exact", "abs-max")
    with pytest.raises(ArgumentError):
        result.find("corr", "vanilla", "all")


@pytest.mark.parametrize("normalise", m.NORMALISATIONS)
def test_the_normalisation_of_mae_is_passed_on(net, dataset, normalise):
    rows = survey(net, image_batches(dataset), ["last:3"], ["vanilla"], measures=["mae"], normalise=normalise).rows
    image, label = dataset[0]
    maps = attribute_rules(net, image[None], ["all", "last:3"], ["vanilla"], target=torch.tensor([label]))["vanilla"].maps
    expected = m.mae(maps["last:3"].abs().amax(1), maps["all"].abs().amax(1), normalise)
    [actual] = [row["mae"] for row in rows if (row["number"], row["subset"]) == (0, "last:3")]
    assert actual == pytest.approx(expected.item(), rel=1e-9)


def test_all_is_added_and_repeats_are_not(net, dataset):
    whole = survey(net, image_batches(dataset), ["last:3", "last: 3"], ["vanilla", "vanilla"], measures=["corr"])
    assert [(row.subset, row.measure) for row in whole.table] == [("last:3", "corr")]
    assert {row["subset"] for row in whole.rows} == {"all", "last:3"}


def test_undefined_values_are_counted_and_excluded(net):
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(4, 3, 5, 5, generator=generator)
    last = torch.randn(4, 3, 5, 5, generator=generator)
    last[1] = 0
    last[2] = 0
    gaps = {"last:2": torch.tensor([0.5, math.nan, math.inf, 0.1])}
    masks = torch.ones(4, 5, 5, dtype=torch.bool)
    masks[3] = False
    batch = Batch(torch.zeros(4, 3, 5, 5), torch.zeros(4, dtype=torch.long), range(4), masks)
    actual = survey(net, [batch], ["last:2"], ["vanilla"], attribute=fake({"all": whole, "last:2": last}, gaps))
    corr = actual.find("corr", "vanilla", "last:2")
    assert (corr.n, corr.n_undefined) == (2, 2)
    kept = m.correlation(last.abs().amax(1), whole.abs().amax(1))[[0, 3]]
    assert corr.mean == pytest.approx(kept.mean().item())
    gap = actual.find("gap", "vanilla", "last:2")
    assert (gap.n, gap.n_undefined, gap.mean) == (2, 2, pytest.approx(0.3))
    energy = actual.find("object_energy", "vanilla", "last:2")
    assert (energy.n, energy.n_undefined, energy.mean) == (1, 3, 1.0)
    assert math.isnan(energy.standard_error)
    # no regions of parts
    assert not [row for row in actual.table if row.measure.startswith("parts")]
    assert actual.nonfinite == 0


def test_nonfinite_maps_are_warned_about(net):
    whole = torch.randn(3, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    bad = whole.clone()
    bad[1, 2, 3, 3] = math.inf
    attribute = fake({"all": whole, "last:2": bad})
    pairs = [(torch.zeros(3, 3, 4, 4), torch.zeros(3, dtype=torch.long))]
    with pytest.warns(UserWarning, match="1 maps contain NaN"):
        actual = survey(net, pairs, ["last:2"], ["vanilla"], attribute=attribute)
    assert actual.nonfinite == 1
    assert actual.find("corr", "vanilla", "last:2").n == 2
    with pytest.warns(UserWarning, match="1 maps contain NaN"):
        actual = survey(net, pairs, ["last:2"], ["vanilla"], attribute=fake({"all": bad, "last:2": whole}))
    assert {actual.find(measure, "vanilla", "last:2").n for measure in ("corr", "mae", "norm_ratio")} == {2}


def test_measures_of_a_short_rank(dataset):
    """4 positions and 24 channels: the last 5 eigenvalues are zero, so that the first 19 have the map of all."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ShortRankWarning)
        short = network(reduce=24, last_stride=None)
        actual = survey(short, image_batches(dataset, 5), ["all", "top:19", "last:5"], ["vanilla"])
    large, small = (actual.find("corr", "vanilla", subset) for subset in ("top:19", "last:5"))
    assert large.mean == pytest.approx(1, abs=1e-9)
    assert (small.n, small.n_undefined) == (0, 5)
    assert math.isnan(small.mean)
    assert actual.find("norm_ratio", "vanilla", "last:5").mean == 0


def test_targets(net, dataset):
    predicted = survey(net, image_batches(dataset), SUBSETS, ["vanilla"], target="predicted")
    with torch.no_grad():
        classes = net(torch.stack([dataset[i][0] for i in range(5)])).argmax(1)
    assert [row["target"] for row in predicted.rows if row["subset"] == "all"] == classes.tolist()
    norm = survey(net, image_batches(dataset), SUBSETS, ["vanilla"], target="norm", measures=["corr"])
    assert {row["target"] for row in norm.rows} == {-1}
    one = survey(net, image_batches(dataset), SUBSETS, ["vanilla"], target=1, measures=["corr"])
    assert {row["target"] for row in one.rows} == {1}
    with pytest.raises(ArgumentError) as caught:
        survey(net, image_batches(dataset), target="norm", measures=["deletion"])
    assert caught.value.argument == "target"


def test_cut_and_collapse_are_passed_on(net, dataset):
    both = survey(net, image_batches(dataset), SUBSETS, ["vanilla"], cut="projector", collapse=("abs-max", "none"))
    assert {row.cut for row in both.table} == {"projector"}
    exact = survey(net, image_batches(dataset), SUBSETS, ["vanilla"])
    assert both.find("corr", "vanilla", "last:3", "abs-max").mean != exact.find("corr", "vanilla", "last:3").mean
    assert both.find("corr", "vanilla", "last:3", "none").mean != both.find("corr", "vanilla", "last:3", "abs-max").mean
    with pytest.raises(ArgumentError):
        both.find("corr", "vanilla", "last:3")


def test_boxes_are_used_without_masks(net, tmp_path):
    """A data set of files with boxes."""
    paths = []
    for i in range(2):
        paths.append(tmp_path / f"{i}.png")
        noise = torch.randint(0, 256, (64, 80, 3), generator=torch.Generator().manual_seed(i), dtype=torch.uint8)
        Image.fromarray(noise.numpy()).save(paths[-1])
    boxes = [(0, 0, 40, 64), (20, 10, 60, 50)]
    pictures = ImageSet("pictures", "test", ["a", "b"], [0, 1], paths, boxes=boxes)
    with pytest.raises(ArgumentError):
        image_batches(pictures)
    pictures.transform = Double(Transforms("scripts", 64))
    [batch] = image_batches(pictures)
    assert batch.objects.sum((1, 2)).tolist() == [32 * 64, 40 * 40]
    assert batch.parts is None
    actual = survey(net, [batch], SUBSETS, ["vanilla"])
    assert {row.measure for row in actual.table} == {"corr", "mae", "norm_ratio", "gap"} | {
        f"object_{place}" for place in ("energy", "pointing", "over_area")
    }
    pictures.transform = lambda image: Double(Transforms("none"))(image)
    with pytest.raises(ValueError):
        list(image_batches(pictures))
    [batch] = image_batches(pictures, regions=False)
    assert batch.objects is None


def test_each_process_gets_its_share_of_the_images(dataset):
    shares = [[n for b in image_batches(dataset, 3, rank=r, world_size=2) for n in b.numbers] for r in (0, 1)]
    assert sorted(shares[0] + shares[1]) == list(range(5))
    assert all(shares)
    for rank, size in ((1, None), (2, 2)):
        with pytest.raises(ArgumentError) as caught:
            image_batches(dataset, rank=rank, world_size=size)
        assert caught.value.argument == "rank"


def test_the_model_is_restored(dataset):
    net = network().train()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    calls = []
    survey(net, image_batches(dataset, 2), SUBSETS, ["vanilla"], each=lambda: calls.append(1))
    assert net.training
    assert len(calls) == 3
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())

    def broken(*args, **kwargs):
        raise KeyError

    with pytest.raises(KeyError):
        survey(net, image_batches(dataset, 2), attribute=broken)
    assert net.training


def test_each_module_gets_its_own_mode_back(dataset):
    net = network().train()
    norms = [module for module in net.modules() if isinstance(module, torch.nn.BatchNorm2d)]
    for norm in norms:
        norm.eval()  # frozen statistics in training mode
    before = [module.training for module in net.modules()]
    assert norms
    survey(net, image_batches(dataset, 5), ["all"], ["vanilla"], attribute=_in_evaluation_mode)
    assert [module.training for module in net.modules()] == before


def _in_evaluation_mode(model, *args, **kwargs):
    assert not any(module.training for module in model.modules())
    return attribute_rules(model, *args, **kwargs)


def test_an_image_that_occurs_twice(net, dataset):
    batches = list(image_batches(dataset, 3))
    with pytest.raises(ArgumentError) as caught:
        survey(net, [*batches, batches[0]], SUBSETS, ["vanilla"])
    assert caught.value.argument == "batches"


@pytest.mark.parametrize(
    ("argument", "value", "error"),
    [
        ("measures", ["cor"], UnknownName),
        ("measures", [], ArgumentError),
        ("target", "labels", UnknownName),
        ("collapse", "max", UnknownName),
        ("normalise", "unit", UnknownName),
        ("subsets", "last:3", ArgumentError),
        ("subsets", ["lasst:3"], ValueError),
        ("subsets", ["last:9"], ValueError),
        ("rules", "vanilla", ArgumentError),
        ("rules", ["vanila"], UnknownName),
        ("cut", "approximate", UnknownName),
        ("batches", [], ArgumentError),
    ],
)
def test_arguments_that_do_not_fit(net, dataset, argument, value, error):
    arguments = {"batches": image_batches(dataset), "subsets": SUBSETS, "rules": ["vanilla"]} | {argument: value}
    with pytest.raises(error) as caught:
        survey(net, **arguments)
    if error is ArgumentError:
        assert caught.value.argument == argument


def test_the_csv_file_is_checked_before_the_work(net, dataset, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError):
        survey(net, image_batches(dataset), csv=tmp_path / "file" / "rows.csv", attribute=lambda *a, **k: 1 / 0)


def test_costly_measures_are_not_measured_by_default():
    assert set(MEASURES) - set(DEFAULT_MEASURES) == {"deletion", "insertion"}


def test_several_results_become_one_table(net, dataset):
    halves = [survey(net, [batch], SUBSETS, ["vanilla"]) for batch in image_batches(dataset, 3)]
    whole = survey(net, image_batches(dataset, 3), SUBSETS, ["vanilla"])
    assert summarise([row for half in halves for row in half.rows]) == whole.table


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """The folder of a survey by two processes."""
    # two processes hung at their rendezvous once, on a small machine: warn and retry once
    for last in (False, True):
        out = tmp_path_factory.mktemp("two")
        command = [sys.executable, "-m", "explain.small_survey", str(out)]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
            break
        except subprocess.TimeoutExpired:
            if last:
                raise
            warnings.warn("two processes hung for 120 s and were started again", stacklevel=1)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """Folder and result of the same survey in one process."""
    folder = tmp_path_factory.mktemp("one")
    return folder, run(folder, 7)


def test_two_processes_agree_with_one(two, one):
    shares = [(two / f"numbers-{rank}").read_text().split() for rank in (0, 1)]
    assert all(shares)  # each process had images
    assert sorted(shares[0] + shares[1]) == [str(i) for i in range(7)]
    _, alone = one
    assert alone.samples == 7
    for file in ("table-0.csv", "table-1.csv"):  # both have the whole table
        table = list(csv.DictReader((two / file).open()))
        assert len(table) == len(alone.table)
        for theirs, ours in zip(table, alone.table, strict=True):
            for key in ("rule", "cut", "subset", "collapse", "measure", "n", "n_undefined"):
                assert theirs[key] == str(getattr(ours, key))
            assert int(theirs["n"]) + int(theirs["n_undefined"]) == 7
            assert float(theirs["mean"]) == pytest.approx(ours.mean, rel=1e-9, abs=1e-9), theirs
            assert float(theirs["standard_error"]) == pytest.approx(ours.standard_error, rel=1e-9, abs=1e-9), theirs


def test_the_rows_of_both_processes_are_in_one_file(two, one):
    theirs, ours = (list(csv.DictReader((folder / "rows.csv").open())) for folder in (two, one[0]))
    assert len(theirs) == len(ours) == 7 * 2 * 3 * 2
    for a, b in zip(theirs, ours, strict=True):
        assert a.keys() == b.keys() == {"number", "label", "target", "rule", "cut", "subset", "collapse", *DEFAULT_MEASURES}
        for key in ("number", "label", "target", "rule", "cut", "subset", "collapse"):
            assert a[key] == b[key]
        for key in DEFAULT_MEASURES:
            assert (
                (a[key] == "") == (b[key] == "") == (b["subset"] == "all" and key in ("corr", "mae", "norm_ratio", "gap"))
            )
            if a[key]:
                assert float(a[key]) == pytest.approx(float(b[key]), rel=1e-9, abs=1e-9)
