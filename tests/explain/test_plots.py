"""Panels: colours, captions, remarks about the rank, and the layout of the sheet."""

import math
from dataclasses import replace

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from PIL import Image

import eigengrain as eg
from eigengrain.data import Transforms, build_transform
from eigengrain.data.plumage import open_plumage
from eigengrain.errors import ArgumentError, ShortRankWarning, UnknownName
from eigengrain.explain import EigenPerturbation, attribute_rules
from eigengrain.explain import plots as module
from eigengrain.explain.plots import Explained, draw_panel, draw_perturbed, explain_images, overlay, rgb_pixels

SUBSETS = ["all", "top:5", "last:3"]


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(0)
    net = eg.create_model("plumage_net", head="mpncov", num_classes=2, reduce=8)
    with torch.no_grad():
        net(birds(net)[0])  # running statistics other than the initial ones
    net.class_names = ["ringed", "barred"]
    return net.eval()


def birds(net):
    transform = build_transform(Transforms("none"), False, net.pretrained_cfg["mean"], net.pretrained_cfg["std"])
    whole = open_plumage("test", classes=2, per_class=2, size=32, cache=False, transform=transform)
    return torch.stack([image for image, _ in whole]), whole.labels


@pytest.fixture(scope="module")
def explained(net):
    images, labels = birds(net)
    return explain_images(net, images, SUBSETS, ["vanilla", "deconv"], names=["a", "b", "c", "d"], labels=labels)


def made(**changes):
    """A black image with constant maps, so that the colours are those of the maps."""
    maps = {"all": torch.ones(8, 8), "top:5": torch.full((8, 8), 0.25), "last:3": torch.full((8, 8), 0.01)}
    gaps = {"all": math.inf, "top:5": 0.125, "last:3": 0.125}
    whole = Explained(torch.zeros(3, 8, 8).byte(), "x.png", {"vanilla": maps}, gaps, "exact", 8, 20, "wren", "wren", 0.875)
    return replace(whole, **changes)


def colours_of(path):
    packed = np.asarray(Image.open(path).convert("RGB")).astype(int) @ [1 << 16, 1 << 8, 1]
    return {(colour >> 16, colour >> 8 & 255, colour & 255) for colour in np.unique(packed).tolist()}


def shade(v):
    """Over black: the colour of the map, mixed with its strength."""
    return tuple(round(255 * v * c) for c in matplotlib.colormaps["inferno"](v)[:3])


# overlays


def test_an_overlay_agrees_with_a_loop_over_pixels():
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (3, 4, 5), generator=generator, dtype=torch.uint8)
    values = torch.rand(4, 5, generator=generator) * 3
    seen = overlay(pixels, values, largest=2.0)
    for y in range(4):
        for x in range(5):
            red, green, blue = pixels[:, y, x].tolist()
            grey = 0.3 * (0.299 * red + 0.587 * green + 0.114 * blue) / 255
            v = min(math.sqrt(values[y, x].item() / 2), 1.0)
            colour = matplotlib.colormaps["inferno"](v)
            for channel in range(3):
                assert seen[y, x, channel] == pytest.approx(255 * ((1 - v) * grey + v * colour[channel]), abs=0.501)


def test_brightness_grows_with_the_map_for_every_eye():
    ramp = overlay(torch.zeros(3, 1, 64).byte(), torch.linspace(0, 1, 64)[None], 1.0)[0].astype(float)
    lightness = ramp @ [0.2126, 0.7152, 0.0722]
    assert (np.diff(lightness) >= -1).all()
    assert lightness[-1] > 230


def test_a_map_of_zeros_or_nan_leaves_the_dimmed_image():
    pixels = torch.full((3, 2, 2), 200, dtype=torch.uint8)
    assert (overlay(pixels, torch.zeros(2, 2), 0.0) == 60).all()
    assert (overlay(pixels, torch.full((2, 2), torch.nan), 1.0) == 60).all()


def test_maps_of_a_row_share_one_scale_unless_each_has_its_own(tmp_path):
    shared = colours_of(draw_panel([made()], tmp_path / "row.png"))
    assert {shade(1.0), shade(0.5), shade(0.1)} <= shared
    alone = colours_of(draw_panel([made()], tmp_path / "each.png", scale="each"))
    assert shade(1.0) in alone
    assert not {shade(0.5), shade(0.1)} & alone


def test_a_row_does_not_change_with_the_rows_beside_it(tmp_path):
    weak = made(maps={"vanilla": {name: 1e-6 * map for name, map in made().maps["vanilla"].items()}})
    draw_panel([weak], tmp_path / "alone.png")
    draw_panel([weak, made()], tmp_path / "both.png")
    alone, both = (np.asarray(Image.open(tmp_path / name).convert("RGB")) for name in ("alone.png", "both.png"))
    assert {shade(1.0), shade(0.5), shade(0.1)} <= colours_of(tmp_path / "alone.png")
    first = alone.shape[0] // 2
    assert (alone[:first] == both[:first]).all()


# predictions and captions


def test_maps_answers_and_truth_are_those_of_the_model(net, explained):
    images, labels = birds(net)
    with torch.no_grad():
        likely = net(images).softmax(1).max(1)
    actual = attribute_rules(net, images, SUBSETS, ["vanilla", "deconv"], target=likely.indices)
    for i, image in enumerate(explained):
        assert image.predicted == net.class_names[likely.indices[i]] == image.target
        assert image.probability == pytest.approx(likely.values[i].item(), abs=1e-6)
        assert image.truth == net.class_names[labels[i]]
        for rule, subset in (("vanilla", "last:3"), ("deconv", "all")):
            expected = actual[rule].maps[subset][i].abs().max(0).values
            torch.testing.assert_close(image.maps[rule][subset], expected, rtol=1e-4, atol=1e-9)
        assert image.gaps["top:5"] == pytest.approx(actual["vanilla"].gaps["top:5"][i].item(), rel=1e-6)
        assert (image.channels, image.positions) == (8, 16)


def test_pixels_are_those_of_the_image(net, explained):
    whole = open_plumage("test", classes=2, per_class=2, size=32, cache=False)
    for i, image in enumerate(explained):
        assert (image.pixels.permute(1, 2, 0).numpy() == np.asarray(whole.image(i))).all()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "x.png · predicted: wren (87.5 %) · gap at the cut: 0.12"),
        ({"truth": "wren"}, "predicted: wren (87.5 %), right ·"),
        ({"truth": "lark"}, "predicted: wren (87.5 %), true: lark ·"),
        ({"target": "lark"}, "· explained: lark · gap"),
        ({"predicted": None, "target": None}, "x.png · explained: norm of the representation"),
        ({"gaps": {"all": math.inf}}, "x.png · predicted: wren (87.5 %)"),
        ({"gaps": {"top:5": math.nan}}, "gap at the cut: between zeros"),
        ({"gaps": {"top:1": 0.5, "top:5": 0.25, "last:3": 0.25}}, "gaps at the cuts: 0.5 (top:1); 0.25 (top:5, last:3)"),
    ],
)
def test_captions(changes, expected):
    caption = made(**changes).caption.replace("\N{NO-BREAK SPACE}", " ")
    assert expected in caption
    assert ("gap" in caption) == ("gap" in expected or "gaps" not in changes)


def test_other_targets(net):
    images, _ = birds(net)
    (other,) = explain_images(net, images[:1], ["all"], ["vanilla"], target=1)
    assert other.target == "barred"
    (norm,) = explain_images(net, images[:1], ["all"], ["vanilla"], target="norm")
    assert norm.target is None
    assert norm.truth is None
    (renamed,) = explain_images(net, images[:1], ["all"], ["vanilla"], target=1, classes=["lark", "wren"])
    assert renamed.target == "wren"


# short rank


@pytest.mark.parametrize("cut", ["exact", "projector"])
def test_a_map_that_is_zero_by_rank_is_labelled_and_not_drawn(net, cut, tmp_path, monkeypatch):
    small = birds(net)[0][:, :, :16, :16]  # a map of 2 × 2, so 3 eigenvalues above 0
    net._rank_warned = False
    with pytest.warns(ShortRankWarning):
        images = explain_images(net, small, ["all", "top:5", "last:3", "top:2"], ["vanilla", "guided"], cut=cut)
    for image in images:
        for rule in ("vanilla", "guided"):
            assert image.remark(rule, "last:3") == "zero: rank N−1 = 3 < 6"
            assert image.remark(rule, "top:5") == "= all: rank 3"
            assert image.remark(rule, "top:2") == image.remark(rule, "all") == ""
            assert [subset for subset in image.maps[rule] if image.is_zero(rule, subset)] == ["last:3"]
    cells = module._map_cells(images[0], "row")
    assert [cell.picture is None for cell in cells] == [False, False, True, False] * 2
    written = figure_of(monkeypatch, lambda: draw_panel(images[:1], tmp_path / "short.png"))
    texts = [text.get_text().replace("\n", " ").replace("\N{NO-BREAK SPACE}", " ") for text in written.texts]
    assert texts.count("zero: rank N−1 = 3 < 6") == 2
    assert texts.count("= all: rank 3") == 2
    assert any("gaps at the cuts: between zeros (top:5, last:3); " in text for text in texts)
    assert (238, 238, 238) in colours_of(tmp_path / "short.png")


def test_a_zero_map_without_a_short_rank():
    dead = {name: torch.zeros(8, 8) for name in ("all", "top:5", "last:3")}
    image = made(maps={"vanilla": dead})
    assert image.remark("vanilla", "last:3") == image.remark("vanilla", "all") == "zero everywhere"
    # a map that only happens to equal that of all eigenvalues has no remark
    same = made(maps={"vanilla": {"all": torch.ones(8, 8), "top:5": torch.ones(8, 8)}})
    assert same.remark("vanilla", "top:5") == ""


# the sheet


def figure_of(monkeypatch, draw):
    """The figure that a function saves, drawn."""
    kept = []
    save = module.save
    monkeypatch.setattr(module, "save", lambda figure, path: kept.append(figure) or save(figure, path))
    draw()
    return kept[0]


def boxes(figure):
    """Bounding box of each text, in dots from the lower left corner."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    return {text: text.get_window_extent(renderer) for text in figure.texts if text.get_text()}


LONG = "one-barred crowned orange-billed plain-breasted"


@pytest.mark.parametrize(
    ("rules", "subsets"),
    [(["vanilla", "deconv", "guided"], SUBSETS), (["vanilla"], ["all"]), (["vanilla", "deconv"], ["all", "top:1+last:3"])],
)
def test_no_text_leaves_the_sheet_or_covers_another(rules, subsets, tmp_path, monkeypatch):
    maps = {rule: {subset: torch.rand(8, 8) for subset in subsets} for rule in rules}
    gaps = {subset: 0.01 * len(subset) for subset in subsets}
    image = made(maps=maps, gaps=gaps, name="$x_1^2$ a long name.jpg", predicted=LONG, truth=LONG[::-1], target=LONG * 2)
    figure = figure_of(monkeypatch, lambda: draw_panel([image, image], tmp_path / "panel.png"))
    width, height = figure.canvas.get_width_height()
    actual = list(boxes(figure).items())
    for text, box in actual:
        assert box.x0 >= 0, text
        assert box.x1 <= width, text
        assert box.y0 >= 0, text
        assert box.y1 <= height, text
    for place, (text, box) in enumerate(actual):
        for other, its in actual[place + 1 :]:
            across = min(box.x1, its.x1) - max(box.x0, its.x0)
            down = min(box.y1, its.y1) - max(box.y0, its.y0)
            assert min(across, down) <= 2, (text, other)
    cells = [axes.get_window_extent() for axes in figure.axes]
    for text, box in actual:
        for cell in cells:
            inside = cell.x0 < (box.x0 + box.x1) / 2 < cell.x1 and cell.y0 < (box.y0 + box.y1) / 2 < cell.y1
            assert not inside, text


def test_type_is_readable_at_the_width_of_a_page(tmp_path, monkeypatch):
    image = made(maps={rule: made().maps["vanilla"] for rule in ("vanilla", "deconv", "guided")})
    figure = figure_of(monkeypatch, lambda: draw_panel([image], tmp_path / "panel.png"))
    assert figure.get_figwidth() <= 7.5  # inches, the width of a printed page
    assert min(text.get_fontsize() for text in figure.texts) >= 6
    width, _ = Image.open(tmp_path / "panel.png").size
    assert width / figure.get_figwidth() >= 150


def test_pixels_of_small_images_stay_square_blocks(tmp_path):
    checks = torch.zeros(3, 8, 8).byte()
    checks[:, ::2, ::2] = checks[:, 1::2, 1::2] = 255
    draw_panel([made(pixels=checks)], tmp_path / "panel.png")
    seen = np.asarray(Image.open(tmp_path / "panel.png").convert("L")).astype(int)
    # the first cell has black and white blocks only, without greys between them
    rows, columns = np.nonzero(seen == 0)
    top, left = rows.min(), columns.min()
    cell = seen[seen.shape[0] // 3 : seen.shape[0] // 3 + 60, left + 4 : left + 64]
    assert top >= 0
    assert set(np.unique(cell)) <= {0, 255}


def test_arguments_that_do_not_fit(explained, tmp_path, net):
    with pytest.raises(UnknownName) as caught:
        draw_panel(explained, tmp_path / "x.png", scale="rows")
    assert caught.value.suggestions == ["row"]
    for images in ([], [made(), made(cut="projector")]):
        with pytest.raises(ArgumentError):
            draw_panel(images, tmp_path / "x.png")
    for argument, values in (("names", ["a", "b", "c"]), ("labels", [0])):
        with pytest.raises(ArgumentError) as caught:
            explain_images(net, birds(net)[0], ["all"], ["vanilla"], **{argument: values})
        assert (caught.value.argument, caught.value.value) == (argument, len(values))


# perturbed images


@pytest.mark.parametrize(
    ("subsets", "compared"), [(["all", "last:3"], True), (["all"], False), (["top:5", "last:3"], False)]
)
def test_the_note_explains_the_numbers_if_there_are_any(subsets, compared, tmp_path, monkeypatch):
    image = made(maps={"vanilla": {subset: torch.ones(8, 8) for subset in subsets}})
    figure = figure_of(monkeypatch, lambda: draw_panel([image], tmp_path / "p.png"))
    texts = [text.get_text().replace("\n", " ") for text in figure.texts]
    assert any(text.startswith("×") for text in texts) is compared
    assert any("Under a map" in text for text in texts) is compared


def test_a_panel_of_perturbed_images_shows_image_steps_and_losses(net, tmp_path, monkeypatch):
    images, _ = birds(net)
    results = [EigenPerturbation(net).perturb(images[:2], way, 5, 10, snapshots=11) for way in ("large", "small")]
    pixels = rgb_pixels(images[:2], results[0].mean, results[0].std)
    figure = figure_of(monkeypatch, lambda: draw_perturbed(pixels, results, tmp_path / "p.png", names=["a.png", "b.png"]))
    texts = [text.get_text() for text in figure.texts]
    for word in ("toward large", "toward small", "step 1", "step 3", "step 10"):
        assert texts.count(word) == (1 if word.startswith("toward") else 2)
    captions = [text for text in texts if text.startswith(("a.png", "b.png"))]
    for i, caption in enumerate(captions):
        first, last = (module._number(results[1].losses[place, i].item()) for place in (0, -1))
        assert f"l₂ from {first} to {last} at step 9" in caption  # the loss after step 10 is not measured
    shown = [axes.images[0].get_array() for axes in figure.axes]
    assert len(shown) == 2 * 7
    assert (shown[0] == pixels[0].permute(1, 2, 0).numpy()).all()
    last = rgb_pixels(results[1].images[1], results[1].mean, results[1].std)
    assert (shown[-1] == last.permute(1, 2, 0).numpy()).all()
    with pytest.raises(ArgumentError):
        draw_perturbed(pixels, [EigenPerturbation(net).perturb(images[:2], "large", 5, 1)], tmp_path / "p.png")


def test_a_map_equals_that_of_all_eigenvalues_because_of_the_rank_only_if_the_subset_has_every_nonzero_one():
    same = torch.ones(2, 2)
    maps = {"all": same, "top:4": same, "top:3": same}
    image = Explained(torch.zeros(3, 2, 2).byte(), "", {"vanilla": maps}, {}, "exact", 8, 5, "wren")  # rank 4 of 8
    assert image.remark("vanilla", "top:4") == "= all: rank 4"
    assert image.remark("vanilla", "top:3") == image.remark("vanilla", "all") == ""


def test_a_zero_map_is_explained_by_the_rank_only_if_every_kept_eigenvalue_is_beyond_it():
    dead = torch.zeros(2, 2)
    maps = {"last:5": dead, "last:4": dead}
    image = Explained(torch.zeros(3, 2, 2).byte(), "", {"vanilla": maps}, {}, "exact", 8, 5, "wren")  # rank 4 of 8
    assert image.remark("vanilla", "last:4") == "zero: rank N−1 = 4 < 5"
    assert image.remark("vanilla", "last:5") == "zero everywhere"


def test_the_brightest_colour_begins_at_a_percentile():
    assert module.brightest(torch.arange(1001.0)) == pytest.approx(995)
    assert module.brightest(torch.cat([torch.zeros(999), torch.ones(1)])) == 1  # the percentile is 0
