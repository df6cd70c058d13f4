"""The text that a model is evaluated on: documents as tokens, with the number of bytes they stand for."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from stablemask.data import DataConfig
from stablemask.data.sources import Part, parts
from stablemask.data.tokenizer import exact


class Document(NamedTuple):
    """Tokens, the first of which is context only, and the UTF-8 bytes that the others stand for."""

    tokens: Annotated[Tensor, "n"]
    num_bytes: int


def read_texts(source: str = "builtin", begins: str | None = None) -> list[str]:
    """The documents of a source.

    Args:
        source: As in ``stablemask.data.DataConfig``: "builtin", a local file or folder, or a dataset on the
            hub. Of the built-in corpus, and of sources with splits of their own, it is the test split.
        begins: A regular expression of the lines that begin a document, likewise.
    """
    config = DataConfig(test=None if source == "builtin" else source, begins=begins)
    return whole_texts(parts(config, Path(config.cache).expanduser())["test"])


def whole_texts(part: Part) -> list[str]:
    """The documents of a split, each in one piece."""
    texts: list[str] = []
    for piece in part.pieces():
        if piece.starts:
            texts.append("")
        texts[-1] += exact(piece.text)
    return texts


def tokenize(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[Document]:
    """Documents of two tokens or more.

    The tokenizer's token for the beginning of a text, or else for its end, comes first, so that every token
    of the text is predicted. Where it has neither, the first token of the text is context only, and its bytes
    do not count. Text that spells a special token is text, as in training.
    """
    first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    documents = []
    for text in texts:
        encoded = tokenizer(
            text,
            add_special_tokens=False,
            split_special_tokens=True,
            return_offsets_mapping=first is None,
            verbose=False,
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
