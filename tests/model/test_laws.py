"""Laws for every position encoding and remedy, whatever the logits are; test_oracle.py says what they are."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import Cache

from stablemask.model import StableMaskForCausalLM, WindowCache
from tests.model import tiny

pytestmark = pytest.mark.parametrize("window", [None, 5], ids=["full", "window"])
every = pytest.mark.parametrize(("position", "remedy"), tiny.EVERY)

LENGTH = 20
CACHES: dict[str, Callable[[StableMaskForCausalLM], Cache]] = {
    "dynamic": lambda model: DynamicCache(config=model.config),
    "dynamic that keeps all": lambda _: DynamicCache(),
    "static": lambda model: StaticCache(config=model.config, max_cache_len=LENGTH + 9),
    "window": lambda model: WindowCache(LENGTH + model.config.num_artificial),
}


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def whole(model: StableMaskForCausalLM, ids: Tensor) -> Tensor:
    logits: Tensor = model(ids, use_cache=False).logits
    return logits


def in_chunks(
    model: StableMaskForCausalLM,
    ids: Tensor,
    cache: Cache,
    sizes: tuple[int, ...],
    mask: Tensor | None = None,
) -> Tensor:
    outs, stop = [], 0
    for chunk in ids.split(list(sizes), 1):
        stop += chunk.shape[1]
        given = None if mask is None else mask[:, :stop]
        outs.append(model(chunk, attention_mask=given, past_key_values=cache).logits)
    return torch.cat(outs, 1)


def padded(ids: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """Two rows: all tokens of the first, and as many of the second as there are places, put there."""
    rows, mask = torch.zeros_like(ids), torch.zeros_like(ids)
    rows[0], mask[0] = ids[0], 1
    rows[1, places], mask[1, places] = ids[1, : len(places)], 1
    return rows, mask


@every
@pytest.mark.parametrize("cache", CACHES)
def test_cached_is_uncached(position: str, remedy: str, window: int | None, cache: str) -> None:
    model, ids = tiny.model(position, remedy, sliding_window=window), tiny.tokens(2, LENGTH)
    expected = whole(model, ids)
    for sizes in ((8, *[1] * 12), (6, 5, 1, 1, 4, 1, 2), (1, 19)):
        assert tiny.difference(in_chunks(model, ids, CACHES[cache](model), sizes), expected) < tiny.EXACT


PADDING = {
    "left": torch.arange(8, LENGTH),
    "right": torch.arange(12),
    "between": torch.tensor([2, 3, 4, 8, 9, 12, 13, 14, 15, 19]),
}


@every
@pytest.mark.parametrize("side", PADDING)
def test_padded_is_unpadded(position: str, remedy: str, window: int | None, side: str) -> None:
    model, ids = tiny.model(position, remedy, sliding_window=window), tiny.tokens(2, LENGTH)
    places, expected = PADDING[side], whole(model, ids)
    rows, mask = padded(ids, places)
    given = model(rows, attention_mask=mask, use_cache=False).logits
    assert tiny.difference(given[1, places], expected[1, : len(places)]) < tiny.EXACT
    assert tiny.difference(given[0], expected[0]) < tiny.EXACT
    assert (
        tiny.difference(model(rows, use_cache=False).logits[1, places], expected[1, : len(places)]) > 1e-3
        or side == "right"
    )


@every
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("side", ["left", "between"])
def test_padded_and_cached_is_unpadded(
    position: str, remedy: str, window: int | None, cache: str, side: str
) -> None:
    if window and side == "between" and cache in ("dynamic", "static"):
        pytest.skip("refused, see test_padding_that_pushes_keys_out_is_refused")
    model, ids = tiny.model(position, remedy, sliding_window=window), tiny.tokens(2, LENGTH)
    places, expected = PADDING[side], whole(model, ids)
    rows, mask = padded(ids, places)
    given = in_chunks(model, rows, CACHES[cache](model), (10, 5, 1, 1, 3), mask)
    assert tiny.difference(given[1, places], expected[1, : len(places)]) < tiny.EXACT
    assert tiny.difference(given[0], expected[0]) < tiny.EXACT


@every
def test_packed_is_separate(position: str, remedy: str, window: int | None) -> None:
    model, ids = tiny.model(position, remedy, sliding_window=window), tiny.tokens(3, LENGTH)
    packed = torch.stack([torch.cat([ids[0, :7], ids[1, :1], ids[2, :12]]), ids[1]])
    positions = torch.stack([torch.cat([torch.arange(n) for n in (7, 1, 12)]), torch.arange(LENGTH)])
    given = model(packed, position_ids=positions, use_cache=False).logits
    expected = whole(model, ids)
    parts = torch.cat([expected[0, :7], expected[1, :1], expected[2, :12]])
    assert tiny.difference(given[0], parts) < tiny.EXACT
    assert tiny.difference(given[1], expected[1]) < tiny.EXACT
    assert tiny.difference(given, whole(model, packed)) > 1e-3


@every
def test_a_whole_mask_of_the_caller(position: str, remedy: str, window: int | None) -> None:
    if remedy == "artificial_token":
        pytest.skip("refused, see test_inputs.py")
    model, ids = tiny.model(position, remedy, sliding_window=window), tiny.tokens(2, LENGTH)
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    seen = ((distance >= 0) & (distance < (window or LENGTH))).expand(2, 1, -1, -1)
    added = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, torch.finfo(torch.float64).min)
    for mask in (seen, added):
        given = model(ids, attention_mask=mask, use_cache=False).logits
        assert tiny.difference(given, whole(model, ids)) < tiny.EXACT
    narrower = seen & (distance < 3)
    assert (
        tiny.difference(model(ids, attention_mask=narrower, use_cache=False).logits, whole(model, ids)) > 1e-3
    )


@every
def test_hidden_states_are_those_of_the_real_tokens(position: str, remedy: str, window: int | None) -> None:
    model, ids = tiny.model(position, remedy, sliding_window=window), tiny.tokens(2, LENGTH)
    out = model(ids, output_hidden_states=True)
    assert len(out.hidden_states) == model.config.num_hidden_layers + 1
    assert {h.shape for h in out.hidden_states} == {(2, LENGTH, model.config.hidden_size)}
    assert torch.equal(model.lm_head(out.hidden_states[-1]), out.logits)


def test_padding_that_pushes_keys_out_is_refused(window: int | None) -> None:
    model, ids = tiny.model(sliding_window=window), tiny.tokens(2, LENGTH)
    rows, mask = padded(ids, PADDING["between"])
    if window is None:
        in_chunks(model, rows, CACHES["dynamic"](model), (10, 10), mask)
        return
    with pytest.raises(ValueError, match=r"attention_mask: .*DynamicCache\(\)"):
        in_chunks(model, rows, CACHES["dynamic"](model), (10, 10), mask)
