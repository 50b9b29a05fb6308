"""The demo at a small size: one page, four heads, and a second start that trains nothing twice."""

import base64
import csv
import html
import io
import re
import signal
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from PIL import Image

from eigengrain.cli import demo
from eigengrain.cli import main as cli
from eigengrain.cli import train as train_command
from eigengrain.cli.demo import HEADS, Demo
from eigengrain.data import build_transform, make_loader
from eigengrain.errors import ArgumentError, FileError, UnknownName
from eigengrain.models import create_model, from_pretrained, list_backbones, save_pretrained
from eigengrain.recipes import load_recipe
from eigengrain.report import comparison
from eigengrain.training import loop
from eigengrain.training.sources import open_sources

TINY = ["--epochs", "1", "--per_class", "5"]


@pytest.fixture(autouse=True, scope="module")
def surroundings(tmp_path_factory):
    """One thread, an empty cache and a wide terminal."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EIGENGRAIN_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("COLUMNS", "200")
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def trained(surroundings, tmp_path_factory):
    """The folder of a finished demo."""
    out = tmp_path_factory.mktemp("demo")
    assert cli.main(["demo", *TINY, "--out", str(out)]) == 0
    return out


class Tags(HTMLParser):
    """The tags of a page with their attributes."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))


def test_the_page_is_one_file_that_loads_and_runs_nothing(trained):
    text = (trained / "report.html").read_text(encoding="utf-8")
    tags = Tags(text).tags
    assert not {"script", "link", "iframe", "object"} & {tag for tag, _ in tags}
    sources = [attributes["src"] for tag, attributes in tags if tag == "img"]
    assert 2 < len(sources) <= 2 + comparison.EXAMPLES
    for source in sources:
        kind, data = source.split(",", 1)
        assert kind == "data:image/png;base64"
        assert base64.b64decode(data, validate=True).startswith(b"\x89PNG")
    assert "http" not in text
    assert "url(" not in text
    assert html.escape("--seeds '[0,1,2]'").replace("&#x27;", "&#39;") in text


def test_the_table_has_a_row_for_each_head_in_the_order_of_training(trained):
    with (trained / "demo.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["head"] for row in rows] == list(HEADS)
    text = (trained / "report.html").read_text(encoding="utf-8")
    best = max(float(row["test_top1"]) for row in rows)
    assert text.index(f'<p class="headline"><b>{best:.1f}\u00a0%</b>') < text.index("<table>")
    table = text[text.index("<table>") : text.index("</table>")]
    assert re.findall(r'<tr><th scope="row">([^<]+)</th>', table) == list(HEADS)
    for row in rows:
        with (trained / row["head"] / "summary.csv").open(newline="", encoding="utf-8") as file:
            [epoch] = csv.DictReader(file)
        assert float(row["test_top1"]) == float(epoch["test_top1"])
        assert float(row["images_per_second"]) == pytest.approx(float(epoch["images_per_second"]), abs=0.06)
        assert float(row["train_seconds"]) == pytest.approx(50 / float(epoch["images_per_second"]), abs=0.06)
        assert (row["s"] != "") == row["head"].endswith("+seb")
        assert row["torch"] == torch.__version__


def test_the_page_shows_what_the_model_computes(trained):
    config = load_recipe(demo.RECIPE, {"data.options": {"per_class": 5}, "out": str(trained / "mpncov+seb")})
    sources = open_sources(config.data, 0)
    seen = comparison.open_finished(config, sources).measured
    model = from_pretrained(trained / "mpncov+seb" / "model")
    transform = build_transform(config.data.transforms, False, model.pretrained_cfg["mean"], model.pretrained_cfg["std"])
    images = torch.stack([transform(sources.test.image(index)) for index in range(4)])
    with torch.inference_mode():
        features = model.forward_features(images).flatten(2).double()
        scores = model(images)
    for index, x in enumerate(features):
        centred = x - x.mean(1, keepdim=True)
        values = torch.linalg.eigvalsh(centred @ centred.T / x.shape[1]).flip(0)
        torch.testing.assert_close(seen.eigenvalues[index], values, rtol=1e-4, atol=1e-6 * float(values[0]))
        s = (values * (-2 * values).exp()).sum().sqrt()
        torch.testing.assert_close(seen.factor[index].double(), s, rtol=1e-4, atol=1e-12)
    assert torch.equal(seen.predictions[:4], scores.argmax(1))
    right = (seen.predictions == torch.tensor(sources.test.labels)).double().mean()
    [row] = csv.DictReader((trained / "mpncov+seb" / "summary.csv").open(newline="", encoding="utf-8"))
    assert 100 * float(right) == pytest.approx(float(row["test_top1"]))


def test_the_images_are_those_where_the_heads_differ(trained):
    """The pictures and answers of the page, by the saved models alone."""
    config = load_recipe(demo.RECIPE, {"data.options": {"per_class": 5}})
    test = open_sources(config.data, 0).test
    predictions = {}
    for head in HEADS:
        model = from_pretrained(trained / head / "model")
        transform = build_transform(
            config.data.transforms, False, model.pretrained_cfg["mean"], model.pretrained_cfg["std"]
        )
        with torch.inference_mode():
            images = torch.stack([transform(test.image(index)) for index in range(len(test))])
            predictions[head] = model(images.contiguous(memory_format=torch.channels_last)).argmax(1).tolist()
    right = [{head: predictions[head][i] == label for head in HEADS} for i, label in enumerate(test.labels)]
    expected = {i for i, row in enumerate(right) if len(set(row.values())) == 2}
    text = (trained / "report.html").read_text(encoding="utf-8")
    tiles = re.findall(r"<figure><img alt=[^>]*base64,([^\"]+)\"><figcaption><b>([^<]+)</b>(.*?)</figcaption>", text)
    assert len(tiles) == min(len(expected), comparison.EXAMPLES) > 0
    pixels = {test.image(i).tobytes(): i for i in expected}
    for data, title, lines in tiles:
        index = pixels[Image.open(io.BytesIO(base64.b64decode(data))).tobytes()]
        assert title == test.classes[test.labels[index]]
        answers = [
            line == f"{head}: right"
            for head, line in zip(HEADS, re.findall(r"<span[^>]*>([^<]+)</span>", lines), strict=True)
        ]
        assert answers == list(right[index].values())
    assert len({title for _, title, _ in tiles}) == min(len({test.labels[i] for i in expected}), comparison.EXAMPLES)


def test_the_next_commands_work(trained, capsys, tmp_path, monkeypatch):
    evaluate, report, train = demo.next_commands(Demo(out=str(trained)))
    assert cli.main([*report.split()[1:], "--out", str(tmp_path / "report.html")]) == 0
    assert (tmp_path / "report.html").is_file()
    assert cli.main([*evaluate.split()[1:], "--out", str(tmp_path / "scores.csv")]) == 0
    with (tmp_path / "scores.csv").open(newline="") as file:
        assert [row["subset"] for row in csv.DictReader(file)] == ["all", "top:32", "last:32"]

    # a user's own images, of other sizes and proportions
    birds = open_sources(load_recipe(demo.RECIPE, {"data.options": {"per_class": 3}}).data, 0)
    for split, dataset in (("train", birds.train), ("test", birds.test)):
        for index, label in enumerate(dataset.labels):
            file = tmp_path / "mine" / split / f"class {label}" / f"{index}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            dataset.image(index).resize((120 + index, 100)).save(file)
    monkeypatch.setattr(train_command, "_weights_available", lambda backbone: False)
    words = train.replace("FOLDER", str(tmp_path / "mine")).replace("runs/mine", str(tmp_path / "run")).split()[1:]
    assert cli.main([*words, "--epochs", "1", "--report", "false"]) == 0
    assert not (tmp_path / "run" / "report.html").exists()
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()


def test_a_second_start_trains_nothing_twice(trained, capsys, monkeypatch):
    started = []
    monkeypatch.setattr(loop, "train", lambda config, sources: started.append(config.model.head))
    before = (trained / "demo.csv").read_text(encoding="utf-8")
    assert cli.main(["demo", *TINY, "--out", str(trained)]) == 0
    assert started == []
    assert (trained / "demo.csv").read_text(encoding="utf-8") == before
    out, err = capsys.readouterr()
    assert len(err.splitlines()) == len(HEADS)
    report, *commands = out.strip().splitlines()[-4:]
    assert report.endswith(str(trained / "report.html"))
    assert [line.split(": ", 1)[1] for line in commands] == demo.next_commands(Demo(out=str(trained)))


def test_an_interrupted_demo_continues(trained, tmp_path, capsys, monkeypatch):
    """Ctrl-C in the second head; the result is the same to the bit as that of an uninterrupted demo."""
    heads = ["--heads", "[gap,mpncov]", *TINY, "--out", str(tmp_path)]
    original = loop.train

    def interrupted(config, sources):
        def stop(epoch, batch, loss):
            if config.model.head == "mpncov" and batch == 0:
                signal.raise_signal(signal.SIGINT)

        return original(config, sources, stop)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "train", interrupted)
        assert cli.main(["demo", *heads]) == 130
    assert capsys.readouterr().err.splitlines()[-1].startswith("eigengrain: ")
    assert (tmp_path / "gap" / "results.json").is_file()
    assert not (tmp_path / "report.html").exists()

    assert cli.main(["demo", *heads]) == 0
    for head in ("gap", "mpncov"):
        ours, theirs = (from_pretrained(folder / head / "model").state_dict() for folder in (tmp_path, trained))
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_other_options_in_the_same_folder_are_refused_unless_it_is_fresh(tmp_path):
    out = ["--heads", "[gap]", "--per_class", "3", "--out", str(tmp_path)]
    assert cli.main(["demo", *out, "--epochs", "1"]) == 0
    with pytest.raises(FileError) as error:
        demo.run(Demo(["gap"], per_class=3, out=str(tmp_path), epochs=2))
    assert error.value.path == tmp_path / "gap"
    kept = tmp_path / "notes.txt"
    kept.write_text("mine")
    assert cli.main(["demo", *out, "--epochs", "2", "--fresh"]) == 0
    assert len((tmp_path / "gap" / "summary.csv").read_text().splitlines()) == 3
    assert kept.read_text() == "mine"


def test_seeds_have_folders_of_their_own_and_the_table_their_range():
    runs = demo.plan(Demo(heads=["gap"], seeds=[0, 2], out="x"))
    assert [(Path(run.out).name, run.seed) for run in runs] == [("gap", 0), ("gap-seed2", 2)]
    row = {"head": "gap", "epochs": 4, "train_seconds": 10.0, "images_per_second": 600.0, "log10_condition": 3.0}
    rows = [row | {"seed": seed, "test_top1": top1, "energy_last": 1e-3, "s": ""} for seed, top1 in ((0, 60.0), (2, 65.0))]
    table = comparison.average(rows)
    assert table.caption == "4 epochs, mean of 2 seeds (lowest to highest)"
    assert [cell.text for cell in table.rows[0]] == ["gap", "62.5 (60.0 to 65.0)", "10", "600", "3.00", "1.0e-03", "–"]
    assert comparison.average(rows[:1]).caption == "4 epochs, one seed (0)"


def test_the_demo_runs_without_matplotlib(trained, capsys, monkeypatch):
    monkeypatch.setattr(demo, "find_spec", lambda name: None)
    page = trained / "report.html"
    before = page.read_text(encoding="utf-8")
    try:
        assert cli.main(["demo", *TINY, "--out", str(trained)]) == 0
        assert page.read_text(encoding="utf-8").count("<img") == before.count("<img") - 2
    finally:
        page.write_text(before, encoding="utf-8")
    assert "eigengrain[explain]" in capsys.readouterr().out


@pytest.mark.parametrize(
    "options",
    [{"heads": []}, {"heads": ["gap", "gap"]}, {"seeds": [0, 0]}, {"seeds": [-1]}, {"epochs": 0}, {"per_class": 0}],
    ids=str,
)
def test_invalid_options(options):
    with pytest.raises(ArgumentError) as error:
        Demo(**options)
    assert error.value.argument in options


def test_an_unknown_head_is_refused_before_anything_is_trained(tmp_path):
    with pytest.raises(UnknownName) as error:
        demo.run(Demo(["gap", "mpncv"], out=str(tmp_path)))
    assert "mpncov" in error.value.suggestions
    assert list(tmp_path.iterdir()) == []


# --- the network and the page ---------------------------------------------------------------------------------------


def test_the_small_backbone_is_created_by_its_name(tmp_path):
    assert list_backbones("plumage*") == ["plumage_net"]
    model = create_model("plumage_net", head="gap", num_classes=3).eval()
    x = torch.rand(2, 3, 96, 96)
    features = model.forward_features(x)
    assert features.shape == (2, 64, 12, 12)
    assert features.shape[2] * features.shape[3] >= 2 * features.shape[1]
    assert create_model("plumage_net", head="gap", last_stride=1).forward_features(x).shape == (2, 64, 24, 24)
    assert sum(p.numel() for p in model.backbone.parameters()) < 100_000
    model.backbone.stem.conv.weight.data.mul_(1.5)
    save_pretrained(model, tmp_path)
    torch.testing.assert_close(from_pretrained(tmp_path)(x), model(x), rtol=0, atol=0)
    with pytest.raises(ValueError):
        create_model("plumage_net", pretrained=True)


def test_its_residual_branches_contribute_from_the_start():
    model = create_model("plumage_net", head="gap", num_classes=3)
    gains = [p for name, p in model.backbone.named_parameters() if name.endswith("bn.weight")]
    assert gains
    assert all(bool((gain == 1).all()) for gain in gains)


def test_measuring_restores_the_mode_of_the_model():
    model = create_model("plumage_net", head="mpncov", num_classes=3).train()
    birds = open_sources(load_recipe(demo.RECIPE, {"data.options": {"per_class": 1}}).data, 0).test
    birds.transform = build_transform(load_recipe(demo.RECIPE).data.transforms, False, (0.5,) * 3, (0.5,) * 3)
    seen = comparison.measure_spectra(model, make_loader(birds, 4, train=False))
    assert model.training
    assert seen.eigenvalues.shape == (10, 64)
    assert bool((seen.eigenvalues.diff(dim=1) <= 0).all())
