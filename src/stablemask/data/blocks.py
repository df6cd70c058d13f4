"""Blocks of one length, cut from a stream of tokens that stays on disk."""

from functools import cached_property
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerFast

from stablemask.data import cache as disk
from stablemask.data.config import Packing
from stablemask.data.tokens import Tokens

Block = dict[str, Annotated[Tensor, "T"]]
NOT_PREDICTED = -100  # the label that the loss of transformers leaves out


class Blocks(Dataset[Block]):
    """The consecutive blocks of a split; the tokens behind the last whole one are left out.

    A block is a dictionary of int64 tensors (T,):

    * ``input_ids``: the tokens. Every document ends with the tokenizer's end of text.
    * ``labels``: the same, for a model that shifts them itself, as those of transformers do. With packing by
      documents, −100 at the first token of each, which nothing before it predicts.
    * ``position_ids``, with packing by documents only: 0-based, restarting with each document and block.

    Attributes:
        length: Tokens in a block, T.
        packing: As in ``DataConfig``.
        num_bytes: Bytes of UTF-8 that the tokens of all blocks stand for. A model's bits per byte are
            its mean loss a token, in bits, × ``num_tokens`` / ``num_bytes``.
    """

    def __init__(self, tokens: Tokens, length: int, packing: Packing, num_bytes: int) -> None:
        self.tokens = tokens
        self.length = length
        self.packing = packing
        self.num_bytes = num_bytes

    def __len__(self) -> int:
        return self.tokens.length // self.length

    @property
    def num_tokens(self) -> int:
        """Tokens of all blocks."""
        return len(self) * self.length

    @property
    def fingerprint(self) -> str:
        """A key of the content: equal text, tokenizer, length and packing give an equal one."""
        return disk.key("blocks", self.tokens.key, self.length, self.packing)

    def __getitem__(self, index: int) -> Block:
        count = len(self)
        if not -count <= index < count:
            raise IndexError(f"index: got {index}; allowed: below {count}, the number of blocks")
        begin = index % count * self.length
        ids = torch.from_numpy(self._stream[begin : begin + self.length].astype(np.int64))
        if self.packing == "concatenated":
            return {"input_ids": ids, "labels": ids.clone()}
        low, high = np.searchsorted(self._starts, [begin, begin + self.length])
        firsts = self._starts[low:high] - begin
        positions = np.arange(self.length)
        last = np.zeros(self.length, np.int64)
        last[firsts] = firsts
        labels = ids.clone()
        labels[torch.from_numpy(firsts)] = NOT_PREDICTED
        positions -= np.maximum.accumulate(last)
        return {"input_ids": ids, "labels": labels, "position_ids": torch.from_numpy(positions)}

    def __getstate__(self) -> dict[str, Any]:
        """Without the mapped files: another process maps them itself."""
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    @cached_property
    def _stream(self) -> npt.NDArray[Any]:
        return self.tokens.stream()

    @cached_property
    def _starts(self) -> npt.NDArray[np.int64]:
        return self.tokens.starts()


def cut_blocks(
    tokens: Tokens, split: str, length: int, packing: Packing, tokenizer: PreTrainedTokenizerFast
) -> Blocks:
    """The blocks of a stream; an error if there is none."""
    if tokens.length < length:
        raise ValueError(
            f"length: got {length}, but the {split} split has only {tokens.length} tokens; allowed: at most "
            "that, or more text"
        )
    whole = tokens.length // length * length
    rest = tokens.stream()[whole:]
    lost = 0
    for document in np.split(rest, np.flatnonzero(rest == tokenizer.eos_token_id)):
        ids = document[document != tokenizer.eos_token_id].tolist()
        lost += len(tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False).encode())
    return Blocks(tokens, length, packing, tokens.text_bytes - lost)
