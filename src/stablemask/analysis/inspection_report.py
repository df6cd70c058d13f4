"""The page about one or several inspected models."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from stablemask.analysis import summary
from stablemask.analysis.figures import heads_figure, pseudo_mass_figure
from stablemask.analysis.inspection import Inspection
from stablemask.analysis.metrics import SINK_THRESHOLD
from stablemask.analysis.report import Picture, write_report
from stablemask.analysis.views import Curve, Table

_HEADS_DRAWN = 3


def inspection_tables(found: Sequence[Inspection], threshold: float = SINK_THRESHOLD) -> list[Table]:
    """Overview, classes of tokens, positions and layers: models side by side."""
    return [
        summary.overview_table(found, threshold),
        summary.class_table(found),
        summary.position_table(found),
        summary.layer_table(found),
    ]


def report_inspections(
    path: str | os.PathLike[str],
    found: Sequence[Inspection],
    *,
    tables: Sequence[Table] = (),
    curves: Sequence[Curve] = (),
    lead: str = "",
    threshold: float = SINK_THRESHOLD,
) -> Path:
    """Write the page about inspected models: maps to explore, tables, curves and figures.

    Args:
        path: The file, in a folder that exists.
        found: From ``inspect_model``.
        tables: More tables, which come first: results, for example.
        curves: More curves, which come last: those of the training, for example.
        lead: A paragraph at the top.
        threshold: ε of the sink rate.
    """
    own = [*inspection_tables(found, threshold), *map(summary.head_table, found)]
    return write_report(
        path,
        [each.view for each in found],
        tables=[*tables, *own],
        curves=[*summary.position_curves(found), *curves],
        pictures=list(_pictures(found)),
        lead=lead,
        threshold=threshold,
    )


def _pictures(found: Sequence[Inspection]) -> Iterator[Picture]:
    views, heads = [each.view for each in found], _strongest(found)
    yield Picture(
        "Heads side by side",
        lambda theme: heads_figure(views, heads, theme=theme),
        "The heads with the strongest attention on the first token, on average over the models.",
    )
    for each in found:
        if bool((each.metrics.pseudo + each.metrics.artificial).any()):
            yield _mass_picture(each)


def _mass_picture(each: Inspection) -> Picture:
    mass = each.metrics.pseudo + each.metrics.artificial
    title = f"Attention on no token: {each.name}"
    return Picture(
        title,
        lambda theme: pseudo_mass_figure(mass, title=title, theme=theme),
        "By layer, head and position, mean over all pieces.",
    )


def _strongest(found: Sequence[Inspection]) -> list[tuple[int, int]]:
    """The layers and heads with the largest sink scores, among those that every model has."""
    layers = min(each.metrics.first.shape[0] for each in found)
    heads = min(each.metrics.first.shape[1] for each in found)
    scores = torch.stack([each.metrics.sink_scores()[:layers, :heads] for each in found]).mean(0)
    order = scores.flatten().argsort(descending=True)[:_HEADS_DRAWN].tolist()
    return [divmod(at, heads) for at in order]
