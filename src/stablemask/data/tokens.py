"""Tokenised text on disk: one stream of tokens and where its documents start, both memory-mapped."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerFast

from stablemask.data import cache as disk
from stablemask.data.fragments import Fragment
from stablemask.data.progress import Bar
from stablemask.data.sources import Part
from stablemask.data.tokenizer import exact, fingerprint

FORMAT = 1
_BATCH = 2**21  # characters given to the tokenizer at once, which it works on in parallel
_SAVED_EVERY = 30.0  # seconds of work that a killed process can lose


@dataclass(frozen=True)
class Progress:
    """How far the tokens on disk go: that of the pieces of text read, and of what was made of them."""

    pieces: int = 0
    tokens: int = 0
    documents: int = 0
    text_bytes: int = 0


@dataclass(frozen=True)
class Tokens:
    """A finished stream. Every document ends with the end of text; ``starts`` says where each begins."""

    folder: Path
    dtype: str
    length: int
    documents: int
    text_bytes: int

    @property
    def key(self) -> str:
        """The key of the content."""
        return self.folder.name

    def stream(self) -> npt.NDArray[Any]:
        """All tokens, mapped."""
        return np.memmap(self.folder / "tokens.bin", self.dtype, mode="r", shape=(self.length,))

    def starts(self) -> npt.NDArray[np.int64]:
        """Where documents start, mapped; ascending, the first is 0."""
        return np.memmap(self.folder / "starts.bin", np.int64, mode="r", shape=(self.documents,))


def open_tokens(part: Part, split: str, tokenizer: PreTrainedTokenizerFast, cache: Path, bar: Bar) -> Tokens:
    """The tokens of a split, from the cache or made now."""
    folder = cache / "tokens"
    name = disk.key("tokens", FORMAT, part.fingerprint(bar), fingerprint(tokenizer))
    make = partial(_make, part=part, split=split, tokenizer=tokenizer, bar=bar)
    found = _read(disk.entry(folder, name, lambda path: _read(path) is not None, make, bar))
    assert found is not None
    return found


def _read(folder: Path) -> Tokens | None:
    """What a folder holds, or None if it is not there or not whole."""
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        tokens = Tokens(folder, meta["dtype"], meta["tokens"], meta["documents"], meta["text_bytes"])
        sizes = [(folder / name).stat().st_size for name in ("tokens.bin", "starts.bin")]
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError):
        return None
    whole = sizes == [tokens.length * np.dtype(tokens.dtype).itemsize, tokens.documents * 8]
    return tokens if whole else None


def _make(folder: Path, *, part: Part, split: str, tokenizer: PreTrainedTokenizerFast, bar: Bar) -> None:
    """Tokenise into a folder, from where a process before this one came to."""
    highest = max(tokenizer.get_vocab().values())
    dtype = np.dtype(np.uint16 if highest < 2**16 else np.uint32)
    with disk.writing(folder):
        state = _saved(folder, dtype)
    writer = _Writer(folder, dtype, state, tokenizer)
    with writer, bar.task(f"tokenising {split}", part.source.total) as advance:
        for batch in _batches(islice(part.pieces(), state.pieces, None)):
            writer.add(batch)
            advance(batch[-1].read, f"{writer.state.tokens / 1e6:.1f} M tokens")
        writer.finish()
    meta = asdict(writer.state) | {"format": FORMAT, "dtype": dtype.name, "source": part.source.name}
    with disk.writing(folder):
        disk.write_atomically(folder / "meta.json", json.dumps(meta, indent=1))
        (folder / "progress.json").unlink(missing_ok=True)


def _saved(folder: Path, dtype: np.dtype[Any]) -> Progress:
    """Where to go on: the last saved progress, with the files cut back to it."""
    file = folder / "progress.json"
    state = Progress(**json.loads(file.read_text(encoding="utf-8"))) if file.exists() else Progress()
    for name, size in (("tokens.bin", state.tokens * dtype.itemsize), ("starts.bin", state.documents * 8)):
        path = folder / name
        path.touch()
        if (
            path.stat().st_size < size
        ):  # saved progress stands for data on disk; this is another kind of damage
            file.unlink()
            return _saved(folder, dtype)
    for name, size in (("tokens.bin", state.tokens * dtype.itemsize), ("starts.bin", state.documents * 8)):
        os.truncate(folder / name, size)
    return state


def _batches(pieces: Iterator[Fragment]) -> Iterator[list[Fragment]]:
    batch: list[Fragment] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text)
        if size >= _BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class _Writer:
    """Appends tokens to the files of a folder and saves, now and then, how far they go."""

    def __init__(
        self, folder: Path, dtype: np.dtype[Any], state: Progress, tokenizer: PreTrainedTokenizerFast
    ) -> None:
        assert tokenizer.eos_token_id is not None
        self.folder = folder
        self.dtype = dtype
        self.state = state
        self.end: int = tokenizer.eos_token_id
        self.backend = tokenizer.backend_tokenizer
        self.backend.no_padding()
        self.backend.no_truncation()
        self.saved = time.monotonic()

    def __enter__(self) -> None:
        # Text that spells a special token is text: a document cannot end another one.
        self.before = self.backend.encode_special_tokens
        self.backend.encode_special_tokens = True
        with disk.writing(self.folder):
            self.tokens = (self.folder / "tokens.bin").open("ab")
            self.starts = (self.folder / "starts.bin").open("ab")

    def __exit__(self, *_: object) -> None:
        self.backend.encode_special_tokens = self.before
        with suppress(OSError):  # after `finish` nothing is left to write; before it, an error is on its way
            self.tokens.close()
        with suppress(OSError):
            self.starts.close()

    def add(self, batch: list[Fragment]) -> None:
        """Append a batch of pieces."""
        texts = [exact(piece.text) for piece in batch]
        encoded = self.backend.encode_batch_fast(texts, add_special_tokens=False)
        ids: list[int] = []
        starts: list[int] = []
        for piece, encoding in zip(batch, encoded, strict=True):
            if piece.starts:
                if self.state.documents or starts:
                    ids.append(self.end)
                starts.append(self.state.tokens + len(ids))
            ids += encoding.ids
        self._append(ids, starts, len(batch), sum(len(text.encode()) for text in texts))
        if time.monotonic() - self.saved > _SAVED_EVERY:
            self._save()

    def finish(self) -> None:
        """End the last document."""
        if self.state.documents:
            self._append([self.end], [], 0, 0)
        self._flush()  # not saved: who went on from here would end the document twice

    def _append(self, ids: list[int], starts: list[int], pieces: int, text_bytes: int) -> None:
        with disk.writing(self.folder):
            self.tokens.write(np.array(ids, self.dtype).tobytes())
            self.starts.write(np.array(starts, np.int64).tobytes())
        self.state = replace(
            self.state,
            pieces=self.state.pieces + pieces,
            tokens=self.state.tokens + len(ids),
            documents=self.state.documents + len(starts),
            text_bytes=self.state.text_bytes + text_bytes,
        )

    def _flush(self) -> None:
        with disk.writing(self.folder):
            for file in (self.tokens, self.starts):
                file.flush()
                os.fsync(file.fileno())

    def _save(self) -> None:
        self._flush()
        with disk.writing(self.folder):
            disk.write_atomically(self.folder / "progress.json", json.dumps(asdict(self.state)))
        self.saved = time.monotonic()
