"""The table of what is measured: every case once, with its bar."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import torch

from stablemask.benchmark import Case

# Lengths of packed documents, shuffled: every length from 8 to 120 once, and every 37th from 100 to 1,000.
SHORT_DOCUMENTS = tuple(8 + 37 * i % 113 for i in range(113))
LONGER_DOCUMENTS = tuple(100 + 37 * (7 * i % 25) for i in range(25))

ALIBI_LENGTHS = (512, 1024, 2048, 4096)
CONTRAST_LENGTHS = (512, 2048)
QUICK_LENGTHS = (256, 1024)


@dataclass(frozen=True)
class Entry:
    """A case with the ratio it must not exceed.

    Args:
        case: What is measured.
        bar: The ratio.
        contrast: Also measure every other back end that can serve the case.
        quick: Part of the short run.
    """

    case: Case
    bar: float
    contrast: bool = False
    quick: bool = False


def _entries() -> Iterator[Entry]:
    for dtype, width in product((torch.float32, torch.bfloat16), (64, 128)):
        for entry in _shapes(partial(Case, dtype=dtype, width=width)):
            yield replace(entry, quick=entry.quick and width == 64)
            if entry.case.group != "decode":
                yield replace(
                    entry, case=replace(entry.case, backward=True), quick=entry.quick and width == 64
                )


def _shapes(case: partial[Case]) -> Iterator[Entry]:
    yield Entry(case("eager", length=64), bar=3.0, quick=True)
    for length in (256, 512, 1024, 2048, 4096, 8192):
        heads = _heads(length)
        plain = partial(case, length=length, heads=heads, kv_heads=heads)
        bar = 1.10 if length < 1024 else 1.03
        yield Entry(plain("causal"), bar, contrast=length in CONTRAST_LENGTHS, quick=length in QUICK_LENGTHS)
        if length in ALIBI_LENGTHS:
            yield Entry(plain("alibi", alibi=True), bar=1.10)
    for length in (1024, 2048):
        yield Entry(case("gqa", length=length, heads=_heads(length), kv_heads=_heads(length) // 4), bar=1.03)
    yield Entry(case("window", length=8192, heads=2, kv_heads=2, window=512), bar=2.0)
    for documents in (SHORT_DOCUMENTS, LONGER_DOCUMENTS):
        length = sum(documents)
        heads = _heads(length)
        yield Entry(case("packed", length=length, documents=documents, heads=heads, kv_heads=heads), bar=1.3)
    yield Entry(case("decode", length=4096, queries=1), bar=1.10, quick=True)


def _heads(length: int) -> int:
    return 8 if length <= 1024 else 4 if length <= 2048 else 2


ENTRIES = tuple(_entries())
