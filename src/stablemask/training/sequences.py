"""The sequences of a run in the order in which it sees them, which a recipe and a seed determine."""

from functools import lru_cache
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from stablemask.data import Blocks
from stablemask.data.blocks import NOT_PREDICTED

Batch = dict[str, Annotated[Tensor, "B T"]]


class Sequences(Dataset[dict[str, Tensor]]):
    """Every sequence of a run, first to last: pass after pass over all blocks, each shuffled anew.

    A run reads it from front to back, so that it goes on at any update without any state but its number.

    Args:
        blocks: The training split.
        count: Sequences in the whole run.
        seed: Of the order.
    """

    def __init__(self, blocks: Blocks, count: int, seed: int) -> None:
        self.blocks = blocks
        self.count = count
        self.seed = seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        number, place = divmod(index, len(self.blocks))
        return self.blocks[int(_order(self.seed, number, len(self.blocks))[place])]


@lru_cache(maxsize=2)  # at the border of two passes a batch has sequences of both
def _order(seed: int, number: int, count: int) -> npt.NDArray[np.uint32]:
    return np.random.default_rng((seed, number)).permutation(np.arange(count, dtype=np.uint32))


def collate(sequences: list[dict[str, Tensor]]) -> Batch:
    """A batch. The first token of a row is no label, as nothing before it predicts it."""
    batch: Any = default_collate(sequences)
    batch["labels"][:, 0] = NOT_PREDICTED
    return {name: torch.as_tensor(values) for name, values in batch.items()}
