"""Intervals against numbers worked out elsewhere, and every branch of the verdict."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from stablemask.reproduce import statistics
from stablemask.reproduce.statistics import (
    RESAMPLES,
    Effect,
    Interval,
    Term,
    decide,
    over_documents,
    over_seeds,
)

UNDECIDED = "undecided at this scale"


@pytest.mark.parametrize(
    ("values", "mean", "half"),
    [
        # Half the width is t · s / √n, with t from a printed table of Student's distribution.
        ((0.0, 2.0), 1.0, 12.706 * 1.41421 / 1.41421),
        ((1.0, 2.0, 3.0), 2.0, 4.303 * 1.0 / 1.73205),
        ((-1.0, 0.0, 1.0, 2.0, 3.0), 1.0, 2.776 * 1.58114 / 2.23607),
        ((1.0,) * 5 + (3.0,) * 6, 23 / 11, 2.228 * 1.04447 / 3.31662),
        ((0.0, 1.0) * 15 + (0.5,), 0.5, 2.042 * 0.5 / 5.56776),
    ],
)
def test_student_interval(values: tuple[float, ...], mean: float, half: float) -> None:
    found = over_seeds(values)
    assert found is not None
    assert found == pytest.approx((mean - half, mean + half), rel=5e-4)
    assert over_seeds(values[::-1]) == pytest.approx(found)


def test_every_entry_of_the_table_leaves_a_fortieth_above_it() -> None:
    """Student's density, integrated from 0 to the entry, gives 0.475."""
    for freedom, entry in enumerate(statistics._STUDENT, 1):
        places = torch.linspace(0, entry, 20_001, dtype=torch.float64)
        scale = math.gamma((freedom + 1) / 2) / math.gamma(freedom / 2) / math.sqrt(freedom * math.pi)
        density = scale * (1 + places**2 / freedom) ** (-(freedom + 1) / 2)
        assert float(torch.trapezoid(density, places)) == pytest.approx(0.475, abs=4e-6), freedom
    assert freedom == 30


def test_more_seeds_than_the_table_knows_give_a_wider_interval_not_a_narrower() -> None:
    values = [0.0, 1.0] * 50
    found = over_seeds(values)
    assert found is not None
    half = (found.high - found.low) / 2
    exact = 1.9842 * math.sqrt(100 / 99) / 2 / 10  # 99 degrees of freedom
    assert exact < half < 1.04 * exact


def test_one_seed_or_one_document_has_no_interval() -> None:
    assert over_seeds([0.5]) is None
    assert over_seeds([]) is None
    assert over_documents([term(1.0, torch.ones(3, 1), torch.ones(1))]) is None


def test_seeds_that_agree_have_an_interval_of_no_width() -> None:
    assert over_seeds([0.25] * 4) == (0.25, 0.25)


def term(weight: float, nats: Tensor, tokens: Tensor) -> Term:
    return Term(weight, nats.double(), tokens)


def planted(generator: torch.Generator, documents: int, effect: float) -> list[Term]:
    """Two models whose losses share a large part that a document decides and differ by ``effect`` a token."""
    tokens = torch.randint(20, 200, (documents,), generator=generator)
    common = 3 + torch.randn(documents, generator=generator)
    own = effect + 0.05 * torch.randn(2, documents, generator=generator)
    return [
        term(1.0, (common + own) * tokens, tokens),
        term(-1.0, common.expand(2, -1) * tokens, tokens),
    ]


def test_the_interval_over_documents_covers_as_often_as_it_says() -> None:
    generator = torch.Generator().manual_seed(3)
    found = [over_documents(planted(generator, 60, -0.02)) for _ in range(200)]
    assert all(interval is not None for interval in found)
    covered = sum(low <= -0.02 <= high for low, high in found if low is not None)
    # 95 % of 200 are 190 ± 12 (4 standard deviations), and percentiles of 60 documents cover a bit less.
    assert 174 <= covered <= 199


def test_the_interval_over_documents_is_that_of_a_mean() -> None:
    """Documents of one length: the bootstrap of a mean has its spread, s / √n, and 1.96 of them each side."""
    losses = torch.linspace(-1, 1, 101, dtype=torch.float64)
    found = over_documents([term(1.0, losses.unsqueeze(0) * 7, torch.full((101,), 7))])
    assert found is not None
    half = 1.96 * float(losses.std(correction=0)) / math.sqrt(101)
    noise = 4 * 2.7 * half / 1.96 / math.sqrt(RESAMPLES)  # of a quantile so far out
    assert found == pytest.approx((-half, half), abs=noise)


def test_models_are_compared_on_the_same_resamples() -> None:
    """What a document gives to both sides is not noise of their difference."""
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(20, 200, (50,), generator=generator)
    nats = (3 + torch.randn(1, 50, generator=generator)) * tokens
    same = over_documents([term(1.0, nats, tokens), term(-1.0, nats, tokens)])
    assert same is not None
    assert same == pytest.approx((0.0, 0.0), abs=1e-12)
    shifted = over_documents([term(1.0, nats - 0.1 * tokens, tokens), term(-1.0, nats, tokens)])
    assert shifted == pytest.approx((-0.1, -0.1), abs=1e-6)
    alone = over_documents([term(1.0, nats, tokens)])
    assert alone is not None
    assert alone.high - alone.low > 0.3, "the documents differ, so pairing is what made it narrow"


def test_a_long_document_counts_by_its_tokens() -> None:
    """Twenty long documents of loss 1 and twenty short ones of loss 3: the short ones are next to nothing."""
    tokens = torch.tensor([1000, 1] * 20)
    losses = torch.tensor([1.0, 3.0] * 20)
    found = over_documents([term(1.0, (losses * tokens).unsqueeze(0), tokens)])
    assert found is not None
    assert 1.0 < found.low < found.high < 1.01


def test_weights_offset_and_seeds_enter_the_interval_over_documents() -> None:
    tokens = torch.tensor([10, 10, 10])
    two_seeds = torch.tensor([[10.0, 10.0, 10.0], [30.0, 30.0, 30.0]])
    assert over_documents([term(1.0, two_seeds, tokens)]) == pytest.approx((2.0, 2.0))
    assert over_documents([term(-3.0, two_seeds, tokens)], offset=0.5) == pytest.approx((-5.5, -5.5))


def test_the_interval_over_documents_is_the_same_every_time() -> None:
    terms = planted(torch.Generator().manual_seed(5), 20, 0.0)
    first = over_documents(terms)
    torch.manual_seed(99)
    assert over_documents(terms) == first


CLEAR = Effect(-0.02, Interval(-0.03, -0.01), Interval(-0.025, -0.015), (-0.02,) * 5)


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ({}, "holds"),
        ({"documents": None}, "holds"),
        ({"mean": -0.005}, "holds"),
        ({"mean": -0.0049}, UNDECIDED),
        ({"seeds": Interval(-0.05, 0.0)}, UNDECIDED),
        ({"seeds": Interval(-0.05, 0.01)}, UNDECIDED),
        ({"documents": Interval(-0.05, 0.01)}, UNDECIDED),
        ({"seeds": None}, UNDECIDED),
        ({"seeds": None, "documents": None}, UNDECIDED),
        ({"mean": math.nan}, UNDECIDED),
        ({"seeds": Interval(math.nan, math.nan)}, UNDECIDED),
        ({"documents": Interval(math.nan, math.nan)}, UNDECIDED),
        ({"mean": 0.01, "seeds": Interval(-0.004, 0.02), "documents": None}, "does not hold"),
        ({"mean": 0.01, "seeds": Interval(-0.005, 0.02), "documents": None}, UNDECIDED),
        ({"mean": 0.01, "seeds": Interval(-0.004, 0.02), "documents": Interval(-0.01, 0.0)}, UNDECIDED),
        (
            {"mean": 0.01, "seeds": Interval(-0.004, 0.02), "documents": Interval(0.0, 0.02)},
            "does not hold",
        ),
        (
            {"mean": -0.003, "seeds": Interval(-0.004, -0.002), "documents": Interval(-0.004, -0.002)},
            "does not hold",  # an effect, but one that was said not to count
        ),
        ({"mean": 0.01, "seeds": Interval(math.nan, math.nan), "documents": None}, UNDECIDED),
    ],
)
def test_verdict(change: dict[str, object], verdict: str) -> None:
    effect = replace(CLEAR, **change)  # type: ignore[arg-type]
    assert decide(effect, 0.005) == verdict


@pytest.mark.parametrize(
    ("mean", "verdict"),
    [
        (-0.5, "holds"),
        (-0.1, "holds"),
        (-0.09, "does not hold"),
        (0.5, "does not hold"),
        (math.nan, UNDECIDED),
    ],
)
def test_verdict_on_what_has_no_chance_in_it(mean: float, verdict: str) -> None:
    assert decide(Effect(mean, None, None, (mean,)), 0.1, exact=True) == verdict


def test_a_claim_that_only_asks_for_a_sign() -> None:
    below, above = Interval(-0.02, -0.001), Interval(0.001, 0.02)
    assert decide(Effect(-0.01, below, None, ()), 0.0) == "holds"
    assert decide(Effect(0.01, above, None, ()), 0.0) == "does not hold"
    assert decide(Effect(0.0, Interval(-0.01, 0.01), None, ()), 0.0) == UNDECIDED
