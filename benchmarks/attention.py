"""The operation against plain causal attention: ``python -m benchmarks.attention --help``.

No figure without correctness: every call that is timed is first held against the float64 reference, within
the error budget. A call that fails gets no figure, and the run fails.
"""

import re
import shlex
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import tyro
from rich.console import Console

from benchmarks import memory
from benchmarks._cases import ENTRIES, Entry
from benchmarks._journal import Journal
from stablemask import __version__
from stablemask.benchmark import (
    PROCESS_TIME,
    WALL_TIME,
    Bench,
    Result,
    able_backends,
    candidate,
    make_problem,
)
from stablemask.cli.terminal import RESULT_LEGEND, make_console, make_progress, result_header, result_row
from stablemask.measuring import MIN_ROUNDS, Rule, environment

_LEGEND = f"""{RESULT_LEGEND}
All but the column "wall" is process time on 1 thread. Window: ratio to the time that its pairs would take at
the causal rate; 1.5 is wanted. Packed: to the documents one by one. Memory: ratio of peaks. Rows without a
verdict are other back ends, for contrast."""
_MEMORY_BAR = 1.05
_MEMORY_SECONDS = 120.0  # of one case; for the estimate of the time left


@dataclass(frozen=True)
class Options:
    """Ratios of time and memory to torch's scaled_dot_product_attention(is_causal=True).

    Args:
        only: Regular expression; just the cases whose name contains a match.
        quick: A few cases by process time alone, in about two minutes.
        output: File for the JSON lines.
        resume: Go on with the file given as output; what it holds is not measured again.
        rounds: Rounds of every comparison; more where the interval stays wide.
    """

    only: str = ""
    quick: bool = False
    output: Path = field(default_factory=lambda: Path("runs/bench") / time.strftime("%Y%m%d-%H%M%S.jsonl"))
    resume: bool = False
    rounds: int = MIN_ROUNDS


def run(options: Options) -> int:
    """Measure what the options select. 0: done; 1: a result was wrong; 2: nothing was selected."""
    wanted = re.compile(options.only)
    entries = [e for e in ENTRIES if wanted.search(e.case.name) and (e.quick or not options.quick)]
    memory_runs = [r for r in memory.RUNS if wanted.search(r.case) and not options.quick]
    console = make_console()
    if not entries and not memory_runs:
        message = f"only: no case matches {options.only!r}; names look like {ENTRIES[0].case.name}"
        console.print(message, markup=False)
        return 2
    clocks = (PROCESS_TIME,) if options.quick else (PROCESS_TIME, WALL_TIME)
    bench = Bench(clocks, Rule(min_rounds=options.rounds))
    command = shlex.join(["python", "-m", "benchmarks.attention", *sys.argv[1:]])
    about = {**environment(), "stablemask": __version__, "command": command}
    journal = Journal(options.output, about, resume=options.resume)
    console.print("\n".join(f"{name}: {value}" for name, value in about.items()), end="\n\n")
    _measure(console, journal, bench, entries, memory_runs)
    verdicts = Counter(result.verdict for result in journal.results.values() if result.verdict)
    console.print(_LEGEND)
    console.print(", ".join(f"{count} {verdict}" for verdict, count in sorted(verdicts.items())))
    console.print(f"JSON lines: {journal.path}")
    return 1 if verdicts["WRONG"] else 0


def _measure(
    console: Console, journal: Journal, bench: Bench, entries: list[Entry], memory_runs: list[memory.Run]
) -> None:
    console.print(result_header(), soft_wrap=True)
    seconds = [bench.seconds(entry.case) * (5 if entry.contrast else 1) for entry in entries]
    with make_progress(console) as progress:
        task = progress.add_task("", total=sum(seconds) + _MEMORY_SECONDS * len(memory_runs))
        for entry, estimate in zip(entries, seconds, strict=True):
            progress.update(task, description=entry.case.name)
            for result in _results(bench, entry, journal):
                console.print(result_row(result), soft_wrap=True)
            progress.advance(task, estimate)
        for memory_run in memory_runs:
            progress.update(task, description=memory_run.case)
            result = journal.once(memory_run.case, memory_run.subject, partial(_memory_result, memory_run))
            console.print(result_row(result), soft_wrap=True)
            progress.advance(task, _MEMORY_SECONDS)


def _results(bench: Bench, entry: Entry, journal: Journal) -> Iterator[Result]:
    """The case as a user calls it, against its bar; then on the other back ends, for contrast."""
    problem = make_problem(entry.case)
    chosen, *others = (name for name, reason in able_backends(problem).items() if reason is None)
    measure = partial(bench.measure, problem, chosen, candidate(problem), entry.bar)
    yield journal.once(entry.case.name, chosen, measure)
    for name in others if entry.contrast else ():
        measure = partial(bench.measure, problem, name, candidate(problem, name))
        yield journal.once(entry.case.name, name, measure)


def _memory_result(run: memory.Run) -> Result:
    """One peak beside that of SDPA, each in its own process."""
    peak, stock = memory.peak_of(run), memory.peak_of(replace(run, subject="sdpa"))
    bar = None if run.subject == "reference" else _MEMORY_BAR
    return Result(run.case, run.subject, bar, peak.worst_error, mib=peak.mib, baseline_mib=stock.mib)


if __name__ == "__main__":
    sys.exit(run(tyro.cli(Options)))
