"""Tokenizers: by name, from a folder, of bytes, or trained on the training split."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import tokenizers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from stablemask.data import cache as disk
from stablemask.data.config import DataConfig
from stablemask.data.progress import Bar
from stablemask.data.sources import Part

END = "<|endoftext|>"
# A vocabulary is learned from at most so many characters: what follows changes few of its entries.
_LEARNED_FROM = 2**28


def open_tokenizer(config: DataConfig, train: Part, bar: Bar) -> PreTrainedTokenizerFast:
    """The tokenizer that a configuration names; it has an end of text and an exact fast form."""
    if config.tokenizer == "bytes":
        # Without words, which only matter to merges.
        return _wrap(_byte_level(models.BPE(vocab=_byte_vocabulary(), merges=[]), words=False))
    if config.tokenizer.startswith("bpe:"):
        return _trained(config, train, bar)
    return named_tokenizer(config.tokenizer)


def fingerprint(tokenizer: PreTrainedTokenizerFast) -> str:
    """A key of all that tokenising depends on."""
    return disk.key(tokenizer.backend_tokenizer.to_str(), tokenizer.eos_token_id)


def named_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """The tokenizer in a folder or on the hub."""
    path = Path(name).expanduser()
    if name.startswith((".", "/", "~")) and not path.is_dir():
        raise FileNotFoundError(f"tokenizer: got {name!r}; there is no such folder")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path if path.is_dir() else name)
    except Exception as error:  # tokenizers has no class of its own for a damaged file
        raise ValueError(
            f"tokenizer: got {name!r}; allowed: 'bytes', 'bpe:N', a folder with a tokenizer, or a name on "
            f"the hub ({error})"
        ) from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise TypeError(
            f"tokenizer: got {name!r}, a {type(tokenizer).__name__}; allowed: one with a tokenizer.json"
        )
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"tokenizer: got {name!r}, which has no eos_token; allowed: one that can end a document"
        )
    return tokenizer


def _trained(config: DataConfig, train: Part, bar: Bar) -> PreTrainedTokenizerFast:
    size = int(config.tokenizer.removeprefix("bpe:"))
    name = disk.key("bpe", 1, tokenizers.__version__, size, train.fingerprint(bar))
    folder = Path(config.cache) / "tokenizers"
    whole = folder / name
    make = partial(_train, size=size, train=train, bar=bar)
    disk.entry(folder, name, lambda path: (path / "tokenizer.json").is_file(), make, bar)
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(whole)
    return tokenizer


def _train(folder: Path, *, size: int, train: Part, bar: Bar) -> None:
    tokenizer = _byte_level(models.BPE(), words=True)
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[END],
        show_progress=False,
    )
    with bar.task(f"training {size} entries of a tokenizer", train.source.total) as advance:

        def texts() -> Iterator[str]:
            seen = 0
            for piece in train.pieces():
                if seen > _LEARNED_FROM:
                    return
                seen += len(piece.text)
                advance(piece.read, "")
                yield exact(piece.text)

        tokenizer.train_from_iterator(texts(), trainer)
    _wrap(tokenizer).save_pretrained(folder)


def exact(text: str) -> str:
    """Text that can be encoded: half a surrogate pair, which JSON may contain, becomes U+FFFD."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _byte_level(model: models.Model, *, words: bool) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _byte_vocabulary() -> dict[str, int]:
    """Every byte under its own number. The letters that stand for bytes are those of GPT-2, in its order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return {letters[byte]: byte for byte in range(256)}


def _wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, bos_token=END, clean_up_tokenization_spaces=False
    )
    assert json.loads(wrapped.backend_tokenizer.to_str())["model"]["type"] == "BPE"
    return wrapped
