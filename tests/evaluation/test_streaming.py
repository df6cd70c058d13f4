"""Streaming: perplexity of every stretch, and that memory is constant where it has to be."""

import math

import pytest
import torch
import torch.nn.functional as F

from stablemask.evaluation.reading import Method
from stablemask.evaluation.streaming import Streaming, join, stream_text
from tests.evaluation import small

KEYS = 12


def values(method: Method, tokens: int, *, chunk: int, **settings: object) -> dict[str, float]:
    model = small.model(num_hidden_layers=1, **settings)
    stream = join(small.documents(tokens // 2, tokens), tokens)
    return dict(stream_text(model, stream, method=method, keys=KEYS, pinned=2, chunk=chunk))


@torch.no_grad()
def test_stretches_of_a_stream() -> None:
    model, documents = small.model(), small.documents(30, 40)
    stream = join(documents, 50)
    assert torch.equal(stream, torch.cat([documents[0].tokens, documents[1].tokens])[:51])
    given = dict(stream_text(model, stream, method="full", keys=KEYS, chunk=3))
    losses = F.cross_entropy(
        model(stream[None, :-1], use_cache=False).logits[0], stream[1:], reduction="none"
    )
    for i in range(10):
        name = f"perplexity/tokens {5 * i + 1}-{5 * i + 5}"
        assert given[name] == pytest.approx(float(losses[5 * i : 5 * i + 5].mean().exp()), rel=1e-10)
    assert given["tokens per second"] > 0


@pytest.mark.parametrize("method", ["window", "pinned"])
def test_chunks_change_nothing(method: Method) -> None:
    one, other = (values(method, 60, chunk=chunk) for chunk in (1, 17))
    for name, value in one.items():
        if name.startswith("perplexity"):
            assert other[name] == pytest.approx(value, rel=1e-10)


@pytest.mark.parametrize(("method", "tokens"), [("window", 20_000), ("pinned", 1_000)])
def test_memory_is_constant(method: Method, tokens: int) -> None:
    given = values(method, tokens, chunk=100)
    held = 2 * 2 * KEYS * 6 * 8 / 2**20  # keys and values, heads, slots, width, bytes
    assert given[f"cache MiB/tokens {tokens // 10}"] == given[f"cache MiB/tokens {tokens}"] == held
    assert given["memory growth MiB"] < 8
    assert all(math.isfinite(value) for value in given.values())


def test_memory_grows_with_all_keys() -> None:
    given = values("full", 1_000, chunk=100)
    assert given["cache MiB/tokens 1000"] == pytest.approx(10 * given["cache MiB/tokens 100"])


def test_a_text_that_is_too_short() -> None:
    with pytest.raises(ValueError, match="text: got 30 tokens; allowed: 31 or more"):
        join(small.documents(30), 31)
    with pytest.raises(ValueError, match="tokens: got 9; allowed: from 10 on"):
        Streaming(tokens=9)
