"""Perplexity with a stride: per token, per byte, and by the position of the token in its window.

A document is read in windows of ``length`` tokens. Every token but the first is predicted once, by the window
in which it has the most context: with a stride below the length, each token behind the first window has at
least length − stride tokens before it. With a stride equal to the length windows do not overlap, and the
figures by position say how well a model predicts with little context.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from stablemask.evaluation.documents import Document

FIRST_BUCKET = 32

OnTokens = Callable[[int], object]


@dataclass(frozen=True)
class Perplexity:
    """How to measure perplexity.

    Args:
        length: Tokens that a prediction sees at most; the training length by default.
        stride: Tokens that each further window predicts; the length by default: windows do not overlap.
        batch_size: Windows in one forward pass.
        max_tokens: Only the first documents, with about so many tokens; all of them by default.
    """

    length: int | None = None
    stride: int | None = None
    batch_size: int = 8
    max_tokens: int | None = None


class Window(NamedTuple):
    """Tokens start … stop − 2 of a document are read; tokens first … stop − 1 are predicted."""

    document: int
    start: int
    first: int
    stop: int


class Losses(NamedTuple):
    """Negative log-likelihoods, in nats, of neighbouring tokens of a document.

    Attributes:
        document: Its number.
        first: The number of the first of these tokens in the document.
        position: The row that predicted the first of them: how many tokens its window had before, less one.
        nats: One number a token, float64.
    """

    document: int
    first: int
    position: int
    nats: Annotated[Tensor, "n"]


@dataclass(frozen=True)
class Sums:
    """What was measured, in nats: by position in the window, and by document.

    Attributes:
        nats_at: Sum over the tokens predicted at each position.
        tokens_at: How many these are.
        nats_of: Sum over the tokens of each document.
        tokens_of: How many these are.
        num_bytes: UTF-8 bytes of all of them.
    """

    nats_at: Annotated[Tensor, "length"]
    tokens_at: Annotated[Tensor, "length"]
    nats_of: Annotated[Tensor, "documents"]
    tokens_of: Annotated[Tensor, "documents"]
    num_bytes: int


def perplexity(
    model: PreTrainedModel,
    documents: Sequence[Document],
    *,
    length: int,
    stride: int | None = None,
    batch_size: int = 8,
    on_tokens: OnTokens | None = None,
) -> Iterator[tuple[str, float]]:
    """Perplexity of a causal language model on documents.

    Args:
        model: Any causal language model of transformers. The device and dtype are its own.
        documents: From ``documents.tokenize``.
        length: Tokens that a prediction sees at most.
        stride: Tokens that each further window predicts; ``length`` by default.
        batch_size: Windows in one forward pass. It changes nothing but speed and memory.
        on_tokens: Called with the number of tokens just predicted.

    Yields:
        ``perplexity``; ``bits_per_byte``; ``perplexity/positions a-b``, from the first 32 positions in
        doubling steps; ``tokens``, the number predicted.
    """
    sums = measure(model, documents, length=length, stride=stride, batch_size=batch_size, on_tokens=on_tokens)
    nats, tokens = sums.nats_of.sum(), sums.tokens_of.sum()
    yield "perplexity", float((nats / tokens).exp())
    yield "bits_per_byte", float(nats) / math.log(2) / sums.num_bytes
    for low, high in buckets(length):
        count = sums.tokens_at[low:high].sum()
        if count:
            yield (
                f"perplexity/positions {low}-{high - 1}",
                float((sums.nats_at[low:high].sum() / count).exp()),
            )
    yield "tokens", float(tokens)


def measure(
    model: PreTrainedModel,
    documents: Sequence[Document],
    *,
    length: int,
    stride: int | None = None,
    batch_size: int = 8,
    on_tokens: OnTokens | None = None,
) -> Sums:
    """The sums behind ``perplexity``, whose arguments these are."""
    sizes = [len(d.tokens) for d in documents]
    at, of = torch.zeros(2, length, dtype=torch.float64), torch.zeros(2, len(sizes), dtype=torch.float64)
    for losses in token_losses(model, documents, length=length, stride=stride, batch_size=batch_size):
        count = len(losses.nats)
        at[0, losses.position : losses.position + count] += losses.nats
        at[1, losses.position : losses.position + count] += 1
        of[0, losses.document] += losses.nats.sum()
        of[1, losses.document] += count
        if on_tokens is not None:
            on_tokens(count)
    return Sums(at[0], at[1], of[0], of[1], sum(d.num_bytes for d in documents))


@torch.inference_mode()
def token_losses(
    model: PreTrainedModel,
    documents: Sequence[Document],
    *,
    length: int,
    stride: int | None = None,
    batch_size: int = 8,
) -> Iterator[Losses]:
    """The loss of every predicted token, long windows first; arguments as in ``perplexity``."""
    stride = length if stride is None else stride
    for name, value, most in (("length", length, math.inf), ("stride", stride, length)):
        if not 1 <= value <= most:
            raise ValueError(f"{name}: got {value}; allowed: from 1 to {most}")
    if batch_size < 1:
        raise ValueError(f"batch_size: got {batch_size}; allowed: from 1 on")
    model.eval()
    windows = [w for i, d in enumerate(documents) for w in cut_windows(i, len(d.tokens), length, stride)]
    windows.sort(key=lambda w: w.start - w.stop)
    for begin in range(0, len(windows), batch_size):
        yield from _batch_losses(model, documents, windows[begin : begin + batch_size])


def cut_windows(document: int, num_tokens: int, length: int, stride: int) -> Iterator[Window]:
    """Windows that predict every token of a document but its first, each once."""
    first = 1
    while first < num_tokens:
        stop = min(first + (length if first == 1 else stride), num_tokens)
        yield Window(document, 0 if first == 1 else first - 1 - (length - stride), first, stop)
        first = stop


def buckets(length: int) -> Iterator[tuple[int, int]]:
    """Ranges of positions in doubling steps: 0–31, 32–63, 64–127 and so on."""
    low, high = 0, FIRST_BUCKET
    while low < length:
        yield low, min(high, length)
        low, high = high, 2 * high


def _batch_losses(
    model: PreTrainedModel, documents: Sequence[Document], windows: Sequence[Window]
) -> Iterator[Losses]:
    sizes = [w.stop - 1 - w.start for w in windows]
    ids = torch.zeros(len(windows), max(sizes), dtype=torch.long)
    for row, (w, size) in enumerate(zip(windows, sizes, strict=True)):
        ids[row, :size] = documents[w.document].tokens[w.start : w.stop - 1]
    mask = torch.arange(max(sizes)) < torch.tensor(sizes).unsqueeze(1)
    skipped = min(w.first - 1 - w.start for w in windows)
    logits = model(
        input_ids=ids.to(model.device),
        attention_mask=None if bool(mask.all()) else mask.long().to(model.device),
        use_cache=False,
        logits_to_keep=max(sizes) - skipped,
    ).logits
    for row, (w, size) in enumerate(zip(windows, sizes, strict=True)):
        position = w.first - 1 - w.start
        targets = documents[w.document].tokens[w.first : w.stop]
        yield Losses(
            w.document, w.first, position, nats(logits[row, position - skipped : size - skipped], targets)
        )


def nats(logits: Annotated[Tensor, "n V"], targets: Annotated[Tensor, "n"]) -> Annotated[Tensor, "n"]:
    """Negative log-likelihood of each target, worked out in float32 or better."""
    precise = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(precise, targets.to(logits.device), reduction="none").double().cpu()
