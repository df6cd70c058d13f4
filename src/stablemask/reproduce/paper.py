"""The paper's tables and figures as data: ``paper.toml``, typed and checked."""

import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from stablemask.analysis.classes import CLASSES
from stablemask.evaluation.perplexity import buckets
from stablemask.evaluation.position_tasks import TASKS
from stablemask.evaluation.reading import METHODS
from stablemask.reproduce import extras
from stablemask.reproduce.measurements import CURVE_POINTS, TIMES
from stablemask.reproduce.study import POSITION_TASKS, Claim, Entry, Study

Scale = Literal["perplexity", "percent", "number"]
Printed = str | int | float

_T = TypeVar("_T")


@dataclass(frozen=True)
class Row:
    """A row of a table.

    Attributes:
        name: What the paper calls it.
        printed: Its values; none where the paper does not have this row.
        spread: What stands behind ± there.
        recipe: What repeats it in full.
        group: What repeats it on a small scale.
        setting: The entry of recipes that has these values.
    """

    name: str
    printed: tuple[Printed, ...] = ()
    spread: tuple[float, ...] = ()
    recipe: str | None = None
    group: str | None = None
    setting: str | None = None


@dataclass(frozen=True)
class Table:
    """A table of the paper, or of what its figures show.

    Attributes:
        title: What it is.
        columns: Names of its columns, the first one, of the rows, left out.
        rows: The rows.
        metrics: Of cells, one a column; none where nothing is measured.
        scale: How they are shown.
        recipes: One a column, for tables of settings.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    metrics: tuple[str, ...] = ()
    scale: Scale = "number"
    recipes: tuple[str, ...] = ()

    @property
    def is_printed(self) -> bool:
        """Whether the paper has numbers in it."""
        return any(row.printed for row in self.rows)


@dataclass(frozen=True)
class Item:
    """A table, figure, theorem or algorithm of the paper.

    Attributes:
        id: What the command line calls it.
        place: Where it stands.
        title: What it is about.
        paper: What the paper says.
        repeats: How the study repeats it.
        recipes: What repeats it in full, beside the recipes of its rows.
        commands: Likewise; RECIPE stands for every recipe whose name begins with what is before it.
        groups: What its figure needs, beside the groups of its rows.
        sinks: The group without whose sinks it says nothing.
        tables: Its numbers.
    """

    id: str
    place: str
    title: str
    paper: str
    repeats: str
    recipes: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    sinks: str | None = None
    tables: tuple[Table, ...] = ()

    def all_groups(self) -> list[str]:
        """Those of the item and of its rows, once."""
        own = [row.group for table in self.tables for row in table.rows if row.group is not None]
        return list(dict.fromkeys([*self.groups, *own]))

    def full_commands(self) -> list[str]:
        """One for each recipe that RECIPE stands for."""
        lines = []
        for command in self.commands:
            before, found, _ = command.partition("RECIPE")
            prefix = before.rpartition("/")[2]
            names = [name for name in self.all_recipes() if name.startswith(prefix)] if found else [""]
            lines += [command.replace(f"{prefix}RECIPE", name) for name in names]
        return lines

    def all_recipes(self) -> list[str]:
        """Those of the item and of its rows and columns, once."""
        own = [row.recipe for table in self.tables for row in table.rows if row.recipe is not None]
        columns = [name for table in self.tables for name in table.recipes]
        return list(dict.fromkeys([*self.recipes, *own, *columns]))


def load_paper(path: Path | None = None) -> list[Item]:
    """The items of a file; by default those that come with the package."""
    source = files("stablemask.reproduce").joinpath("paper.toml") if path is None else path
    table = tomllib.loads(source.read_text(encoding="utf-8"))
    items = [_item(entry) for entry in table["item"]]
    ids = [item.id for item in items]
    doubled = sorted({name for name in ids if ids.count(name) > 1})
    if doubled:
        raise ValueError(f"paper: got {', '.join(doubled)} more than once; allowed: one item of each id")
    return items


def choose(items: Sequence[Item], ids: Iterable[str]) -> list[Item]:
    """The items of some ids, in the order of the paper; "all" stands for all of them."""
    known = {item.id: item for item in items}
    wanted = set(ids)
    for name in sorted(wanted - set(known) - {"all"}):
        near = get_close_matches(name, known, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(near)}?" if near else f"allowed: all, {', '.join(known)}"
        raise ValueError(f"ID: got {name!r}; {hint}")
    return [item for item in items if "all" in wanted or item.id in wanted]


def entries_of(items: Iterable[Item], claims: Iterable[Claim], study: Study) -> list[Entry]:
    """The models and other cells that some items are about, those of their claims included."""
    chosen = list(items)
    ids = {item.id for item in chosen}
    groups = {group for item in chosen for group in item.all_groups()}
    groups |= {term.group for claim in claims if ids & set(claim.items) for term in claim.terms}
    looked_at = [extras.model_entry(entry) for entry in extras.entries() if entry.group in groups]
    models = {entry for entry in looked_at if entry is not None}
    own = [e for e in study.entries() if e.group in groups or e in models]
    return [*own, *(entry for entry in extras.entries() if entry.group in groups)]


def metrics_of(group: str, study: Study) -> list[str]:
    """What the cells of a group can have, on a text that has all sets of documents."""
    entry = Entry(group, 0)
    if extras.is_extra(entry):
        return list(extras.METRICS[extras.kind(entry)])
    if extras.kind(entry) == POSITION_TASKS:
        return [*TASKS, *(f"{task} beyond" for task in TASKS)]
    ranges = [f"{low}-{high - 1}" for low, high in buckets(study.recipe(group).train.length)]
    shares = ("first", "pseudo", *CLASSES)
    return [
        *(f"{name}/{place}" for name in ("valid", "other") for place in ("all", *ranges)),
        *(f"curve/{k}" for k in range(1, CURVE_POINTS + 1)),
        *(f"{method}/{times}" for method in METHODS for times in TIMES),
        *(f"{name}/{place}" for name in shares for place in ("64", "last")),
        "sink rate",
    ]


def problems(items: Sequence[Item], claims: Sequence[Claim], study: Study) -> list[str]:
    """What the data names that does not exist: groups, metrics, items."""
    known = {entry.group for entry in [*study.entries(), *extras.entries()]}
    named = [
        (f"{item.id}: {row.name}", row.group, metric)
        for item in items
        for table in item.tables
        for row in table.rows
        if row.group is not None
        for metric in table.metrics or ("",)
    ]
    named += [(item.id, group, "") for item in items for group in item.groups]
    named += [(item.id, item.sinks, "sink rate") for item in items if item.sinks is not None]
    named += [(f"claim {c.id}", term.group, term.metric) for c in claims for term in c.terms]
    found = [f"{where}: no group {group!r}" for where, group, _ in named if group not in known]
    found += [
        f"{where}: {group} has no metric {metric!r}"
        for where, group, metric in named
        if group in known and metric and metric not in metrics_of(group, study)
    ]
    ids = {item.id for item in items}
    found += [f"claim {c.id}: no item {name!r}" for c in claims for name in c.items if name not in ids]
    return list(dict.fromkeys(found))


def _item(entry: dict[str, Any]) -> Item:
    tables = tuple(_table(table, entry["id"]) for table in entry.pop("table", []))
    return _make(Item, {**entry, "tables": tables}, f"paper: {entry['id']}")


def _table(entry: dict[str, Any], where: str) -> Table:
    place = f"paper: {where}, table {entry['title']!r}"
    rows = tuple(_make(Row, row, f"{place}, {row['name']}") for row in entry["rows"])
    table = _make(Table, {**entry, "rows": rows}, place)
    width = len(table.columns)
    lists = [("metrics", table.metrics), ("recipes", table.recipes)]
    lists += [
        (f"{name} of {row.name!r}", getattr(row, name)) for row in rows for name in ("printed", "spread")
    ]
    for name, values in lists:
        if values and len(values) != width:
            raise ValueError(f"{place}: got {len(values)} {name}; allowed: {width}, one a column")
    if table.scale not in get_args(Scale):
        raise ValueError(f"{place}: got scale {table.scale!r}; allowed: {', '.join(get_args(Scale))}")
    return table


def _make(kind: type[_T], entry: dict[str, Any], where: str) -> _T:
    """A dataclass from a table of TOML, lists as tuples."""
    known = [f.name for f in fields(kind)]  # type: ignore[arg-type]
    unknown = [name for name in entry if name not in known]
    if unknown:
        raise ValueError(f"{where}: got {', '.join(unknown)}; allowed: {', '.join(known)}")
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in entry.items()})
