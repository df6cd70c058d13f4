"""Perplexity against length, past the training length, with all keys and with a constant number of them.

One text is cut into sequences of T tokens, then of 2T, and so on up to the longest. Every cut predicts the
same tokens, each once; only the number of tokens before them differs. So a rise of the curve is the price of
length, and a fall what longer context is worth. The second half of each sequence, where that shows most, is
also counted alone.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor
from transformers import PreTrainedModel

from stablemask.evaluation.documents import Document
from stablemask.evaluation.perplexity import nats
from stablemask.evaluation.reading import METHODS, Method, Reader

OnTokens = Callable[[int], object]
Sequences = Annotated[Tensor, "n longest+1"]


@dataclass(frozen=True)
class Extrapolation:
    """How to measure perplexity against length.

    Args:
        length: T, the training length by default.
        times: Lengths, in multiples of T; each of them divides the last.
        methods: full keeps all keys; window the most recent ones; pinned the first tokens and the most
            recent ones, with positions inside the cache (StreamingLLM).
        keys: How many keys window and pinned keep, T by default.
        pinned: How many of them are those of the first tokens, with pinned.
        max_tokens: About so many tokens are predicted, from all documents in turn.
        batch_size: Sequences of the longest kind that are read at once; of shorter ones as many more as have
            the same number of tokens.
        chunk: Tokens in one forward pass.
    """

    length: int | None = None
    times: tuple[int, ...] = (1, 2, 4, 8, 16)
    methods: tuple[Method, ...] = METHODS
    keys: int | None = None
    pinned: int = 4
    max_tokens: int = 65_536
    batch_size: int = 8
    chunk: int = 2048

    def __post_init__(self) -> None:
        """Refuse what no model could make right."""
        times = self.times
        if not times or min(times) < 1 or any(max(times) % t for t in times):
            raise ValueError(f"times: got {times}; allowed: positive integers that all divide the largest")
        for name in ("length", "keys", "max_tokens", "batch_size", "chunk"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}: got {value}; allowed: from 1 on")


def cut_sequences(documents: Sequence[Document], longest: int, max_tokens: int) -> Sequences:
    """Sequences of ``longest`` tokens to be predicted, with the one before, from all documents in turn."""
    room = [(len(document.tokens) - 1) // longest for document in documents]
    if not any(room):
        most = max(len(document.tokens) - 1 for document in documents)
        raise ValueError(f"text: got documents of up to {most} tokens; allowed: one of {longest} or more")
    found: list[Tensor] = []
    for turn in range(max(room)):
        for document, count in zip(documents, room, strict=True):
            if turn < count and len(found) * longest < max_tokens:
                found.append(document.tokens[turn * longest : (turn + 1) * longest + 1])
    return torch.stack(found)


@torch.inference_mode()
def extrapolate(
    model: PreTrainedModel,
    sequences: Sequences,
    *,
    length: int,
    method: Method,
    keys: int,
    pinned: int = 4,
    batch_size: int = 8,
    chunk: int = 2048,
    on_tokens: OnTokens | None = None,
) -> Iterator[tuple[str, float]]:
    """Perplexity of a text that is read in sequences of ``length`` tokens.

    Args:
        model: Any causal language model of transformers. The device and dtype are its own.
        sequences: From ``cut_sequences``; their length is a multiple of ``length``.
        length: Tokens after which the model begins anew.
        method: Which keys it keeps.
        keys: How many of them, with "window" and "pinned".
        pinned: How many of these are those of the first tokens, with "pinned".
        batch_size: Sequences of the longest kind that are read at once.
        chunk: Tokens in one forward pass; like ``batch_size``, it changes nothing but speed and memory.
        on_tokens: Called with the number of tokens just predicted.

    Yields:
        ``perplexity``, of all tokens; ``perplexity/second half``, of those with half a sequence or more
        before them; ``tokens``, the number predicted.
    """
    longest = sequences.shape[1] - 1
    if length < 1 or longest % length:
        raise ValueError(f"length: got {length}; allowed: what divides {longest}")
    model.eval()
    texts, targets = (t.reshape(-1, length) for t in (sequences[:, :-1], sequences[:, 1:]))
    at_once = batch_size * (longest // length)
    sums = torch.zeros(length, dtype=torch.float64)
    for ids, wanted in zip(texts.split(at_once), targets.split(at_once), strict=True):
        reader = Reader(model, method, keys=keys, pinned=pinned)
        sums += _read(reader, ids, wanted, chunk, on_tokens)
    late = sums[length // 2 :]
    yield "perplexity", math.exp(float(sums.sum()) / targets.numel())
    yield "perplexity/second half", math.exp(float(late.sum()) / (len(late) * len(targets)))
    yield "tokens", float(targets.numel())


def _read(
    reader: Reader,
    ids: Annotated[Tensor, "B T"],
    targets: Annotated[Tensor, "B T"],
    chunk: int,
    on_tokens: OnTokens | None,
) -> Annotated[Tensor, "T"]:
    """Loss at every position, summed over the texts, in nats."""
    sums = []
    rows = max(chunk // len(ids), 1)
    for piece, wanted in zip(ids.split(rows, 1), targets.split(rows, 1), strict=True):
        losses = nats(reader(piece.to(reader.model.device)).flatten(0, 1), wanted.flatten())
        sums.append(losses.view(wanted.shape).sum(0))
        if on_tokens is not None:
            on_tokens(wanted.numel())
    return torch.cat(sums)
