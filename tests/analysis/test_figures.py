"""Figures show what they are given: looked at as drawn, not only as made."""

import math
import runpy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from stablemask import PseudoScores
from stablemask.analysis import figures
from stablemask.analysis.palette import PALETTES, Theme
from stablemask.analysis.views import Curve, Interval, Series, Table, sink_curve
from tests.analysis.views import make_view

DOCS = Path(__file__).parents[2] / "docs" / "figures"
CURVE = Curve(
    "Extrapolation",
    "tokens",
    "perplexity",
    [
        Series("full", [64, 128, 256], [20, 30, math.nan], [19, 28, math.nan], [21, 32, math.nan]),
        Series("window", [64, 128, 256], [21, 22, 23]),
    ],
    log_x=True,
    log_y=True,
    marks=[(64, "training length")],
)
TABLE = Table(
    "Position", ["encoding", "mapping"], [["RoPE", 1.5], ["RoPE + StableMask", 100.0], ["none", None]]
)

INTERVALS = [
    Interval("ahead", -0.02, (-0.03, -0.01), (-0.025, -0.015)),
    Interval("by seeds alone", 0.01, (-0.01, 0.03), (math.nan, math.nan)),
]


def every_figure(theme: Theme) -> dict[str, Callable[[], Figure]]:
    with_it, without = make_view(), make_view("plain", sink=False)
    scores = PseudoScores(0.5, horizon=5, headwise=False)
    return {
        "heads": lambda: figures.heads_figure([without, with_it], [(0, 1), (2, 0)], theme=theme),
        "all heads": lambda: figures.all_heads_figure(with_it, theme=theme),
        "intervals": lambda: figures.interval_figure("Claims", "nats", INTERVALS, mark=-0.005, theme=theme),
        "pseudo mass": lambda: figures.pseudo_mass_figure(with_it.pseudo_mass, theme=theme),
        "construction": lambda: figures.construction_figure(scores, torch.eye(5), theme=theme),
        "sinks": lambda: figures.curve_figure(sink_curve([without, with_it]), theme=theme),
        "extrapolation": lambda: figures.curve_figure(CURVE, theme=theme),
        "position": lambda: figures.table_figure(TABLE, best=100, theme=theme),
    }


@pytest.mark.parametrize("theme", PALETTES)
def test_figures_are_drawn_on_the_surface_of_their_theme(theme: Theme) -> None:
    for name, make in every_figure(theme).items():
        figure = make()
        canvas = FigureCanvasAgg(figure)
        canvas.draw()  # warnings, as for a glyph that the font lacks, are errors
        corner = "#" + bytes(canvas.buffer_rgba())[:3].hex()
        assert corner == PALETTES[theme].surface, name


def texts(figure: Figure) -> list[str]:
    figure.draw_without_rendering()
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def test_the_construction_shows_the_method() -> None:
    scores = PseudoScores(0.5, horizon=3, headwise=False)
    figure = figures.construction_figure(scores, torch.zeros(3, 3))
    c, p, mixed, kept = (texts_of(figure, i) for i in range(4))
    assert c == ["1", "0", "0", "1", "1", "0", "1", "1", "1"]
    assert p == ["0.0", "−0.5", "−1.0", "0.0", "0.0", "−1.0", "0.0", "0.0", "0.0"]
    assert mixed == p  # A is zero here
    rest = math.exp(-0.5) + math.exp(-1)
    assert kept[:4] == [f"{1 / (1 + rest):.2f}", "", "", f"{rest / (1 + rest):.2f}"]
    assert kept[8:] == ["0.33", "0.33", "0.33", "0.00"]


def texts_of(figure: Figure, place: int) -> list[str]:
    return [text.get_text() for text in figure.axes[place].texts]


def test_maps_are_those_of_the_models() -> None:
    view = make_view()
    figure = figures.heads_figure([view], [(2, 1)])
    drawn = figure.axes[0].images[0].get_array()
    assert drawn is not None
    assert torch.equal(torch.from_numpy(drawn.data), view.attention(2, 1))
    (beside,) = figure.axes[0].child_axes
    column = beside.images[0].get_array()
    assert column is not None
    assert torch.equal(torch.from_numpy(column.data)[:, 0], view.pseudo_mass[2, 1])


def test_any_token_can_be_drawn() -> None:
    tokens = ["$x$", "\n", "中", "\U0001fae0", "<b>", "\ud800", "a" * 40, "_^{", "\x00", "ش", "é"]
    figure = figures.heads_figure([replace(make_view(), tokens=tokens)], [(0, 0)])
    figure.draw_without_rendering()
    shown = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert shown == [
        "$x$",
        "⟨A⟩",
        "⟨4E2D⟩",
        "⟨1FAE0⟩",
        "<b>",
        "⟨D800⟩",
        "a" * 11 + "…",
        "_^{",
        "⟨0⟩",
        "ش",
        "é",
    ]


def test_lines_differ_without_colour() -> None:
    lines = [Series(str(i), [1, 2], [i, i]) for i in range(6)]
    figure = figures.curve_figure(Curve("c", "x", "y", lines))
    styles = {(str(line.get_linestyle()), line.get_marker()) for line in figure.axes[0].get_lines()}
    dashes = {str(line._dash_pattern) for line in figure.axes[0].get_lines()}  # type: ignore[attr-defined] # get_linestyle hides custom dashes
    assert len(styles) == len(dashes) == 6


def test_the_table_shades_what_is_good() -> None:
    figure = figures.table_figure(TABLE, best=100)
    faces = [to_hex(patch.get_facecolor()) for patch in figure.axes[0].patches]
    ramp = PALETTES["light"].attention_ramp()
    assert [ramp.index(face) for face in faces] == [round(2.55 * 0.85 * 1.5), round(255 * 0.85)]
    assert "–" in texts(figure)


@pytest.mark.parametrize("suffix", [".svg", ".pdf", ".png"])
def test_saving_is_whole_and_repeatable(tmp_path: Path, suffix: str) -> None:
    first, second = (
        figures.save_figure(figures.curve_figure(CURVE), tmp_path / f"{i}{suffix}") for i in "ab"
    )
    assert first.read_bytes() == second.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"a{suffix}", f"b{suffix}"]


def test_wrong_arguments_are_named(tmp_path: Path) -> None:
    view = make_view()
    with pytest.raises(ValueError, match=r"path: got 'a.gif'; allowed suffixes are .svg, .pdf, .png"):
        figures.save_figure(figures.curve_figure(CURVE), tmp_path / "a.gif")
    with pytest.raises(FileNotFoundError, match="allowed is a file in a folder that exists"):
        figures.save_figure(figures.curve_figure(CURVE), tmp_path / "none" / "a.png")
    with pytest.raises(ValueError, match="heads: got none"):
        figures.heads_figure([view], [])
    with pytest.raises(ValueError, match=r"pseudo_mass: got shape \(11,\)"):
        figures.pseudo_mass_figure(view.pseudo_mass[0, 0])
    with pytest.raises(ValueError, match=r"attention_scores: got shape \(13, 13\)"):
        figures.construction_figure(PseudoScores(0.5, horizon=13), torch.zeros(13, 13))
    with pytest.raises(ValueError, match="head: got 1; allowed are 0 … 0"):
        figures.construction_figure(PseudoScores(0.5, horizon=5), torch.zeros(5, 5), head=1)


@pytest.mark.slow
def test_the_pictures_of_the_documentation_are_current(tmp_path: Path) -> None:
    runpy.run_path(str(DOCS / "make.py"))["main"](tmp_path)
    made = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    kept = {path.name: path.read_bytes() for path in DOCS.glob("*.svg")}
    of_results = {name for name in kept if name.startswith("results-")}  # drawn by `stablemask reproduce`
    assert made == {name: kept[name] for name in kept.keys() - of_results}, "run `make figures`"


def test_all_heads_are_drawn_with_their_maps() -> None:
    view = make_view()
    axes = figures.all_heads_figure(view).axes
    titles = {place.get_title(loc="left"): place for place in axes if place.get_title(loc="left")}
    assert list(titles) == ["0.0", "0.1", "1.0", "1.1", "2.0", "2.1"]
    for title, place in titles.items():
        layer, head = map(int, title.split("."))
        shown = torch.as_tensor(place.images[0].get_array())
        torch.testing.assert_close(shown, view.attention(layer, head))


def test_intervals_are_drawn_where_they_are() -> None:
    (axes,) = figures.interval_figure("Claims", "nats", INTERVALS, mark=-0.005).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["ahead", "by seeds alone"]
    spans = [tuple(line.get_xdata()) for line in axes.lines if len(line.get_xdata()) == 2]
    assert spans == [(-0.03, -0.01), (-0.025, -0.015), (-0.01, 0.03), (0, 0), (-0.005, -0.005)]
    dots = [tuple(float(x) for x in line.get_xdata()) for line in axes.lines if line.get_marker() == "o"]
    assert dots == [(-0.02,), (0.01,)]
    assert axes.yaxis_inverted(), "the first one is on top"
    with pytest.raises(ValueError, match="intervals"):
        figures.interval_figure("Claims", "nats", [])
