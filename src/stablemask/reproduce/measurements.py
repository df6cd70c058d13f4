"""What is measured of a trained model of the study.

* Loss of every validation document, by the position of the token in its window (``evaluation.perplexity``).
* Loss past the training length, with all keys, recent keys, and recent keys with pinned first tokens
  (``evaluation.extrapolation``).
* Attention on the first token and on classes of tokens, pseudo mass, the sink rate (``analysis``).
"""

import math
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import torch
from torch import Tensor

from stablemask.analysis import CLASSES, Metrics, average, capture, measure
from stablemask.evaluation.documents import Document, cut
from stablemask.evaluation.extrapolation import cut_sequences, extrapolate
from stablemask.evaluation.perplexity import buckets, token_losses
from stablemask.evaluation.reading import METHODS, why_not
from stablemask.model import StableMaskForCausalLM
from stablemask.reproduce.corpus import Corpus

CURVE_POINTS = 5
CURVE_TOKENS = 131_072
TIMES = (1, 2, 4, 8, 16)
_LONG_TOKENS = 32_768
_SINK_TEXTS = 32
_BATCH = 32

Table = dict[str, Any]
Values = dict[str, float]


def by_document(model: StableMaskForCausalLM, documents: Sequence[Document], length: int) -> Table:
    """Losses summed over the tokens of each document and range of positions, and how many these are."""
    ranges = list(buckets(length))
    edges = torch.tensor([low for low, _ in ranges])
    sums = torch.zeros(2, len(documents), len(ranges), dtype=torch.float64)
    for losses in token_losses(model, documents, length=length, batch_size=_BATCH):
        positions = losses.position + torch.arange(len(losses.nats))
        places = torch.bucketize(positions, edges, right=True) - 1
        sums[0, losses.document].scatter_add_(0, places, losses.nats)
        sums[1, losses.document].scatter_add_(0, places, torch.ones_like(losses.nats))
    return {
        "positions": [f"{low}-{high - 1}" for low, high in ranges],
        "tokens": sums[1].long().tolist(),
        "nats": [[round(value, 2) for value in row] for row in sums[0].tolist()],
    }


def mean_loss(model: StableMaskForCausalLM, documents: Sequence[Document], length: int) -> float:
    """Mean loss a token on the first documents: a point of a learning curve."""
    total, count = 0.0, 0
    for losses in token_losses(model, cut(documents, CURVE_TOKENS), length=length, batch_size=_BATCH):
        total += float(losses.nats.sum())
        count += len(losses.nats)
    return total / count


def past_training(
    model: StableMaskForCausalLM, documents: Sequence[Document], length: int
) -> Iterator[tuple[str, float]]:
    """Mean loss a token in sequences of 1 … 16 times the training length: ``window/16`` and so on.

    Yields nothing where no document is long enough.
    """
    longest = TIMES[-1] * length
    if max(len(d.tokens) for d in documents) <= longest:
        return
    sequences = cut_sequences(documents, longest, _LONG_TOKENS)
    for method in METHODS:
        for times in TIMES:
            if why_not(model, method, times * length) is not None:
                continue
            found = dict(extrapolate(model, sequences, length=times * length, method=method, keys=length))
            yield f"{method}/{times}", math.log(found["perplexity"])


@torch.inference_mode()
def attention(model: StableMaskForCausalLM, corpus: Corpus, length: int) -> tuple[Values, Table]:
    """Scalars at position 64 and at the last one, and curves over all positions.

    Means over layers, heads and the first T tokens of 32 validation documents, the same for all models.
    """
    found: list[Metrics] = []
    for document, classes in zip(corpus.documents["valid"], corpus.classes, strict=True):
        if len(document.tokens) >= length and len(found) < _SINK_TEXTS:
            with capture(model) as layers:
                model(input_ids=document.tokens[:length].unsqueeze(0).to(model.device), use_cache=False)
            found.append(measure(layers, classes[:length]))
    if not found:
        return {}, {}
    mean = average(found)
    values = {"sink rate": mean.sink_rate()}
    for row, name in enumerate(("64", "last")[-len(mean.class_rows) :]):
        at = mean.class_rows[row] - 1
        values[f"first/{name}"] = float(mean.first[:, :, at].mean())
        values[f"pseudo/{name}"] = float(mean.pseudo[:, :, at].mean())
        for number, kind in enumerate(CLASSES):
            values[f"{kind}/{name}"] = float(mean.by_class[:, :, row, number].mean())
    curves = {name: _rounded(getattr(mean, name).mean((0, 1))) for name in ("first", "pseudo", "entropy")}
    return values, curves


def _rounded(values: Annotated[Tensor, "T"]) -> list[float]:
    return [round(value, 4) for value in values.tolist()]
