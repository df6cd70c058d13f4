"""The measuring rule: ratios of interleaved timings, with an interval and the noise of the machine beside.

A round times baseline and candidate in the order A B B A, so that a machine that slows down steadily favours
neither. The figure is the median of the rounds' ratios with a bootstrap 95 % interval. The A/A line beside it
is the baseline against itself: of two rounds in a row, the inner two A over the outer two. A bar is met when
the median is not above it and the interval is narrow; a wide one is reported as not measured.
"""

import gc
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

MIN_ROUNDS = 20
MAX_ROUNDS = 100
MIN_SECONDS = 0.02
NARROW = 0.03

_RESAMPLES = 2000

Clock = Callable[[], float]
Verdict = Literal["met", "missed", "not measured"]


@dataclass(frozen=True)
class Ratio:
    """The median of the rounds' ratios and its bootstrap 95 % interval."""

    median: float
    low: float
    high: float
    rounds: int

    @property
    def half_width(self) -> float:
        """Half the length of the interval."""
        return (self.high - self.low) / 2

    def verdict(self, bar: float) -> Verdict:
        """Whether the bar is met; "not measured" where the interval is wider than ± 0.03."""
        if not self.half_width <= NARROW:
            return "not measured"
        return "met" if self.median <= bar else "missed"


@dataclass(frozen=True)
class Comparison:
    """Candidate against baseline, baseline against itself, and the median seconds of one call of each."""

    ratio: Ratio
    noise: Ratio
    baseline_seconds: float
    candidate_seconds: float


@dataclass(frozen=True)
class Rule:
    """How long to measure.

    Args:
        min_rounds: Rounds that are always done.
        max_rounds: Where the interval is wide, rounds go on to this number …
        max_seconds: … or for this long, whichever comes first.
        min_seconds: One timing repeats its call until it takes at least about this long.
    """

    min_rounds: int = MIN_ROUNDS
    max_rounds: int = MAX_ROUNDS
    max_seconds: float = 60.0
    min_seconds: float = MIN_SECONDS

    def __post_init__(self) -> None:
        if not 2 <= self.min_rounds <= self.max_rounds:
            got = f"min_rounds = {self.min_rounds}, max_rounds = {self.max_rounds}"
            raise ValueError(f"min_rounds, max_rounds: got {got}; allowed: 2 ≤ min_rounds ≤ max_rounds")


def compare(
    baseline: Callable[[], object],
    candidate: Callable[[], object],
    *,
    clock: Clock = time.process_time,
    rule: Rule = Rule(),
    factor: float = 1.0,
    on_round: Callable[[int], object] | None = None,
) -> Comparison:
    """Time both in rounds A B B A until the interval is narrow or the rule says it is enough.

    Args:
        baseline: What the candidate is compared with.
        candidate: What is measured.
        clock: Seconds, from any start.
        rule: How long to measure.
        factor: The ratio is to a baseline that takes 1/``factor`` of the time.
        on_round: Called after every round with the number of rounds done.
    """
    repeats_a = _repeats(baseline, clock, rule.min_seconds)
    repeats_b = _repeats(candidate, clock, rule.min_seconds)
    outer: list[tuple[float, float]] = []
    inner: list[tuple[float, float]] = []
    ratio = Ratio(math.nan, -math.inf, math.inf, 0)
    begin = time.perf_counter()
    with _no_garbage_collection():
        while _goes_on(len(outer), ratio, time.perf_counter() - begin, rule):
            first = _time(baseline, repeats_a, clock)
            inner.append((_time(candidate, repeats_b, clock), _time(candidate, repeats_b, clock)))
            outer.append((first, _time(baseline, repeats_a, clock)))
            if on_round is not None:
                on_round(len(outer))
            if len(outer) >= rule.min_rounds:
                ratio = median_ratio([factor * sum(b) / sum(a) for a, b in zip(outer, inner, strict=True)])
    pairs = zip(outer[::2], outer[1::2], strict=False)
    noise = median_ratio([(last + first) / (begun + ended) for (begun, last), (first, ended) in pairs])
    return Comparison(ratio, noise, _median_of_all(outer), _median_of_all(inner))


def median_ratio(values: Sequence[float]) -> Ratio:
    """Median and bootstrap 95 % interval of the median (2,000 resamples with a fixed seed)."""
    sample = torch.tensor(values, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    picks = torch.randint(len(values), (_RESAMPLES, len(values)), generator=generator)
    medians = sample[picks].quantile(0.5, dim=1)
    low, high = medians.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Ratio(float(sample.quantile(0.5)), low, high, len(values))


def matmul_rate(dtype: torch.dtype, *, device: str, clock: Clock, size: int = 2048) -> float:
    """Floating-point operations per second of a square matrix product: median of five calls."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    _time(lambda: a @ b, 1, clock)
    return 2 * size**3 / statistics.median(_time(lambda: a @ b, 1, clock) for _ in range(5))


def attention_flops(pairs: int, heads: int, width: int, *, backward: bool) -> int:
    """Useful operations of attention over ``pairs`` visible query-key pairs in each head.

    Two products forward (QKᵀ, PV) and five backward (QKᵀ again, dP, dV, dQ, dK), one multiplication and one
    addition an element. The softmax and masked pairs do not count.
    """
    return 2 * (7 if backward else 2) * pairs * heads * width


def cuda_clock() -> float:
    """Wall time after everything that was queued on the GPU has finished."""
    torch.cuda.synchronize()
    return time.perf_counter()


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Let PyTorch compute with this many threads inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def environment() -> dict[str, str | int]:
    """What a reader of a figure needs to know about where it was taken."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count() or 1,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "date": time.strftime("%Y-%m-%d"),
    }


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _median_of_all(pairs: Sequence[tuple[float, float]]) -> float:
    return statistics.median(seconds for pair in pairs for seconds in pair)


def _goes_on(done: int, ratio: Ratio, seconds: float, rule: Rule) -> bool:
    if done < rule.min_rounds:
        return True
    return ratio.half_width > NARROW and done < rule.max_rounds and seconds < rule.max_seconds


def _repeats(call: Callable[[], object], clock: Clock, min_seconds: float) -> int:
    """How many calls one timing needs to last ``min_seconds``, found after two calls to warm up."""
    _time(call, 2, clock)
    repeats = 1
    while (seconds := _time(call, repeats, clock) * repeats) < min_seconds / 4 and repeats < 1 << 20:
        repeats *= 4
    return max(1, math.ceil(repeats * min_seconds / max(seconds, 1e-9)))


def _time(call: Callable[[], object], repeats: int, clock: Clock) -> float:
    """Seconds of one call, averaged over ``repeats``."""
    start = clock()
    for _ in range(repeats):
        call()
    return (clock() - start) / repeats


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
