"""The pictures of the studies: a name has one look and one height in all panels, whichever of them it is in."""

import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from studies.charts import Dots

from studies import charts


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """The figure that a call of the module draws."""
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **options: figures.append(figure))

    def draw(name, *arguments):
        getattr(charts, name)(*arguments, tmp_path / "figure.png")
        return figures[-1]

    return draw


def colours(axes: Axes) -> dict[str, str]:
    """Label to colour of what a panel shows, without what is there for the legend alone."""
    seen = [line for line in axes.get_lines() if len(line.get_xdata()) and not str(line.get_label()).startswith("_")]
    return {str(line.get_label()): to_hex(line.get_color()) for line in seen}


def test_a_method_has_the_same_height_in_every_panel(drawn):
    """Table 3 has two lines more on Birds, and the names stand beside the first panel alone."""
    birds = [Dots("A", 80.0, {"ours": [79.0]}), Dots("B", None, {"ours": [78.0]}), Dots("C", 82.0, {"ours": [81.0]})]
    planes = [Dots("A", 70.0, {"ours": [69.0]}), Dots("C", 72.0, {"ours": [71.0]})]
    left, right = drawn("draw_dots", {"Birds": birds, "Aircrafts": planes}, "accuracy").axes
    named = {label.get_text(): height for label, height in zip(left.get_yticklabels(), left.get_yticks(), strict=True)}
    lines = [*left.get_lines(), *right.get_lines()]
    heights = {float(line.get_xdata()[0]): float(line.get_ydata()[0]) for line in lines}
    assert heights[80.0] == heights[79.0] == heights[70.0] == heights[69.0] == named["A"]
    assert heights[82.0] == heights[72.0] == heights[71.0] == named["C"]
    assert heights[78.0] == named["B"]
    assert left.get_ylim() == right.get_ylim()


def test_a_legend_is_no_wider_than_its_figure_and_a_protocol_looks_the_same_in_all(drawn):
    fair, paper, search = "ours, fair", "ours, paper's protocol", "ours, fair, rate not chosen"
    lines = [Dots("A", 80.0, {search: [79.0]}), Dots("B", 81.0, {paper: [1.0], fair: [2.0]})]
    long = drawn("draw_dots", {"Birds": lines}, "x")
    [legend] = long.legends
    assert {text.get_text() for text in legend.get_texts()} == {"paper", fair, paper, search}
    assert legend.get_window_extent().width <= long.bbox.width
    short = drawn("draw_dots", {"Birds": [Dots("B", 81.0, {fair: [2.0], paper: [1.0]})]}, "x")
    looks, same = (colours(figure.axes[0]) for figure in (long, short))
    assert {fair: looks[fair], paper: looks[paper]} == {fair: same[fair], paper: same[paper]}


def test_a_method_has_the_same_colour_in_every_panel(drawn):
    curve = [1, 2], [50.0, 60.0]
    rates = {"Birds": {"GAP": curve, "B-CNN": curve, "MPN-COV": curve}, "Cars": {"MPN-COV": curve, "SEB": curve}}
    curves = {data: {"accuracy": {name: [line] for name, line in lines.items()}} for data, lines in rates.items()}
    for figure in (
        drawn("draw_rates", rates, False),
        drawn("draw_curves", curves),
    ):
        looks: dict[str, set[str]] = {}
        for axes in figure.axes:
            for name, colour in colours(axes).items():
                looks.setdefault(name, set()).add(colour)
        assert all(len(outcome) == 1 for outcome in looks.values()), looks
        ours = [colour for name, outcome in looks.items() if name != "paper" for colour in outcome]
        assert len(set(ours)) == len(ours)


def test_each_of_many_methods_has_a_look_of_its_own(drawn):
    figure = drawn("draw_rates", {"Birds": {f"head {k}": ([1, 2], [50.0, 60.0]) for k in range(28)}}, False)
    looks = {(line.get_color(), line.get_marker(), line.get_linestyle()) for line in figure.axes[0].get_lines()}
    assert len(looks) == 28


def test_the_best_accuracy_of_every_head_is_drawn(drawn):
    lines = {"A": ([1, 2], [80.0, 3.0]), "B": ([1, 2], [40.0, 55.0])}
    [axes] = [axes for axes in drawn("draw_rates", {"Birds": lines}, False).axes if axes.get_visible()]
    low, high = axes.get_ylim()
    assert 40 < low < 55
    assert high > 80


def test_a_histogram_has_the_colour_of_its_method(drawn):
    """Also where the other one was not looked at; above the eigenvalues, below the condition numbers."""
    values = {"histogram_edges": [0.0, 1.0, 2.0], "histogram": [3, 4]}
    single, summary = values | {"log10_condition_of_images": [5.0, 6.0]}, values | {"log10_condition": [1, 2, 3, 4, 5]}
    figure = drawn("draw_histograms", {"Birds": {"A": single, "B": single}, "Cars": {"B": single}}, 2.0**-18)
    birds, cars, below_birds, below_cars = figure.axes
    top = {patch.get_label(): to_hex(patch.get_edgecolor()) for axes in (birds, cars) for patch in axes.patches}
    assert top["A"] != top["B"]
    assert [to_hex(patch.get_edgecolor()) for patch in cars.patches] == [top["B"]]
    assert [to_hex(line.get_color()) for line in below_birds.get_lines()] == [top["A"], top["B"]]
    assert [to_hex(line.get_color()) for line in below_cars.get_lines()] == [top["B"]]
    boxes = (
        drawn("draw_histograms", {"Birds": {"A": summary, "B": summary}, "Cars": {"B": summary}}, 2.0**-18).axes[3].patches
    )
    assert [to_hex(box.get_facecolor()) for box in boxes] == [top["B"]]
