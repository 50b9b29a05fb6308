"""The report: choices of subsets and targets, tables, files and the page."""

import csv
import math
import re

import numpy as np
import pytest
import torch
from PIL import Image

import eigengrain as eg
from eigengrain.data import ImageSet, Transforms, build_transform
from eigengrain.data.plumage import open_plumage
from eigengrain.errors import ArgumentError, UnknownName
from eigengrain.explain import plots
from eigengrain.explain import report as module
from eigengrain.explain.report import Report, measure_tables
from eigengrain.explain.survey import Summary, choose_subsets, image_batches, read_target, split_point, survey
from eigengrain.heads import Parts, create_head
from eigengrain.names import MEASURES
from eigengrain.pages import TEMPLATES, Cell

ENVIRONMENT = {"torch": "2"}


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(0)
    net = eg.create_model("plumage_net", head="mpncov", num_classes=2, reduce=8)
    with torch.no_grad():
        for _ in range(10):
            net(torch.stack([image for image, _ in birds()]))  # running statistics of the data
    return net.eval()


def birds():
    transform = build_transform(Transforms("none"), False, (0.5,) * 3, (0.5,) * 3)
    return open_plumage("test", classes=2, per_class=3, size=32, cache=False, transform=transform)


# choices


def test_the_default_split_is_the_share_of_the_paper():
    assert [split_point(d) for d in (256, 64, 2)] == [206, 52, 1]
    assert split_point(8, 3) == 3
    for wrong in (0, 8):
        with pytest.raises(ArgumentError) as caught:
            split_point(8, wrong)
        assert (caught.value.argument, caught.value.value) == ("split_at", wrong)


def test_the_default_subsets_contain_that_of_the_head():
    assert choose_subsets(create_head("mpncov", 8)) == ["all", "top:6", "last:2"]
    assert choose_subsets(create_head("mpncov", 8, subset="top:5"), split_at=4) == ["all", "top:5", "top:4", "last:4"]
    assert choose_subsets(create_head("mpncov", 8), ["last: 2", "all", "last:2"]) == ["last:2", "all"]


@pytest.mark.parametrize("head", ["gap", "isqrt"])
def test_heads_without_selectable_eigenvalues_have_one_subset(head):
    with pytest.raises(ArgumentError) as caught:
        choose_subsets(create_head(head, 8))
    assert caught.value.argument == "subsets"
    assert choose_subsets(create_head(head, 8), ["all"]) == ["all"]


def test_a_class_by_name_comes_before_one_by_number():
    assert read_target("0", 2, ["7", "0"]) == 1
    assert read_target("0", 2, ["lark", "wren"]) == read_target(0, 2, ["lark", "wren"]) == 0
    assert read_target("predicted", 2, ["lark", "wren"]) == "predicted"
    with pytest.raises(ArgumentError) as caught:
        read_target("2", 2, ["lark", "wren"])
    assert caught.value.argument == "target"
    with pytest.raises(UnknownName) as unknown:
        read_target("predict", 2, ["lark", "wren"])
    assert unknown.value.suggestions[0] == "predicted"


def test_the_images_of_the_panels_are_the_first_of_those_measured(net, tmp_path):
    first, again, other = (Report(net, birds(), tmp_path, seed=seed, count=2).indices for seed in (0, 0, 1))
    assert first == again != other
    assert sorted(first) == list(range(6))
    assert Report(net, birds(), tmp_path, count=2).shown == first[:2]
    assert Report(net, birds(), tmp_path, seed=None).indices == list(range(6))


def test_a_perturbation_is_checked_before_any_work(net, tmp_path):
    with pytest.raises(ArgumentError) as caught:
        Report(net, birds(), tmp_path, perturb=1, perturb_lr=0.0)
    assert (caught.value.argument, caught.value.value) == ("perturb_lr", 0.0)
    flat = eg.create_model("plumage_net", head="gap", num_classes=2).eval()
    with pytest.raises(ArgumentError) as caught:
        Report(flat, birds(), tmp_path, subsets=["all"], perturb=1)
    assert caught.value.argument == "model"


# tables


def summary(measure="corr", mean=0.5, error=0.01, n=10, undefined=0, subset="last:3", cut="exact", rule="vanilla"):
    return Summary(rule, cut, subset, "abs-max", measure, mean, error, n, undefined)


def test_tables_have_means_errors_and_undefined_values():
    exact, projector = measure_tables(
        [
            summary(n=8, undefined=2, mean=0.91234, error=0.0123),
            summary("gap", 0.25, 0.0, 10, subset="top:5"),
            summary("mae", math.nan, math.nan, 0, 10),
            summary("norm_ratio", 1.5, math.nan, 1, 9),
            summary(cut="projector", mean=-0.25, error=0.1, n=7),
        ]
    )
    assert exact.heads == ["", "last:3", "top:5"]
    assert exact.groups == [("vanilla", 2)]
    assert [row[0].text for row in exact.rows] == ["corr", "mae", "norm ratio", "gap"]
    assert [row[1] for row in exact.rows] == [
        Cell("0.91", notes=["± 0.01", "n = 8,\n2 undefined"]),
        Cell("–", notes=["n = 0,\n10 undefined"]),
        Cell("1.5", notes=["n = 1,\n9 undefined"]),
        Cell(""),
    ]
    assert exact.rows[3][2] == Cell("0.25", notes=[])
    assert projector.rows[0][1] == Cell("-0.2", notes=["± 0.1"])


# files and page


@pytest.fixture(scope="module")
def written(net, tmp_path_factory):
    """A report with perturbed images of two birds."""
    out = tmp_path_factory.mktemp("report")
    report = Report(net, birds(), out, count=2, measure_count=4, target="1", rules=["vanilla"], perturb=3, batch_size=4)
    surveys, pictures = report.measure(), report.draw()
    files = report.write(surveys, pictures, command="eigengrain explain 'a & b'", environment=ENVIRONMENT)
    return report, surveys, pictures, files


def test_measures_agree_with_a_survey(net, written):
    report, [result], _, [means, images, _] = written
    part = birds().subset(report.indices[:4])
    expected = survey(net, image_batches(part, 4), report.subsets, ["vanilla"], target=1)
    assert [row.mean for row in result.table] == pytest.approx([row.mean for row in expected.table], nan_ok=True)
    with means.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["mean"]) for row in rows] == pytest.approx([row.mean for row in expected.table], nan_ok=True)
    assert {(row["data"], row["split"], row["target"], row["torch"]) for row in rows} == {("plumage", "test", "1", "2")}
    with images.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["number"] for row in rows} == set(map(str, report.indices[:4]))
    assert {row["target"] for row in rows} == {"1"}


def test_the_page_embeds_its_pictures_and_loads_nothing(written):
    _, _, pictures, [*_, page] = written
    html = page.read_text(encoding="utf-8")
    assert [picture.kind for picture in pictures] == ["maps", "perturbed", "film", "film"]
    assert re.findall(r'src="data:image/(\w+);base64', html) == ["png", "png", "gif", "gif"]
    assert not re.search(r"<script|<link|@import|url\(|<iframe|https?:|\son\w+=", html)
    assert "eigengrain explain &#39;a &amp; b&#39;" in html
    for words in (birds().classes[1], "3 steps of Adam", "Perturbed images are", "relative gap", "torch 2"):
        assert words in html
    assert "deletion curve" not in html  # not measured


def test_a_page_without_measures_or_large_animations(net, written, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LIGHT", 100)
    pictures = written[2]
    small = Report(net, birds(), tmp_path, measure_count=0, subsets=["all"], rules=["vanilla"])
    assert small.measure() == []
    [page] = small.write([], pictures, command="", environment=ENVIRONMENT)
    html = page.read_text(encoding="utf-8")
    assert html.count("data:image/") == 2
    assert "<h2>Measures</h2>" not in html
    [page] = small.write([], pictures[:1], command="", environment=ENVIRONMENT)
    assert "Perturbed images are" not in page.read_text(encoding="utf-8")


def test_unlabelled_photographs_have_no_label_and_keep_their_order(net, tmp_path):
    files = []
    for k in range(2):
        files.append(tmp_path / f"bird {k}.png")
        birds().image(k).save(files[-1])
    photos = ImageSet("images", "given", ["a", "b"], [0, 0], files, birds().transform)
    report = Report(net, photos, tmp_path / "out", labelled=False, seed=None, rules=["vanilla"])
    [result] = report.measure()
    assert {row["label"] for row in result.rows} == {None}
    assert not [row for row in result.table if row.measure.startswith(("object", "parts"))]
    assert [picture.path.name for picture in report.draw()] == ["panel-exact-1.png"]
    report.write([result], [], command="", environment=ENVIRONMENT)
    with (tmp_path / "out" / "measures-images.csv").open(newline="") as file:
        assert list(dict.fromkeys(row["image"] for row in csv.DictReader(file))) == list(map(str, files))


def test_panels_have_a_limited_number_of_rows(net, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "ROWS", 2)
    report = Report(net, birds(), tmp_path, count=3, subsets=["all"], rules=["vanilla"], cuts=["exact", "projector"])
    names = [f"panel-{cut}-{k}.png" for cut in ("exact", "projector") for k in (1, 2)]
    assert [picture.path.name for picture in report.draw()] == names


def test_the_page_explains_every_measure():
    template = (TEMPLATES / "explain.html").read_text(encoding="utf-8")
    assert re.findall(r'^  "(\w+)": ', template.split("meanings = {")[1], re.MULTILINE) == list(MEASURES)


def test_the_number_of_images_includes_those_without_a_value():
    [table] = measure_tables([Summary("vanilla", "exact", "top:6", "abs-max", "corr", 0.5, 0.1, n=3, n_undefined=2)])
    assert " n = 5 " in table.caption


def test_a_film_has_the_start_and_every_step(written):
    _, _, pictures, _ = written
    for picture in pictures:
        if picture.kind == "film":
            with Image.open(picture.path) as film:
                assert film.n_frames == 4  # of three steps


def test_selected_parts_are_framed(tmp_path):
    torch.manual_seed(0)
    model = eg.create_model("test_vit", "transfg", num_classes=2, img_size=32, patch_stride=8).eval()
    report = Report(model, birds(), tmp_path, count=2, subsets=["all"], rules=["vanilla"], measure_count=2)
    pictures = report.draw()
    assert [picture.kind for picture in pictures] == ["maps", "parts"]
    assert pictures[1].path.is_file()
    page = report.write([], pictures, command="", environment=ENVIRONMENT)[-1]
    assert page.read_text().count("data:image/png") == 2


def test_frames_are_at_the_boxes(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(plots, "compose", lambda groups, lines, note, bar: drawn.extend(lines))
    monkeypatch.setattr(plots, "save", lambda sheet, path: path)
    pixels = torch.zeros(2, 3, 20, 20, dtype=torch.uint8)
    boxes = torch.tensor([[[2.0, 4.0, 10.0, 9.0]] * 2, [[0.0, 0.0, 20.0, 20.0]] * 2])
    plots.draw_parts(pixels, Parts(boxes, None), tmp_path / "parts.png")
    for line, (left, top, right, bottom) in zip(drawn, boxes[:, 0].int().tolist(), strict=True):
        before, after = (cell.picture for cell in line.cells)
        assert not before.any()
        rows, columns = after.any(2).nonzero()
        assert (rows.min(), rows.max(), columns.min(), columns.max()) == (top, bottom - 1, left, right - 1)
        assert not after[top + 1 : bottom - 1, left + 1 : right - 1].any()


def test_what_is_outside_of_the_parts_is_darker(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(plots, "compose", lambda groups, lines, note, bar: drawn.extend(lines))
    monkeypatch.setattr(plots, "save", lambda sheet, path: path)
    pixels = torch.full((1, 3, 20, 20), 200, dtype=torch.uint8)
    plots.draw_parts(pixels, Parts(torch.tensor([[[2.0, 4.0, 10.0, 9.0]]]), None), tmp_path / "parts.png")
    before, after = (cell.picture for cell in drawn[0].cells)
    assert (before == 200).all()
    assert (after[5:8, 3:9] == 200).all()
    outside = np.ones((20, 20), dtype=bool)
    outside[4:9, 2:10] = False
    assert (after[outside] == 90).all()
