"""What sources of text yield, and how it is joined and cut for the tokenizer.

A source yields *fragments* in an order that never changes: a row, a line, a part of a file. A fragment says
whether a document begins with it. ``pieces`` joins them into what the tokenizer gets.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from stablemask.data.progress import Bar

# Characters. A document of any length passes through in pieces of this size, cut before white space, where
# pre-tokenizers cut as well; a piece also bounds what the tokenizer holds at a time.
PIECE = 2**16


class Reading(NamedTuple):
    """How a source is read: the option that names it, its column of text, what begins a document.

    ``cache`` is the folder in which hashes of files are remembered.
    """

    option: str
    column: str
    begins: re.Pattern[str] | None
    cache: Path

    def key(self) -> list[str | None]:
        """What of it decides on the text that is read."""
        return [self.column, None if self.begins is None else self.begins.pattern]


class Fragment(NamedTuple):
    """Some text, whether it begins a document, and how much of the source is read with it."""

    text: str
    starts: bool
    read: int


class Source(Protocol):
    """Text in an order that never changes."""

    @property
    def name(self) -> str:
        """How errors name it."""

    @property
    def total(self) -> int:
        """What ``Fragment.read`` ends at: bytes of files, rows of datasets."""

    def fingerprint(self, bar: Bar) -> str:
        """A key of its content."""

    def fragments(self) -> Iterator[Fragment]:
        """Its text."""


def pieces(fragments: Iterator[Fragment]) -> Iterator[Fragment]:
    """Fragments of a document joined, and cut again where they are too long; empty documents left out."""
    held: list[str] = []
    size, starts, read = 0, True, 0
    for fragment in fragments:
        if fragment.starts:
            if size:
                yield Fragment("".join(held), starts, read)
            held, size, starts = [], 0, True
        held.append(fragment.text)
        size += len(fragment.text)
        read = fragment.read
        if size > PIECE:
            text = "".join(held)
            begin = 0
            while size - begin > PIECE:
                end = _cut(text, begin)
                yield Fragment(text[begin:end], starts, read)
                begin, starts = end, False
            held = [text[begin:]]
            size -= begin
    if size:
        yield Fragment("".join(held), starts, read)


def _cut(text: str, begin: int) -> int:
    """Where to end a piece: before the last white space of its second half, if there is any."""
    end = begin + PIECE
    for place in range(end, begin + PIECE // 2, -1):
        if text[place].isspace() and not text[place - 1].isspace():
            return place
    return end
