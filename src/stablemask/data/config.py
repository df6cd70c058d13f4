"""What to train on: the text, its tokenizer and its packing, as one table of a recipe."""

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

Packing = Literal["documents", "concatenated"]
SMALLEST_BPE = 257  # every byte, and the end of text


def default_cache() -> str:
    """``$XDG_CACHE_HOME/stablemask``, by default ``~/.cache/stablemask``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return str((Path(base) if base else Path.home() / ".cache") / "stablemask")


@dataclass(frozen=True)
class DataConfig:
    """Where the text comes from and how it becomes blocks."""

    source: str = "builtin"
    """"builtin" (documentation and source of the running Python's standard library, no download), the name of
    a dataset on the Hugging Face hub, with its configuration behind it if it has several
    ("Salesforce/wikitext/wikitext-103-raw-v1"), or a local file or folder: .txt, .jsonl, .parquet, also
    compressed (.gz, .zst, .xz, .bz2)."""

    text: str = "text"
    """The column of the text, for sources that have columns."""

    begins: str | None = None
    """Regular expression. A row (of a .txt file: a line) that matches at its start begins a document, the
    others continue it: "^ = [^=]" for WikiText, whose rows are lines of articles. By default every row, and
    every .txt file, is a document."""

    tokenizer: str = "bpe:4096"
    """"bytes", "bpe:N" (N entries, trained on the training split), a local folder, or a name on the hub
    such as "gpt2"."""

    packing: Packing = "concatenated"
    """"concatenated": blocks are cut from one stream of tokens and attention crosses documents, as in the
    paper. "documents": positions restart with every document, which keeps attention inside it."""

    valid: str | None = None
    """Source of the validation split. By default the source's own, else documents held out of training."""

    test: str | None = None
    """Source of the test split, likewise."""

    held_out: float = 0.05
    """Share of the documents, chosen by a hash of their text, that a split without a source gets."""

    cache: str = field(default_factory=default_cache)
    """Folder of tokenised text and trained tokenizers."""

    def __post_init__(self) -> None:
        """Refuse what no source could make right."""
        for name in ("source", "text", "tokenizer", "cache", "valid", "test"):
            if getattr(self, name) == "":
                raise ValueError(f"{name}: got an empty string; allowed: any other")
        if self.packing not in get_args(Packing):
            raise ValueError(f"packing: got {self.packing!r}; allowed: {', '.join(get_args(Packing))}")
        if not 0 < self.held_out < 0.5:
            raise ValueError(f"held_out: got {self.held_out}; allowed: above 0 and below 0.5")
        if self.tokenizer.startswith("bpe:"):
            size = self.tokenizer.removeprefix("bpe:")
            if not size.isdecimal() or int(size) < SMALLEST_BPE:
                raise ValueError(
                    f"tokenizer: got {self.tokenizer!r}; allowed: bpe:N with N of at least {SMALLEST_BPE}, "
                    "which are the bytes and the end of text"
                )
        if self.begins is not None:
            try:
                re.compile(self.begins)
            except re.error as error:
                raise ValueError(
                    f"begins: got {self.begins!r}; allowed: a regular expression ({error})"
                ) from error
