"""The text that a model is evaluated on: documents as tokens, with the number of bytes they stand for."""

import gzip
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

_KINDS = (".txt", ".raw", ".jsonl")


class Document(NamedTuple):
    """Tokens, the first of which is context only, and the UTF-8 bytes that the others stand for."""

    tokens: Annotated[Tensor, "n"]
    num_bytes: int


def read_texts(source: Path) -> list[str]:
    """Texts of a file or of every file in a folder.

    Args:
        source: ``.txt`` and ``.raw`` files are one text each, ``.jsonl`` files one a line, under the key
            "text". All of them may be compressed: ``.txt.gz``. A folder is read in the order of its names.
    """
    if not source.exists():
        raise ValueError(f"text: got {str(source)!r}, which does not exist; allowed: a file or a folder")
    files = [source] if source.is_file() else sorted(p for p in source.rglob("*") if _kind(p) in _KINDS)
    texts = [text for file in files for text in _texts(file) if text.strip()]
    if not texts:
        raise ValueError(f"text: got {str(source)!r}, without any text; allowed: {', '.join(_KINDS)}, or .gz")
    return texts


def tokenize(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[Document]:
    """Documents of two tokens or more.

    The tokenizer's token for the beginning of a text, or else for its end, comes first, so that every token
    of the text is predicted. Where it has neither, the first token of the text is context only, and its bytes
    do not count.
    """
    first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    documents = []
    for text in texts:
        encoded = tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=first is None, verbose=False
        )
        ids, predicted = encoded["input_ids"], text
        if first is not None:
            ids = [first, *ids]
        elif ids:
            predicted = text[encoded["offset_mapping"][0][1] :]
        if len(ids) > 1:
            documents.append(Document(torch.tensor(ids), len(predicted.encode())))
    if not documents:
        raise ValueError("text: got no document of two tokens; allowed: documents with something to predict")
    return documents


def cut(documents: Sequence[Document], max_tokens: int) -> list[Document]:
    """The first documents, as many as have at most ``max_tokens`` predicted tokens; never less than one."""
    kept: list[Document] = []
    left = max_tokens
    for document in documents:
        left -= len(document.tokens) - 1
        if kept and left < 0:
            break
        kept.append(document)
    return kept


def digest(documents: Sequence[Document]) -> str:
    """A short name for exactly these tokens."""
    total = hashlib.sha256()
    for document in documents:
        total.update(document.tokens.numpy().tobytes() + b"|")
    return total.hexdigest()[:12]


def _kind(path: Path) -> str:
    return path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix


def _texts(file: Path) -> Iterator[str]:
    if _kind(file) not in _KINDS:
        raise ValueError(f"text: got {str(file)!r}; allowed: {', '.join(_KINDS)}, each also with .gz")
    opener = gzip.open if file.suffix == ".gz" else open
    with opener(file, "rt", encoding="utf-8") as lines:
        if _kind(file) != ".jsonl":
            yield lines.read()
            return
        for number, line in enumerate(lines, 1):
            entry = json.loads(line) if line.strip() else {"text": ""}
            if not isinstance(entry, dict) or not isinstance(entry.get("text"), str):
                got = f'line {number} of {str(file)!r} without "text"'
                raise ValueError(f"text: got {got}; allowed: objects with one")  # noqa: TRY004 - of a file
            yield entry["text"]
