"""``stablemask demo``: a pair of small models, trained here and now, and what StableMask changed in them."""

import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table as RichTable
from transformers.utils import logging as hf_logging

from stablemask.analysis.inspection import Inspection, inspect_model
from stablemask.analysis.metrics import SINK_THRESHOLD
from stablemask.analysis.pieces import cut_pieces
from stablemask.analysis.report import write_report
from stablemask.analysis.summary import overview_table, position_curves, position_table
from stablemask.analysis.training_log import training_curves
from stablemask.analysis.views import Cell, Table
from stablemask.cli.demo_pair import (
    PAIR,
    POSITION_LENGTH,
    TIMES_LONGER,
    Plan,
    Remedy,
    decoding_times,
    grow_pair,
    recipe,
)
from stablemask.cli.terminal import environment_line, make_console, make_progress
from stablemask.data import prepare
from stablemask.evaluation.documents import read_texts
from stablemask.evaluation.models import open_model, open_tokenizer
from stablemask.training.trainer import METRICS

_LEAD = """
[bold]StableMask attention[/bold] is plain causal attention with one more logit in every row, whose value is
zero: what a row has no use for goes there instead of to the first token. Two small decoders learn the
documentation and source of Python's standard library, with the same seed and the same order of the text. One
has StableMask, the other has not; nothing else differs.
"""
_NOTE = """\
Everything was measured in this run: one seed, {tokens:,.0f} tokens of training. That shows the mechanism and
decides nothing about quality; the log of experiments has what several seeds say. Chance is 1/{length} on the
first position task and 1/2 on the second."""
_WHERE_NEXT = """
[bold]Where to go next[/bold]
  {report}   open it: every head of both models, row by row
  stablemask inspect {model} --file your.txt
  stablemask train recipes/small.toml --out runs/small
  stablemask demo operation   that the operation is right, and how fast it is"""
_PIECES = 8


@dataclass(frozen=True)
class Options:
    """Train a pair of small models with and without StableMask, in a few minutes, and compare them.

    The same command goes on where it was interrupted.

    Args:
        folder: Everything is in it: both runs, what was measured, and report.html.
        plan: How much is done.
    """

    folder: Path = Path("runs/demo")
    plan: Plan = field(default_factory=Plan)


def run(options: Options) -> int:
    """Print the table and write the page. 2: wrong options, or a process failed; 130: interrupted."""
    hf_logging.disable_progress_bar()  # its bars for files would stand in the middle of ours
    console = make_console()
    console.print(_LEAD)
    console.print(environment_line(), style="dim")
    begin = time.perf_counter()
    try:
        options.folder.mkdir(parents=True, exist_ok=True)
        values = _grow(console, options)
        with console.status("timing the decoding of tokens"):
            decoding = decoding_times(options.folder, options.plan)
        looked = [_look(options, remedy) for remedy in PAIR]
    except (OSError, ValueError, RuntimeError) as error:
        print(f"stablemask demo: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stablemask demo: interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    table = _table(options, values, decoding, looked)
    _print(console, table)
    report = _write(options, table, looked)
    console.print(_WHERE_NEXT.format(report=report, model=options.folder / "stablemask" / "model"))
    console.print(f"\n{time.perf_counter() - begin:.0f} s", style="dim")
    return 0


def _grow(console: Console, options: Options) -> dict[Remedy, dict[str, float]]:
    plan = options.plan
    prepare(recipe("none", plan).data, plan.length)
    with make_progress(console) as progress:
        tasks = {remedy: progress.add_task(name, total=plan.effort) for remedy, name in PAIR.items()}

        def advance(remedy: Remedy, what: str, steps: int) -> None:
            progress.update(tasks[remedy], description=f"{PAIR[remedy]}: {what}", advance=steps)

        if not console.is_terminal:
            console.print(f"training {' and '.join(PAIR.values())}, {plan.steps} updates each")
        return grow_pair(options.folder, plan, advance)


def _look(options: Options, remedy: Remedy) -> Inspection:
    folder = str(options.folder / remedy / "model")
    tokenizer = open_tokenizer(folder)
    pieces = cut_pieces(read_texts(), tokenizer, length=options.plan.length, count=_PIECES)
    with torch.inference_mode():
        return inspect_model(open_model(folder, device="cpu", dtype="float32"), PAIR[remedy], pieces)


def _table(
    options: Options,
    values: dict[Remedy, dict[str, float]],
    decoding: dict[str, float],
    looked: list[Inspection],
) -> Table:
    plan = options.plan
    milliseconds = 1000 * decoding["seconds a token"]
    longer = f"{TIMES_LONGER} × the training length of {plan.length}"
    rows: list[list[Cell]] = [
        ["parameters", *(f"{v['parameters']:,.0f}" for v in values.values())],
        _row("validation perplexity", values, "perplexity"),
        _row(f"perplexity at {longer}, a window of {plan.length} keys", values, "longer/window"),
        _row(f"perplexity at {longer}, all keys", values, "longer/full"),
        _row("perplexity of the same text at the training length", values, "longer/trained length"),
        _row("position task: which row am I? accuracy, %", values, "mapping/accuracy", 100),
        _row("position task: is my row odd? accuracy, %", values, "odd_even/accuracy", 100),
        ["attention on the first token, %", *(100 * float(m.metrics.first.mean()) for m in looked)],
        [
            f"heads with more than {SINK_THRESHOLD:.0%} on the first token, %",
            *(100 * m.metrics.sink_rate(SINK_THRESHOLD) for m in looked),
        ],
        ["attention on no token (pseudo mass), %", *(100 * float(m.metrics.pseudo.mean()) for m in looked)],
        ["decoding, ms a token", milliseconds, milliseconds * decoding["ratio"]],
        ["training, s", *(v["seconds"] for v in values.values())],
    ]
    note = _NOTE.format(tokens=values["none"]["tokens"], length=POSITION_LENGTH)
    return Table("The pair", ["", *PAIR.values()], rows, note.replace("\n", " "))


def _row(name: str, values: dict[Remedy, dict[str, float]], key: str, factor: float = 1) -> list[Cell]:
    return [name, *(factor * values[remedy][key] for remedy in PAIR)]


def _print(console: Console, table: Table) -> None:
    shown = RichTable(title=table.title)
    for i, column in enumerate(table.columns):
        shown.add_column(column, justify="right" if i else "left")
    for row in table.rows:
        shown.add_row(*(f"{cell:,.2f}" if isinstance(cell, float) else str(cell) for cell in row))
    console.print(shown)
    console.print(table.note, style="dim")


def _write(options: Options, table: Table, looked: list[Inspection]) -> Path:
    curves = training_curves({PAIR[remedy]: options.folder / remedy / METRICS for remedy in PAIR})
    return write_report(
        options.folder / "report.html",
        [inspection.view for inspection in looked],
        tables=[table, overview_table(looked), position_table(looked)],
        curves=[*curves, *position_curves(looked)],
        title="With and without StableMask",
        lead="Two small decoders that differ in nothing but StableMask, on a text neither has seen.",
    )
