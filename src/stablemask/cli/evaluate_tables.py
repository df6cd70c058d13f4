"""The tables of ``stablemask eval``."""

from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from stablemask.evaluation.cells import Values
from stablemask.evaluation.downstream import printed


def value_table(title: str, values: Mapping[str, float]) -> Table:
    """Names and values as they are."""
    table = _table(title, ["", ""])
    for name, value in values.items():
        table.add_row(name, f"{value:,.0f}" if value.is_integer() else f"{value:,.4f}")
    return table


def extrapolation_table(
    title: str, found: Mapping[tuple[str, int], Values], notes: Mapping[str, str]
) -> Group:
    """A row for each length, two columns for each method."""
    methods = list(dict.fromkeys(method for method, _ in found))
    columns = [name for method in methods for name in (method, "2nd half")]
    table = _table(title, ["length", *columns])
    for length in sorted({length for _, length in found}):
        cells = []
        for method in methods:
            values = found.get((method, length), {})
            cells += [_number(values, "perplexity"), _number(values, "perplexity/second half")]
        table.add_row(f"{length:,}", *cells)
    return _with_note(table, _notes(notes))


def streaming_table(title: str, found: Mapping[str, Values], notes: Mapping[str, str]) -> Group:
    """A row for each value, a column for each method."""
    table = _table(title, ["", *found])
    for name in dict.fromkeys(name for values in found.values() for name in values):
        table.add_row(name, *(_number(values, name) for values in found.values()))
    return _with_note(table, _notes(notes))


def latency_table(found: Mapping[tuple[int, int], Values]) -> Group:
    """A row for each length of prompt and output; ratios with half their 95 % interval."""
    title = "Latency of generation: ratios to the same weights without StableMask, with a cache"
    note = (
        "SM-I is StableMask with a cache, SM without one, A/A the baseline to itself: the noise. "
        "± is half of the 95 % interval."
    )
    columns = ["prompt", "output", "baseline, ms", "SM-I", "SM", "A/A"]
    table = _table(title, columns)
    for (prompt, output), values in found.items():
        ratios = [_ratio(values, name) for name in ("SM-I", "SM", "A/A")]
        table.add_row(f"{prompt:,}", f"{output:,}", f"{1e3 * values['seconds/baseline']:,.1f}", *ratios)
    return _with_note(table, note)


def downstream_table(found: Mapping[str, Values], limit: int | None) -> Group:
    """The paper's two models beside the measured one, in percent."""
    paper = printed()["accuracy"]
    note = (
        "Accuracies in percent, without examples in the prompt. The paper's models have 1.4 billion "
        "parameters; it does not say whether its accuracies are normalised by length (norm.)."
    )
    if limit is not None:
        note += f" Only the first {limit} questions of each task were asked."
    columns = ["task", "measured", "norm.", "± error", *(f"paper: {name}" for name in paper)]
    table = _table("Downstream tasks", columns)
    for task, values in found.items():
        measured = [_percent(values.get(f"{task}/{name}")) for name in ("acc", "acc_norm", "acc_stderr")]
        table.add_row(task, *measured, *(_percent(column.get(task)) for column in paper.values()))
    return _with_note(table, note)


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left")
    return table


def _with_note(table: Table, note: str) -> Group:
    return Group(table, Text(note, style="dim")) if note else Group(table)


def _notes(notes: Mapping[str, str]) -> str:
    return "\n".join(f"Not everything with {name}: {reason}." for name, reason in notes.items())


def _number(values: Mapping[str, float], name: str) -> str:
    return f"{values[name]:,.2f}" if name in values else "–"


def _ratio(values: Mapping[str, float], name: str) -> str:
    half = (values[f"ratio/{name}/high"] - values[f"ratio/{name}/low"]) / 2
    return f"{values[f'ratio/{name}']:.3f} ± {half:.3f}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}"
