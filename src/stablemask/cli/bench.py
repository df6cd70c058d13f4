"""``stablemask bench``: one call of your choice on every back end that can serve it, checked, then timed."""

from dataclasses import dataclass
from typing import Literal

import torch

from stablemask.benchmark import (
    CUDA_TIME,
    PROCESS_TIME,
    Bench,
    Case,
    able_backends,
    candidate,
    make_problem,
)
from stablemask.cli.terminal import (
    RESULT_LEGEND,
    environment_line,
    make_console,
    make_progress,
    result_header,
    result_row,
)
from stablemask.measuring import MIN_ROUNDS, Rule, threads


@dataclass(frozen=True)
class Options:
    """Time a call on every back end that can serve it, against plain causal attention.

    Args:
        length: Tokens, T.
        heads: Query heads, H.
        kv_heads: Key and value heads; as many as query heads by default.
        width: Of a head, D.
        dtype: Of q, k and v.
        device: cpu or cuda.
        backward: With the gradients of q, k and v.
        window: Each query sees this many keys.
        alibi: With ALiBi's slopes.
        backends: Only these.
        rounds: Rounds of every comparison; more where the interval stays wide.
    """

    length: int = 1024
    heads: int = 8
    kv_heads: int | None = None
    width: int = 64
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    device: str = "cpu"
    backward: bool = True
    window: int | None = None
    alibi: bool = False
    backends: tuple[str, ...] = ()
    rounds: int = MIN_ROUNDS


def run(options: Options) -> int:
    """Print a line for every back end. 0: all that ran were right; 1: one was wrong; 2: none could run."""
    case = Case(
        "call",
        getattr(torch, options.dtype),
        options.width,
        options.length,
        backward=options.backward,
        heads=options.heads,
        kv_heads=options.heads if options.kv_heads is None else options.kv_heads,
        window=options.window,
        alibi=options.alibi,
        device=options.device,
    )
    console = make_console()
    problem = make_problem(case)
    reasons = able_backends(problem)
    unknown = [name for name in options.backends if name not in reasons]
    if unknown:
        console.print(f"backends: got {', '.join(unknown)}; allowed: {', '.join(reasons)}")
        return 2
    asked = options.backends or tuple(reasons)
    able = [name for name in asked if reasons[name] is None]
    clock = CUDA_TIME if torch.device(options.device).type == "cuda" else PROCESS_TIME
    bench = Bench((clock,), Rule(min_rounds=options.rounds))
    console.print(f"{environment_line()}; {clock.name}\n")
    console.print(result_header(), soft_wrap=True)
    results = []
    with make_progress(console) as progress, threads(1):
        for name in progress.track(able, description="measuring"):
            results.append(bench.measure(problem, name, candidate(problem, name)))
            console.print(result_row(results[-1]), soft_wrap=True)
    for name in asked:
        if name not in able:
            console.print(f"{name} did not run: {reasons[name]}", style="dim")
    console.print(RESULT_LEGEND)
    if not results:
        return 2
    return 1 if any(result.verdict == "WRONG" for result in results) else 0
