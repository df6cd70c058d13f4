"""Reading text, and counting the bytes that tokens stand for."""

import gzip
import json
from pathlib import Path

import pytest

from stablemask.evaluation.documents import cut, digest, read_texts, tokenize
from tests.evaluation import small


def test_documents_of_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("eins\nzwei\ndrei", encoding="utf-8")
    with gzip.open(tmp_path / "b.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write(json.dumps({"text": "vier" * 2**17}) + "\n" + json.dumps({"text": "fünf \ud800"}) + "\n")
    assert read_texts(str(tmp_path / "a.txt")) == ["eins\nzwei\ndrei"]
    assert read_texts(str(tmp_path / "a.txt"), begins="z") == ["eins\n", "zwei\ndrei"]
    assert read_texts(str(tmp_path / "b.jsonl.gz")) == ["vier" * 2**17, "fünf \ufffd"]


def test_the_builtin_corpus_gives_what_training_holds_out() -> None:
    texts = read_texts()
    assert len(texts) > 1
    assert texts == read_texts("builtin")


def test_bytes_of_what_is_predicted() -> None:
    (with_end,) = tokenize(["aé€"], small.tokenizer())
    assert (len(with_end.tokens), with_end.num_bytes) == (7, 6)
    (without,) = tokenize(["aé€"], small.tokenizer(end=False))
    assert (len(without.tokens), without.num_bytes) == (6, 5)
    with pytest.raises(ValueError, match="no document of two tokens"):
        tokenize(["a"], small.tokenizer(end=False))


def test_text_that_spells_a_special_token_is_text() -> None:
    tokenizer = small.tokenizer()
    end = tokenizer.eos_token
    (document,) = tokenize([f"a{end}b"], tokenizer)
    assert len(document.tokens) - 1 == document.num_bytes == len(f"a{end}b")
    assert document.tokens.tolist().count(tokenizer.eos_token_id) == 1, "the one in front"
    assert tokenizer(end)["input_ids"] == [tokenizer.eos_token_id], "the tokenizer is as it was"


def test_cut_and_digest() -> None:
    documents = small.documents(10, 20, 30)
    assert [len(d.tokens) - 1 for d in cut(documents, 35)] == [10, 20]
    assert cut(documents, 1) == documents[:1]
    assert digest(documents) == digest(small.documents(10, 20, 30))
    assert digest(documents) != digest(small.documents(10, 20, 30, seed=4))
