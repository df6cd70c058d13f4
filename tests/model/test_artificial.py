"""Artificial tokens, against an oracle that costs nothing: k zero vectors are a sink of log k everywhere."""

import math

import pytest
import torch
from transformers import DynamicCache, StaticCache

from stablemask.model import StableMaskForCausalLM
from tests.model import tiny


def with_sink(
    model: StableMaskForCausalLM, logit: float, remedy: str = "learned_sink"
) -> StableMaskForCausalLM:
    """A model with the weights of another and one sink logit for all heads."""
    twin = tiny.model(model.config.position, remedy, sliding_window=model.config.sliding_window)
    twin.load_state_dict({k: v for k, v in model.state_dict().items() if "artificial" not in k}, strict=False)
    for name, parameter in twin.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.constant_(parameter, logit)
    return twin


@torch.no_grad()
@pytest.mark.parametrize("position", ["rope", "none"])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_zero_vectors_are_a_sink(position: str, count: int) -> None:
    model = tiny.model(position, "artificial_token", artificial_tokens=count, artificial_zero=True)
    ids = tiny.tokens(2, 20)
    given = model(ids, output_hidden_states=True)
    expected = with_sink(model, math.log(count))(ids, output_hidden_states=True)
    for ours, theirs in zip(given.hidden_states, expected.hidden_states, strict=True):
        assert tiny.difference(ours, theirs) < tiny.EXACT
    wrong = with_sink(model, math.log(count) + 0.01)(ids).logits
    assert tiny.difference(given.logits, wrong) > 1e-5


@torch.no_grad()
def test_one_zero_vector_is_softmax_plus_one() -> None:
    model = tiny.model("rope", "artificial_token", artificial_tokens=1, artificial_zero=True)
    ids = tiny.tokens(2, 20)
    assert (
        tiny.difference(model(ids).logits, with_sink(model, 0.0, "softmax_plus_one")(ids).logits) < tiny.EXACT
    )


@torch.no_grad()
def test_the_relation_holds_for_padded_packed_and_cached_tokens() -> None:
    model = tiny.model("rope", "artificial_token", artificial_tokens=3, artificial_zero=True)
    sink, ids = with_sink(model, math.log(3)), tiny.tokens(2, 20)
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    positions = torch.cat([torch.arange(n) for n in (4, 1, 15)]).expand(2, -1)
    for inputs in ({"attention_mask": mask}, {"position_ids": positions, "use_cache": False}):
        kept = mask.bool() if "attention_mask" in inputs else torch.ones_like(ids, dtype=torch.bool)
        assert (
            tiny.difference(model(ids, **inputs).logits[kept], sink(ids, **inputs).logits[kept]) < tiny.EXACT
        )


@pytest.mark.parametrize("packed", [False, True])
def test_learned_tokens_get_their_gradient(packed: bool) -> None:
    """The k vectors are as if they were k words of the vocabulary in front of every document."""
    model, ids = tiny.model("rope", "artificial_token", artificial_tokens=2), tiny.tokens(1, 12)
    lengths = (5, 7) if packed else (12,)
    positions = torch.cat([torch.arange(n) for n in lengths]).unsqueeze(0)
    out = model(ids, position_ids=positions, use_cache=False).logits
    direction = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(5))
    (out * direction).sum().backward()
    assert model.model.artificial is not None
    weight = model.model.artificial.weight
    plain = tiny.model("rope", "none")
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if "artificial" not in k})
    own = weight.detach().clone().requires_grad_()
    total = torch.zeros((), dtype=out.dtype)
    for part, along in zip(ids.split(lengths, 1), direction.split(lengths, 1), strict=True):
        embedded = torch.cat([own.unsqueeze(0), plain.model.embed_tokens(part).detach()], 1)
        total = total + (plain(inputs_embeds=embedded).logits[:, 2:] * along).sum()
    total.backward()
    assert weight.grad is not None
    assert own.grad is not None
    assert tiny.difference(weight.grad, own.grad) < tiny.EXACT


@torch.no_grad()
def test_they_do_not_count_as_cached_tokens() -> None:
    model, ids = tiny.model("rope", "artificial_token"), tiny.tokens(1, 9)
    for cache in (DynamicCache(), StaticCache(config=model.config, max_cache_len=9)):
        model(ids, past_key_values=cache)
        assert int(cache.get_seq_length()) == 9


@torch.no_grad()
def test_an_emptied_cache_takes_them_again() -> None:
    model, ids = tiny.model("rope", "artificial_token"), tiny.tokens(2, 9)
    cache = StaticCache(config=model.config, max_cache_len=12)
    model(ids, past_key_values=cache)
    cache.reset()
    assert model.model.artificial is not None
    model.model.artificial.weight.mul_(3.0)
    for stop in (8, 9):
        given = model(ids[:, 8 * (stop - 8) : stop], past_key_values=cache).logits
    assert tiny.difference(given[:, -1], model(ids).logits[:, -1]) < tiny.EXACT


@torch.no_grad()
def test_a_cache_that_began_without_them_is_refused() -> None:
    ids, cache = tiny.tokens(1, 9), DynamicCache()
    tiny.model("rope", "none")(ids, past_key_values=cache)
    with pytest.raises(ValueError, match="past_key_values: got tokens without artificial tokens"):
        tiny.model("rope", "artificial_token")(ids, past_key_values=cache)
