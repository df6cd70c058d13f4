"""``stablemask eval position``: the paper's table of position tasks, measured and extended."""

import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from stablemask.cli.terminal import environment_line, make_console, make_progress
from stablemask.evaluation.cells import Cell, Results, Values
from stablemask.evaluation.position_tasks import (
    ENCODINGS,
    TASKS,
    Encoding,
    Setting,
    Task,
    ceiling,
    position_task,
    printed,
)
from stablemask.measuring import threads

_NOTE = """\
Accuracy over the positions asked, in percent. "paper" is what it prints, for a model of 160 million
parameters and a length it does not give. "T + 1 … 2T" is task (3) past the training length; in tasks (1) and
(2) the labels there never occurred in training, so nothing can answer them. "–": not printed, or the
encoding has a table that ends at T."""
_COLUMNS = {"mapping": "(1) mapping", "identification": "(2) identification", "odd_even": "(3) odd-even"}


@dataclass(frozen=True)
class Options:
    """Train small decoders on the position tasks of the paper and print its table, extended.

    Each finished model is a JSON file in the output folder; the same command goes on where it stopped.

    Args:
        lengths: Lengths of the sequences, T.
        seeds: Models trained for each entry; with several, the table has the mean and the range.
        tasks: Only these.
        encodings: Only these, such as "rope" or "rope+stablemask"; by default every row of the table.
        out: Where the results go.
        jobs: Models trained at the same time, each on one core; by default as many as there are cores, on
            cuda one.
        device: cpu or cuda.
        setting: The models and their training.
    """

    lengths: tuple[int, ...] = (64, 256)
    seeds: int = 1
    tasks: tuple[Task, ...] = TASKS
    encodings: tuple[str, ...] = ()
    out: Path = Path("results/position")
    jobs: int | None = None
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    setting: Setting = field(default_factory=Setting)


class Entry(NamedTuple):
    """One model to be trained."""

    task: Task
    encoding: Encoding
    length: int
    seed: int


def run(options: Options) -> int:
    """Print the tables. 0: done; 1: a model above its ceiling; 2: something in the options is wrong."""
    console = make_console()
    try:
        entries = _entries(options)
    except ValueError as error:
        print(f"stablemask eval position: {error}", file=sys.stderr)
        return 2
    results = Results(options.out)
    console.print(f"{len(entries)} models on {options.device}; {environment_line()}")
    _train_missing(console, options, results, entries)
    found = {entry: results.find(_cell(options, entry)) or {} for entry in entries}
    for length in options.lengths:
        console.print(_table(length, {e: v for e, v in found.items() if e.length == length}))
    console.print(_NOTE, style="dim")
    path = results.write_lines([_cell(options, entry) for entry in entries])
    console.print(f"All values, one a line: {path}", style="dim", soft_wrap=True)
    return 1 if _report_ceilings(console, found) else 0


def _entries(options: Options) -> list[Entry]:
    """Slow ones first, so that no core waits for the last of them."""
    names = {_name(encoding): encoding for encoding in ENCODINGS}
    for given in options.encodings:
        if given not in names:
            raise ValueError(f"encodings: got {given!r}; allowed: {', '.join(names)}")
    for name, least in (("seeds", 1), ("jobs", 1)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise ValueError(f"{name}: got {value}; allowed: from {least} on")
    if not options.lengths or min(options.lengths) < 2:
        raise ValueError(f"lengths: got {options.lengths}; allowed: from 2 on")
    entries = [
        Entry(task, names[name], length, seed)
        for seed in range(options.seeds)
        for task in options.tasks
        for name in (options.encodings or names)
        for length in options.lengths
    ]
    return sorted(entries, key=lambda e: (e.seed, -_cost(e)))


def _train_missing(console: Console, options: Options, results: Results, entries: Sequence[Entry]) -> None:
    missing = [entry for entry in entries if results.find(_cell(options, entry)) is None]
    with make_progress(console) as progress:
        bar = progress.add_task("training", total=sum(map(_cost, missing)))
        for entry, values, seconds in _train_all(options, missing):
            results.save(_cell(options, entry), values.items(), seconds)
            progress.advance(bar, _cost(entry))
            title = f"{entry.task}, T = {entry.length}, {_name(entry.encoding)}, seed {entry.seed}"
            console.print(f"{title:60} {100 * values['accuracy']:5.1f} %  {seconds:5.0f} s", style="dim")


def _train_all(options: Options, entries: Sequence[Entry]) -> Iterator[tuple[Entry, Values, float]]:
    jobs = options.jobs or (1 if options.device.startswith("cuda") else os.cpu_count() or 1)
    if min(jobs, len(entries)) <= 1:
        for entry in entries:
            yield entry, *_train(entry, options.setting, options.device)
        return
    pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"))
    try:
        futures = {pool.submit(_train, e, options.setting, options.device): e for e in entries}
        for future in as_completed(futures):
            yield futures[future], *future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _train(entry: Entry, setting: Setting, device: str) -> tuple[Values, float]:
    begin = time.perf_counter()
    with threads(1):
        values = position_task(
            entry.task,
            entry.encoding,
            length=entry.length,
            seed=entry.seed,
            setting=setting,
            device=device,
        )
        return dict(values), time.perf_counter() - begin


def _cell(options: Options, entry: Entry) -> Cell:
    settings = {
        "task": entry.task,
        **entry.encoding._asdict(),
        "length": entry.length,
        "seed": entry.seed,
        "device": torch.device(options.device).type,
        **asdict(options.setting),
    }
    return Cell("position", settings)


def _cost(entry: Entry) -> float:
    """Roughly how long a model takes, in relation to others."""
    more = 2 if entry.task == "identification" else 1
    dense = 2 if entry.encoding.position == "t5" or entry.encoding.remedy == "urpe" else 1
    return float(entry.length * more * dense + 200)


def _table(length: int, found: Mapping[Entry, Values]) -> Table:
    table = Table(title=f"T = {length}", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("encoding")
    for task in TASKS:
        table.add_column(_COLUMNS[task], justify="right")
        table.add_column("paper", justify="right", style="dim")
    table.add_column("T + 1 … 2T", justify="right")
    paper = printed()["accuracy"]
    for encoding in ENCODINGS:
        rows = {e: v for e, v in found.items() if e.encoding == encoding}
        if not rows:
            continue
        cells = [_name(encoding)]
        for task in TASKS:
            cells.append(_percent([v["accuracy"] for e, v in rows.items() if e.task == task]))
            value = paper.get(_name(encoding), {}).get(task)
            cells.append("–" if value is None else f"{100 * value:.1f}")
        beyond = [v for e, v in rows.items() if e.task == "odd_even" and "accuracy_beyond" in v]
        table.add_row(*cells, _percent([v["accuracy_beyond"] for v in beyond]))
    return table


def _percent(values: Sequence[float]) -> str:
    if not values:
        return "–"
    mean = f"{100 * statistics.fmean(values):.1f}"
    return mean if len(values) == 1 else f"{mean} ({100 * min(values):.0f}–{100 * max(values):.0f})"


def _report_ceilings(console: Console, found: Mapping[Entry, Values]) -> list[Entry]:
    """The control: identical inputs leave a relative encoding alone only one answer. Returns who broke it."""
    held, broken = 0, []
    for entry, values in found.items():
        limit = ceiling(entry.task, entry.encoding, entry.length)
        if limit is not None and values["accuracy"] > limit:
            broken.append(entry)
            console.print(
                f"{entry}: accuracy {values['accuracy']} above its ceiling {limit}", style="bold red"
            )
        held += limit is not None
    if held and not broken:
        console.print(
            f"Control: all {held} models with a relative encoding alone, or none, are at or below the "
            "ceiling of identical inputs, 1/T in task (1) and one half in task (3).",
            style="green",
        )
    return broken


def _name(encoding: Encoding) -> str:
    return encoding.position if encoding.remedy == "none" else f"{encoding.position}+{encoding.remedy}"
