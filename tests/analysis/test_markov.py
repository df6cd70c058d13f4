"""Information of Markov sources, against sums over whole sequences written out."""

import itertools
import math
from collections import defaultdict

import pytest
import torch

from stablemask.analysis.markov import (
    MarkovSource,
    identical_probability,
    markov_source,
    soft_copy_last,
)

Joint = dict[tuple[int, ...], float]


def lopsided() -> MarkovSource:
    """Another matrix at every step, zeros among them, and an uneven start."""
    steps = torch.rand(4, 3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    steps[1, 0, 2] = steps[2, 1] = 0.0
    steps[2, 1, 0] = 1.0
    return MarkovSource(torch.tensor([0.7, 0.3, 0.0]), steps / steps.sum(-1, keepdim=True))


SOURCES = {
    "softCopyLast": soft_copy_last(3, 5),
    "lopsided": lopsided(),
    "chain": markov_source(torch.tensor([[0.9, 0.1], [0.4, 0.6]]), 6),
}


def joint(source: MarkovSource) -> Joint:
    """The probability of every sequence, token by token."""
    table = {}
    for sequence in itertools.product(range(source.symbols), repeat=source.length):
        chance = float(source.start[sequence[0]])
        for m, (left, right) in enumerate(itertools.pairwise(sequence)):
            chance *= float(source.steps[m, left, right])
        table[sequence] = chance
    return table


def entropy_of(table: Joint, places: list[int]) -> float:
    marginal: dict[tuple[int, ...], float] = defaultdict(float)
    for sequence, chance in table.items():
        marginal[tuple(sequence[p] for p in places)] += chance
    return -sum(p * math.log(p) for p in marginal.values() if p > 0)


@pytest.mark.parametrize("name", SOURCES)
def test_information_of_prefixes(name: str) -> None:
    source = SOURCES[name]
    table = joint(source)
    found, left = source.information(), source.entropies()
    for n in range(1, source.length):
        for i in range(1, source.length):
            if i > n:
                assert math.isnan(found[n - 1, i - 1])
                continue
            prefix = list(range(i))
            given = entropy_of(table, [*prefix, n]) - entropy_of(table, prefix)
            assert math.isclose(left[n - 1, i - 1], given, abs_tol=1e-12)
            assert math.isclose(found[n - 1, i - 1], entropy_of(table, [n]) - given, abs_tol=1e-12)
            conditional = (
                entropy_of(table, [*prefix, n - 1])
                + entropy_of(table, [n - 1, n])
                - entropy_of(table, [n - 1])
                - entropy_of(table, [*prefix, n - 1, n])
            )
            assert i == n or abs(conditional) < 1e-12, "I(X_≤i; X_{n+1} | X_n) = 0, as the proof says"


@pytest.mark.parametrize("name", SOURCES)
def test_probabilities_are_those_of_the_steps(name: str) -> None:
    source = SOURCES[name]
    expected = joint(source)
    sequences = source.sequences()
    assert [tuple(s) for s in sequences.tolist()] == list(expected)
    found = source.probabilities(sequences)
    assert torch.allclose(found, torch.tensor(list(expected.values()), dtype=torch.float64), atol=1e-15)
    same = sum(p for s, p in expected.items() if len(set(s)) == 1)
    assert math.isclose(identical_probability(source), same, rel_tol=1e-12)


def test_a_symmetric_chain_by_hand() -> None:
    flip = 0.2
    source = markov_source(torch.tensor([[1 - flip, flip], [flip, 1 - flip]]), 6)
    information = source.information()
    for distance in range(1, 6):
        wrong = (1 - (1 - 2 * flip) ** distance) / 2
        expected = math.log(2) + wrong * math.log(wrong) + (1 - wrong) * math.log(1 - wrong)
        assert math.isclose(information[4, 5 - distance], expected, rel_tol=1e-6)
    shares = source.shares()
    assert torch.equal(shares.diagonal(), torch.ones(5).double())
    assert (shares[4].diff() > 0).all()


def test_small_information_keeps_its_digits() -> None:
    near = 1e-9
    matrix = torch.tensor([[0.5 + near, 0.5 - near], [0.5 - near, 0.5 + near]], dtype=torch.float64)
    assert math.isclose(markov_source(matrix, 2).information()[0, 0], 2 * near**2, rel_tol=1e-6)


def test_nothing_is_known_about_independent_tokens() -> None:
    source = markov_source(torch.tensor([[0.3, 0.7], [0.3, 0.7]]), 4)
    assert torch.nan_to_num(source.information()).abs().max() < 1e-30
    assert source.shares().isnan().all() or (source.shares()[~source.shares().isnan()] <= 1).all()


def test_soft_copy_last_by_hand() -> None:
    source = soft_copy_last(4, 3)
    assert source.start.tolist() == [0.25] * 4
    for n in (2, 3):
        stays = 1 - math.exp(-n) + math.exp(-n) / 4
        assert torch.allclose(source.steps[n - 2].diagonal(), torch.tensor(stays, dtype=torch.float64))
    product = math.prod(1 - math.exp(-n) * 3 / 4 for n in (2, 3))
    assert math.isclose(identical_probability(source), product)
    likely = [identical_probability(soft_copy_last(v, 40)) for v in (2, 3, 100)]
    assert likely == sorted(likely, reverse=True)
    assert min(likely) > 0.797, "whatever the vocabulary: Π (1 − e^−n) from n = 2 on is 0.798"


def test_causal_isotropy() -> None:
    assert soft_copy_last(3, 5).anisotropy() < 1e-12
    turning = torch.tensor([[0.1, 0.8, 0.1], [0.1, 0.1, 0.8], [0.8, 0.1, 0.1]])
    assert markov_source(turning, 5).anisotropy() < 1e-12
    assert SOURCES["chain"].anisotropy() > 0.1
    uneven = markov_source(torch.tensor([[0.8, 0.2], [0.2, 0.8]]), 4, start=torch.tensor([0.9, 0.1]))
    assert uneven.anisotropy() < 1e-12, "only what follows the last known token matters"


def test_samples_have_the_frequencies() -> None:
    source, count = SOURCES["lopsided"], 20_000
    drawn = source.sample(count, torch.Generator().manual_seed(0))
    for place, expected in enumerate(source.marginals()):
        found = torch.bincount(drawn[:, place], minlength=3) / count
        assert (found - expected).abs().max() < 5 * 0.5 / math.sqrt(count)
    chances = source.probabilities(drawn)
    assert (chances > 0).all(), "impossible sequences are not drawn"


def test_what_is_no_source() -> None:
    with pytest.raises(ValueError, match=r"steps: got .*allowed: rows ≥ 0 of sum 1"):
        markov_source(torch.tensor([[0.5, 0.6], [0.5, 0.5]]), 4)
    with pytest.raises(ValueError, match="start: got"):
        markov_source(torch.eye(2), 4, start=torch.tensor([1.5, -0.5]))
    with pytest.raises(ValueError, match=r"matrix: got shape \(2, 3\)"):
        markov_source(torch.ones(2, 3) / 3, 4)
    with pytest.raises(ValueError, match="length: got 1"):
        markov_source(torch.eye(2), 1)
    with pytest.raises(ValueError, match="symbols, length: got 1, 5"):
        soft_copy_last(1, 5)
    with pytest.raises(ValueError, match=r"start, steps: got shapes \(2,\) and \(3, 3, 3\)"):
        MarkovSource(torch.ones(2) / 2, torch.ones(3, 3, 3) / 3)
    with pytest.raises(ValueError, match="length: got 2 symbols, 30 tokens"):
        soft_copy_last(2, 30).sequences()
