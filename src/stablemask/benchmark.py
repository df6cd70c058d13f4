"""The operation timed against plain causal attention, and not before it was found to be right.

A ``Case`` names a call; ``Problem`` is the case with its tensors; ``Truth`` is what the float64 reference
says about it. ``Bench.measure`` holds a call against the truth and then times it: what is checked is what is
timed, the same callable on the same tensors. A call outside its error budget gets no figure.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from stablemask.attention import available_backends, stable_attention
from stablemask.measuring import (
    Clock,
    Comparison,
    Rule,
    attention_flops,
    compare,
    cuda_clock,
    matmul_rate,
    threads,
)
from stablemask.pseudo import PseudoScores
from stablemask.shapes import Keys, Output, Queries, Values
from stablemask.testing import Deviation, Example, Results, attend, evaluate
from stablemask.testing import compare as compare_with_budget

_CHUNK_SCORES = 1 << 25  # 256 MiB of float64 scores at a time
_FLOPS_A_SECOND = 5e10  # a guess, for estimates of the time left

Measured = Callable[[], Results]


@dataclass(frozen=True)
class Case:
    """One call of the operation and the plain attention it is compared with.

    Args:
        group: What the case shows, for its name.
        dtype: Of q, k and v.
        width: D.
        length: Number of keys.
        backward: With the gradients of q, k and v.
        heads: H.
        kv_heads: G.
        queries: The last queries only; None means as many as keys.
        window: As in the operation.
        alibi: With ALiBi's slopes.
        documents: Lengths of packed documents; their sum is ``length``.
        device: Where the tensors are.
    """

    group: str
    dtype: torch.dtype
    width: int
    length: int
    backward: bool = False
    heads: int = 8
    kv_heads: int = 8
    queries: int | None = None
    window: int | None = None
    alibi: bool = False
    documents: tuple[int, ...] = ()
    device: str = "cpu"

    @property
    def name(self) -> str:
        """For example ``causal/T1024/D64/bfloat16/fwd+bwd``."""
        direction = "fwd+bwd" if self.backward else "fwd"
        return f"{self.group}/T{self.length}/D{self.width}/{str(self.dtype)[6:]}/{direction}"

    @property
    def visible_pairs(self) -> int:
        """Query-key pairs that the call has to look at, in each head."""
        if self.documents:
            return sum(n * (n + 1) // 2 for n in self.documents)
        if self.window is not None:
            return self.length * min(self.window, self.length)
        queries = self.length if self.queries is None else self.queries
        return queries * self.length - queries * (queries - 1) // 2

    @property
    def baseline_pairs(self) -> int:
        """Query-key pairs that the baseline looks at: those of the case, but all causal ones for a window."""
        return self.length * (self.length + 1) // 2 if self.window is not None else self.visible_pairs


@dataclass(frozen=True)
class Problem:
    """The tensors of a case. q, k and v require gradients if the case has a backward."""

    case: Case
    q: Queries
    k: Keys
    v: Values
    grad: Output
    scores: PseudoScores
    options: dict[str, Any]

    def documents(self) -> "list[Problem]":
        """Every packed document with tensors of its own; the whole problem if nothing is packed."""
        if not self.case.documents:
            return [self]
        ends = list(accumulate(self.case.documents))[:-1]
        pieces = (t.detach().tensor_split(ends, 2) for t in (self.q, self.k, self.v, self.grad))
        return [_problem(self.case, q, k, v, grad, {}) for q, k, v, grad in zip(*pieces, strict=True)]


def make_problem(case: Case) -> Problem:
    """Random tensors from a fixed seed; γ = 0.5 spread over the heads, the horizon as long as the case."""
    generator = torch.Generator().manual_seed(0)
    queries = case.length if case.queries is None else case.queries

    def draw(heads: int, length: int) -> Tensor:
        return torch.randn(1, heads, length, case.width, generator=generator).to(case.device, case.dtype)

    q, grad = draw(case.heads, queries), draw(case.heads, queries)
    k, v = draw(case.kv_heads, case.length), draw(case.kv_heads, case.length)
    options: dict[str, Any] = {}
    if case.window is not None:
        options["window"] = case.window
    if case.alibi:
        options["alibi_slopes"] = (
            PseudoScores(0.5, horizon=None).gammas(case.heads).to(case.device, torch.float32)
        )
    if case.documents:
        lengths = torch.tensor(case.documents, device=case.device)
        numbers = torch.arange(lengths.numel(), device=case.device)
        options["document_ids"] = numbers.repeat_interleave(lengths).unsqueeze(0)
    return _problem(case, q, k, v, grad, options)


def able_backends(problem: Problem) -> dict[str, str | None]:
    """As ``available_backends``: the fastest first, with None or the reason against it."""
    return available_backends(problem.q, problem.k, problem.v, problem.scores, **problem.options)


def candidate(problem: Problem, backend: str | None = None) -> Measured:
    """The operation on the whole problem; ``backend=None`` is what a user gets."""
    q, k, v, scores, options = problem.q, problem.k, problem.v, problem.scores, problem.options
    return _measured(problem, lambda: stable_attention(q, k, v, scores, **options, backend=backend))


def baseline(problem: Problem) -> Callable[[], list[Results]]:
    """Stock attention: causal, one call for the whole problem or one for every document."""
    calls = [_stock(piece) for piece in problem.documents()]
    return lambda: [call() for call in calls]


class Truth:
    """The float64 reference of a case, gradients included, and the stock errors that set its budget."""

    def __init__(self, case: Case) -> None:
        pieces = make_problem(replace(case, backward=True)).documents()
        self._dtype = case.dtype
        self._expected = _joined([_exact(piece, piece.scores) for piece in pieces])
        plain = _joined([_exact(replace(piece, options={}), None) for piece in pieces])
        stock = _joined([_detached(_stock(piece)) for piece in pieces])
        self._stock_errors = {name: _relative_error(t, plain[name]) for name, t in stock.items()}

    def deviations(self, call: Measured) -> list[Deviation]:
        """Every tensor that the call returns, against its error budget."""
        actual = _detached(call)
        found = compare_with_budget(actual, self._expected, self._stock_errors, dtype=self._dtype)
        return [d for d in found if d.name in actual]

    def worst_error(self, call: Measured) -> float:
        """The largest error as a share of its budget; infinite where something else is wrong."""
        return max(math.inf if d.complaint else d.error / d.budget for d in self.deviations(call))


class Stopwatch(NamedTuple):
    """A clock, and with how many threads it is read."""

    name: str
    threads: int
    clock: Clock


PROCESS_TIME = Stopwatch("process time, 1 thread", 1, time.process_time)
WALL_TIME = Stopwatch("wall time, 2 threads", 2, time.perf_counter)
CUDA_TIME = Stopwatch("wall time, GPU idle before and after", 1, cuda_clock)


@dataclass(frozen=True)
class Timing:
    """One comparison by one clock, with the share of the matrix-multiply rate that the candidate reaches."""

    clock: str
    comparison: Comparison
    of_matmul: float


@dataclass(frozen=True)
class Result:
    """Everything about one case on one back end.

    Args:
        case: Name of the case.
        backend: What ran.
        bar: The ratio not to be exceeded; None where the figure is for contrast only.
        worst_error: The largest error as a share of its budget.
        timings: By clock, the one that decides first. Empty where the result is wrong.
        mib: Peak memory, in a case about memory …
        baseline_mib: … and that of the baseline.
    """

    case: str
    backend: str
    bar: float | None
    worst_error: float
    timings: list[Timing] = field(default_factory=list)
    mib: float | None = None
    baseline_mib: float | None = None

    @property
    def memory_ratio(self) -> float | None:
        """Peak memory to that of the baseline."""
        return None if self.mib is None or self.baseline_mib is None else self.mib / self.baseline_mib

    @property
    def verdict(self) -> str:
        """One of met, missed and not measured; nothing where there is no bar; WRONG for a wrong result."""
        if not self.worst_error <= 1:
            return "WRONG"
        if self.bar is None:
            return ""
        if self.memory_ratio is not None:
            return "met" if self.memory_ratio <= self.bar else "missed"
        return self.timings[0].comparison.ratio.verdict(self.bar)


class Bench:
    """The clocks that are read, how long is measured, and what has been computed so far."""

    def __init__(self, stopwatches: tuple[Stopwatch, ...], rule: Rule) -> None:
        self.stopwatches = stopwatches
        self.rule = rule
        self._truth = lru_cache(maxsize=1)(Truth)
        self._matmul_rate = cache(measured_matmul_rate)

    def measure(self, problem: Problem, backend: str, call: Measured, bar: float | None = None) -> Result:
        """Hold the call against the truth, then time it. A wrong call is not timed."""
        case = problem.case
        worst_error = self._truth(replace(case, backward=True)).worst_error(call)
        if not worst_error <= 1:
            return Result(case.name, backend, bar, worst_error)
        stock = baseline(problem)
        timings = [self._time(case, stopwatch, stock, call) for stopwatch in self.stopwatches]
        return Result(case.name, backend, bar, worst_error, timings)

    def seconds(self, case: Case) -> float:
        """About how long one measurement takes."""
        flops = attention_flops(case.baseline_pairs, case.heads, case.width, backward=case.backward)
        call = flops / _FLOPS_A_SECOND
        timings = 4 * self.rule.min_rounds * len(self.stopwatches)
        return max(call, self.rule.min_seconds) * timings + 50 * call

    def _time(self, case: Case, stopwatch: Stopwatch, stock: Callable[[], object], call: Measured) -> Timing:
        rate = self._matmul_rate(case.dtype, case.device, stopwatch)
        with threads(stopwatch.threads):
            factor = case.baseline_pairs / case.visible_pairs
            found = compare(stock, call, clock=stopwatch.clock, rule=self.rule, factor=factor)
        flops = attention_flops(case.visible_pairs, case.heads, case.width, backward=case.backward)
        return Timing(stopwatch.name, found, flops / found.candidate_seconds / rate)


def measured_matmul_rate(dtype: torch.dtype, device: str, stopwatch: Stopwatch) -> float:
    """Operations a second of a large product, by this clock on its threads."""
    with threads(stopwatch.threads):
        return matmul_rate(dtype, device=device, clock=stopwatch.clock)


def _problem(case: Case, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, options: dict[str, Any]) -> Problem:
    q, k, v = (t.clone().requires_grad_(case.backward) for t in (q, k, v))
    return Problem(case, q, k, v, grad.clone(), PseudoScores(0.5, horizon=case.length), options)


def _stock(problem: Problem) -> Measured:
    q, k, v = problem.q, problem.k, problem.v
    causal, grouped = q.shape[2] == k.shape[2], q.shape[1] != k.shape[1]
    return _measured(
        problem, lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)
    )


def _measured(problem: Problem, call: Callable[[], Tensor]) -> Measured:
    if not problem.case.backward:
        return lambda: {"out": call()}
    leaves = (problem.q, problem.k, problem.v)

    def forward_and_backward() -> Results:
        out = call()
        dq, dk, dv = torch.autograd.grad(out, leaves, problem.grad)
        return {"out": out, "dq": dq, "dk": dk, "dv": dv}

    return forward_and_backward


def _exact(problem: Problem, scores: PseudoScores | None) -> Results:
    """The reference in float64 on the same numbers, by chunks of query rows with the keys up to their end."""
    q, k, v, grad = (t.detach().double() for t in (problem.q, problem.k, problem.v, problem.grad))
    sums = {"dk": torch.zeros_like(k), "dv": torch.zeros_like(v)}
    by_rows: dict[str, list[Tensor]] = {"out": [], "lse": [], "dq": []}
    for rows, keys in _chunks(problem):
        example = Example(
            q[:, :, rows],
            k[:, :, keys],
            v[:, :, keys],
            scores,
            grad_out=grad[:, :, rows],
            options=problem.options,
        )
        results = evaluate(lambda e: attend(e, "reference"), example, ("q", "k", "v"))
        for name, parts in by_rows.items():
            parts.append(results[name])
        for name, total in sums.items():
            total[:, :, keys] += results[name]
    return {name: torch.cat(parts, 2) for name, parts in by_rows.items()} | sums


def _chunks(problem: Problem) -> Iterator[tuple[slice, slice]]:
    queries, keys = problem.q.shape[2], problem.k.shape[2]
    height = max(1, _CHUNK_SCORES // (problem.q.shape[1] * keys))
    for first in range(0, queries, height):
        last = min(first + height, queries)
        yield slice(first, last), slice(0, keys - queries + last)


def _relative_error(t: Tensor, exact: Tensor) -> float:
    return float((t.double() - exact).norm() / exact.norm())


def _detached(call: Measured) -> Results:
    return {name: t.detach() for name, t in call().items()}


def _joined(pieces: list[Results]) -> Results:
    """The results of documents side by side, as those of the packed call lie."""
    return {name: torch.cat([piece[name] for piece in pieces], 2) for name in pieces[0]}
