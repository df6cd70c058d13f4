"""The figures of the results page, drawn from finished cells alone. Those without cells are left out."""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from matplotlib.figure import Figure

from stablemask.analysis.figures import (
    all_heads_figure,
    curve_figure,
    heads_figure,
    interval_figure,
    table_figure,
)
from stablemask.analysis.views import Curve, Interval, ModelView, Series, Table
from stablemask.evaluation.position_tasks import RELATIVE, TASKS
from stablemask.model import StableMaskForCausalLM
from stablemask.reproduce.cells import Document
from stablemask.reproduce.gather import Found
from stablemask.reproduce.judge import Judged, metric_of
from stablemask.reproduce.measurements import CURVE_POINTS, TIMES
from stablemask.reproduce.study import Entry, Study
from stablemask.training.plan import vocabulary_size

PAIR = {"small/rope/none": "RoPE", "small/rope/stablemask": "RoPE + StableMask"}
OVERVIEW = "overview"
_METHODS = {"window": "recent keys", "pinned": "recent and first keys", "full": "all keys"}


@dataclass(frozen=True)
class Picture:
    """A figure of an item.

    Attributes:
        name: Of its files.
        item: What it belongs to; ``OVERVIEW`` for the page as a whole.
        alt: What is to be seen, for those who cannot.
        draw: Makes it for a theme.
    """

    name: str
    item: str
    alt: str
    draw: Callable[..., Figure]


def pictures(found: Found, judged: Sequence[Judged], study: Study) -> list[Picture]:
    """All that can be drawn."""
    return [
        *_effects(judged),
        *_learning(found),
        *_heads(found),
        *_sinks(found),
        *_positions(found),
        *_scaling(found, study),
        *_lengths(found),
    ]


def _effects(judged: Sequence[Judged]) -> Iterator[Picture]:
    """Claims about losses: one scale, and one smallest effect that counts."""
    sizes = {j.claim.smallest for j in judged if j.claim.offset == 0 and j.claim.smallest < 0.01}
    lines = [
        Interval(
            j.claim.id,
            j.effect.mean,
            j.effect.seeds or (math.nan, math.nan),
            j.effect.documents or (math.nan, math.nan),
        )
        for j in judged
        if j.effect is not None and j.claim.offset == 0 and j.claim.smallest in sizes
    ]
    if lines:
        title = "Differences of losses; negative: as claimed"
        label = "nats per token: mean, 95 % intervals from seeds (upper) and documents (lower)"
        draw = partial(interval_figure, title, label, lines, mark=-max(sizes))
        alt = "Claims about losses with both intervals, a line each; dashed: the smallest effect that counts."
        yield Picture("effects", OVERVIEW, alt, draw)


def _learning(found: Found) -> Iterator[Picture]:
    series = []
    for group, name in PAIR.items():
        points = [_perplexities(found, group, f"curve/{k}") for k in range(1, CURVE_POINTS + 1)]
        if all(points):
            series.append(
                _with_range(name, [100 * k / CURVE_POINTS for k in range(1, CURVE_POINTS + 1)], points)
            )
    if series:
        curve = Curve("Perplexity while training", "% of the training", "perplexity", series)
        alt = (
            "Perplexity after each fifth of the training, with StableMask and without; bands span the seeds."
        )
        yield Picture("learning", "table-2-tokens", alt, partial(curve_figure, curve))


def _heads(found: Found) -> Iterator[Picture]:
    cells = {group: found.cells.get(Entry(f"heads/{group}", 0)) for group in PAIR}
    views = {group: _view(PAIR[group], cell) for group, cell in cells.items() if cell is not None}
    if len(views) == len(PAIR):
        plain, ours = views.values()
        shares = plain.on_first_token()[:, :, 1:].mean(-1)
        chosen = [(layer, int(shares[layer].argmax())) for layer in range(plain.num_layers)]
        alt = "In each layer the head with the strongest sink without StableMask, and the same head with it."
        yield Picture("heads", "figure-1a", alt, partial(heads_figure, [plain, ours], chosen))
    if "small/rope/stablemask" in views:
        alt = "Attention maps of all heads of the small RoPE model with StableMask."
        draw = partial(all_heads_figure, views["small/rope/stablemask"])
        yield Picture("all-heads", "figure-f", alt, draw)


def _sinks(found: Found) -> Iterator[Picture]:
    titles = {"first": "Attention on the first token", "pseudo": "Attention on no token (pseudo mass)"}
    for key, title in titles.items():
        first = 1 if key == "first" else 0
        series = [
            Series(name, [float(i + 1) for i in range(first, len(curve))], curve[first:])
            for group, name in {**PAIR, "small/rope/softmax_plus_one": "RoPE + softmax-plus-one"}.items()
            if (curve := _mean_curve(found, group, key))
        ]
        if series:
            chart = Curve(title, "position", "mean share", series, log_x=True)
            alt = f"{title} over the position: mean over layers, heads, documents and seeds, a line a model."
            yield Picture(f"sinks-{key}", "figure-1b", alt, partial(curve_figure, chart))


def _positions(found: Found) -> Iterator[Picture]:
    names = {"alibi": "ALiBi", "t5": "T5", "rope": "RoPE"}
    rows = [
        [
            names[encoding],
            *(_tasks(found, f"position/{encoding}/{remedy}") for remedy in ("none", "stablemask")),
        ]
        for encoding in RELATIVE
    ]
    if all(value is not None for row in rows for value in row):
        title = "Position tasks: accuracy in %, mean of the three"
        table = Table(title, ["encoding", "alone", "with StableMask"], rows)
        alt = "Mean accuracy of relative encodings in the three position tasks, alone and with StableMask."
        yield Picture("positions", "figure-1c", alt, partial(table_figure, table, best=100.0))


def _scaling(found: Found, study: Study) -> Iterator[Picture]:
    names = {"none": "", "stablemask": " + StableMask"}
    series = []
    for position, title in {"alibi": "ALiBi", "rope": "RoPE"}.items():
        for arm, more in names.items():
            groups = [f"{size}/{position}/{arm}" for size in ("small", "medium")]
            points = [_perplexities(found, group, "valid/all") for group in groups]
            if all(points):
                series.append(_with_range(title + more, [_millions(study, g) for g in groups], points))
    if series:
        curve = Curve("Perplexity over size", "million parameters", "perplexity", series, log_x=True)
        alt = (
            "Validation perplexity of two sizes of model, with StableMask and without; bands span the seeds."
        )
        yield Picture("scaling", "figure-4-scaling", alt, partial(curve_figure, curve))


def _lengths(found: Found) -> Iterator[Picture]:
    series = []
    for method, what in _METHODS.items():
        for group, name in PAIR.items():
            points = [_perplexities(found, group, f"{method}/{times}") for times in TIMES]
            if all(points):
                series.append(_with_range(f"{name}, {what}", [float(t) for t in TIMES], points))
    if series:
        title = "Past the training length"
        curve = Curve(title, "length, in training lengths", "perplexity", series, log_x=True, log_y=True)
        alt = (
            "Perplexity in sequences of 1 to 16 training lengths, by the keys that are kept, a line a model."
        )
        yield Picture("lengths", "figure-4d", alt, partial(curve_figure, curve))


def _perplexities(found: Found, group: str, metric: str) -> list[float]:
    values = (metric_of(found.cells[Entry(group, seed)], metric) for seed in found.seeds(group))
    return [math.exp(value) for value in values if value is not None]


def _with_range(name: str, x: Sequence[float], points: Sequence[Sequence[float]]) -> Series:
    """Means over seeds, in the band from the least to the largest."""
    return Series(
        name, x, [statistics.fmean(p) for p in points], [min(p) for p in points], [max(p) for p in points]
    )


def _mean_curve(found: Found, group: str, key: str) -> list[float]:
    curves = [found.cells[Entry(group, seed)].get("curves", {}).get(key) for seed in found.seeds(group)]
    kept = [curve for curve in curves if curve]
    return [statistics.fmean(values) for values in zip(*kept, strict=True)]


def _tasks(found: Found, group: str) -> float | None:
    """The mean accuracy in all tasks and seeds, in percent."""
    values = [metric_of(found.cells[Entry(group, s)], task) for s in found.seeds(group) for task in TASKS]
    known = [value for value in values if value is not None]
    return 100 * statistics.fmean(known) if known and len(known) == len(values) else None


def _millions(study: Study, group: str) -> float:
    recipe = study.recipe(group)
    with torch.device("meta"):
        model = StableMaskForCausalLM(recipe.config(vocabulary_size(recipe.data.tokenizer)))
    return round(sum(p.numel() for p in model.parameters()) / 1e6, 3)


def _view(name: str, cell: Document) -> ModelView:
    """Maps of a cell ``heads/…`` as figures take them."""
    places = [tuple(int(n) for n in place.split("/")) for place in cell["maps"]]
    layers, heads = (1 + max(place[i] for place in places) for i in (0, 1))
    length = len(cell["tokens"])
    maps, mass = torch.zeros(layers, heads, length, length), torch.zeros(layers, heads, length)
    for layer, head in places:
        for row, shares in enumerate(cell["maps"][f"{layer}/{head}"]):
            maps[layer, head, row, : row + 1] = torch.tensor(shares)
        mass[layer, head] = torch.tensor(cell["pseudo mass"][f"{layer}/{head}"])
    return ModelView(name, cell["tokens"], maps, mass)
