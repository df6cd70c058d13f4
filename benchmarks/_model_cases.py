"""What is measured of whole models: each case once, with its bar."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch

from benchmarks._models import (
    Subject,
    Truth,
    cached_step,
    draw_tokens,
    make_model,
    training_step,
    uncached_step,
)
from stablemask.benchmark import PROCESS_TIME, WALL_TIME, Result, Stopwatch, Timing, measured_matmul_rate
from stablemask.measuring import Rule, attention_flops, compare, threads
from stablemask.model import StableMaskConfig
from stablemask.model.sizes import named_config

Group = Literal["step", "fwd+bwd", "decode", "cache"]

TRAINING_LENGTH = 512
DECODING_HORIZON = 1024
CURVE = (64, 128, 256, 512, 1024)
TRAINING_BAR, DECODING_BAR = 1.03, 1.05

_OF_MATMUL = 0.5  # what a model reaches of the rate of a product, for estimates of the time left


@dataclass(frozen=True)
class Case:
    """One comparison of two models, or of one with itself.

    Args:
        group: ``step`` is a training step with clipping and AdamW, ``fwd+bwd`` the same without them.
            ``decode`` is a token at the end of ``length`` with a cache; all three stand against the stock
            model. ``cache`` is such a token against the same one without a cache.
        subject: The candidate.
        length: Tokens of a sequence.
        bar: The ratio not to be exceeded; None where the figure is for contrast only.
        size: A named size.
        batch: Sequences.
    """

    group: Group
    subject: Subject
    length: int
    bar: float | None = None
    size: str = "71m"
    batch: int = 1

    @property
    def name(self) -> str:
        """For example ``step/71m/T512/float32``."""
        return f"{self.group}/{self.size}/T{self.length}/float32"

    @property
    def trains(self) -> bool:
        """Whether it is about training."""
        return self.group in ("step", "fwd+bwd")

    @property
    def config(self) -> StableMaskConfig:
        """Of the candidate."""
        return named_config(self.size, horizon=self.horizon)

    @property
    def horizon(self) -> int:
        """The training length."""
        return max(self.length, TRAINING_LENGTH if self.trains else DECODING_HORIZON)

    @property
    def flops(self) -> int:
        """Useful operations of one call of the candidate: products with weights, and attention."""
        config, width = self.config, self.config.hidden_size
        assert config.num_key_value_heads is not None
        layer = 2 * width * config.width_of_head * (config.num_attention_heads + config.num_key_value_heads)
        layer += 3 * width * config.intermediate_size
        weights = config.num_hidden_layers * layer + width * config.vocab_size
        rows = self.length if self.trains else 1
        pairs = self.length * (self.length + 1) // 2 if self.trains else self.length
        attention = attention_flops(
            pairs, config.num_attention_heads, config.width_of_head, backward=self.trains
        )
        products = (6 if self.trains else 2) * weights * rows
        return self.batch * (products + config.num_hidden_layers * attention)


CASES = (
    *(
        Case(group, subject, TRAINING_LENGTH, TRAINING_BAR)
        for group in ("step", "fwd+bwd")
        for subject in ("decoder", "enabled")
    ),
    *(
        Case("decode", subject, length, DECODING_BAR)
        for length in CURVE
        for subject in ("decoder", "enabled")
    ),
    *(Case("cache", "decoder", length) for length in CURVE),
)


class Models:
    """Measures cases by process time on one thread, and those with a bar by wall time on two as well."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self._truth = lru_cache(maxsize=1)(_truth)
        self._rates = {
            stopwatch.name: measured_matmul_rate(torch.float32, "cpu", stopwatch)
            for stopwatch in (PROCESS_TIME, WALL_TIME)
        }

    def seconds(self, case: Case) -> float:
        """About how long one measurement takes."""
        call = case.flops / self._rates[PROCESS_TIME.name] / _OF_MATMUL
        baseline = call * (case.length if case.group == "cache" else 1)
        return len(_stopwatches(case)) * 2 * (self.rule.min_rounds + 1) * (call + baseline) + 20 * call

    def measure(self, case: Case) -> Result:
        """Hold the candidate against the truth, then time it. A wrong candidate is not timed."""
        with threads(PROCESS_TIME.threads):
            return self._measure(case)

    def _measure(self, case: Case) -> Result:
        config = case.config
        tokens = draw_tokens(config, case.batch, case.length)
        truth = self._truth(case.size, case.horizon, case.batch, case.length)
        model = make_model(case.subject, config)
        if case.trains:
            worst_error = truth.training_error(model)
            baseline, candidate = (
                training_step(m, tokens, optimizer=case.group == "step")
                for m in (make_model("stock", config), model)
            )
        else:
            candidate = cached_step(model, tokens)
            worst_error = truth.decoding_error(candidate)
            if case.group == "cache":
                baseline = uncached_step(model, tokens)
                worst_error = max(worst_error, truth.decoding_error(baseline))
            else:
                baseline = cached_step(make_model("stock", config), tokens)
        if not worst_error <= 1:
            return Result(case.name, case.subject, case.bar, worst_error)
        timings = [self._time(case, stopwatch, baseline, candidate) for stopwatch in _stopwatches(case)]
        return Result(case.name, case.subject, case.bar, worst_error, timings)

    def _time(
        self,
        case: Case,
        stopwatch: Stopwatch,
        baseline: Callable[[], object],
        candidate: Callable[[], object],
    ) -> Timing:
        with threads(stopwatch.threads):
            found = compare(baseline, candidate, clock=stopwatch.clock, rule=self.rule)
        rate = self._rates[stopwatch.name]
        return Timing(stopwatch.name, found, case.flops / found.candidate_seconds / rate)


def _stopwatches(case: Case) -> tuple[Stopwatch, ...]:
    return (PROCESS_TIME,) if case.bar is None else (PROCESS_TIME, WALL_TIME)


def _truth(size: str, horizon: int, batch: int, length: int) -> Truth:
    config = named_config(size, horizon=horizon)
    return Truth(config, draw_tokens(config, batch, length))
