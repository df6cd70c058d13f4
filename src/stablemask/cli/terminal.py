"""How commands and benchmarks write to a terminal, and into a pipe or file."""

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from stablemask.benchmark import Result
from stablemask.measuring import Ratio, environment

_STYLES = {"met": "green", "missed": "bold red", "not measured": "yellow", "WRONG": "bold white on red"}
_COLUMNS = {
    "case": 36,
    "back end": 10,
    "ratio": 15,
    "A/A": 15,
    "wall, 2 threads": 15,
    "a call": 8,
    "of mm": 5,
    "error": 5,
}
_WIDTH_OF_A_PIPE = 110


def make_console() -> Console:
    """Colours and the terminal's width on a terminal; plain text of a fixed width elsewhere."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_WIDTH_OF_A_PIPE)


def make_progress(console: Console) -> Progress:
    """A bar with the time left, which disappears when the work is done and is not drawn into a pipe."""
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def environment_line() -> str:
    """The machine and the versions behind the figures that follow."""
    about = environment()
    machine = about["cpu"] if about["gpu"] == "none" else f"{about['cpu']}, {about['gpu']}"
    return f"{machine}, {about['cores']} cores; PyTorch {about['torch']}; {about['date']}"


def result_header() -> Text:
    """The titles of a table of results, which is printed line by line as they come."""
    return Text(_line(list(_COLUMNS)) + "  verdict", style="bold")


def result_row(result: Result) -> Text:
    """A result as a line of that table."""
    cells = [result.case, result.backend, *_figures(result), f"{result.worst_error:.2f}"]
    bar = "" if result.bar is None else f" (≤ {result.bar:g})"
    style = _STYLES.get(result.verdict, "")
    return Text(_line(cells) + "  ").append(f"{result.verdict}{bar}", style=style)


RESULT_LEGEND = """
"ratio" is to plain causal attention: the median of the rounds ± half of its 95 % interval; A/A is that
attention against itself, the noise of the measurement. "of mm" is the share of the rate of a matrix product
of that dtype. "error" is the largest error as a share of its budget."""


def ratio_text(ratio: Ratio) -> str:
    """For example ``1.012 ± 0.004``."""
    return f"{ratio.median:.3f} ± {ratio.half_width:.3f}"


def _figures(result: Result) -> list[str]:
    if result.verdict == "WRONG":
        return ["–"] * 5
    if result.memory_ratio is not None:
        return [f"{result.memory_ratio:.3f}", "–", "–", f"{result.mib:.0f} MiB", "–"]
    first, *others = result.timings
    return [
        ratio_text(first.comparison.ratio),
        ratio_text(first.comparison.noise),
        ratio_text(others[0].comparison.ratio) if others else "–",
        f"{1e3 * first.comparison.candidate_seconds:.3g} ms",
        f"{100 * first.of_matmul:.0f} %",
    ]


def _line(cells: list[str]) -> str:
    sized = zip(cells, _COLUMNS.values(), strict=True)
    return " ".join(f"{cell:{'<' if i < 2 else '>'}{width}}" for i, (cell, width) in enumerate(sized))
