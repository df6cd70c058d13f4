"""From a configuration to blocks: the built-in corpus, splits, packing, and the cache."""

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stablemask.data import Blocks, DataConfig, Splits, builtin, prepare

TEXTS = [f"Document {n}.\nIt has {'many ' * (n % 7)}words, é and 語, and ends." for n in range(97)]


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    file = tmp_path / "text.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS), encoding="utf-8")
    return DataConfig(source=str(file), tokenizer="bytes", held_out=0.2, cache=str(tmp_path / "cache"))


def everything(blocks: Blocks, splits: Splits) -> list[str]:
    """The documents that the blocks hold, the last of which may be cut."""
    ids = torch.cat([blocks[i]["input_ids"] for i in range(len(blocks))])
    return splits.tokenizer.decode(ids.tolist()).split(splits.tokenizer.eos_token)


def test_every_document_is_in_one_split_and_whole(config: DataConfig) -> None:
    splits = prepare(config, 16)
    found: list[str] = []
    for blocks in splits[:3]:
        *whole, cut = everything(blocks, splits)
        found += whole
        assert sum(text.startswith(cut) for text in TEXTS) >= 1
        assert 0 < len(whole) < len(TEXTS)
    assert len(found) == len(set(found)) >= len(TEXTS) - 6
    assert set(found) <= set(TEXTS)


def test_bytes_are_counted_exactly(config: DataConfig) -> None:
    splits = prepare(config, 16)
    ids = torch.cat([splits.train[i]["input_ids"] for i in range(len(splits.train))])
    ends = int((ids == splits.tokenizer.eos_token_id).sum())
    assert splits.train.num_tokens == len(ids) == splits.train.num_bytes + ends


def test_packing_by_documents_restarts_positions_and_leaves_first_tokens_out(config: DataConfig) -> None:
    plain = prepare(config, 64).train
    packed = prepare(replace(config, packing="documents"), 64).train
    end = 256
    assert plain.fingerprint != packed.fingerprint
    restarts = 0
    for i in range(len(plain)):
        block = packed[i]
        ids = plain[i]["input_ids"]
        assert torch.equal(ids, block["input_ids"])
        assert torch.equal(ids, plain[i]["labels"])
        position, previous = 0, plain[i - 1]["input_ids"][-1] if i else end
        for t, token in enumerate(ids):
            first = previous == end
            position = 0 if first or t == 0 else position + 1
            assert block["position_ids"][t] == position
            assert block["labels"][t] == (-100 if first else token)
            restarts += bool(first and t)
            previous = token
    assert restarts > 20


def test_the_cache_is_used_whatever_the_length(config: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    first = prepare(config, 16)
    monkeypatch.setattr("stablemask.data.tokens._batches", None)
    again = prepare(replace(config, packing="documents"), 48)
    assert again.train.tokens == first.train.tokens
    with pytest.raises(TypeError, match="NoneType"):
        prepare(replace(config, held_out=0.3), 16)


def test_the_built_in_corpus(tmp_path: Path) -> None:
    splits = prepare(DataConfig(tokenizer="bytes", cache=str(tmp_path)), 512)
    assert all(len(blocks) > 100 for blocks in splits[:3])
    assert sum(blocks.num_bytes for blocks in splits[:3]) > 5_000_000


def test_the_built_in_corpus_is_not_in_the_order_of_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    walk = os.walk

    def backwards(folder: Path) -> Iterator[tuple[str, list[str], list[str]]]:
        for parent, folders, names in walk(folder):
            folders.reverse()
            yield parent, folders, names[::-1]

    found = [builtin.StandardLibrary().documents]
    monkeypatch.setattr(os, "walk", backwards)
    found.append(builtin.StandardLibrary().documents)
    assert found[0] == found[1]
