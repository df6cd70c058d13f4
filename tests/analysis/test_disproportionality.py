"""Disproportional attention and Proposition 1: by the definitions, entry by entry, and on real decoders."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from stablemask.analysis import capture
from stablemask.analysis.disproportionality import (
    Collapsed,
    Disproportion,
    disproportion,
    excess,
    fit,
    proposition,
    steepen,
)
from stablemask.analysis.markov import MarkovSource, entropy, markov_source, soft_copy_last
from stablemask.model import StableMaskConfig, StableMaskForCausalLM

SYMMETRIC = torch.tensor([[0.8, 0.2], [0.2, 0.8]])
LOPSIDED = torch.tensor([[0.9, 0.1], [0.4, 0.6]])
ROUNDING = 1e-10


def decoder(
    source: MarkovSource, remedy: str = "none", position: str = "rope", **settings: Any
) -> StableMaskForCausalLM:
    torch.manual_seed(0)
    own = {"horizon": source.length} if remedy == "stablemask" else {}
    small: dict[str, Any] = {
        "vocab_size": source.symbols,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "initializer_range": 0.4,
    }
    config = StableMaskConfig(**small | settings, position=position, remedy=remedy, **own)
    return StableMaskForCausalLM(config).double().eval()


def attention(length: int) -> Tensor:
    """Weights with sums below 1, as a sink leaves them."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(3, length, length, generator=generator, dtype=torch.float64)
    weights = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf).softmax(-1)
    return weights * torch.rand(3, length, 1, generator=generator, dtype=torch.float64)


def test_excess_is_the_definition() -> None:
    source = soft_copy_last(2, 7)
    weights, shares = attention(6), source.shares()
    for head in range(3):
        given = weights[head].tolist()
        pairs = [
            sum(given[n - 1][:i]) - float(shares[n - 1, i - 1]) * sum(given[n - 1][:n])
            for n in range(1, 7)
            for i in range(1, n)
        ]
        assert math.isclose(excess(weights, shares)[head], max(pairs), abs_tol=1e-14)
        weak = max(sum(given[n - 1][: n - 1]) for n in range(2, 7))
        assert math.isclose(excess(weights, torch.zeros_like(shares))[head], weak, abs_tol=1e-14)


def test_uniform_attention_by_hand() -> None:
    weights = torch.tensor([[1.0, 0.0], [0.5, 0.5]], dtype=torch.float64)
    half = 1 - math.exp(-3) / 2  # token 3 is token 2
    both = half * (1 - math.exp(-2) / 2) + (1 - half) * math.exp(-2) / 2  # token 3 is token 1
    ratio = float(
        (math.log(2) - entropy(torch.tensor([both, 1 - both], dtype=torch.float64)))
        / (math.log(2) - entropy(torch.tensor([half, 1 - half], dtype=torch.float64)))
    )
    assert math.isclose(excess(weights, soft_copy_last(2, 3).shares()), 0.5 - ratio, rel_tol=1e-9)


def test_without_information_nothing_is_disproportional() -> None:
    shares = torch.full((5, 5), torch.nan, dtype=torch.float64)
    assert (excess(attention(5), shares) == -torch.inf).all()


def test_a_sink_does_not_change_the_verdict_on_given_scores() -> None:
    shares = markov_source(SYMMETRIC, 7).shares()
    weights = attention(6)
    whole = weights / weights.sum(-1, keepdim=True)
    over = (whole.cumsum(-1) - shares) * weights.sum(-1, keepdim=True)
    below = torch.ones(6, 6).tril(-1).bool()
    assert torch.allclose(excess(weights, shares), over.masked_fill(~below, -torch.inf).amax((-1, -2)))
    assert torch.equal(excess(weights, shares) > 0, excess(whole, shares) > 0)


@pytest.mark.parametrize("remedy", ["none", "stablemask"])
def test_degrees_are_sums_over_inputs(remedy: str) -> None:
    source = markov_source(LOPSIDED, 6)
    model = decoder(source, remedy)
    found = disproportion(model, source)
    assert found.over.shape == (2, 2, 2**5)
    shares = source.shares()
    expected = torch.zeros(2, 2, dtype=torch.float64)
    for sequence in itertools.product(range(2), repeat=5):
        ids = torch.tensor([sequence])
        with capture(model) as layers, torch.no_grad():
            model(ids, use_cache=False)
        for layer, head in itertools.product(range(2), range(2)):
            over = excess(layers.attention_map(layer, head), shares)
            expected[layer, head] += float(source.probabilities(ids)) * float(over > 0.3)
    assert torch.allclose(found.degree(0.3), expected)
    assert 0 < expected.min() < expected.max()
    assert found.degree(0.3).max() <= 1, "summed probabilities may round to more"
    assert (found.degree(0.5) <= found.degree(0.3)).all()
    assert (found.degree(0.3, weak=True) >= found.degree(0.3)).all()


def test_degree_and_identical_inputs_by_hand() -> None:
    sequences = torch.tensor([[0, 0], [0, 1], [1, 1]])
    over = torch.tensor([[[0.2, -0.1, 0.05]]], dtype=torch.float64)
    chance = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    found = Disproportion(sequences, chance, over, over + 0.2)
    assert found.identical().tolist() == [True, False, True]
    assert [round(float(found.degree(e)), 6) for e in (0.0, 0.1, 0.2)] == [0.7, 0.5, 0.0]
    assert float(found.degree(weak=True)) == 1.0
    with pytest.raises(ValueError, match="epsilon: got -1"):
        found.degree(-1)


def test_first_layer_is_as_disproportional_with_stablemask() -> None:
    """It sees the same scores; deeper layers see other inputs."""
    source = soft_copy_last(2, 7)
    plain, ours = (disproportion(decoder(source, r), source) for r in ("none", "stablemask"))
    assert torch.equal(plain.over[0] > 1e-12, ours.over[0] > 1e-12)
    assert not torch.allclose(plain.over[0], ours.over[0])
    assert not torch.equal(plain.over[1] > 1e-12, ours.over[1] > 1e-12)


@pytest.mark.parametrize("remedy", ["none", "stablemask"])
@pytest.mark.parametrize("position", ["none", "alibi", "rope"])
def test_every_layer_is_weakly_disproportional_on_identical_inputs(remedy: str, position: str) -> None:
    source = soft_copy_last(3, 6)
    found = disproportion(decoder(source, remedy, position), source)
    assert found.identical().sum() == 3
    assert found.weak[..., found.identical()].min() > 0.01
    assert found.degree(weak=True).min() > 1 - 1e-12
    if position == "none":
        assert found.over[..., found.identical()].max() < 0, (
            "uniform attention is below the definition's threshold"
        )


def test_steep_scores_are_not_even_weakly_disproportional() -> None:
    source = soft_copy_last(2, 7)
    model = decoder(source)
    steepen(model)
    single = torch.nn.Module.float(model)
    found = disproportion(single, source)
    assert found.weak[..., found.identical()].max() == 0, "what the others get underflows"
    with pytest.raises(ValueError, match="model: got 'alibi' positions"):
        steepen(decoder(source, position="alibi"))
    with pytest.raises(ValueError, match="model: got 'rope' positions, 1 key heads; allowed: 'rope', 2"):
        steepen(decoder(source, num_key_value_heads=1))


@pytest.mark.parametrize(
    ("position", "remedy"), [("rope", "none"), ("none", "stablemask"), ("alibi", "softmax_plus_one")]
)
def test_proposition_of_a_contextual_decoder(position: str, remedy: str) -> None:
    source = soft_copy_last(3, 6)
    found = proposition(decoder(source, remedy, position), source)
    assert found.contextual
    assert min(found.slack().values()) > -ROUNDING
    assert torch.allclose(found.mean.diagonal(dim1=1, dim2=2), source.entropies().diagonal().expand(3, -1))


def test_proposition_over_all_sequences_of_eight_tokens() -> None:
    """Three symbols; the collapsed layer knows what X_≤i−1 says, no more and no less."""
    source = soft_copy_last(3, 9)
    model = decoder(source)
    model.model.layers[0] = Collapsed(model.model.layers[0])
    found = proposition(model, source)
    assert not found.contextual
    known, marginal = source.entropies(), entropy(source.marginals()[1:])
    for n in range(8):
        for i in range(n + 1):
            late = known[n, i - 1] if i else marginal[n]
            assert torch.allclose(found.mean[1:, n, i], late, atol=ROUNDING)
            assert late > known[n, i] + 1e-4, "strict"
            assert torch.allclose(found.mean[0, n, i], known[n, i], atol=ROUNDING), (
                "embeddings forget nothing"
            )
    assert torch.allclose(found.loss(), torch.tensor([0.0, 0.7330, 0.7330]).double(), atol=1e-4)
    slack = found.slack()
    assert min(slack["1"], slack["3"]) > -ROUNDING
    assert max(slack["2"], slack["4"]) < -0.7


def test_isotropy_is_needed() -> None:
    source = markov_source(LOPSIDED, 7)
    found = proposition(decoder(source), source)
    slack = found.slack()
    assert found.contextual
    assert min(slack["1"], slack["2"], slack["shares"]) > -ROUNDING
    assert max(slack["3"], slack["4"]) < -0.1


def test_shares_need_a_contextual_decoder() -> None:
    source = markov_source(SYMMETRIC, 7)
    model = decoder(source)
    assert proposition(model, source).slack()["shares"] > -ROUNDING
    model.model.layers[1] = Collapsed(model.model.layers[1])
    assert proposition(model, source).slack()["shares"] < -0.005


def test_contextual_depends_on_what_the_source_distinguishes() -> None:
    """Tokens 1 and 2 have one embedding: contextual only if the same follows both."""
    alike = torch.tensor([[0.6, 0.2, 0.2], [0.1, 0.5, 0.4], [0.1, 0.5, 0.4]])
    for source, expected in ((markov_source(alike, 5), True), (soft_copy_last(3, 5), False)):
        model = decoder(source)
        with torch.no_grad():
            model.model.embed_tokens.weight[2] = model.model.embed_tokens.weight[1]
        found = proposition(model, source)
        assert found.contextual is expected
        assert (found.slack()["2"] > -ROUNDING) is expected


def test_fit_and_its_loss() -> None:
    source = soft_copy_last(2, 6)
    model = torch.nn.Module.float(decoder(source))
    with torch.no_grad():
        model.lm_head.weight.zero_()
    unfit = fit(model, source, steps=1, learning_rate=1e-9)
    assert math.isclose(unfit, math.log(2) - float(source.entropies().diagonal().mean()), rel_tol=1e-4)
    steps: list[int] = []
    fitted = fit(decoder(source), source, steps=60, on_step=steps.append)
    assert 0 < fitted < unfit / 5
    assert sum(steps) == 60


def test_wrong_arguments() -> None:
    source = soft_copy_last(3, 5)
    small = decoder(soft_copy_last(2, 5))
    for function in (disproportion, proposition, fit):
        with pytest.raises(
            ValueError, match="source: got 3 symbols; allowed: up to the vocabulary of the model, 2"
        ):
            function(small, source)
    with pytest.raises(ValueError, match=r"weights, shares: got shapes \(3, 5, 5\), \(4, 4\)"):
        excess(attention(5), source.shares())
