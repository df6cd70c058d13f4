"""``generate`` finds what a loop of uncached forward passes finds, with every cache and way of decoding."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig

from stablemask.model import StableMaskForCausalLM, WindowCache
from tests.model import tiny

NEW = 14
PROMPT = 9
kinds = pytest.mark.parametrize(("position", "remedy"), tiny.EACH)
windows = pytest.mark.parametrize("window", [None, 5], ids=["full", "window"])


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def greedy(model: StableMaskForCausalLM, prompt: Tensor, new: int = NEW) -> Tensor:
    """One unpadded prompt, every step from the start."""
    ids = prompt
    for _ in range(new):
        ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    return ids


def generate(model: StableMaskForCausalLM, ids: Tensor | None, **settings: Any) -> Tensor:
    if ids is not None:  # the models may well say 0, which is padding only where we say so
        settings = {"attention_mask": torch.ones_like(ids), **settings}
    config = GenerationConfig(max_new_tokens=NEW, do_sample=False, pad_token_id=0, eos_token_id=None)
    out: Tensor = model.generate(ids, generation_config=config, **settings)
    return out


@pytest.fixture(params=tiny.EACH, ids="-".join)
def model(request: pytest.FixtureRequest) -> StableMaskForCausalLM:
    position, remedy = request.param
    return tiny.model(position, remedy)


@kinds
@windows
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_left_padded_batch(position: str, remedy: str, window: int | None, cache: str) -> None:
    model = tiny.model(position, remedy, sliding_window=window)
    short, long = tiny.tokens(1, PROMPT - 4, seed=2), tiny.tokens(1, PROMPT, seed=3)
    ids = torch.cat([torch.nn.functional.pad(short, (4, 0)), long])
    mask = (ids != 0).long()
    given = generate(model, ids, attention_mask=mask, cache_implementation=cache)
    assert torch.equal(given[:1, 4:], greedy(model, short))
    assert torch.equal(given[1:], greedy(model, long))


@windows
@pytest.mark.parametrize("chunk", [1, 4])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_chunked_prefill(window: int | None, chunk: int, cache: str) -> None:
    for position, remedy in (("rope", "stablemask"), ("alibi", "artificial_token"), ("t5", "urpe")):
        model, ids = tiny.model(position, remedy, sliding_window=window), tiny.tokens(2, PROMPT)
        given = generate(model, ids, prefill_chunk_size=chunk, cache_implementation=cache)
        assert torch.equal(given, generate(model, ids, use_cache=False))


def test_beams(model: StableMaskForCausalLM) -> None:
    ids = tiny.tokens(2, PROMPT)
    expected = generate(model, ids, num_beams=3, use_cache=False)
    assert torch.equal(generate(model, ids, num_beams=3), expected)
    assert torch.equal(generate(model, ids, num_beams=3, cache_implementation="static"), expected)
    assert torch.equal(generate(model, ids, num_beams=3, past_key_values=WindowCache(64)), expected)


def test_assisted_by_a_smaller_model(model: StableMaskForCausalLM) -> None:
    ids = tiny.tokens(1, PROMPT)
    assistant = tiny.model(model.config.position, model.config.remedy, seed=1, num_hidden_layers=1)
    assert torch.equal(generate(model, ids, assistant_model=assistant), greedy(model, ids))
    assert torch.equal(generate(model, ids, assistant_model=model), greedy(model, ids))


def test_prompt_lookup(model: StableMaskForCausalLM) -> None:
    ids = tiny.tokens(1, 3).repeat(1, 4)
    assert torch.equal(generate(model, ids, prompt_lookup_num_tokens=3), greedy(model, ids))


@windows
def test_prompt_lookup_with_a_sliding_cache(window: int | None) -> None:
    model, ids = tiny.model(sliding_window=window), tiny.tokens(1, 3).repeat(1, 4)
    assert torch.equal(generate(model, ids, prompt_lookup_num_tokens=3), greedy(model, ids))


def test_a_streaming_cache_is_refused_where_tokens_are_taken_back() -> None:
    with pytest.raises(ValueError, match="past_key_values: got a WindowCache"):
        generate(tiny.model(), tiny.tokens(1, 9), prompt_lookup_num_tokens=3, past_key_values=WindowCache(8))


def test_a_conversation_goes_on_with_its_cache(model: StableMaskForCausalLM) -> None:
    first = tiny.tokens(2, PROMPT)
    cache = DynamicCache(config=model.config)
    said = generate(model, first, past_key_values=cache)
    ids = torch.cat([said, tiny.tokens(2, 5, seed=4)], 1)
    assert cache.get_seq_length() == said.shape[1] - 1
    expected = torch.cat([greedy(model, row[None]) for row in ids])
    assert torch.equal(generate(model, ids, past_key_values=cache), expected)


def test_embeddings_instead_of_tokens(model: StableMaskForCausalLM) -> None:
    ids = tiny.tokens(2, PROMPT)
    given = generate(model, None, inputs_embeds=model.model.embed_tokens(ids))
    assert torch.equal(given, generate(model, ids)[:, PROMPT:])
