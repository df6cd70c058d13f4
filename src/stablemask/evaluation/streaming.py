"""One long text through a cache of constant size: is the memory constant, and does the model stay itself?"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import psutil  # type: ignore[import-untyped]
import torch
from torch import Tensor
from transformers import PreTrainedModel

from stablemask.evaluation.documents import Document
from stablemask.evaluation.perplexity import nats
from stablemask.evaluation.reading import Method, Reader

STRETCHES = 10
_MIB = 1 << 20

OnTokens = Callable[[int], object]


@dataclass(frozen=True)
class Streaming:
    """How to stream.

    Args:
        tokens: Length of the stream, which is all documents, one after the other.
        methods: Which of window and pinned; see extrapolation.
        keys: How many keys are kept, the training length by default.
        pinned: How many of them are those of the first tokens, with pinned.
        chunk: Tokens handed over at once.
    """

    tokens: int = 100_000
    methods: tuple[Method, ...] = ("window", "pinned")
    keys: int | None = None
    pinned: int = 4
    chunk: int = 256

    def __post_init__(self) -> None:
        """Refuse what no model could make right."""
        for name, least in (("tokens", STRETCHES), ("chunk", 1), ("keys", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name}: got {value}; allowed: from {least} on")


def join(documents: Sequence[Document], tokens: int) -> Annotated[Tensor, "tokens+1"]:
    """All documents in one, cut after so many predicted tokens."""
    stream = torch.cat([document.tokens for document in documents])[: tokens + 1]
    if len(stream) <= tokens:
        raise ValueError(f"text: got {len(stream) - 1} tokens; allowed: {tokens} or more")
    return stream


@torch.inference_mode()
def stream_text(
    model: PreTrainedModel,
    stream: Annotated[Tensor, "tokens+1"],
    *,
    method: Method,
    keys: int,
    pinned: int = 4,
    chunk: int = 256,
    on_tokens: OnTokens | None = None,
) -> Iterator[tuple[str, float]]:
    """Read one text from its first token to its last and watch perplexity and memory.

    Args:
        model: Any causal language model of transformers.
        stream: From ``join``.
        method: Which keys are kept; "full" for contrast.
        keys: How many of them.
        pinned: How many of these are those of the first tokens, with "pinned".
        chunk: Tokens handed over at once; it changes nothing but speed and memory.
        on_tokens: Called with the number of tokens just predicted.

    Yields:
        ``perplexity/tokens a-b`` of every tenth of the stream; ``cache MiB/tokens b`` after the first tenth
        and at the end; ``memory growth MiB``, by which the memory of the process (on a GPU: the most that
        was allocated there) at the end is above that after the first tenth; ``tokens per second``.
    """
    if len(stream) <= STRETCHES:
        raise ValueError(f"stream: got {len(stream) - 1} tokens; allowed: from {STRETCHES} on")
    model.eval()
    reader = Reader(model, method, keys=keys, pinned=pinned)
    ends = [(i + 1) * (len(stream) - 1) // STRETCHES for i in range(STRETCHES)]
    memory: list[float] = []
    begin, first = time.perf_counter(), 0
    for stop in ends:
        total = 0.0
        for start in range(first, stop, chunk):
            end = min(start + chunk, stop)
            logits = reader(stream[start:end].unsqueeze(0).to(model.device))
            total += float(nats(logits[0], stream[start + 1 : end + 1]).sum())
            if on_tokens is not None:
                on_tokens(end - start)
        memory.append(_memory(model.device))
        yield f"perplexity/tokens {first + 1}-{stop}", math.exp(total / (stop - first))
        if stop in (ends[0], ends[-1]):
            yield f"cache MiB/tokens {stop}", reader.held_bytes() / _MIB
        first = stop
    yield "memory growth MiB", memory[-1] - memory[0]
    yield "tokens per second", (len(stream) - 1) / (time.perf_counter() - begin)


def _memory(device: torch.device) -> float:
    """MiB in use: of the process, or the most so far on its GPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / _MIB
    return float(psutil.Process().memory_info().rss) / _MIB
