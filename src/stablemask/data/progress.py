"""Progress of long work, on a terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

Advance = Callable[[int, str], None]


class Bar:
    """Draws a bar for each task in turn, or nothing: without a terminal, or when it is not wanted."""

    def __init__(self, shown: bool) -> None:
        self.shown = shown

    @contextmanager
    def task(self, description: str, total: int | None) -> Iterator[Advance]:
        """Gives a function that takes how much is read by now, and a word on what was made of it."""
        console = Console(stderr=True)
        progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[made]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not (self.shown and console.is_terminal),
        )
        with progress:
            task = progress.add_task(description, total=total, made="")
            yield lambda read, made: progress.update(task, completed=read, made=made)
