"""Perplexity: what is summed, and that batches, padding and dtype do not change it."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from stablemask.evaluation import perplexity as module
from stablemask.evaluation.documents import Document
from stablemask.evaluation.perplexity import buckets, cut_windows, measure, perplexity, token_losses
from stablemask.model import StableMaskForCausalLM
from tests.evaluation import small

LENGTH = small.LENGTH


def slow(model: StableMaskForCausalLM, document: Document, length: int, stride: int) -> list[float]:
    """Token by token, each in a forward pass of its own, with the context that the stride leaves it."""
    tokens, losses = document.tokens, []
    for target in range(1, len(tokens)):
        late = target - 1 - length  # targets behind the first window
        start = 0 if late < 0 else (late // stride + 1) * stride
        logits = model(tokens[None, start:target], use_cache=False).logits[0, -1]
        losses.append(float(F.cross_entropy(logits, tokens[target])))
    return losses


def in_order(model: Any, documents: list[Document], **options: Any) -> list[Tensor]:
    losses = [torch.full((len(d.tokens) - 1,), math.nan, dtype=torch.float64) for d in documents]
    for part in token_losses(model, documents, **options):
        losses[part.document][part.first - 1 : part.first - 1 + len(part.nats)] = part.nats
    return losses


@pytest.mark.parametrize("stride", [1, 5, LENGTH])
@torch.no_grad()
def test_against_one_forward_pass_a_token(stride: int) -> None:
    model, documents = small.model(), small.documents(41, 7, 16, 17)
    expected = [slow(model, d, LENGTH, stride) for d in documents]
    given = dict(perplexity(model, documents, length=LENGTH, stride=stride, batch_size=3))
    total = math.fsum(map(math.fsum, expected))
    assert given["tokens"] == 81
    assert given["perplexity"] == pytest.approx(math.exp(total / 81), rel=1e-12)
    assert given["bits_per_byte"] == pytest.approx(total / math.log(2) / (3 * 81), rel=1e-12)
    for got, wanted in zip(in_order(model, documents, length=LENGTH, stride=stride), expected, strict=True):
        torch.testing.assert_close(got, torch.tensor(wanted).double(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [1, 2, 15, 16, 17, 40])
@pytest.mark.parametrize("stride", [1, 5, 16])
def test_windows_predict_every_token_once(size: int, stride: int) -> None:
    windows = list(cut_windows(0, size + 1, LENGTH, stride))
    assert [t for w in windows for t in range(w.first, w.stop)] == list(range(1, size + 1))
    assert all(0 <= w.start < w.first < w.stop and w.stop - 1 - w.start <= LENGTH for w in windows)
    assert all(w.first - w.start > LENGTH - stride for w in windows[1:])


def test_buckets_cover_the_length() -> None:
    assert list(buckets(100)) == [(0, 32), (32, 64), (64, 100)]
    assert list(buckets(20)) == [(0, 20)]
    assert all(a[1] == b[0] for a, b in pairwise(buckets(4096)))


@torch.no_grad()
def test_positions_are_those_in_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_BUCKET", 4)
    model, documents = small.model(), small.documents(32, 3)
    given = dict(perplexity(model, documents, length=LENGTH))
    rows = [slow(model, d, LENGTH, LENGTH) for d in documents]
    early = [*rows[0][0:4], *rows[0][16:20], *rows[1]]
    late = [*rows[0][8:16], *rows[0][24:32]]
    assert given["perplexity/positions 0-3"] == pytest.approx(math.exp(math.fsum(early) / 11), rel=1e-6)
    assert given["perplexity/positions 8-15"] == pytest.approx(math.exp(math.fsum(late) / 16), rel=1e-6)
    assert "perplexity/positions 16-31" not in given


@pytest.mark.parametrize("position", ["rope", "alibi", "learned"])
def test_batches_and_padding_change_nothing(position: str) -> None:
    model, documents = small.model(position=position), small.documents(41, 7, 23, 1)
    alone = in_order(model, documents, length=LENGTH, stride=6, batch_size=1)
    for batch_size in (2, 100):
        together = in_order(model, documents, length=LENGTH, stride=6, batch_size=batch_size)
        for one, other in zip(alone, together, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtype_costs_what_it_costs_a_plain_model(dtype: torch.dtype) -> None:
    """Twice the error of the same weights without StableMask in that dtype, and two roundings."""
    documents, errors = small.documents(41, 16, 16, 16), {}
    for remedy in ("none", "stablemask"):
        model = small.model(remedy).to(dtype)
        rounded = torch.cat(in_order(model, documents, length=LENGTH, batch_size=4))
        exact = torch.cat(in_order(model.double(), documents, length=LENGTH, batch_size=1))
        errors[remedy] = float((rounded - exact).norm() / exact.norm())
    assert 0 < errors["stablemask"] <= 2 * errors["none"] + 2 * torch.finfo(dtype).eps


def test_other_architectures() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    llama = LlamaForCausalLM(config).double()
    given = in_order(llama, small.documents(21, 9), length=LENGTH, batch_size=2)
    alone = in_order(llama, small.documents(21, 9), length=LENGTH, batch_size=1)
    torch.testing.assert_close(torch.cat(given), torch.cat(alone), rtol=1e-12, atol=1e-12)


def test_sums_by_document() -> None:
    model, documents = small.model(), small.documents(20, 5)
    sums = measure(model, documents, length=LENGTH)
    losses = in_order(model, documents, length=LENGTH)
    assert sums.tokens_of.tolist() == [20, 5]
    torch.testing.assert_close(sums.nats_of, torch.stack([loss.sum() for loss in losses]))
    assert float(sums.nats_at.sum()) == pytest.approx(float(sums.nats_of.sum()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 0}, "length: got 0"),
        ({"length": 8, "stride": 9}, "stride: got 9; allowed: from 1 to 8"),
        ({"length": 8, "batch_size": 0}, "batch_size: got 0"),
    ],
)
def test_wrong_options(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dict(perplexity(small.model(), small.documents(3), **options))
