"""Progress of long work, on a terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Advance = Callable[[int, str], None]


class Bar:
    """Draws a bar for each task in turn, or nothing: without a terminal, or when it is not wanted."""

    def __init__(self, shown: bool) -> None:
        self.shown = shown

    @contextmanager
    def task(self, description: str, total: int | None) -> Iterator[Advance]:
        """Gives a function that takes how much is read by now, and a word on what was made of it."""
        if not self.shown:
            yield lambda _read, _made: None
            return
        from rich.console import Console  # noqa: PLC0415 - blocks that are only read need no rich
        from rich.progress import (  # noqa: PLC0415 - as above
            BarColumn,
            Progress,
            SpinnerColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

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
            disable=not console.is_terminal,
        )
        with progress:
            task = progress.add_task(description, total=total, made="")
            yield lambda read, made: progress.update(task, completed=read, made=made)
