"""Perplexity against length: what is predicted, with which context, whatever the chunks."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from stablemask.evaluation.documents import Document
from stablemask.evaluation.extrapolation import Extrapolation, cut_sequences, extrapolate
from stablemask.evaluation.perplexity import perplexity
from stablemask.evaluation.reading import METHODS, Method
from stablemask.model import StreamingLLMCache
from tests.evaluation import small

LENGTH, LONGEST = 8, 32


def sequences(*sizes: int) -> torch.Tensor:
    return cut_sequences(small.documents(*sizes), LONGEST, 10_000)


def measured(model: Any, text: torch.Tensor, method: Method, length: int, **options: Any) -> dict[str, float]:
    given = {"keys": LENGTH, "pinned": 2, **options}
    return dict(extrapolate(model, text, length=length, method=method, **given))


def test_sequences_come_from_all_documents_in_turn() -> None:
    documents = small.documents(70, 40, 10)
    cut = cut_sequences(documents, LONGEST, 10_000)
    expected = [documents[0].tokens[:33], documents[1].tokens[:33], documents[0].tokens[32:65]]
    assert torch.equal(cut, torch.stack(expected))
    assert torch.equal(cut_sequences(documents, LONGEST, LONGEST + 1), torch.stack(expected[:2]))
    assert torch.equal(cut_sequences(documents, LONGEST, 1), torch.stack(expected[:1]))
    with pytest.raises(ValueError, match="text: got documents of up to 70 tokens; allowed: one of 71 or"):
        cut_sequences(documents, 71, 10_000)


@pytest.mark.parametrize("length", [8, 16, 32])
@pytest.mark.parametrize("method", METHODS)
@torch.no_grad()
def test_against_one_forward_pass_a_sequence(method: Method, length: int) -> None:
    """All keys, or those of a sliding window; pinned ones are compared with the model's own cache."""
    model, text = small.model(), sequences(70, 40)
    twin = small.model(sliding_window=LENGTH) if method == "window" else model
    rows, targets = text[:, :-1].reshape(-1, length), text[:, 1:].reshape(-1, length)
    if method == "pinned":
        logits = model(rows, past_key_values=StreamingLLMCache(2, LENGTH - 2)).logits
    else:
        logits = twin(rows, use_cache=False).logits
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
    values = measured(model, text, method, length, batch_size=1, chunk=7)
    assert values["tokens"] == 96
    assert values["perplexity"] == pytest.approx(float(losses.mean().exp()), rel=1e-10)
    late = float(losses[:, length // 2 :].mean().exp())
    assert values["perplexity/second half"] == pytest.approx(late, rel=1e-10)


@pytest.mark.parametrize("method", METHODS)
def test_batches_and_chunks_change_nothing(method: Method) -> None:
    model, text = small.model("none"), sequences(100, 70, 40)
    first = measured(model, text, method, 16)
    for options in ({"batch_size": 1}, {"chunk": 1}, {"batch_size": 2, "chunk": 50}):
        assert measured(model, text, method, 16, **options) == pytest.approx(first, rel=1e-12)


def test_the_methods_agree_at_the_length_they_keep() -> None:
    model, text = small.model(), sequences(70)
    at_once = [measured(model, text, method, LENGTH) for method in METHODS]
    assert at_once[1] == at_once[2] == pytest.approx(at_once[0], rel=1e-12)
    later = [measured(model, text, method, LONGEST)["perplexity"] for method in METHODS]
    assert len({round(value, 6) for value in later}) == 3


def test_the_training_length_is_plain_perplexity() -> None:
    model, documents = small.model(), small.documents(64)
    plain = dict(perplexity(model, documents, length=LENGTH))
    given = measured(model, cut_sequences(documents, LONGEST, 10_000), "full", LENGTH)
    assert given["perplexity"] == pytest.approx(plain["perplexity"], rel=1e-12)


def test_a_model_that_only_counts_recent_tokens_stays_the_same_in_a_window() -> None:
    """One layer, text of period 8, a window of 8: every token has the same keys whatever the length."""
    model = small.model("none", position="alibi", num_hidden_layers=1)
    tokens = torch.arange(129) % 8
    text = cut_sequences([Document(tokens, 128)], 64, 64)
    windows = [measured(model, text, "window", length)["perplexity/second half"] for length in (32, 64)]
    assert windows[0] == pytest.approx(windows[1], rel=1e-12)
    full = [measured(model, text, "full", length)["perplexity/second half"] for length in (32, 64)]
    assert not math.isclose(full[0], full[1], rel_tol=1e-9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"times": ()}, "times: got"),
        ({"times": (1, 2, 3)}, r"times: got \(1, 2, 3\); allowed: positive integers that all divide"),
        ({"times": (0, 2)}, "times: got"),
        ({"keys": 0}, "keys: got 0"),
        ({"chunk": 0}, "chunk: got 0"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Extrapolation(**options)
    with pytest.raises(ValueError, match="length: got 5; allowed: what divides 32"):
        measured(small.model(), sequences(40), "full", 5)
