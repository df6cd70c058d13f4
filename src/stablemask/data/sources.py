"""Sources of text: which one a name means, which splits it has, and how its documents are read.

A source yields *fragments* in an order that never changes: a row, a line, a part of a file. A fragment says
whether a document begins with it. ``pieces`` joins them into what the tokenizer gets.
"""

import hashlib
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple, Protocol

from stablemask.data.config import DataConfig

# Characters. A document of any length passes through in pieces of this size, cut before white space, where
# pre-tokenizers cut as well; a piece also bounds what the tokenizer holds at a time.
PIECE = 2**18
SPLITS = ("train", "valid", "test")


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

    def fingerprint(self) -> str:
        """A key of its content."""

    def fragments(self) -> Iterator[Fragment]:
        """Its text."""


class Part(NamedTuple):
    """One split: a source, and the share of its documents, by their hash, that belong to the split."""

    source: Source
    share: tuple[float, float] = (0.0, 1.0)

    def pieces(self) -> Iterator[Fragment]:
        """Its text in pieces, without empty documents."""
        everything = pieces(self.source.fragments())
        return everything if self.share == (0.0, 1.0) else _chosen(everything, self.share)

    def fingerprint(self) -> str:
        """A key of its content."""
        return f"{self.source.fingerprint()} {self.share}"


def parts(config: DataConfig, cache: Path) -> dict[str, Part]:
    """The three splits: their own sources, the source's own splits, else documents held out of training."""
    own = open_source(config, "source", cache)
    given = {name: config.valid if name == "valid" else config.test for name in SPLITS[1:]}
    found: dict[str, Part] = {}
    held: list[str] = []
    for name, source in given.items():
        if source is not None:
            found[name] = Part(_only(open_source(config, name, cache), name))
        elif name in own:
            found[name] = Part(own[name])
        else:
            held.append(name)
    start = 0.0
    for name in held:
        found[name] = Part(own["train"], (start, start + config.held_out))
        start += config.held_out
    found["train"] = Part(own["train"], (start, 1.0))
    return {name: found[name] for name in SPLITS}


def open_source(config: DataConfig, option: str, cache: Path) -> dict[str, Source]:
    """The splits of the source that an option of the configuration names; ``train`` is always there."""
    from stablemask.data import builtin, files  # noqa: PLC0415 - they import this module

    value = {"source": config.source, "valid": config.valid, "test": config.test}[option]
    assert value is not None
    begins = None if config.begins is None else re.compile(config.begins)
    if value == "builtin":
        return {"train": builtin.StandardLibrary()}
    path = Path(value).expanduser()
    if path.exists():
        return files.open_local(path, option, config.text, begins, cache)
    if files.is_path(value):
        raise FileNotFoundError(f"{option}: got {value!r}; there is no such file or folder")
    from stablemask.data import hub  # noqa: PLC0415 - importing datasets takes its time

    return hub.open_dataset(value, option, config.text, begins)


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


def _only(splits: dict[str, Source], name: str) -> Source:
    """Of a source given for one split: that split of it if it has it, else all of it."""
    return splits.get(name) or splits["train"]


def _cut(text: str, begin: int) -> int:
    """Where to end a piece: before the last white space of its second half, if there is any."""
    end = begin + PIECE
    for place in range(end, begin + PIECE // 2, -1):
        if text[place].isspace() and not text[place - 1].isspace():
            return place
    return end


def _chosen(everything: Iterator[Fragment], share: tuple[float, float]) -> Iterator[Fragment]:
    keep = False
    for piece in everything:
        if piece.starts:
            digest = hashlib.blake2b(piece.text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
            keep = share[0] <= int.from_bytes(digest, "big") / 2**64 < share[1]
        if keep:
            yield piece


def chained(sources: Iterator[Iterator[Fragment]]) -> Iterator[Fragment]:
    """One source after another."""
    return chain.from_iterable(sources)
