"""Punctuation, function words, digits, others: the classes of tokens over which attention is summed.

A class belongs to a word, and a token has the class of the word it is a piece of: the ``the`` of ``theory``
is no function word. Words are found in the text, so a tokenizer has to say where its tokens stand.
"""

import re
from collections.abc import Sequence
from typing import Annotated

import torch
from torch import Tensor

CLASSES = ("punctuation", "function words", "digits", "others")
"""In the order of their numbers."""

TokenClasses = Annotated[Tensor, "T"]

_PUNCTUATION, _FUNCTION_WORD, _DIGITS, _OTHER = range(len(CLASSES))
_WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)*")  # letters, an apostrophe between them

FUNCTION_WORDS = frozenset(
    """
    a an the this that these those each every either neither some any no all both few many much more most
    several such another other own same what which whose whatever whichever
    i me my mine myself you your yours yourself yourselves he him his himself she her hers herself it its
    itself we us our ours ourselves they them their theirs themselves who whom whoever one oneself someone
    somebody something anyone anybody anything everyone everybody everything nobody nothing none
    about above across after against along amid among around as at before behind below beneath beside besides
    between beyond but by concerning despite down during except for from in inside into like near of off on
    onto out outside over past per regarding since through throughout till to toward towards under underneath
    until unto up upon versus via with within without
    and or nor so yet if unless although though because whereas while whether than when where why how whenever
    wherever once
    am is are was were be been being have has had having do does did doing can could may might must shall
    should will would ought need dare used cannot
    not won't shan't never there here then thus too very just only also again even still already ever
    """.split()  # noqa: SIM905 - words read best as words
)
"""Closed classes of English: determiners, pronouns, prepositions, conjunctions, auxiliaries, particles."""


def classify(text: str, offsets: Sequence[tuple[int, int]]) -> TokenClasses:
    """The class of every token, as an index into ``CLASSES``.

    Args:
        text: What was tokenized.
        offsets: Where each token begins and ends in it, as fast tokenizers report; (0, 0) for special tokens,
            which are others. White space around a token does not count, and alone it is others.

    Examples:
        >>> [CLASSES[c] for c in classify("The cat, 9", [(0, 3), (3, 7), (7, 8), (8, 10)])]
        ['function words', 'others', 'punctuation', 'digits']
    """
    inside = bytearray(len(text))
    for word in _WORD.finditer(text):
        if _is_function_word(word[0].lower().replace("’", "'")):
            inside[word.start() : word.end()] = b"\1" * len(word[0])
    return torch.tensor([_class_of(text, start, stop, inside) for start, stop in offsets], dtype=torch.int64)


def _is_function_word(word: str) -> bool:
    """Whether it is in the list, or a contraction of a word that is: it's, isn't, can't."""
    return not FUNCTION_WORDS.isdisjoint((word, word.removesuffix("n't"), word.partition("'")[0]))


def _class_of(text: str, start: int, stop: int, inside: bytearray) -> int:
    if not 0 <= start <= stop <= len(text):
        raise ValueError(f"offsets: got ({start}, {stop}); allowed: places in a text of {len(text)}")
    piece = text[start:stop].strip()
    if not piece:
        return _OTHER
    if all(c.isnumeric() for c in piece):
        return _DIGITS
    if not any(c.isalnum() for c in piece):
        return _PUNCTUATION
    letters = [at for at in range(start, stop) if not text[at].isspace()]
    return _FUNCTION_WORD if all(inside[at] for at in letters) else _OTHER
