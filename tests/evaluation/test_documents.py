"""Reading text, and counting the bytes that tokens stand for."""

import gzip
import json
from pathlib import Path

import pytest

from stablemask.evaluation.documents import cut, digest, read_texts, tokenize
from tests.evaluation import small


def test_every_kind_of_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("eins\nzwei", encoding="utf-8")
    with gzip.open(tmp_path / "b.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write(json.dumps({"text": "drei"}) + "\n\n" + json.dumps({"text": "vïer", "id": 4}) + "\n")
    (tmp_path / "c.raw").write_text(" \n", encoding="utf-8")
    (tmp_path / "d.md").write_text("no text of this folder", encoding="utf-8")
    assert read_texts(tmp_path) == ["eins\nzwei", "drei", "vïer"]
    assert read_texts(tmp_path / "b.jsonl.gz") == ["drei", "vïer"]


def test_what_is_no_text(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        read_texts(tmp_path / "nothing")
    with pytest.raises(ValueError, match="without any text"):
        read_texts(tmp_path)
    (tmp_path / "a.pdf").write_text("x", encoding="utf-8")
    with pytest.raises(ValueError, match=r"a.pdf.*allowed: \.txt"):
        read_texts(tmp_path / "a.pdf")
    (tmp_path / "b.jsonl").write_text('{"text": "x"}\n{"words": 1}\n', encoding="utf-8")
    with pytest.raises(ValueError, match="got line 2 of"):
        read_texts(tmp_path / "b.jsonl")


def test_bytes_of_what_is_predicted() -> None:
    (with_end,) = tokenize(["aé€"], small.tokenizer())
    assert (len(with_end.tokens), with_end.num_bytes) == (7, 6)
    (without,) = tokenize(["aé€"], small.tokenizer(end=False))
    assert (len(without.tokens), without.num_bytes) == (6, 5)
    with pytest.raises(ValueError, match="no document of two tokens"):
        tokenize(["a"], small.tokenizer(end=False))


def test_cut_and_digest() -> None:
    documents = small.documents(10, 20, 30)
    assert [len(d.tokens) - 1 for d in cut(documents, 35)] == [10, 20]
    assert cut(documents, 1) == documents[:1]
    assert digest(documents) == digest(small.documents(10, 20, 30))
    assert digest(documents) != digest(small.documents(10, 20, 30, seed=4))
