"""Training curves from the metrics.jsonl of runs."""

import json
from collections.abc import Mapping
from pathlib import Path

from stablemask.analysis.views import Curve, Series

_CURVES = {
    "loss": ("Training loss", "nats per token"),
    "perplexity": ("Validation perplexity", "perplexity"),
}


def read_log(path: Path) -> list[dict[str, float]]:
    """The lines of a metrics.jsonl. A last line that a killed run left unfinished is not one of them."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    if text and not text.endswith("\n"):
        lines.pop()
    entries = []
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: got no JSON: {error}") from error
        if not isinstance(entry, dict) or not isinstance(entry.get("step"), int):
            raise ValueError(  # noqa: TRY004 - what is wrong is in the file
                f"{path}, line {number}: got {line[:80]!r}; allowed: an object with a step"
            )
        entries.append(entry)
    return entries


def training_curves(logs: Mapping[str, Path]) -> list[Curve]:
    """Loss and validation perplexity over the updates of runs, a line a run.

    Args:
        logs: The ``metrics.jsonl`` of every run, by its name.
    """
    entries = {name: read_log(path) for name, path in logs.items()}
    curves = []
    for key, (title, y_label) in _CURVES.items():
        series = []
        for name, lines in entries.items():
            points = [(float(line["step"]), float(line[key])) for line in lines if key in line]
            if points:
                series.append(Series(name, [x for x, _ in points], [y for _, y in points]))
        if series:
            curves.append(Curve(title, "update", y_label, series))
    return curves
