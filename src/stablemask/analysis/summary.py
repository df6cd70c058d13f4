"""What was found in models, as tables, curves and JSON."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from stablemask.analysis.classes import CLASSES
from stablemask.analysis.inspection import Inspection
from stablemask.analysis.metrics import SINK_THRESHOLD, Metrics
from stablemask.analysis.views import Cell, Curve, Series, Table

Read = Callable[[Metrics], Tensor]

_MOST_POINTS = 512
_ROWS: dict[str, Read] = {
    "first token": lambda metrics: metrics.first,
    "no token": lambda metrics: metrics.pseudo + metrics.artificial,
    "entropy": lambda metrics: metrics.entropy,
}
_NOTE = (
    "Shares are means over rows, layers, heads and pieces of text, in percent. Entropy, in nats, is that of "
    "what tokens get."
)


def overview_table(models: Sequence[Inspection], threshold: float = SINK_THRESHOLD) -> Table:
    """A row for every model."""
    columns = ["model", f"sink rate, ε = {threshold:g}", *_ROWS]
    rows = [
        [m.name, 100 * m.metrics.sink_rate(threshold), *(_mean(m, what) for what in _ROWS)] for m in models
    ]
    note = (
        "The sink rate is the share of heads that give their first token more than ε on average, in percent. "
    )
    return Table("Attention", columns, rows, note + _NOTE)


def position_table(models: Sequence[Inspection]) -> Table:
    """Means over the rows between powers of two."""
    length = max(model.length for model in models)
    rows: list[list[Cell]] = []
    for start, stop in position_buckets(length):
        name = str(start + 1) if stop == start + 1 else f"{start + 1}–{stop}"
        rows.append([name, *(_mean(m, what, slice(start, stop)) for what in _ROWS for m in models)])
    return Table("By position", ["position", *_columns(models)], rows, "Positions count from 1. " + _NOTE)


def layer_table(models: Sequence[Inspection]) -> Table:
    """A row for every layer."""
    layers = max(model.metrics.first.shape[0] for model in models)
    rows = [
        [str(layer), *(_mean(m, what, layer=layer) for what in _ROWS for m in models)]
        for layer in range(layers)
    ]
    return Table("By layer", ["layer", *_columns(models)], rows, _NOTE)


def head_table(model: Inspection) -> Table:
    """A row for every head of a model."""
    layers, heads, _ = model.metrics.first.shape
    rows: list[list[Cell]] = [
        [layer, head, *(_mean(model, what, layer=layer, head=head) for what in _ROWS)]
        for layer in range(layers)
        for head in range(heads)
    ]
    return Table(f"By head: {model.name}", ["layer", "head", *_ROWS], rows, _NOTE)


def class_table(models: Sequence[Inspection]) -> Table:
    """What rows give to the tokens of each class, beside how many of the tokens there are of that class."""
    rows: list[list[Cell]] = []
    positions = sorted({row for model in models for row in model.metrics.class_rows})
    for position in positions:
        for number, name in enumerate(CLASSES):
            cells = [_of_class(model, position, number) for model in models]
            rows.append([position, name, *(cell for pair in zip(*cells, strict=True) for cell in pair)])
    columns = [f"{what}: {m.name}" for what in ("of the tokens", "of the attention") for m in models]
    note = "Percent at that position, mean over layers, heads and pieces. The first token is in no class."
    return Table("By class of tokens", ["position", "class", *columns], rows, note)


def position_curves(models: Sequence[Inspection]) -> list[Curve]:
    """First token, no token and entropy over position: a line a model, mean over layers and heads."""
    labels = {
        "first token": ("Attention on the first token", "mean share"),
        "no token": ("Attention on no token", "mean share"),
        "entropy": ("Spread of attention", "mean entropy in nats"),
    }
    curves = []
    for what, (title, y_label) in labels.items():
        first = 1 if what == "first token" else 0
        series = [_series(model, what, first) for model in models]
        if what != "no token" or any(any(line.y) for line in series):
            note = "The first row is left out: it sees no other token." if first else ""
            curves.append(Curve(title, "position", y_label, series, note))
    return curves


def to_json(model: Inspection, threshold: float = SINK_THRESHOLD) -> dict[str, Any]:
    """Everything, by layer, head and position; positions are means between powers of two."""
    metrics = model.metrics
    buckets = position_buckets(model.length)
    values = {name.replace(" ", "_"): read(metrics) for name, read in _ROWS.items()}
    values["artificial_tokens"] = metrics.artificial
    return {
        "name": model.name,
        "details": dict(model.view.details),
        "pieces": model.pieces,
        "length": model.length,
        "sink_threshold": threshold,
        "sink_rate": metrics.sink_rate(threshold),
        "mean": {name: float(value.mean()) for name, value in values.items()},
        "by_layer_and_head": {name: _rounded(value.mean(-1)) for name, value in values.items()},
        "by_layer_head_and_position": {
            "positions": [[start + 1, stop] for start, stop in buckets],
            **{
                name: _rounded(torch.stack([value[:, :, a:b].mean(-1) for a, b in buckets], -1))
                for name, value in values.items()
            },
        },
        "by_class": {
            "classes": list(CLASSES),
            "positions": list(metrics.class_rows),
            "share_of_tokens": _rounded(metrics.class_shares),
            "by_layer_and_head": _rounded(metrics.by_class),
        },
    }


def position_buckets(length: int) -> list[tuple[int, int]]:
    """0-based rows 0, 1, 2–3, 4–7 and so on, each as (start, stop)."""
    edges = [0, 1]
    while edges[-1] < length:
        edges.append(min(2 * edges[-1], length))
    return list(pairwise(edges))


def _columns(models: Sequence[Inspection]) -> list[str]:
    return [f"{what}: {model.name}" if len(models) > 1 else what for what in _ROWS for model in models]


def _mean(
    model: Inspection,
    what: str,
    rows: slice = slice(None),
    *,
    layer: int | None = None,
    head: int | None = None,
) -> Cell:
    """A mean, shares in percent; None where the model has no such layer or position."""
    values = _ROWS[what](model.metrics)
    if layer is not None:
        values = values[layer : layer + 1]
    if head is not None:
        values = values[:, head : head + 1]
    values = values[:, :, rows]
    if not values.numel():
        return None
    return float(values.mean()) * (1 if what == "entropy" else 100)


def _of_class(model: Inspection, position: int, number: int) -> tuple[Cell, Cell]:
    metrics = model.metrics
    if position not in metrics.class_rows:
        return None, None
    row = metrics.class_rows.index(position)
    given = float(metrics.by_class[:, :, row, number].mean())
    return 100 * float(metrics.class_shares[row, number]), 100 * given


def _series(model: Inspection, what: str, first: int) -> Series:
    """The mean at every position, or over as many neighbours as it takes to stay below a number of points."""
    mean = _ROWS[what](model.metrics).double().mean((0, 1))[first:]
    width = -(-len(mean) // _MOST_POINTS)
    parts = mean.split(width)
    centres = [first + 1 + i * width + (len(part) - 1) / 2 for i, part in enumerate(parts)]
    return Series(model.name, centres, [float(part.mean()) for part in parts])


def _rounded(values: Tensor) -> Any:
    return torch.round(values.double(), decimals=6).tolist()
