"""Tables of an item as text: what the paper prints beside what was measured, and verdicts on its claims."""

import json
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

from stablemask.model import StableMaskForCausalLM
from stablemask.reproduce.gather import Found
from stablemask.reproduce.judge import Judged, metric_of
from stablemask.reproduce.paper import Item, Printed, Row, Scale, Table
from stablemask.reproduce.statistics import Interval
from stablemask.reproduce.study import Claim, Entry
from stablemask.training.plan import vocabulary_size
from stablemask.training.recipe import Recipe, parse

NOT_MEASURED = "not measured"
_LOSSES = ("valid/", "other/", "curve/", "full/", "window/", "pinned/")


@dataclass(frozen=True)
class Grid:
    """Text in rows and columns."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def grids(item: Item, found: Found) -> list[Grid]:
    """Every table of an item."""
    return [_grid(table, found) for table in item.tables]


def claims_grid(judged: Sequence[Judged], printed: Sequence[Table] = ()) -> Grid:
    """A row for each claim; beside the measured difference that of the values in the tables of the paper."""
    rows = []
    for each in judged:
        theirs = printed_effect(each.claim, printed)
        about = (each.claim.id, verdict(each), each.claim.says)
        effects = ("–" if theirs is None else _difference(each.claim, theirs), *_effect(each))
        rows.append((*about, *effects, _needed(each), f"{len(each.seeds)} of {each.claim.seeds}"))
    columns = ("claim", "verdict", "in words", "the paper's difference", "difference")
    more = ("from seeds", "from documents", "counts from", "seeds")
    return Grid("Claims", (*columns, *more), tuple(rows))


def printed_effect(claim: Claim, printed: Sequence[Table]) -> float | None:
    """What the paper's own values give, in the unit of the claim; None where one of them is not printed."""
    for table in printed:
        values = [_printed_as_measured(table, term.group, term.metric) for term in claim.terms]
        known = [value for value in values if value is not None]
        if len(known) == len(values):
            weighted = (term.weight * value for term, value in zip(claim.terms, known, strict=True))
            return claim.offset + sum(weighted)
    return None


def verdict(judged: Judged) -> str:
    """With the reason, where there is one."""
    return f"{judged.verdict}: {judged.reason}" if judged.reason else judged.verdict


def summary(item: Item, judged: Sequence[Judged], found: Found) -> str:
    """One line on how an item came out."""
    if judged:
        counts = Counter(each.verdict for each in judged)
        return ", ".join(f"{name} ({count})" if len(judged) > 1 else name for name, count in counts.items())
    groups = item.all_groups()
    if not groups:
        return "nothing to measure"
    done = sum(bool(found.seeds(group)) for group in groups)
    if done == len(groups):
        return "measured"
    return f"measured in part ({done} of {len(groups)} cells)" if done else NOT_MEASURED


def without_sinks(item: Item, found: Found) -> str:
    """That the model whose sinks an item is about has none, if its cells say so; else nothing."""
    if item.sinks is None:
        return ""
    seeds = found.seeds(item.sinks)
    rates = [metric_of(found.cells[Entry(item.sinks, seed)], "sink rate") for seed in seeds]
    if not rates or any(rate != 0 for rate in rates):
        return ""
    cells = "the one cell" if len(rates) == 1 else f"all {len(rates)} cells"
    return (
        f"In {cells} of {item.sinks} the sink rate is 0: these small models have no sinks to begin with, so "
        "what the paper says of sinks cannot be tested at this scale, whatever the verdicts."
    )


def measured(row: Row, metric: str, found: Found) -> list[float]:
    """The values of all seeds, in their order."""
    if row.group is None:
        return []
    values = (metric_of(found.cells[Entry(row.group, s)], metric) for s in found.seeds(row.group))
    return [value for value in values if value is not None]


def shown(values: Sequence[float], scale: Scale) -> str:
    """The mean over seeds, ± their standard deviation."""
    on_scale = [_scaled(value, scale) for value in values]
    if not on_scale:
        return NOT_MEASURED
    mean = statistics.fmean(on_scale)
    if len(on_scale) == 1 or scale == "number":
        return _text(mean, scale)
    return f"{_text(mean, scale)} ± {_text(statistics.stdev(on_scale), scale)}"


def _grid(table: Table, found: Found) -> Grid:
    """The paper's values and the measured ones: side by side for one column, else one above the other."""
    if not (table.is_printed and table.metrics):
        return _plain(table, found)
    return _beside(table, found) if len(table.columns) == 1 else _above(table, found)


def _plain(table: Table, found: Found) -> Grid:
    """Measured values alone, or the paper's where nothing is to be measured."""
    seeds = _seeds(table, found)
    rows = [(row.name, *_values(table, row, found), *seeds.get(row, ())) for row in table.rows]
    return Grid(_title(table, found), ("", *table.columns, *["seeds"] * bool(seeds)), tuple(rows))


def _beside(table: Table, found: Found) -> Grid:
    """With the size of the models where they read a text: neither it nor the text is the paper's."""
    seeds, text = _seeds(table, found), _reads_text(table, found)
    columns = ["", f"{table.columns[0]}, paper", f"measured, text: {found.text_name}" if text else "measured"]
    rows = [
        (
            row.name,
            _printed(row, 0),
            *_values(table, row, found),
            *[_size(row, found)] * text,
            *seeds.get(row, ()),
        )
        for row in table.rows
    ]
    return Grid(table.title, (*columns, *["parameters here"] * text, *["seeds"] * bool(seeds)), tuple(rows))


def _above(table: Table, found: Found) -> Grid:
    seeds = _seeds(table, found)
    rows: list[tuple[str, ...]] = []
    for row in table.rows:
        if row.printed:
            printed = [_printed(row, i) for i in range(len(table.columns))]
            rows.append((row.name, "paper", *printed, *[""] * bool(seeds)))
        name = "" if row.printed else row.name
        rows.append((name, "measured", *_values(table, row, found), *seeds.get(row, ())))
    columns = ("", "", *table.columns, *["seeds"] * bool(seeds))
    return Grid(_title(table, found), columns, tuple(rows))


def _title(table: Table, found: Found) -> str:
    """With text and sizes of the models, where they read a text."""
    sizes = " and ".join(dict.fromkeys(size for row in table.rows if (size := _size(row, found))))
    return f"{table.title}; {sizes} parameters, trained on {found.text_name}" if sizes else table.title


def _seeds(table: Table, found: Found) -> dict[Row, tuple[str]]:
    """How many there are of each row, where a row has several; else nothing."""
    counts = {row: len(found.seeds(row.group)) for row in table.rows if row.group is not None}
    if max(counts.values(), default=0) < 2:
        return {}
    return {row: (str(counts[row]) if row in counts else "",) for row in table.rows}


def _reads_text(table: Table, found: Found) -> bool:
    return any(_size(row, found) for row in table.rows)


def _size(row: Row, found: Found) -> str:
    """Parameters of a model that read the text, in millions; nothing for all others."""
    seeds = [] if row.group is None else found.seeds(row.group)
    if row.group is None or not seeds:
        return ""
    recipe = found.cells[Entry(row.group, seeds[0])]["settings"].get("recipe")
    return "" if recipe is None else f"{_millions(json.dumps(recipe)):.1f}M"


@cache
def _millions(recipe: str) -> float:
    made = parse(Recipe, json.loads(recipe), "recipe of a cell")
    with torch.device("meta"):
        model = StableMaskForCausalLM(made.config(vocabulary_size(made.data.tokenizer)))
    return sum(p.numel() for p in model.parameters()) / 1e6


def _values(table: Table, row: Row, found: Found) -> list[str]:
    """What was measured; what the paper prints, where nothing is to be measured."""
    if not table.metrics:
        return [_printed(row, i) for i in range(len(table.columns))]
    return [_cell(row, metric, table.scale, found) for metric in table.metrics]


def _cell(row: Row, metric: str, scale: Scale, found: Found) -> str:
    if row.group is None:
        return ""
    text, interval = shown(measured(row, metric, found), scale), _interval(row, metric, found)
    return text if interval is None else f"{text} ({_span(interval, scale)})"


def _printed(row: Row, column: int) -> str:
    if not row.printed:
        return "–"
    value = row.printed[column]
    text = _as_printed(value)
    return f"{text} ± {_as_printed(row.spread[column])}" if row.spread else text


def _as_printed(value: Printed) -> str:
    """29.0 with its decimal, 6e-4 without a needless zero."""
    if not isinstance(value, float) or abs(value) >= 1e-3 or value == 0:
        return str(value)
    digits, _, exponent = f"{value:e}".partition("e")
    return f"{float(digits):g}e{int(exponent)}"


def _printed_as_measured(table: Table, group: str, metric: str) -> float | None:
    """What the paper prints for a group, on the scale of cells: a loss, a share."""
    row = next((row for row in table.rows if row.group == group and row.printed), None)
    if row is None or metric not in table.metrics:
        return None
    value = float(row.printed[table.metrics.index(metric)])
    if table.scale == "perplexity":
        return math.log(value)
    return value / 100 if table.scale == "percent" else value


def _interval(row: Row, metric: str, found: Found) -> Interval | None:
    """That of a ratio, which was measured in rounds and not in seeds."""
    ends = [measured(row, f"{metric}/{end}", found) for end in ("low", "high")]
    return Interval(ends[0][0], ends[1][0]) if all(ends) else None


def _scaled(value: float, scale: Scale) -> float:
    if scale == "perplexity":
        return math.exp(value)
    return 100 * value if scale == "percent" else value


def _text(value: float, scale: Scale) -> str:
    if scale == "perplexity":
        return f"{value:,.2f}"
    if scale == "percent":
        return f"{value:.1f}"
    if value == 0 or (float(value).is_integer() and abs(value) < 1e6):
        return _minus(f"{value:,.0f}")
    return _minus(f"{value:.1e}" if abs(value) < 1e-3 else f"{value:,.4g}")


def _span(interval: Interval, scale: Scale) -> str:
    return f"{_text(interval.low, scale)} to {_text(interval.high, scale)}"


def _effect(judged: Judged) -> tuple[str, str, str]:
    """Mean and both intervals; where documents have none, the seeds alone decide."""
    if judged.effect is None:
        return ("–", "–", "–")
    documents = "none: seeds alone" if judged.effect.documents is None else _ends(judged.effect.documents)
    return _difference(judged.claim, judged.effect.mean), _ends(judged.effect.seeds), documents


def _difference(claim: Claim, value: float) -> str:
    """Where it is one of losses, in per cent of perplexity as well."""
    text = f"{value:+.4f}"
    if claim.offset == 0 and all(term.metric.startswith(_LOSSES) for term in claim.terms):
        text += f" ({100 * math.expm1(value):+.1f} %)"
    return _minus(text)


def _ends(interval: Interval | None) -> str:
    return "–" if interval is None else _minus(f"{interval.low:+.4f} to {interval.high:+.4f}")


def _needed(judged: Judged) -> str:
    return "any" if judged.claim.smallest == 0 else _minus(f"{-judged.claim.smallest:g}")


def _minus(text: str) -> str:
    return text.replace("-", "−").replace("e−", "e-")
