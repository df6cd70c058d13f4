"""``python -m stablemask.reproduce.worker``: cells of the study on a machine that has little installed.

It needs torch, transformers and accelerate, a prepared corpus and nothing else. ``stablemask reproduce`` does
the same and more. Results are files; run it again for what is missing.
"""

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from stablemask.reproduce import runner
from stablemask.reproduce.cells import Conditions, Job
from stablemask.reproduce.corpus import open_corpus
from stablemask.reproduce.study import load_study

_LINES_EVERY = 15.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Work through cells. 0: all are there; 1: time was up, or some failed; 2: an option is wrong."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(given)
    try:
        corpus = open_corpus(options.corpus)
        study = load_study(options.study)
        entries = runner.select(study, options.groups, options.seeds, options.first_seed)
        conditions = Conditions(options.device, options.precision, corpus.digest)
        command = f"python -m stablemask.reproduce.worker {shlex.join(given)}"
        job = Job(study, conditions, options.corpus, options.results, command, options.weights)
        todo = runner.missing(job, entries)
        say(f"{len(entries)} cells, {len(entries) - len(todo)} finished before; {options.jobs} processes")
        seconds = None if options.minutes is None else 60 * options.minutes
        rest = runner.run(job, todo, jobs=options.jobs, seconds=seconds, on_state=_Lines())
    except (OSError, ValueError) as error:
        say(f"reproduce: {error}")
        return 2
    if rest:
        say(f"missing: {', '.join(f'{e.group} {e.seed}' for e in rest)}")
    return 1 if rest else 0


def say(text: str) -> None:
    """A line on standard error."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201 - a command speaks


class _Lines:
    """A line for every finished cell, and one now and then."""

    def __init__(self) -> None:
        self.last = time.monotonic()

    def __call__(self, state: runner.State) -> None:
        now = time.monotonic()
        if state.message or now - self.last >= _LINES_EVERY:
            self.last = now
            left = "" if state.left is None else f"  left {state.left / 60:.1f} min"
            say(f"{100 * state.share:5.1f} %{left}  {state.message}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m stablemask.reproduce.worker", description=__doc__)
    add = parser.add_argument
    add("--corpus", type=Path, required=True, help="folder of a prepared corpus")
    add("--results", type=Path, default=Path("results"), help="folder of the finished cells")
    add("--groups", nargs="*", default=[], metavar="PATTERN", help='such as "small/rope/*"; default: all')
    add("--seeds", type=int, help="seeds 0 … N − 1 of each group; default: as the study says")
    add("--first-seed", type=int, default=0, help="leave out those before it")
    add("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    add("--precision", choices=("fp32", "bf16"), default="bf16" if torch.cuda.is_available() else "fp32")
    add("--jobs", type=int, default=1, help="processes")
    add("--minutes", type=float, help="stop after so long, keeping what is finished")
    add("--weights", type=Path, help="folder for the trained models of seed 0")
    add("--study", type=Path, help="a study of your own; default: the one of the package")
    return parser


if __name__ == "__main__":
    sys.exit(main())
