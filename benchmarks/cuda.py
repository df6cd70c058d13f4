"""The operation on a GPU against plain causal attention: ``python -m benchmarks.cuda --help``.

As ``benchmarks.attention``: a call is held against the float64 reference before it is timed, and every ratio
has its interval and the noise of the machine beside it. Needs torch and nothing else, so that it runs in
whatever Python a GPU machine has.
"""

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from benchmarks._cases import LONGER_DOCUMENTS, SHORT_DOCUMENTS, Entry
from benchmarks._journal import Journal
from stablemask import __version__
from stablemask.benchmark import CUDA_TIME, Bench, Case, Result, able_backends, candidate, make_problem
from stablemask.measuring import Rule, environment

LENGTHS = (1024, 2048, 4096, 8192, 16_384)
CONTRAST = ("triton", "flex")
CONTRAST_LENGTHS = (4096,)
_HEADER = f"{'case':<44} {'back end':<11} {'ratio':>6} {'95 %':>13} {'A/A':>13} {'of matmul':>9}  verdict"


def entries() -> Iterator[Entry]:
    """Every case with its bar; ``contrast`` ones also on the other fused back ends."""
    for width in (64, 128):
        for entry in _forward(partial(Case, dtype=torch.bfloat16, width=width, device="cuda")):
            yield entry
            if entry.case.group != "decode":
                yield replace(entry, case=replace(entry.case, backward=True))
    half = Case("half", torch.float16, 64, 4096, heads=32, kv_heads=32, device="cuda")
    yield Entry(half, bar=1.03)
    yield Entry(replace(half, backward=True), bar=1.03)


def _forward(case: partial[Case]) -> Iterator[Entry]:
    many = partial(case, heads=32, kv_heads=32)
    for length in LENGTHS:
        yield Entry(many("causal", length=length), bar=1.03, contrast=length in CONTRAST_LENGTHS)
    yield Entry(many("alibi", length=4096, alibi=True), bar=1.10)
    yield Entry(case("gqa", length=4096, heads=32, kv_heads=8), bar=1.03)
    yield Entry(many("window", length=8192, window=512), bar=2.0)
    for documents in (SHORT_DOCUMENTS, LONGER_DOCUMENTS):
        yield Entry(many("packed", length=sum(documents), documents=documents), bar=1.3)
    yield Entry(many("decode", length=4096, queries=1), bar=1.10)


def run(only: str, output: Path, *, resume: bool) -> int:
    """Measure what matches. 0: done; 1: a result was wrong; 2: there is no GPU or nothing was selected."""
    if not torch.cuda.is_available():
        print("needs a GPU: torch.cuda is not available", file=sys.stderr)
        return 2
    selected = [entry for entry in entries() if re.search(only, entry.case.name)]
    about = {**environment(), "stablemask": __version__}
    journal = Journal(output, about, resume=resume)
    print("\n".join(f"{name}: {value}" for name, value in about.items()), _HEADER, sep="\n", flush=True)
    bench = Bench((CUDA_TIME,), Rule())
    for entry in selected:
        for result in _results(bench, entry, journal):
            print(_row(result), flush=True)
    verdicts = Counter(result.verdict for result in journal.results.values() if result.verdict)
    print(", ".join(f"{count} {verdict}" for verdict, count in sorted(verdicts.items())))
    print(f"JSON lines: {output}")
    return 2 if not selected else 1 if verdicts["WRONG"] else 0


def _results(bench: Bench, entry: Entry, journal: Journal) -> Iterator[Result]:
    """The case as a user calls it, against its bar; the other fused back ends for contrast."""
    problem = make_problem(entry.case)
    chosen, *others = (name for name, reason in able_backends(problem).items() if reason is None)
    measure = partial(bench.measure, problem, chosen, candidate(problem), entry.bar)
    yield journal.once(entry.case.name, chosen, measure)
    for name in others:
        if entry.contrast and name in CONTRAST:
            measure = partial(bench.measure, problem, name, candidate(problem, name))
            yield journal.once(entry.case.name, name, measure)


def _row(result: Result) -> str:
    if not result.timings:
        return f"{result.case:<44} {result.backend:<11} {'':>44}  {result.verdict}"
    timing = result.timings[0]
    ratio, noise = timing.comparison.ratio, timing.comparison.noise
    return (
        f"{result.case:<44} {result.backend:<11} {ratio.median:>6.3f} {ratio.low:>6.3f}–{ratio.high:<6.3f} "
        f"{noise.low:>6.3f}–{noise.high:<6.3f} {timing.of_matmul:>8.0%}  {result.verdict}"
    )


def _main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cuda", description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="regular expression: cases whose name contains a match")
    parser.add_argument("--output", type=Path, default=Path("runs/bench/cuda.jsonl"), help="JSON lines")
    parser.add_argument("--resume", action="store_true", help="go on with the file given as output")
    options = parser.parse_args()
    return run(options.only, options.output, resume=options.resume)


if __name__ == "__main__":
    sys.exit(_main())
