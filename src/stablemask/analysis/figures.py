"""Static figures: for papers, for the documentation and for results.

Every function returns a :class:`matplotlib.figure.Figure`; :func:`save_figure` writes it as SVG, PDF or
PNG. ``theme="light"`` is made for white paper, also without colour: ramps are ordered by lightness, lines
differ in their dashes and markers as well.
"""

import math
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from io import BytesIO
from pathlib import Path
from typing import Annotated, Literal

import torch
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colorbar import Colorbar
from matplotlib.colors import ListedColormap, PowerNorm
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, get_font
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
from torch import Tensor

from stablemask import PseudoScores
from stablemask.analysis._files import write_whole
from stablemask.analysis.palette import PALETTES, Palette, Theme
from stablemask.analysis.views import Cell, Curve, Interval, ModelView, PseudoMass, Table

_SHARES = PowerNorm(0.5, 0.0, 1.0)
_DASHES = ("-", "--", "-.", ":", (0, (6, 1.5, 1.5, 1.5, 1.5, 1.5)), (0, (1, 3)))
_MARKERS = ("o", "s", "^", "D", "v", "x")
_MAX_MARKED = 12
_MAX_NAMED_TOKENS = 24
_MAX_LABEL = 12
_DATES: dict[str, dict[str, None]] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}, ".png": {}}


def heads_figure(
    models: Sequence[ModelView], heads: Sequence[tuple[int, int]], *, theme: Theme = "light"
) -> Figure:
    """Attention maps side by side: a row for every (layer, head), a column for every model.

    The column at the right of every map is the pseudo mass of the rows. Colours go with the square root of
    the share, so that a share of 1 % can still be seen.
    """
    _need(models, "models")
    _need(heads, "heads")
    palette, rows, columns = PALETTES[theme], len(heads), len(models)
    with _style(palette):
        figure = Figure(figsize=(3.3 * columns + 0.7, 3.1 * rows + 0.3), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False)
        for down, (layer, head) in enumerate(heads):
            for across, model in enumerate(models):
                _draw_map(axes[down][across], model, layer, head, palette)
                title = f"layer {layer}, head {head}"
                axes[down][across].set_title(f"{model.name}\n{title}" if down == 0 else title)
        bars = (("share of attention", palette.attention_ramp()), ("pseudo mass", palette.pseudo_ramp()))
        for label, colours in bars:
            _label_shares(figure.colorbar(_scale(colours), ax=axes, label=label, aspect=30 * rows, pad=0.02))
    return figure


def all_heads_figure(model: ModelView, *, theme: Theme = "light") -> Figure:
    """Attention maps of every head of a model: a row for every layer, the pseudo mass beside each map."""
    palette, rows, columns = PALETTES[theme], model.num_layers, model.num_heads
    with _style(palette):
        figure = Figure(figsize=(1.25 * columns + 1.2, 1.3 * rows + 0.5), layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False)
        for layer in range(rows):
            for head in range(columns):
                axes = grid[layer][head]
                _draw_map(axes, model, layer, head, palette, labelled=False)
                axes.set_title(f"{layer}.{head}", fontsize=7)
        figure.suptitle(f"{model.name}, layer.head")
        _label_shares(figure.colorbar(_scale(palette.attention_ramp()), ax=grid, label="share", aspect=40))
    return figure


def interval_figure(
    title: str, x_label: str, intervals: Sequence[Interval], *, mark: float = 0.0, theme: Theme = "light"
) -> Figure:
    """Differences with their intervals, a line each; 0 is marked, and the value from which one counts."""
    _need(intervals, "intervals")
    palette = PALETTES[theme]
    with _style(palette):
        figure = Figure(figsize=(7.2, 0.26 * len(intervals) + 1.1), layout="constrained")
        axes = figure.subplots()
        for row, interval in enumerate(intervals):
            for (low, high), colour, shift in (
                (interval.first, palette.series[0], -0.13),
                (interval.second, palette.series[1], 0.13),
            ):
                if not math.isnan(low):
                    axes.plot((low, high), (row + shift,) * 2, color=colour, linewidth=2.2)
            axes.plot(interval.value, row, color=palette.text, marker="o", markersize=4)
        axes.axvline(0, color=palette.muted, linewidth=0.8)
        axes.axvline(mark, color=palette.muted, linewidth=0.8, linestyle=(0, (2, 2)))
        axes.set_yticks(range(len(intervals)), [interval.name for interval in intervals], fontsize=8)
        axes.set(ylim=(len(intervals) - 0.5, -0.5), xlabel=x_label)
        axes.set_title(title)
        axes.grid(axis="x", color=palette.line, linewidth=0.6)
        axes.set_axisbelow(True)
    return figure


def pseudo_mass_figure(
    pseudo_mass: PseudoMass, *, title: str = "Pseudo mass 1 − α", theme: Theme = "light"
) -> Figure:
    """Pseudo mass of every layer, as a map of head and position."""
    if pseudo_mass.ndim != 3 or 0 in pseudo_mass.shape:
        raise ValueError(
            f"pseudo_mass: got shape {tuple(pseudo_mass.shape)}; allowed is (layers, heads, positions)"
        )
    palette, (layers, heads, _) = PALETTES[theme], pseudo_mass.shape
    columns = min(layers, 4)
    rows = math.ceil(layers / columns)
    with _style(palette):
        height = max(1.0, 0.17 * heads + 0.5) * rows + 0.8
        size = (max(2.6 * columns, 4.6) + 1.0, max(height, 2.6))  # the labels of the bar need as much
        figure = Figure(figsize=size, layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
        for place, axes in enumerate(grid.flat):
            if place >= layers:
                axes.set_visible(False)
                continue
            _matrix(axes, pseudo_mass[place], palette.pseudo_ramp(), aspect="auto")
            if layers > 1:
                axes.set_title(f"layer {place}")
            axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
            axes.yaxis.set_major_locator(MaxNLocator(min(heads, 8), integer=True))
        figure.suptitle(title)
        figure.supxlabel("position", fontsize=9)
        figure.supylabel("head", fontsize=9)
        _label_shares(figure.colorbar(_scale(palette.pseudo_ramp()), ax=grid, label="pseudo mass", aspect=24))
    return figure


def construction_figure(
    scores: PseudoScores,
    attention_scores: Annotated[Tensor, "T T"],
    *,
    num_heads: int = 1,
    head: int = 0,
    theme: Theme = "light",
) -> Figure:
    """The paper's construction in numbers: C, P, A ⊙ C + P, and the result with the pseudo mass beside it."""
    length = attention_scores.shape[0]
    if attention_scores.shape != (length, length) or not 1 <= length <= 12:
        got = tuple(attention_scores.shape)
        raise ValueError(
            f"attention_scores: got shape {got}; allowed is (T, T) with T in 1 … 12, to stay readable"
        )
    if not 0 <= head < num_heads:
        raise ValueError(f"head: got {head}; allowed are 0 … {num_heads - 1}")
    palette = PALETTES[theme]
    visible, pseudo = scores.dense(length, num_heads)
    mixed = attention_scores.to(torch.float64) * visible + pseudo[head]
    shares = torch.softmax(mixed, -1)
    kept = torch.cat([shares * visible, (shares * (1 - visible)).sum(-1, keepdim=True)], -1)
    panels = (
        ("C", visible, "{:.0f}"),
        ("P", pseudo[head], "{:.1f}"),
        ("A ⊙ C + P", mixed, "{:.1f}"),
        ("Ã, and the pseudo mass 1 − α", kept, "{:.2f}"),
    )
    with _style(palette):
        figure = Figure(figsize=(0.36 * (4 * length + 1) + 1.6, 0.36 * length + 0.6), layout="constrained")
        axes = figure.subplots(1, 4, width_ratios=[length, length, length, length + 1])
        for place, (title, matrix, form) in zip(axes, panels, strict=True):
            _draw_numbers(place, matrix, form, palette, shaded=title.startswith("Ã"))
            place.set_title(title)
    return figure


def curve_figure(curve: Curve, *, theme: Theme = "light") -> Figure:
    """A curve: sinks over position, extrapolation over length, perplexity over size."""
    palette = PALETTES[theme]
    with _style(palette):
        figure = Figure(figsize=(5.6, 3.5), layout="constrained")
        axes = figure.subplots()
        for i, line in enumerate(curve.series):
            colour = palette.series[i % len(palette.series)]
            marker = _MARKERS[i % len(_MARKERS)] if len(line.x) <= _MAX_MARKED else ""
            dashes = _DASHES[i % len(_DASHES)]
            axes.plot(line.x, line.y, color=colour, linestyle=dashes, marker=marker, label=line.name)
            if line.low is not None and line.high is not None:
                axes.fill_between(line.x, line.low, line.high, color=colour, alpha=0.18, linewidth=0)
        for x, label in curve.marks:
            axes.axvline(x, color=palette.muted, linewidth=0.8, linestyle=(0, (2, 2)), zorder=0)
            axes.annotate(
                label,
                (x, 1.01),
                xycoords=("data", "axes fraction"),
                ha="center",
                fontsize=8,
                color=palette.muted,
            )
        _scales(axes, curve)
        axes.set(xlabel=curve.x_label, ylabel=curve.y_label)
        axes.set_title(curve.title, pad=16 if curve.marks else 8)
        axes.grid(axis="y", color=palette.line, linewidth=0.6)
        axes.set_axisbelow(True)
        if len(curve.series) > 1:
            axes.legend(frameon=False, handlelength=3.2)
    return figure


def table_figure(table: Table, *, best: float | None = None, theme: Theme = "light") -> Figure:
    """A table as a figure; with ``best``, numbers are shaded from 0 to it, as suits accuracies."""
    if not table.rows:
        raise ValueError(f"rows: got none in table {table.title!r}; allowed is at least one")
    palette, ramp = PALETTES[theme], PALETTES[theme].attention_ramp()
    texts = [[_shown(cell) for cell in row] for row in table.rows]
    widths = [0.35 + 0.085 * max(map(len, column)) for column in zip(table.columns, *texts, strict=True)]
    edges = [sum(widths[:i]) for i in range(len(widths) + 1)]
    with _style(palette):
        figure = Figure(figsize=(edges[-1] + 0.2, 0.28 * (len(texts) + 1) + 0.5), layout="constrained")
        axes = figure.subplots()
        axes.set(xlim=(0, edges[-1]), ylim=(len(texts) + 0.5, -0.5))
        axes.set_title(table.title)
        axes.axis("off")
        axes.plot([0, edges[-1]], [0.5, 0.5], color=palette.text, linewidth=0.8)
        numeric = [
            any(isinstance(cell, int | float) for cell in column) for column in zip(*table.rows, strict=True)
        ]
        for down, row in enumerate([table.columns, *texts]):
            for across, text in enumerate(row):
                value = table.rows[down - 1][across] if down else None
                colour = palette.text
                if best is not None and isinstance(value, int | float) and not math.isnan(value):
                    step = min(max(round(255 * 0.85 * value / best), 0), 255)
                    _fill(axes, (edges[across], edges[across + 1]), down, ramp[step], palette.surface)
                    colour = _readable(step, palette)
                right = numeric[across]
                x = edges[across + 1] - 0.12 if right else edges[across] + 0.12
                align = "right" if right else "left"
                axes.text(x, down, _drawable(text), ha=align, va="center", fontsize=8.5, color=colour)
    return figure


def save_figure(figure: Figure, path: str | os.PathLike[str]) -> Path:
    """Write a figure as SVG, PDF or PNG, by the suffix; the same figure gives the same bytes."""
    target = Path(path)
    if target.suffix not in _DATES:
        raise ValueError(f"path: got {target.name!r}; allowed suffixes are {', '.join(_DATES)}")
    return write_whole(target, render_figure(figure, target.suffix))


def render_figure(figure: Figure, suffix: str = ".svg") -> bytes:
    """The content of such a file."""
    content = BytesIO()
    with rc_context({"svg.hashsalt": "stablemask", "svg.fonttype": "path", "pdf.fonttype": 42}):
        figure.savefig(content, format=suffix[1:], dpi=200, metadata=_DATES[suffix])
    return content.getvalue()


def _style(palette: Palette) -> AbstractContextManager[None]:
    return rc_context(
        {
            "font.size": 9,
            "axes.titlesize": 9.5,
            "axes.titlelocation": "left",
            "axes.edgecolor": palette.muted,
            "axes.labelcolor": palette.text,
            "axes.titlecolor": palette.text,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.facecolor": palette.surface,
            "figure.facecolor": palette.surface,
            "savefig.facecolor": palette.surface,
            "text.color": palette.text,
            "text.parse_math": False,  # names and tokens are text, whatever they contain
            "xtick.color": palette.muted,
            "ytick.color": palette.muted,
            "lines.linewidth": 1.6,
            "lines.markersize": 4.5,
        }
    )


def _scale(colours: Sequence[str]) -> ScalarMappable:
    return ScalarMappable(_SHARES, ListedColormap(colours))


def _label_shares(bar: Colorbar) -> None:
    shares = (0, 0.01, 0.1, 0.25, 0.5, 1)
    bar.set_ticks(list(shares), labels=[f"{100 * share:g} %" for share in shares])


def _matrix(axes: Axes, values: Tensor, colours: Sequence[str], aspect: Literal["auto", "equal"]) -> None:
    pixels = values.detach().to("cpu", torch.float32).numpy()
    axes.imshow(pixels, cmap=ListedColormap(colours), norm=_SHARES, aspect=aspect, interpolation="nearest")
    axes.spines[:].set_visible(False)


def _draw_map(
    axes: Axes, model: ModelView, layer: int, head: int, palette: Palette, *, labelled: bool = True
) -> None:
    _matrix(axes, model.attention(layer, head), palette.attention_ramp(), "equal")
    axes.spines[["left", "bottom"]].set_visible(True)
    beside = axes.inset_axes((1.02, 0, 0.05, 1))
    _matrix(beside, model.pseudo_mass[layer, head][:, None], palette.pseudo_ramp(), "auto")
    beside.set(xticks=[], yticks=[])
    beside.spines[:].set(visible=True, color=palette.line)
    if not labelled:
        axes.set(xticks=[], yticks=[])
    elif len(model.tokens) <= _MAX_NAMED_TOKENS:
        names = [_label(token) for token in model.tokens]
        axes.set_xticks(range(len(names)), names, rotation=90, fontsize=7)
        axes.set_yticks(range(len(names)), names, fontsize=7)
    else:
        axes.set(xlabel="attended token", ylabel="row")


def _draw_numbers(axes: Axes, matrix: Tensor, form: str, palette: Palette, *, shaded: bool) -> None:
    """A matrix with its numbers; what belongs to pseudo columns is orange, the rest blue."""
    rows, columns = matrix.shape
    for i in range(rows):
        for j in range(columns):
            value, real = float(matrix[i, j]), j <= i
            hidden = shaded and not real and j < rows
            ramp = palette.attention_ramp() if real else palette.pseudo_ramp()
            step = round(190 * math.sqrt(value)) if shaded and not hidden else 28 * (not hidden)
            _fill(axes, (j, j + 1), i, ramp[step], palette.surface)
            text = "" if hidden else form.format(value).replace("-", "−")
            axes.text(j + 0.5, i, text, ha="center", va="center", fontsize=7, color=_readable(step, palette))
    axes.set(xlim=(0, columns), ylim=(rows - 0.5, -0.5), aspect="equal", xticks=[], yticks=[])
    axes.spines[:].set(visible=True, color=palette.muted)
    if columns > rows:
        axes.axvline(rows, color=palette.text, linewidth=1.2)


def _fill(axes: Axes, span: tuple[float, float], row: int, colour: str, edge: str) -> None:
    axes.add_patch(
        Rectangle((span[0], row - 0.5), span[1] - span[0], 1, facecolor=colour, edgecolor=edge, linewidth=0.6)
    )


def _readable(step: int, palette: Palette) -> str:
    """Text on a step of a ramp: the ramps begin at the surface and end far from it."""
    return palette.text if step < 128 else palette.surface


def _scales(axes: Axes, curve: Curve) -> None:
    if curve.log_x:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    if curve.log_y:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())


def _shown(cell: Cell) -> str:
    if cell is None:
        return "–"
    return f"{cell:.4g}" if isinstance(cell, float) else str(cell)


def _drawable(text: str) -> str:
    """The text with everything named that the font cannot draw."""
    known = get_font(findfont("DejaVu Sans")).get_charmap()
    return "".join(c if ord(c) in known and c.isprintable() else f"⟨{ord(c):X}⟩" for c in text)


def _label(token: str) -> str:
    drawn = _drawable(token)
    return drawn if len(drawn) <= _MAX_LABEL else drawn[: _MAX_LABEL - 1] + "…"


def _need(things: Sequence[object], name: str) -> None:
    if not things:
        raise ValueError(f"{name}: got none; allowed is at least one")
