"""Intervals of a difference between two ways to train, and the verdict that was fixed before the runs.

Two sources of chance are looked at separately, because either alone can mislead: the seeds (initial weights
and the order of the text), and the documents on which the models are compared.

* Seeds: models with the same seed begin with the same weights and read the same text in the same order. Their
  differences, one a seed, give a Student interval of the mean difference.
* Documents: the difference of the mean loss a token, all seeds together, under 2,000 resamples of whole
  documents; the same resample for all models.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import torch
from torch import Tensor

Verdict = Literal["holds", "does not hold", "undecided at this scale", "not measured"]

RESAMPLES = 2000
# The 97.5 % point of Student's distribution with 1 … 30 degrees of freedom.
_STUDENT = (
    *(12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281),
    *(2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860),
    *(2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423),
)


class Interval(NamedTuple):
    """A 95 % interval."""

    low: float
    high: float


@dataclass(frozen=True)
class Term:
    """One side of a difference, as measured on the same documents by one model a seed.

    Attributes:
        weight: Its factor in the sum of all terms.
        nats: Losses summed over the tokens of each document.
        tokens: How many these are.
    """

    weight: float
    nats: Annotated[Tensor, "seeds documents"]
    tokens: Annotated[Tensor, "documents"]


@dataclass(frozen=True)
class Effect:
    """A measured difference. ``documents`` is None where nothing was measured document by document."""

    mean: float
    seeds: Interval | None
    documents: Interval | None
    values: tuple[float, ...]


def over_seeds(values: Sequence[float]) -> Interval | None:
    """Student's interval of the mean of differences; None for a single one."""
    if len(values) < 2:
        return None
    mean, spread = statistics.fmean(values), statistics.stdev(values)
    factor = _STUDENT[min(len(values) - 1, len(_STUDENT)) - 1]
    half = factor * spread / math.sqrt(len(values))
    return Interval(mean - half, mean + half)


def over_documents(terms: Sequence[Term], offset: float = 0.0) -> Interval | None:
    """Bootstrap interval of Σ weight · (mean loss a token) + offset; None for a single document."""
    count = len(terms[0].tokens)
    if count < 2:
        return None
    generator = torch.Generator().manual_seed(0)
    picks = torch.randint(count, (RESAMPLES, count), generator=generator)
    draws = torch.zeros(RESAMPLES, count, dtype=torch.float64)
    draws.scatter_add_(1, picks, torch.ones_like(draws))
    total = torch.full((RESAMPLES,), offset, dtype=torch.float64)
    for term in terms:
        nats, tokens = term.nats.double().mean(0), term.tokens.double()
        total += term.weight * (draws @ nats) / (draws @ tokens)
    low, high = total.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Interval(low, high)


def decide(effect: Effect, smallest: float, *, exact: bool = False) -> Verdict:
    """The verdict on the claim that the effect is negative and at least ``smallest`` large.

    * holds: the mean is at or below −smallest, and all of every interval is below 0.
    * does not hold: all of every interval is above −smallest, so that an effect which counts is excluded.
    * undecided: anything else, and anything without an interval over seeds, unless it is ``exact``.
    """
    if math.isnan(effect.mean):
        return "undecided at this scale"
    if exact:
        return "holds" if effect.mean <= -smallest else "does not hold"
    if effect.seeds is None:
        return "undecided at this scale"
    intervals = [effect.seeds] + ([] if effect.documents is None else [effect.documents])
    if effect.mean <= -smallest and all(interval.high < 0 for interval in intervals):
        return "holds"
    if all(interval.low > -smallest for interval in intervals):
        return "does not hold"
    return "undecided at this scale"
