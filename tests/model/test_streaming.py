"""The window cache and the StreamingLLM baseline: what they compute; that they neither grow nor slow down."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.cache_utils import Cache
from transformers.generation.streamers import BaseStreamer

from stablemask.model import StableMaskForCausalLM, StreamingLLMCache, WindowCache
from tests.model import dense, tiny

LENGTH, WINDOW, PINNED = 24, 6, 2
SIZES = {
    "one by one": [1] * LENGTH,
    "prompt first": [10, *[1] * 14],
    "chunks": [4, 3, 9, 1, 1, 6],
    "at once": [LENGTH],
}
every = pytest.mark.parametrize(("position", "remedy"), tiny.EVERY)


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def feed(model: StableMaskForCausalLM, ids: Tensor, cache: Cache, sizes: list[int], **inputs: Any) -> Tensor:
    return torch.cat(
        [model(chunk, past_key_values=cache, **inputs).logits for chunk in ids.split(sizes, 1)], 1
    )


@every
@pytest.mark.parametrize("sizes", SIZES)
def test_a_window_cache_is_a_sliding_window(position: str, remedy: str, sizes: str) -> None:
    model, ids = tiny.model(position, remedy), tiny.tokens(2, LENGTH)
    sliding = tiny.model(position, remedy, sliding_window=WINDOW)
    given = feed(model, ids, WindowCache(WINDOW), SIZES[sizes])
    assert tiny.difference(given, sliding(ids, use_cache=False).logits) < tiny.EXACT
    assert tiny.difference(given, model(ids, use_cache=False).logits) > 1e-3


@pytest.mark.parametrize("position", ["rope", "alibi", "t5", "learned"])
def test_a_window_cache_takes_padding(position: str) -> None:
    model, sliding = tiny.model(position), tiny.model(position, sliding_window=WINDOW)
    ids = tiny.tokens(2, LENGTH)
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    cache, outs = WindowCache(WINDOW), []
    for stop, chunk in zip((4, 12, 13, 14, 24), ids.split([4, 8, 1, 1, 10], 1), strict=True):
        outs.append(model(chunk, attention_mask=mask[:, :stop], past_key_values=cache).logits)
    given = torch.cat(outs, 1)
    assert tiny.difference(given[0], sliding(ids[:1], use_cache=False).logits[0]) < tiny.EXACT
    assert tiny.difference(given[1, 9:], sliding(ids[1:, 9:], use_cache=False).logits[0]) < tiny.EXACT


def test_a_window_inside_a_window() -> None:
    model, ids = tiny.model(sliding_window=WINDOW - 2), tiny.tokens(2, LENGTH)
    given = feed(model, ids, WindowCache(WINDOW), SIZES["chunks"])
    assert tiny.difference(given, model(ids, use_cache=False).logits) < tiny.EXACT


@pytest.mark.parametrize(
    "cache", [WindowCache(WINDOW), StreamingLLMCache(PINNED, WINDOW)], ids=["window", "streaming"]
)
def test_generate_with_a_streaming_cache(cache: Cache) -> None:
    model, ids = tiny.model(), tiny.tokens(2, 9)
    config = GenerationConfig(max_new_tokens=20, do_sample=False, pad_token_id=0, eos_token_id=None)
    given = model.generate(
        ids, attention_mask=torch.ones_like(ids), generation_config=config, past_key_values=cache
    )
    cache.reset()
    expected = ids
    logits = feed(model, ids, cache, [1] * 9)
    for _ in range(20):
        expected = torch.cat([expected, logits[:, -1:].argmax(-1)], 1)
        logits = feed(model, expected[:, -1:], cache, [1])
    assert torch.equal(given, expected)


def streaming_llm(model: StableMaskForCausalLM, ids: Tensor) -> Tensor:
    """Row by row: the first tokens and the last ones, put side by side and numbered from 0."""
    c = model.config.to_dict()
    w = {name: t.double() for name, t in model.state_dict().items()}
    x = w["model.embed_tokens.weight"][ids]
    heads, groups, d = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    for layer in range(c["num_hidden_layers"]):
        p = f"model.layers.{layer}."
        inner = dense.rms(x, w[p + "input_layernorm.weight"], c)
        q, k, v = (inner @ w[p + f"self_attn.{name}_proj.weight"].T for name in "qkv")
        rows = []
        for i in range(len(ids)):
            kept = [j for j in range(i + 1) if j < PINNED or j > i - WINDOW]
            outs = []
            for h in range(heads):
                g = h // (heads // groups)
                qh, kh = q[kept, h * d : (h + 1) * d], k[kept, g * d : (g + 1) * d]
                if c["position"] == "rope":
                    qh, kh = dense.rotate(qh, c["rope_theta"]), dense.rotate(kh, c["rope_theta"])
                scores = (qh[-1] @ kh.T / d**0.5) + dense.relative(w, c, h, len(kept))[-1]
                outs.append(
                    dense.weigh(scores, len(kept) - 1, h, w, p + "self_attn.", c)
                    @ v[kept, g * d : (g + 1) * d]
                )
            rows.append(torch.cat(outs))
        x = x + torch.stack(rows) @ w[p + "self_attn.o_proj.weight"].T
        x = x + dense.feed_forward(
            w, p + "mlp.", c, dense.rms(x, w[p + "post_attention_layernorm.weight"], c)
        )
    return dense.rms(x, w["model.norm.weight"], c) @ w["lm_head.weight"].T


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("position", ["rope", "alibi", "t5", "none"])
@pytest.mark.parametrize("remedy", ["none", "stablemask", "learned_sink", "urpe"])
def test_streaming_llm_as_published(position: str, remedy: str, sizes: str) -> None:
    model, ids = tiny.model(position, remedy), tiny.tokens(2, LENGTH)
    given = feed(model, ids, StreamingLLMCache(PINNED, WINDOW), SIZES[sizes])
    assert tiny.difference(given, torch.stack([streaming_llm(model, row) for row in ids])) < tiny.EXACT


def test_streaming_llm_is_the_whole_model_until_it_is_full() -> None:
    model, ids = tiny.model(), tiny.tokens(2, LENGTH)
    given = feed(model, ids, StreamingLLMCache(PINNED, LENGTH), [7, 1, LENGTH - 8])
    assert tiny.difference(given, model(ids, use_cache=False).logits) < tiny.EXACT


def test_streaming_llm_keeps_artificial_tokens() -> None:
    """A zero vector in front for ever is a sink of 0 for ever, which no position can move."""
    model = tiny.model("rope", "artificial_token", artificial_tokens=1, artificial_zero=True)
    twin, ids = tiny.model("rope", "softmax_plus_one"), tiny.tokens(2, LENGTH)
    twin.load_state_dict(model.state_dict())
    given = feed(model, ids, StreamingLLMCache(PINNED, WINDOW), SIZES["chunks"])
    assert (
        tiny.difference(given, feed(twin, ids, StreamingLLMCache(PINNED, WINDOW), SIZES["chunks"]))
        < tiny.EXACT
    )


@pytest.mark.parametrize("length", [3, LENGTH])
def test_streaming_llm_refuses_padding(length: int) -> None:
    ids = tiny.tokens(2, length)
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    with pytest.raises(ValueError, match="attention_mask: got padding"):
        tiny.model()(ids, attention_mask=mask, past_key_values=StreamingLLMCache(PINNED, WINDOW))


@pytest.mark.parametrize(("position", "remedy"), [("learned", "stablemask"), ("rope", "urpe")])
def test_a_table_does_not_stream_past_its_end(position: str, remedy: str) -> None:
    model, ids = tiny.model(position, remedy, max_position_embeddings=20), tiny.tokens(1, 21)
    cache = WindowCache(WINDOW)
    feed(model, ids[:, :20], cache, [1] * 20)
    with pytest.raises(ValueError, match="position_ids: got 20; allowed: below 20"):
        feed(model, ids[:, 20:], cache, [1])


@pytest.mark.parametrize(("window", "pinned"), [(0, 0), (-3, 0), (4, -1), (2.5, 0), (True, 0)])
def test_sizes_of_a_cache(window: Any, pinned: Any) -> None:
    with pytest.raises(ValueError, match=r"(window|pinned): got .*; allowed: integers ≥"):
        StreamingLLMCache(pinned=pinned, window=window)


class Meter(BaseStreamer):
    """Processor time and resident memory at every token of ``generate``."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.megabytes: list[float] = []

    def put(self, value: Tensor) -> None:  # noqa: ARG002 - the signature of transformers
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        self.seconds.append(time.process_time())
        self.megabytes.append(pages * 4096 / 2**20)

    def end(self) -> None:
        """Nothing is left to do."""


def held(cache: Cache) -> int:
    """Bytes of keys and values."""
    return sum(t.untyped_storage().nbytes() for layer in cache.layers for t in (layer.keys, layer.values))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("cache", [WindowCache(256), StreamingLLMCache(4, 252)], ids=["window", "streaming"])
def test_twenty_thousand_tokens_in_constant_memory_and_time(cache: Cache) -> None:
    count = 20_000 if isinstance(cache, WindowCache) else 5_000
    model, meter = tiny.model(num_hidden_layers=1).float(), Meter()
    config = GenerationConfig(max_new_tokens=count, do_sample=False, pad_token_id=0, eos_token_id=None)
    ids = tiny.tokens(1, 4)
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        generation_config=config,
        past_key_values=cache,
        streamer=meter,
    )
    assert cache.get_seq_length() == count + 3
    assert held(cache) == 2 * 2 * 256 * 6 * 4  # keys and values, heads, slots, width, bytes
    steps = torch.tensor(meter.seconds).double().diff()
    early, late = steps[1_000:2_000].median(), steps[-1_000:].median()
    assert late < 1.3 * early
    assert meter.megabytes[-1] - meter.megabytes[1_000] < 8
