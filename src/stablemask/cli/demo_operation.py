"""``stablemask demo operation``: what the operation is, that it is right, and how fast it is here."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from stablemask import PseudoScores, available_backends, stable_attention
from stablemask.benchmark import PROCESS_TIME, Bench, Case, able_backends, candidate, make_problem
from stablemask.cli.terminal import (
    RESULT_LEGEND,
    environment_line,
    make_console,
    make_progress,
    result_header,
    result_row,
)
from stablemask.measuring import Rule, threads
from stablemask.shapes import Keys, Queries, Values
from stablemask.testing import Example, check_backend, make_gradients, make_qkv, plain_errors

_WHAT_IT_IS = """
[bold]StableMask attention[/bold] is plain causal attention with one more logit σ in every row, whose value is
zero. What a row has no use for goes there instead of to the first token, and how much goes there depends on
the position of the row.
"""
_SHARES = "Share of each row that stays on its tokens"
_SHARES_NOTE = """\
γ = 0.5 spread over 8 heads, horizon 512, random q and k. The last row of the horizon keeps everything.
"""
_CORRECTNESS_NOTE = """\
Relative errors in norm against the dense reference in float64, T = 256. A call is right where every error is
at most twice that of plain attention plus twice the rounding unit of its dtype.
"""
_WHERE_NEXT = """
[bold]Where to go next[/bold]
  from stablemask import PseudoScores, stable_attention
  out = stable_attention(q, k, v, PseudoScores(0.5, horizon=2048))   # q, k, v: \\[B, H, T, D]

  stablemask bench --help    your own shapes, on every back end
  stablemask doctor          what works on this machine, and why the rest does not
  docs/method.md             the formulas
  docs/how-to/training.md    training with it"""

_TENSORS = {"out": "out", "lse": "lse'", "dq": "dq", "dk": "dk", "dv": "dv"}
_SPEED_CASES = (
    Case("causal", torch.float32, 64, 512, backward=True),
    Case("causal", torch.float32, 64, 1024, backward=True),
    Case("causal", torch.bfloat16, 64, 1024, backward=True),
    Case("window", torch.float32, 64, 2048, heads=2, kv_heads=2, window=256),
    Case("decode", torch.float32, 64, 4096, queries=1),
)
_CONTRAST = _SPEED_CASES[0]


@dataclass(frozen=True)
class Options:
    """Show what the operation is, that it is right and how fast it is on this machine, in about a minute."""


def run(options: Options) -> int:  # noqa: ARG001 - every command has the same function
    """Print the demonstration. 1 if a result was outside its error budget."""
    console = make_console()
    console.print(_WHAT_IT_IS)
    console.print(_kept_shares())
    console.print(_SHARES_NOTE, style="dim")
    with make_progress(console) as progress, threads(1):
        right = _show_correctness(console)
        fast = _show_speed(console, progress)
    console.print(_WHERE_NEXT)
    return 0 if right and fast else 1


def _kept_shares() -> Table:
    """Attention over values of one returns the sum of each row: the share that is left for the tokens."""
    q, k, v = _tensors(512, torch.float32)
    shares = stable_attention(q, k, torch.ones_like(v), PseudoScores(0.5, horizon=512))[0, :, :, 0]  # (H, T)
    rows = (1, 2, 4, 16, 64, 256, 511, 512)
    table = _table(_SHARES, "", *(f"row {row}" for row in rows))
    for head in (1, 4, 8):
        table.add_row(f"head {head}", *(f"{100 * float(shares[head - 1, row - 1]):.1f} %" for row in rows))
    return table


def _show_correctness(console: Console) -> bool:
    right = True
    refused: dict[str, str] = {}
    table = _table("Is it right?", "", *_TENSORS.values(), "")
    for dtype in (torch.float32, torch.bfloat16):
        example = _example(dtype)
        plain = plain_errors(example)
        name = str(dtype)[6:]
        table.add_row(f"plain attention, {name}", *_cells(plain), "", style="dim")
        for backend in _reasons(example):
            variant = next((v for v in _variants(example) if _reasons(v)[backend] is None), None)
            if variant is None:
                refused[backend] = _reasons(example)[backend] or ""
                continue
            deviations = check_backend(variant, backend)
            ok = all(d.ok for d in deviations)
            right &= ok
            errors = {d.name: d.error for d in deviations}
            table.add_row(f"{backend}, {name}", *_cells(errors), _mark(ok))
        table.add_section()
    console.print(table)
    for backend, reason in refused.items():
        console.print(f"{backend} cannot run here: {reason}", style="dim")
    console.print(_CORRECTNESS_NOTE, style="dim")
    return right


def _show_speed(console: Console, progress: Progress) -> bool:
    console.print("How fast is it?", style="bold")
    console.print(f"{environment_line()}; {PROCESS_TIME.name}; 1 sequence", style="dim")
    console.print(result_header(), soft_wrap=True)
    bench = Bench((PROCESS_TIME,), Rule(max_seconds=15.0))
    task = progress.add_task(
        "timing", total=sum(map(bench.seconds, _SPEED_CASES)) + 4 * bench.seconds(_CONTRAST)
    )
    right = True
    for case in _SPEED_CASES:
        problem = make_problem(case)
        able = [name for name, reason in able_backends(problem).items() if reason is None]
        for name in able if case is _CONTRAST else able[:1]:
            progress.update(task, description=f"{case.name} {name}")
            result = bench.measure(problem, name, candidate(problem, name))
            right &= result.verdict != "WRONG"
            console.print(result_row(result), soft_wrap=True)
            progress.advance(task, bench.seconds(case))
    progress.remove_task(task)
    console.print(RESULT_LEGEND, style="dim")
    return right


def _tensors(length: int, dtype: torch.dtype) -> tuple[Queries, Keys, Values]:
    """q, k, v of one sequence with eight heads of width 64."""
    generator = torch.Generator().manual_seed(0)
    return make_qkv(
        generator, batch=1, heads=8, kv_heads=8, num_queries=length, num_keys=length, dim=64, dtype=dtype
    )


def _example(dtype: torch.dtype) -> Example:
    q, k, v = _tensors(256, dtype)
    return make_gradients(Example(q, k, v, PseudoScores(0.5, horizon=256)), torch.Generator().manual_seed(1))


def _variants(example: Example) -> Iterator[Example]:
    """The call with everything, without lse', without gradients: some back ends cannot do all of it."""
    without_lse = replace(example, grad_lse=None, return_lse=False)
    yield example
    yield without_lse
    yield replace(example, grad_out=None, grad_lse=None)


def _reasons(example: Example) -> dict[str, str | None]:
    needs_grad = example.grad_out is not None
    q, k, v = (t.detach().requires_grad_(needs_grad) for t in (example.q, example.k, example.v))
    return available_backends(q, k, v, example.sink, **example.options, return_lse=example.return_lse)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", no_wrap=True)
    return table


def _cells(errors: Mapping[str, float]) -> list[str]:
    return [f"{errors[name]:.1e}" if name in errors else "–" for name in _TENSORS]


def _mark(ok: bool) -> Text:
    return Text("right", "green") if ok else Text("WRONG", "bold white on red")
