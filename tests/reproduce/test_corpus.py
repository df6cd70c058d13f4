"""The folder of tokens: what goes in comes out, and nothing that is half there is read."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from stablemask.analysis import CLASSES
from stablemask.evaluation.documents import tokenize
from stablemask.reproduce import corpus as corpora
from stablemask.reproduce.corpus import META, Corpus, Source, open_corpus, open_or_prepare, prepare_corpus
from tests.reproduce import small


def texts(path: str | None) -> list[str]:
    assert path is not None
    return [json.loads(line)["text"] for line in Path(path).read_text(encoding="utf-8").splitlines()]


def prepared(folder: Path, source: Source, name: str = "corpus") -> Corpus:
    return open_or_prepare(folder / name, source, str(folder / "cache"))


@pytest.fixture
def source(tmp_path: Path) -> Source:
    return small.write_texts(tmp_path)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A prepared corpus that may be damaged."""
    shutil.copytree(small.corpus_folder(), tmp_path / "copy")
    return tmp_path / "copy"


def test_every_set_holds_its_texts(tmp_path: Path, source: Source) -> None:
    corpus = prepared(tmp_path, source)
    for name in corpora.SETS:
        wanted = tokenize(texts(getattr(source, name)), corpus.tokenizer)
        assert len(corpus.documents[name]) == len(wanted)
        for found, expected in zip(corpus.documents[name], wanted, strict=True):
            assert torch.equal(found.tokens, expected.tokens)
            assert found.num_bytes == expected.num_bytes
    assert corpus.about["tokens"] == {
        "train": corpus.train.length,
        **{name: sum(len(d.tokens) - 1 for d in corpus.documents[name]) for name in corpora.SETS},
    }


def test_the_training_stream_is_the_text_of_training(tmp_path: Path, source: Source) -> None:
    corpus = prepared(tmp_path, source)
    end = corpus.tokenizer.eos_token
    documents = corpus.tokenizer.decode(corpus.train.stream().astype(np.int64)).split(end)
    assert documents.pop() == ""
    read = texts(source.data)
    assert set(documents) < set(read), "in their order, less those that a test split holds out"
    assert documents == [text for text in read if text in set(documents)]
    assert len(documents) > 0.8 * len(read)
    assert corpus.about["train_bytes"] == sum(len(text.encode()) for text in documents)
    blocks = corpus.blocks(16, "concatenated")
    stream = torch.from_numpy(corpus.train.stream().astype(np.int64))
    assert len(blocks) == len(stream) // 16
    assert torch.equal(blocks[3]["input_ids"], stream[48:64])


def test_every_token_of_valid_has_its_class(tmp_path: Path, source: Source) -> None:
    corpus = prepared(tmp_path, source)
    for document, classes in zip(corpus.documents["valid"], corpus.classes, strict=True):
        assert document.tokens.shape == classes.shape
        pieces = corpus.tokenizer.batch_decode(document.tokens[1:].unsqueeze(1))
        named = [CLASSES[c] for c in classes[1:]]
        assert {name for piece, name in zip(pieces, named, strict=True) if piece in {",", "."}} == {
            "punctuation"
        }
        assert {name for piece, name in zip(pieces, named, strict=True) if piece.isdigit()} == {"digits"}
        assert named.count("function words") > 0
        assert CLASSES[classes[0]] == "others", "what stands for the beginning"


def test_text_that_spells_the_end_of_text_is_text(tmp_path: Path, source: Source) -> None:
    path = tmp_path / "valid.jsonl"
    path.write_text(json.dumps({"text": "The mask<|endoftext|>, 12"}) + "\n", encoding="utf-8")
    corpus = prepared(tmp_path, source)
    (document,), (classes,) = corpus.documents["valid"], corpus.classes
    assert len(document.tokens) - 1 == document.num_bytes
    assert document.tokens.shape == classes.shape


def test_sets_that_nobody_gave_are_empty_and_valid_is_held_out(tmp_path: Path, source: Source) -> None:
    corpus = prepared(tmp_path, Source(data=source.data, tokenizer="bytes"))
    assert corpus.documents["other"] == corpus.documents["long"] == []
    held_out = [corpus.tokenizer.decode(d.tokens[1:]) for d in corpus.documents["valid"]]
    assert held_out
    assert set(held_out) < set(texts(source.data))
    trained_on = corpus.tokenizer.decode(corpus.train.stream().astype(np.int64))
    assert not any(text in trained_on for text in held_out)


def test_long_texts_are_cut(tmp_path: Path, source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpora, "_LONG_CHARACTERS", 100)
    corpus = prepared(tmp_path, source)
    (document,) = corpus.documents["long"]
    assert document.num_bytes == 100
    assert max(d.num_bytes for d in corpus.documents["valid"]) > 100


def test_lines_that_begin_documents_of_the_other_text(tmp_path: Path, source: Source) -> None:
    path = tmp_path / "articles.txt"
    path.write_text(" = One = \n first\n = = Part = = \n second\n = Two = \n third\n", encoding="utf-8")
    corpus = prepared(tmp_path, replace(source, other=str(path), other_begins="^ = [^=]"))
    first, second = (corpus.tokenizer.decode(d.tokens[1:]) for d in corpus.documents["other"])
    assert (first.split()[1], second.split()[1]) == ("One", "Two")
    assert corpus.about["other_begins"] == "^ = [^=]", "whoever prepares it again has to know"


def test_equal_texts_have_one_digest_wherever_they_lie(tmp_path: Path, source: Source) -> None:
    digest = prepared(tmp_path, source).digest
    (tmp_path / "elsewhere").mkdir()
    moved = small.write_texts(tmp_path / "elsewhere")
    assert prepared(tmp_path, moved).digest == digest, "the folder that is there serves"
    assert prepared(tmp_path / "elsewhere", moved).digest == digest
    other = replace(source, long=None)
    assert prepared(tmp_path, other, "no long texts").digest != digest


def test_a_prepared_folder_is_opened_and_not_made_again(
    tmp_path: Path, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = prepared(tmp_path, source)
    monkeypatch.setattr(corpora, "prepare_corpus", None)
    assert prepared(tmp_path, source).digest == before.digest


@pytest.mark.parametrize("name", ["data", "valid", "other", "long"])
def test_a_folder_of_another_source_is_refused(tmp_path: Path, source: Source, name: str) -> None:
    prepared(tmp_path, source)
    path = tmp_path / "new.jsonl"
    shutil.copy(getattr(source, name), path)
    with pytest.raises(ValueError, match=r"corpus' holds .*; allowed: .*'new\.jsonl'.*, or another folder"):
        prepared(tmp_path, replace(source, **{name: str(path)}))


def test_another_tokenizer_and_other_beginnings_are_refused(tmp_path: Path, source: Source) -> None:
    prepared(tmp_path, source)
    for change in ({"tokenizer": "bpe:300"}, {"other_begins": "^x"}, {"long": None}):
        with pytest.raises(ValueError, match="or another folder"):
            prepared(tmp_path, replace(source, **change))


@pytest.mark.parametrize("name", ["data", "valid", "other", "long"])
def test_a_text_that_was_changed_since_is_refused(tmp_path: Path, source: Source, name: str) -> None:
    prepared(tmp_path, source)
    path = Path(getattr(source, name))
    path.write_text(path.read_text(encoding="utf-8").replace("mask", "Mask", 1), encoding="utf-8")
    with pytest.raises(ValueError, match="or another folder"):
        prepared(tmp_path, source)


def test_a_folder_without_a_corpus_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"corpus: got '.*nothing'; allowed: a folder with"):
        open_corpus(tmp_path / "nothing")


@pytest.mark.parametrize("stop", ["save_pretrained", "savez_compressed", "_digest"])
def test_what_was_begun_is_not_read_and_made_anew(
    tmp_path: Path, source: Source, monkeypatch: pytest.MonkeyPatch, stop: str
) -> None:
    """Also where a whole corpus was there before: it is given up first."""

    def fail(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    folder = tmp_path / "corpus"
    whole = prepared(tmp_path, source)
    other = replace(source, valid=source.other)
    owner = {"save_pretrained": corpora.PreTrainedTokenizerFast, "savez_compressed": np}.get(stop, corpora)
    with monkeypatch.context() as patch:
        patch.setattr(owner, stop, fail)
        with pytest.raises(KeyboardInterrupt):
            prepare_corpus(folder, other, str(tmp_path / "cache"))
    assert (folder / "train" / "tokens.bin").exists()
    assert not (folder / META).exists()
    with pytest.raises(FileNotFoundError):
        open_corpus(folder)
    assert prepared(tmp_path, source).digest == whole.digest


def change_array(folder: Path, name: str, key: str) -> None:
    with np.load(folder / f"{name}.npz") as held:
        arrays = {k: held[k] for k in held.files}
    arrays[key] = arrays[key].copy()
    arrays[key][-1] += 1
    np.savez_compressed(folder / f"{name}.npz", allow_pickle=False, **arrays)


def test_a_changed_folder_is_damaged(copy: Path) -> None:
    open_corpus(copy)
    with (copy / "train" / "tokens.bin").open("r+b") as file:
        byte = file.read(1)
        file.seek(0)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(ValueError, match="is damaged or of another version; remove it"):
        open_corpus(copy)


@pytest.mark.parametrize(
    ("name", "key"),
    [("valid", "tokens"), ("valid", "classes"), ("other", "sizes"), ("long", "bytes"), ("other", "tokens")],
)
def test_a_changed_array_is_damage(copy: Path, name: str, key: str) -> None:
    change_array(copy, name, key)
    with pytest.raises(ValueError, match="is damaged"):
        open_corpus(copy)


def test_another_compression_of_the_same_arrays_is_no_damage(copy: Path) -> None:
    before = (copy / "valid.npz").read_bytes()
    with np.load(copy / "valid.npz") as held:
        arrays = {k: held[k] for k in held.files}
    np.savez(copy / "valid.npz", allow_pickle=False, **arrays)
    assert (copy / "valid.npz").read_bytes() != before
    assert open_corpus(copy).digest == small.corpus().digest


def test_a_folder_of_another_version_is_refused(copy: Path) -> None:
    about = json.loads((copy / META).read_text(encoding="utf-8"))
    (copy / META).write_text(json.dumps({**about, "format": about["format"] + 1}), encoding="utf-8")
    with pytest.raises(ValueError, match="of another version"):
        open_corpus(copy)


def test_a_copy_serves_without_source_and_cache(copy: Path) -> None:
    found, made = open_corpus(copy), small.corpus()
    assert (found.digest, found.vocabulary, found.about) == (made.digest, made.vocabulary, made.about)
    assert torch.equal(found.blocks(16, "documents")[5]["labels"], made.blocks(16, "documents")[5]["labels"])
    assert all(str(copy) in str(path) for path in (found.folder, found.train.folder))
