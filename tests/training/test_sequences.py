"""The order in which a run sees its text: fixed by the seed, each block once a pass, from any update on."""

import pytest
import torch

from stablemask.data import Blocks, prepare
from stablemask.data.blocks import NOT_PREDICTED
from stablemask.training.sequences import Sequences, collate
from tests.training import small


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Blocks:
    return prepare(small.recipe(tmp_path_factory.mktemp("blocks")).data, 61, progress=False).train


def seen(blocks: Blocks, count: int, seed: int) -> list[tuple[int, ...]]:
    sequences = Sequences(blocks, count, seed)
    return [tuple(sequences[i]["input_ids"].tolist()) for i in range(count)]


def test_each_pass_has_every_block_once_in_an_order_of_its_own(blocks: Blocks) -> None:
    count = len(blocks)
    every = sorted(tuple(blocks[i]["input_ids"].tolist()) for i in range(count))
    assert len(set(every)) > count // 2
    found = seen(blocks, 2 * count + 3, seed=0)
    first, second, begun = found[:count], found[count : 2 * count], found[2 * count :]
    assert sorted(first) == sorted(second) == every
    assert first != second
    assert first != [tuple(blocks[i]["input_ids"].tolist()) for i in range(count)]
    assert begun == seen(blocks, 3 * count, seed=0)[2 * count : 2 * count + 3], "whatever the run's length"


def test_the_seed_decides(blocks: Blocks) -> None:
    assert seen(blocks, len(blocks), seed=1) == seen(blocks, len(blocks), seed=1)
    assert seen(blocks, len(blocks), seed=1) != seen(blocks, len(blocks), seed=2)


def test_the_first_token_of_a_row_is_no_label(blocks: Blocks) -> None:
    batch = collate([blocks[0], blocks[1]])
    assert batch["labels"].shape == (2, 61)
    assert (batch["labels"][:, 0] == NOT_PREDICTED).all()
    assert torch.equal(batch["labels"][:, 1:], batch["input_ids"][:, 1:])
