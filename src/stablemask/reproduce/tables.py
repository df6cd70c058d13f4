"""Tables of an item as text: what the paper prints beside what was measured, and verdicts on its claims."""

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from stablemask.reproduce.gather import Found
from stablemask.reproduce.judge import Judged, metric_of
from stablemask.reproduce.paper import Item, Printed, Row, Scale, Table
from stablemask.reproduce.statistics import Interval
from stablemask.reproduce.study import Entry

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


def claims_grid(judged: Sequence[Judged]) -> Grid:
    """A row for each claim."""
    rows = []
    for each in judged:
        seeds = f"{len(each.seeds)} of {each.claim.seeds}"
        rows.append((each.claim.id, verdict(each), each.claim.says, *_effect(each), _needed(each), seeds))
    columns = ("claim", "verdict", "in words", "difference", "from seeds", "from documents", "counts from")
    return Grid("Claims", (*columns, "seeds"), tuple(rows))


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
    both = table.is_printed and bool(table.metrics)
    columns = ["", *table.columns]
    if both:
        columns = ["", f"{table.columns[0]}, paper", "measured"] if len(columns) == 2 else ["", *columns]
    with_seeds = any(len(found.seeds(row.group)) > 1 for row in table.rows if row.group is not None)
    rows: list[tuple[str, ...]] = []
    for row in table.rows:
        seeds = [str(len(found.seeds(row.group))) if row.group else ""] * with_seeds
        values, printed = _values(table, row, found), [_printed(row, i) for i in range(len(table.columns))]
        if not both:
            rows.append((row.name, *values, *seeds))
        elif len(table.columns) == 1:
            rows.append((row.name, *printed, *values, *seeds))
        else:
            rows += [(row.name, "paper", *printed, *[""] * with_seeds)] * bool(row.printed)
            rows.append(("" if row.printed else row.name, "measured", *values, *seeds))
    return Grid(table.title, (*columns, *["seeds"] * with_seeds), tuple(rows))


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
    """Mean and both intervals; where it is a difference of losses, in per cent of perplexity as well."""
    if judged.effect is None:
        return ("–", "–", "–")
    mean = _minus(f"{judged.effect.mean:+.4f}")
    if judged.claim.offset == 0 and all(term.metric.startswith(_LOSSES) for term in judged.claim.terms):
        mean += _minus(f" ({100 * math.expm1(judged.effect.mean):+.1f} %)")
    return mean, _ends(judged.effect.seeds), _ends(judged.effect.documents)


def _ends(interval: Interval | None) -> str:
    return "–" if interval is None else _minus(f"{interval.low:+.4f} to {interval.high:+.4f}")


def _needed(judged: Judged) -> str:
    return "any" if judged.claim.smallest == 0 else _minus(f"{-judged.claim.smallest:g}")


def _minus(text: str) -> str:
    return text.replace("-", "−").replace("e−", "e-")
