"""From a configuration to the blocks of all splits."""

from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedTokenizerFast

from stablemask.data import cache as disk
from stablemask.data.blocks import Blocks, cut_blocks
from stablemask.data.config import DataConfig
from stablemask.data.progress import Bar
from stablemask.data.sources import SPLITS, parts
from stablemask.data.tokenizer import open_tokenizer
from stablemask.data.tokens import open_tokens


class Splits(NamedTuple):
    """The blocks of each split and the tokenizer they were made with."""

    train: Blocks
    valid: Blocks
    test: Blocks
    tokenizer: PreTrainedTokenizerFast


def prepare(config: DataConfig, length: int, *, progress: bool = True) -> Splits:
    """Tokenised blocks of ``length`` tokens, from the cache if this text was tokenised before.

    Any number of processes may call it at once: one works, the others wait for it. A process that is killed
    is continued by the next. Length and packing are applied on reading, so that changing them costs nothing.

    Args:
        config: The text, its tokenizer and its packing.
        length: Tokens in a block.
        progress: Show bars, where standard error is a terminal.

    Raises:
        ValueError: Something about the text is wrong; the message names the option, the file and the line.
        OSError: A file is missing, or the cache cannot be written.
    """
    if length < 2:
        raise ValueError(f"length: got {length}; allowed: at least 2, one token to predict from another")
    cache, bar = Path(config.cache).expanduser(), Bar(progress)
    with disk.writing(cache):
        cache.mkdir(parents=True, exist_ok=True)
    found = parts(config, cache)
    tokenizer = open_tokenizer(config, found["train"], bar)
    blocks = {}
    for split in SPLITS:
        tokens = open_tokens(found[split], split, tokenizer, cache, bar)
        if tokens.length == 0:
            raise ValueError(
                f"{split}: got {found[split].source.name!r}, which has no text for this split; allowed: a "
                "source with more documents, or one for each split (options `valid` and `test`)"
            )
        blocks[split] = cut_blocks(tokens, split, length, config.packing, tokenizer)
    return Splits(blocks["train"], blocks["valid"], blocks["test"], tokenizer)
