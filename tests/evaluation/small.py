"""A model, a tokenizer and documents small enough for a test."""

from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from stablemask.evaluation.documents import Document
from stablemask.model import StableMaskForCausalLM
from tests.model import tiny

LENGTH = 16


def tokenizer(*, end: bool = True) -> PreTrainedTokenizerFast:
    """One token a byte; and one for the end of a text."""
    alphabet = {letter: number for number, letter in enumerate(sorted(ByteLevel.alphabet()))}
    if end:
        alphabet["<end>"] = len(alphabet)
    inner = Tokenizer(BPE(alphabet, []))
    inner.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>" if end else None)


def model(remedy: str = "stablemask", position: str = "rope", **settings: object) -> StableMaskForCausalLM:
    own = {"horizon": LENGTH} if remedy == "stablemask" else {}
    return tiny.model(
        position, remedy, **{"vocab_size": 257, "max_position_embeddings": LENGTH, **own, **settings}
    )


def documents(*sizes: int, seed: int = 3) -> list[Document]:
    """Documents with so many predicted tokens, each of which stands for three bytes."""
    generator = torch.Generator().manual_seed(seed)
    return [Document(torch.randint(257, (size + 1,), generator=generator), 3 * size) for size in sizes]


def save(folder: Path, remedy: str = "stablemask") -> Path:
    model(remedy).float().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder
