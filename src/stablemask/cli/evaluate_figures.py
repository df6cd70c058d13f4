"""The curves of ``stablemask eval`` as figures, the models that were evaluated together in one."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from stablemask.evaluation.cells import Values


class Point(NamedTuple):
    """A value of a curve, with its interval where there is one."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Chart:
    """How the values of a suite become curves.

    Attributes:
        title: What it shows.
        x_label: The horizontal axis, logarithmic.
        y_label: The vertical axis, logarithmic.
        curves: From the values of the suite's cells to named curves.
        mark: A value of x that is labelled, such as the training length.
    """

    title: str
    x_label: str
    y_label: str
    curves: Callable[[Sequence[Values]], Mapping[str, Sequence[Point]]]
    mark: tuple[float, str] | None = None


def extrapolation_curves(found: Mapping[tuple[str, int], Values]) -> dict[str, list[Point]]:
    """Perplexity against length, for each method."""
    curves: dict[str, list[Point]] = {}
    for (method, length), values in found.items():
        curves.setdefault(method, []).append(Point(length, values["perplexity"]))
    return curves


def latency_curves(found: Mapping[tuple[int, int], Values]) -> dict[str, list[Point]]:
    """Ratio to the baseline against the length of the output, for each prompt."""
    curves: dict[str, list[Point]] = {}
    for name in ("SM-I", "SM"):
        for (prompt, output), values in found.items():
            interval = (values[f"ratio/{name}{end}"] for end in ("", "/low", "/high"))
            curves.setdefault(f"{name}, prompt {prompt}", []).append(Point(output, *interval))
    return curves


def write_figure(chart: Chart, path: Path, curves: Mapping[str, Sequence[Point]]) -> Path:
    """Draw curves into an SVG file. Needs matplotlib."""
    from stablemask.analysis.figures import curve_figure, save_figure  # noqa: PLC0415 - only for this
    from stablemask.analysis.views import Curve, Series  # noqa: PLC0415 - as above

    series = []
    for name, points in curves.items():
        intervals = [(p.low, p.high) for p in points if p.low is not None and p.high is not None]
        low, high = ([i[0] for i in intervals], [i[1] for i in intervals]) if intervals else (None, None)
        series.append(Series(name, [p.x for p in points], [p.y for p in points], low, high))
    marks = [] if chart.mark is None else [chart.mark]
    curve = Curve(chart.title, chart.x_label, chart.y_label, series, log_x=True, log_y=True, marks=marks)
    return save_figure(curve_figure(curve), path)
