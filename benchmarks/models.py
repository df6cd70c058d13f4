"""Whole models with StableMask against stock Llama: ``python -m benchmarks.models --help``.

No figure without correctness: loss, gradients and logits of every model are first held against a float64
Llama that forms the paper's matrices. A model outside its error budget gets no figure, and the run fails.
"""

import re
import shlex
import sys
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import tyro
from rich.console import Console
from rich.table import Table

from benchmarks import model_memory
from benchmarks._journal import Journal
from benchmarks._model_cases import CASES, Case, Models
from benchmarks._model_profile import DATA, PROFILES, data_waiting, step_profile
from stablemask import __version__
from stablemask.benchmark import Result
from stablemask.cli.terminal import make_console, make_progress, result_header, result_row
from stablemask.measuring import MIN_ROUNDS, Rule, environment

_LEGEND = """
step, fwd+bwd: a training step with clipping and AdamW, and without them. decode: one token of T with a cache.
All three as ratios to stock Llama with PyTorch's attention and the same weights. cache: a token with a cache
to the same token without one (SM-I to SM in the paper). memory: ratio of peaks of a whole training step.
"decoder" is StableMaskForCausalLM, "enabled" stock Llama after stablemask.hf.enable. Process time, 1 thread,
but for the column "wall": the median of the rounds ± half of its 95 % interval; A/A is the baseline against
itself, the noise of the measurement. "of mm" is the share of the rate of a matrix product. "error" is the
largest error as a share of its budget."""
_MEMORY_RUNS = 3
_MEMORY_BAR = 1.0
_MEMORY_SECONDS = 120.0  # of one case; for the estimate of the time left


@dataclass(frozen=True)
class Options:
    """Ratios of time and memory of whole models to transformers' Llama with PyTorch's attention.

    Args:
        only: Regular expression; just the cases whose name contains a match: step, fwd+bwd, decode, cache,
            memory, profile, data.
        output: File for the JSON lines.
        resume: Go on with the file given as output; what it holds is not measured again.
        rounds: Rounds of every comparison; more where the interval stays wide.
        max_seconds: Of one comparison whose interval stays wide.
    """

    only: str = ""
    output: Path = field(
        default_factory=lambda: Path("runs/bench") / time.strftime("models-%Y%m%d-%H%M%S.jsonl")
    )
    resume: bool = False
    rounds: int = MIN_ROUNDS
    max_seconds: float = 60.0


def run(options: Options) -> int:
    """Measure what the options select. 0: done; 1: a result was wrong; 2: nothing was selected."""
    wanted = re.compile(options.only)
    cases = [case for case in CASES if wanted.search(case.name)]
    memory_runs = [r for r in model_memory.RUNS if wanted.search(r.case)]
    notes = {name: make for name, make in _notes().items() if wanted.search(name)}
    console = make_console()
    if not cases and not memory_runs and not notes:
        console.print(f"only: no case matches {options.only!r}; names look like {CASES[0].name}")
        return 2
    command = shlex.join(["python", "-m", "benchmarks.models", *sys.argv[1:]])
    about = {
        **environment(),
        "transformers": version("transformers"),
        "stablemask": __version__,
        "command": command,
    }
    journal = Journal(options.output, about, resume=options.resume)
    console.print("\n".join(f"{name}: {value}" for name, value in about.items()), end="\n\n")
    _measure(
        console, journal, Models(Rule(options.rounds, max_seconds=options.max_seconds)), cases, memory_runs
    )
    for name, make in notes.items():
        console.print(_table(name, journal.note(name, make)))
    verdicts = Counter(result.verdict for result in journal.results.values() if result.verdict)
    console.print(_LEGEND)
    console.print(", ".join(f"{count} {verdict}" for verdict, count in sorted(verdicts.items())))
    console.print(f"JSON lines: {journal.path}")
    return 1 if verdicts["WRONG"] else 0


def _measure(
    console: Console,
    journal: Journal,
    models: Models,
    cases: list[Case],
    memory_runs: list[model_memory.Run],
) -> None:
    console.print(result_header(), soft_wrap=True)
    seconds = [models.seconds(case) for case in cases]
    with make_progress(console) as progress:
        task = progress.add_task("", total=sum(seconds) + _MEMORY_SECONDS * len(memory_runs))
        for case, estimate in zip(cases, seconds, strict=True):
            progress.update(task, description=case.name)
            result = journal.once(case.name, case.subject, partial(models.measure, case))
            console.print(result_row(result), soft_wrap=True)
            progress.advance(task, estimate)
        for memory_run in memory_runs:
            progress.update(task, description=memory_run.case)
            result = journal.once(memory_run.case, memory_run.subject, partial(_memory_result, memory_run))
            console.print(result_row(result), soft_wrap=True)
            progress.advance(task, _MEMORY_SECONDS)


def _memory_result(run: model_memory.Run) -> Result:
    """A peak beside that of the stock model: each the median of processes, whose allocators differ by 8 %."""
    peaks = [model_memory.peak_of(run) for _ in range(_MEMORY_RUNS)]
    stock = [model_memory.peak_of(replace(run, subject="stock")) for _ in range(_MEMORY_RUNS)]
    return Result(
        run.case,
        run.subject,
        _MEMORY_BAR if run.subject == "decoder" else None,
        max(peak.worst_error for peak in peaks),
        mib=median(peak.mib for peak in peaks),
        baseline_mib=median(peak.mib for peak in stock),
    )


def _notes() -> dict[str, Any]:
    return {**{f"profile/{s}": partial(step_profile, s) for s in PROFILES}, DATA: data_waiting}


def _table(name: str, note: dict[str, Any]) -> Table:
    table = Table("", "", title=name, title_justify="left", show_header=False)
    for label, value in note.items():
        table.add_row(label, f"{value:.4g}" if isinstance(value, float) else str(value))
    return table


if __name__ == "__main__":
    sys.exit(run(tyro.cli(Options)))
