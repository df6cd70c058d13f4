"""Texts as a model reads them: pieces of one length, with the text and the class of every token."""

from collections.abc import Iterable
from typing import Annotated, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from stablemask.analysis.classes import CLASSES, TokenClasses, classify


class Piece(NamedTuple):
    """Tokens that go through a model together.

    Attributes:
        ids: What the model gets.
        tokens: The same as text, special tokens by their names.
        classes: The class of each, as an index into ``CLASSES``.
    """

    ids: Annotated[Tensor, "1 T"]
    tokens: list[str]
    classes: TokenClasses

    @property
    def length(self) -> int:
        """T."""
        return len(self.tokens)


def cut_pieces(
    texts: Iterable[str], tokenizer: PreTrainedTokenizerBase, *, length: int, count: int = 1
) -> list[Piece]:
    """The first ``count`` pieces of ``length`` tokens, none of them across two texts.

    Special tokens that the tokenizer puts in front of a text stand in front of every piece, and are counted.
    Where no text has ``length`` tokens there is one piece, the longest text.

    Args:
        texts: No more of them are read than it takes.
        tokenizer: A fast one, which knows where its tokens stand.
        length: Tokens of a piece.
        count: Pieces at most.

    Examples:
        >>> pieces = cut_pieces(["A text."], tokenizer, length=512)
    """
    if length < 2 or count < 1:
        raise ValueError(f"length, count: got {length}, {count}; allowed: 2 tokens or more, 1 piece or more")
    if not tokenizer.is_fast:
        got = f"{type(tokenizer).__name__}, which does not say where its tokens stand"
        raise ValueError(f"tokenizer: got {got}; allowed: fast tokenizers")
    front = _front(tokenizer)
    step = length - front.length
    if step < 1:
        raise ValueError(f"length: got {length}; allowed: more than the {front.length} special tokens")
    pieces: list[Piece] = []
    longest = front
    for text in texts:
        whole = _tokenize(text, tokenizer)
        parts = [_slice(whole, at, at + step) for at in range(0, whole.length - step + 1, step)]
        pieces += [_join(front, part) for part in parts]
        if len(pieces) >= count:
            break
        if front.length + whole.length > longest.length:
            longest = _join(front, whole)
    if not pieces and longest.length < 2:
        raise ValueError(f"text: got {longest.length} tokens; allowed: texts of two or more")
    return pieces[:count] or [longest]


def _tokenize(text: str, tokenizer: PreTrainedTokenizerBase) -> Piece:
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    offsets = encoded["offset_mapping"]
    ids = torch.tensor([encoded["input_ids"]], dtype=torch.int64)
    return Piece(ids, [text[start:stop] for start, stop in offsets], classify(text, offsets))


def _front(tokenizer: PreTrainedTokenizerBase) -> Piece:
    """The special tokens that the tokenizer puts in front of every text."""
    encoded = tokenizer("a", return_special_tokens_mask=True)
    count = [*encoded["special_tokens_mask"], 0].index(0)
    ids = torch.tensor([encoded["input_ids"][:count]], dtype=torch.int64)
    names = [str(tokenizer.convert_ids_to_tokens(int(i))) for i in ids[0]]
    return Piece(ids, names, torch.full((count,), len(CLASSES) - 1))


def _slice(piece: Piece, start: int, stop: int) -> Piece:
    return Piece(piece.ids[:, start:stop], piece.tokens[start:stop], piece.classes[start:stop])


def _join(first: Piece, second: Piece) -> Piece:
    ids, classes = torch.cat([first.ids, second.ids], 1), torch.cat([first.classes, second.classes])
    return Piece(ids, first.tokens + second.tokens, classes)


def head(piece: Piece, length: int) -> Piece:
    """The first ``length`` tokens of a piece."""
    return _slice(piece, 0, length)
