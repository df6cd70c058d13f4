"""Metrics from blocks are those of dense maps, in memory that does not grow with the square of the length."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from stablemask.analysis import CLASSES, Metrics, average, capture, classify, measure
from stablemask.analysis.capture import Capture
from stablemask.analysis.inspection import inspect_model
from stablemask.analysis.pieces import Piece
from tests.hf import tiny as stock
from tests.model.tiny import EXACT, difference, model, tokens

LENGTH = 83
CASES: dict[str, Any] = {
    "grouped heads": model,
    "window": lambda: model(sliding_window=9),
    "alibi": lambda: model("alibi"),
    "t5": lambda: model("t5", "none", max_position_embeddings=128),
    "artificial": lambda: model("rope", "artificial_token"),
    "learned sink": lambda: model("none", "learned_sink"),
    "softcap": lambda: stock.model("gemma2", dtype=torch.float64),
    "stock": lambda: stock.model("llama", dtype=torch.float64),
}


def captured(built: Any, length: int = LENGTH) -> Capture:
    with capture(built) as layers, torch.no_grad():
        built(tokens(1, length), use_cache=False)
    return layers


def classes(length: int = LENGTH) -> Tensor:
    return torch.arange(length) * 7 % 4


def dense(layers: Capture, classes: Tensor, layer: int, head: int) -> dict[str, Any]:
    """The definitions, entry by entry."""
    weights = layers.attention_map(layer, head)
    rows = [[w for w in row if w > 0] for row in weights.tolist()]
    entropy = [-sum(w / sum(row) * math.log(w / sum(row)) for w in row) for row in rows]
    early = torch.stack([weights[63][1:][classes[1:] == c].sum() for c in range(4)])
    late = torch.stack([weights[-1][1:][classes[1:] == c].sum() for c in range(4)])
    return {
        "first": weights[:, 0],
        "entropy": torch.tensor(entropy, dtype=weights.dtype),
        "by_class": torch.stack([early, late]),
        "left": 1 - weights.sum(-1),
    }


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("block", [5, 1000])
def test_blocks_give_the_dense_metrics(case: str, block: int) -> None:
    layers = captured(CASES[case]())
    found = measure(layers, classes(), block=block)
    assert found.class_rows == (64, LENGTH)
    for layer, head in ((0, 0), (1, 3)):
        expected = dense(layers, classes(), layer, head)
        assert difference(found.first[layer, head], expected["first"]) < EXACT
        assert (found.entropy[layer, head] - expected["entropy"]).abs().max() < 1e-7
        assert difference(found.by_class[layer, head], expected["by_class"]) < EXACT
        left = found.pseudo[layer, head] + found.artificial[layer, head]
        assert (left - expected["left"]).abs().max() < EXACT


class LargestTensor(TorchDispatchMode):
    """Numbers in the largest tensor that any operator returns."""

    largest = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for t in torch.utils._pytree.tree_leaves(out):
            if isinstance(t, Tensor):
                self.largest = max(self.largest, t.untyped_storage().nbytes() // t.element_size())
        return out


@pytest.mark.parametrize("kind", ["rope", "alibi"])
def test_memory_is_a_block_of_rows(kind: str) -> None:
    length, block = 1500, 8
    layers = captured(model(kind).float(), length)
    with LargestTensor() as seen:
        measure(layers, classes(length), block=block)
    assert 4 * length <= seen.largest <= 4 * block * length, "more than a block of rows of all heads"


@pytest.mark.parametrize("make", [model, lambda: stock.model("llama")])
def test_a_whole_inspection_needs_no_square(make: Any) -> None:
    """The model reads the text, too; of its logits only the last are computed."""
    length, block = 1500, 8
    piece = Piece(tokens(1, length), ["a"] * length, classes(length))
    with LargestTensor() as seen:
        found = inspect_model(make().float(), "model", [piece], shown=20, block=block)
    assert found.metrics.first.shape == (2, 4, length)
    assert seen.largest <= 64 * length < length**2 / 20


def test_sink_rate_by_hand() -> None:
    first = torch.tensor([[[1.0, 0.5, 0.0], [1.0, 0.2, 0.0]], [[1.0, 1.0, 1.0], [1.0, 0.0, 0.2]]])
    nothing = torch.zeros(2, 2, 3)
    metrics = Metrics(first, nothing, nothing, nothing, (3,), torch.zeros(2, 2, 1, 4), torch.zeros(1, 4))
    assert torch.allclose(metrics.sink_scores(), torch.tensor([[0.5, 0.4], [1.0, 0.4]]))
    assert [metrics.sink_rate(e) for e in (0.3, 0.45, 0.5, 0.99)] == [1.0, 0.5, 0.25, 0.25]
    with pytest.raises(ValueError, match="threshold: got 1"):
        metrics.sink_rate(1.0)


def test_a_model_built_to_have_a_sink_has_one() -> None:
    """A learned sink at −30 is none; one at 30 takes everything, and first tokens get nothing."""
    built = model("none", "learned_sink")
    rates = {}
    for logit in (-30.0, 30.0):
        for layer in built.model.layers:
            torch.nn.init.constant_(layer.self_attn.sinks, logit)
        found = measure(captured(built, 20))
        rates[logit] = (found.sink_rate(0.01), float(found.pseudo.mean()))
    assert rates[-30.0][0] == 1.0
    assert rates[-30.0][1] < 1e-6
    assert rates[30.0][0] == 0.0
    assert rates[30.0][1] > 0.9


def test_shares_of_classes_and_short_texts() -> None:
    layers = captured(model(), 5)
    found = measure(layers, torch.tensor([0, 3, 3, 1, 0]))
    assert found.class_rows == (5,)
    assert found.class_shares.tolist() == [[0.25, 0.25, 0.0, 0.5]]
    one = measure(captured(model(), 1), torch.tensor([2]))
    assert one.by_class.sum() == 0
    assert one.entropy.abs().max() < 1e-12


def test_average_is_the_mean() -> None:
    built = model()
    texts = []
    for seed in (1, 2):
        with capture(built) as layers, torch.no_grad():
            built(tokens(1, 30, seed=seed))
        texts.append(measure(layers, classes(30)))
    mean = average(texts)
    assert torch.allclose(mean.first, (texts[0].first + texts[1].first) / 2)
    assert torch.allclose(mean.by_class, (texts[0].by_class + texts[1].by_class) / 2)
    with pytest.raises(ValueError, match="one length"):
        average([texts[0], measure(captured(built, 20), classes(20))])


def test_texts_that_cannot_be_measured() -> None:
    built = model()
    with capture(built) as layers, torch.no_grad():
        built(tokens(2, 5))
    with pytest.raises(ValueError, match="got 2 sequences"):
        measure(layers)
    with pytest.raises(ValueError, match=r"classes: got shape \(4,\); allowed: one per token, \(5,\)"):
        measure(captured(built, 5), torch.zeros(4, dtype=torch.int64))


def test_classes_of_words_and_their_pieces() -> None:
    text = "The theory, isn't it? In 1999: café_9 … «yes» it's x2"
    pieces = [
        ("The", "function words"),
        (" the", "others"),
        ("ory", "others"),
        (",", "punctuation"),
        (" isn", "function words"),
        ("'t", "function words"),
        (" it", "function words"),
        ("?", "punctuation"),
        (" In", "function words"),
        (" 19", "digits"),
        ("99", "digits"),
        (":", "punctuation"),
        (" ca", "others"),
        ("fé", "others"),
        ("_", "punctuation"),
        ("9", "digits"),
        (" …", "punctuation"),
        (" «", "punctuation"),
        ("yes", "others"),
        ("»", "punctuation"),
        (" it's", "function words"),
        (" ", "others"),
        ("x2", "others"),
    ]
    offsets, at = [], 0
    for piece, _ in pieces:
        assert text[at : at + len(piece)] == piece
        offsets.append((at, at + len(piece)))
        at += len(piece)
    assert at == len(text)
    got = [CLASSES[c] for c in classify(text, offsets)]
    assert list(zip([p for p, _ in pieces], got, strict=True)) == pieces
    assert [CLASSES[c] for c in classify(text, [(0, 0)])] == ["others"]
    for word, kind in (("won’t", 1), ("can't", 1), ("you'll", 1), ("cat's", 3), ("oughta", 3)):
        assert classify(word, [(0, len(word))]).tolist() == [kind], word
    with pytest.raises(ValueError, match="offsets: got"):
        classify("ab", [(1, 3)])
