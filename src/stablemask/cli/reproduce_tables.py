"""What ``stablemask reproduce`` prints."""

from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from stablemask.cli.terminal import environment_line
from stablemask.reproduce import tables
from stablemask.reproduce.cells import Job, read_all, updates
from stablemask.reproduce.gather import Found
from stablemask.reproduce.judge import Judged
from stablemask.reproduce.paper import Item
from stablemask.reproduce.study import Entry
from stablemask.training import Plan, load_recipe, plan
from stablemask.training.progress import clock

_STYLES = {
    "holds": "green",
    "does not hold": "red",
    "undecided at this scale": "yellow",
    "not measured": "dim",
}
_CLAIM_COLUMNS = ("verdict", "in words", "difference", "from seeds", "from documents", "seeds")


def print_index(console: Console, items: Sequence[Item], judged: Sequence[Judged], found: Found) -> None:
    """A row for each item of the paper."""
    table = _table("The paper, item by item", ("ID", "in the paper", "about", "here"))
    for item in items:
        own = [each for each in judged if item.id in each.claim.items]
        table.add_row(item.id, item.place, item.title, tables.summary(item, own, found))
    console.print(table)


def print_item(console: Console, item: Item, judged: Sequence[Judged], found: Found) -> None:
    """The tables of an item, and the verdicts on its claims."""
    console.print(f"\n[bold]{escape(item.place)}: {escape(item.title)}[/bold]")
    console.print(f"The paper: {item.paper}\nHere: {item.repeats}", style="dim", markup=False)
    for grid in tables.grids(item, found):
        printed = _table(grid.title, grid.columns)
        for row in grid.rows:
            printed.add_row(*map(escape, row))
        console.print(printed)
    own = [each for each in judged if item.id in each.claim.items]
    if not own:
        return
    grid = tables.claims_grid(own)
    kept = [grid.columns.index(name) for name in _CLAIM_COLUMNS]
    claims = _table(grid.title, _CLAIM_COLUMNS)
    for each, row in zip(own, grid.rows, strict=True):
        said, *others = (escape(row[i]) for i in kept)
        claims.add_row(f"[{_STYLES[each.verdict]}]{said}[/]", *others)
    console.print(claims)


def print_plan(console: Console, job: Job, todo: Sequence[Entry], jobs: int) -> None:
    """What is missing, and how long it would take at the speed of the cells that are finished."""
    table = _table("Missing", ("group", "seeds"))
    for group in dict.fromkeys(entry.group for entry in todo):
        table.add_row(group, ", ".join(str(entry.seed) for entry in todo if entry.group == group))
    console.print(table)
    known = [
        (updates(job.study, Entry(document["settings"]["group"], 0)), document["seconds"])
        for document in read_all(job.results)
        if document["settings"]["group"] in {entry.group for entry in job.study.entries()}
    ]
    if not known:
        console.print("How long it takes is known once a cell is finished.")
        return
    rate = sum(work for work, _ in known) / sum(seconds for _, seconds in known)
    seconds = sum(updates(job.study, entry) for entry in todo) / rate / jobs
    console.print(
        f"About {clock(seconds)}, at the speed of the {len(known)} cells that are there, {jobs} at a time."
    )


def print_recipes(console: Console, items: Sequence[Item], folder: Path) -> int:
    """The profile "paper": what each recipe would take, and the commands. Nothing is trained."""
    names = list(dict.fromkeys(name for item in items for name in item.all_recipes()))
    plans = {name: plan(load_recipe(folder / f"{name}.toml")) for name in names}
    if plans:
        _print_plans(console, plans)
    for item in items:
        console.print(f"\n[bold]{item.id}[/bold]  {escape(item.place)}: {escape(item.title)}", soft_wrap=True)
        training = [f"stablemask train {folder / name}.toml" for name in item.all_recipes()]
        for line in [*training, *item.full_commands()] or ["nothing to run"]:
            console.print(f"  {line}", markup=False, soft_wrap=True)
    return 0


def _print_plans(console: Console, plans: dict[str, Plan]) -> None:
    console.print(f"One process on {environment_line()}")
    columns = ("recipe", "million parameters", "updates", "tokens", "operations", "memory, GiB", "time here")
    table = _table("What training takes", columns)
    for name, found in plans.items():
        count, size = sum(found.parameters.values()), sum(found.memory.values())
        run = ["?"] * 3 + [f"{size / 2**30:.1f}", "?"]
        if found.updates is not None:
            total = found.operations * found.updates
            tokens = f"{found.tokens * found.updates / 1e9:.1f} G"
            run = [
                f"{found.updates:,}",
                tokens,
                f"{total:.1e}",
                run[3],
                clock(found.seconds_per_update * found.updates),
            ]
        table.add_row(name, f"{count / 1e6:,.1f}", *run)
    console.print(table)


def _long(seconds: float) -> str:
    days = seconds / 86400
    return clock(seconds) if days < 2 else f"{days:,.0f} days"


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=escape(title), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for i, column in enumerate(columns):
        words = i == 0 or column in ("in words", "verdict", "in the paper", "about", "here")
        table.add_column(escape(column), justify="left" if words else "right")
    return table
