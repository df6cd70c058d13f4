"""Local files and folders: every form is read exactly, and what is wrong is named with its file and line."""

import re
from pathlib import Path

import pytest

from stablemask.data import DataConfig, prepare
from stablemask.data import fragments as fragments_module
from stablemask.data.files import kind_of
from tests.data.corpus import COMPRESS, ODD, documents, write


def config_of(path: Path, **options: str | None) -> DataConfig:
    here = path.parent
    other = str(write(here / "elsewhere" / "other.txt", ["other text " * 9]))
    given = {"valid": other, "test": other, "tokenizer": "bytes", "cache": str(here / "cache")} | options
    return DataConfig(**{"source": str(path), **given})  # type: ignore[arg-type]


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("kind", [".txt", ".jsonl"])
def test_text_and_json_lines_are_read_exactly(tmp_path: Path, kind: str, suffix: str) -> None:
    texts = ODD if kind == ".jsonl" else ["\n".join(ODD)]
    config = config_of(write(tmp_path / f"corpus{kind}{suffix}", texts))
    assert documents(config) == texts
    splits = prepare(config, 8)
    ids = splits.train.tokens.stream().tolist()
    assert bytes(i if i < 256 else 0xFF for i in ids) == b"".join(text.encode() + b"\xff" for text in texts)


def test_parquet_is_read_exactly(tmp_path: Path) -> None:
    assert documents(config_of(write(tmp_path / "corpus.parquet", ODD))) == ODD


def test_the_mark_of_utf_8_is_no_text(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(b"\xef\xbb\xbftext")
    assert documents(config_of(file)) == ["text"]


def test_half_a_surrogate_pair_becomes_the_replacement_character(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "half \\ud83d and whole \\ud83d\\ude00, some more"}\n', encoding="utf-8")
    splits = prepare(config_of(file), 8)
    stored = bytes(splits.train.tokens.stream()[:-1].tolist()).decode()
    assert stored == "half \ufffd and whole 😀, some more"


def test_empty_lines_null_and_empty_documents_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(
        '{"text": ""}\n\n{"text": "one"}\r\n{"text": null}\n  \n{"text": ""}\n{"text": "two"}',
        encoding="utf-8",
    )
    assert documents(config_of(file)) == ["one", "two"]


def test_lines_that_begin_documents(tmp_path: Path) -> None:
    article = " = Title = \n \n Text . \n = = Section = = \n More . \n"
    config = config_of(write(tmp_path / "wiki.txt", [article * 3]), begins="^ = [^=]")
    assert documents(config) == [article] * 3
    rows = article.splitlines(keepends=True)
    config = config_of(write(tmp_path / "wiki.parquet", rows * 3), begins="^ = [^=]")
    assert documents(config) == [article] * 3


@pytest.mark.parametrize("begins", [None, "^#"])
def test_a_huge_line_passes_through_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begins: str | None
) -> None:
    monkeypatch.setattr(fragments_module, "PIECE", 64)
    monkeypatch.setattr("stablemask.data.files.PIECE", 64)
    text = "# " + "word " * 200 + "x" * 300 + " ünd # end" * 20
    config = config_of(write(tmp_path / "a.txt", [text]), begins=begins)
    assert documents(config) == [text]
    found = list(fragments_module.pieces(iter([fragments_module.Fragment(text, starts=True, read=1)])))
    assert max(len(piece.text) for piece in found) == 64
    assert sum(piece.text.startswith(" ") for piece in found) > 10, (
        "cut before white space where there is some"
    )


def test_the_order_is_that_of_names_and_links_are_followed_once(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    for name in ("b/2", "a/1", "c"):
        write(folder / f"{name}.txt", [name])
    (folder / ".hidden.txt").write_text("hidden")
    (folder / "z.txt").symlink_to(folder / "c.txt")
    (folder / "a" / "loop").symlink_to(folder)
    outside = write(tmp_path / "outside" / "d.txt", ["d"])
    (folder / "linked").symlink_to(outside.parent)
    assert documents(config_of(folder)) == ["a/1", "b/2", "c", "d"]


def test_equal_documents_are_in_the_same_split(tmp_path: Path) -> None:
    texts = [f"document {n % 40}" for n in range(200)]
    config = DataConfig(
        source=str(write(tmp_path / "a.jsonl", texts)), cache=str(tmp_path / "cache"), held_out=0.25
    )
    splits = [set(documents(config, split)) for split in ("train", "valid", "test")]
    assert all(splits)
    assert sum(map(len, splits)) == 40


@pytest.mark.parametrize(
    "names",
    [
        ("train.jsonl", "valid.jsonl", "test.jsonl"),
        ("x-train-00000-of-00002.jsonl.gz", "x-validation.jsonl.gz", "x-test.jsonl.gz"),
        ("train/0.jsonl", "dev/0.jsonl", "test/0.jsonl"),
    ],
)
def test_a_folder_may_have_its_own_splits(tmp_path: Path, names: tuple[str, str, str]) -> None:
    for name in names:
        write(tmp_path / "corpus" / name, [name])
    config = config_of(tmp_path / "corpus", valid=None, test=None)
    assert [documents(config, split) for split in ("train", "valid", "test")] == [[name] for name in names]


def test_a_source_of_one_split_may_have_splits(tmp_path: Path) -> None:
    for name in ("train", "valid"):
        write(tmp_path / "other" / f"{name}.txt", [f"other {name}"])
    config = config_of(write(tmp_path / "a.txt", ["mine"]), valid=str(tmp_path / "other"))
    assert [documents(config, split) for split in ("train", "valid")] == [["mine"], ["other valid"]]


@pytest.mark.parametrize(
    ("line", "error", "message"),
    [
        ('{"text": "broken', ValueError, "a.jsonl, line 3: is not JSON: "),
        ('{"text": "\xff"}', ValueError, "a.jsonl, line 3: is not JSON: 'utf-8' codec"),
        ('"text"', TypeError, "a.jsonl, line 3: got str; allowed: an object with text in 'text'"),
        ('{"body": "", "id": 1}', ValueError, "a.jsonl, line 3: there is no column 'text' .*: 'body', 'id'"),
        ('{"text": 7}', TypeError, "a.jsonl, line 3: got int as text; allowed: a string"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str, error: type[Exception], message: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"text": "good"}\n\n' + line.encode("latin-1") + b"\n")
    with pytest.raises(error, match=message):
        prepare(config_of(file), 8)


def test_a_missing_column_is_named_with_those_there_are(tmp_path: Path) -> None:
    file = write(tmp_path / "a.parquet", ["text"], column="content")
    with pytest.raises(ValueError, match=r"a.parquet: there is no column 'text' .*: 'content', 'id'"):
        prepare(config_of(file), 8)
    assert documents(config_of(file, text="content")) == ["text"]


@pytest.mark.parametrize(
    "name", ["a.txt.gz", "a.txt.bz2", "a.txt.xz", "a.txt.zst", "a.jsonl.gz", "a.parquet"]
)
@pytest.mark.parametrize("damage", ["truncated", "other bytes"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str, damage: str) -> None:
    file = write(tmp_path / name, ["text " * 99])
    content = file.read_bytes()
    file.write_bytes(content[:-9] if damage == "truncated" else b"no archive" * 9)
    with pytest.raises(
        ValueError, match=f"{name}: cannot be read as a .{name.rsplit('.', maxsplit=1)[1]} file: ."
    ):
        prepare(config_of(file), 8)


def test_text_in_another_encoding_is_named(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes("Füße".encode("latin-1"))
    with pytest.raises(ValueError, match=r"a.txt: is not UTF-8: .*0xfc in position 1"):
        prepare(config_of(file), 8)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a.pdf"], r"with \.pdf; allowed: \.txt, \.jsonl, \.parquet; .*\.zst"),
        ([], "with no files; allowed: "),
        (["a.txt", "b.jsonl"], r"with \.jsonl and \.txt; allowed: one of them"),
        (["train.txt", "other.txt"], r"with files of no split \(other.txt\), train \(train.txt\); allowed: "),
        (["valid.txt"], r"with files of valid \(valid.txt\); allowed: .*; train must be there"),
    ],
)
def test_a_folder_of_something_else(tmp_path: Path, names: list[str], message: str) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name in names:
        write(folder / name, ["text"])
    with pytest.raises(ValueError, match=f"source: got the folder .*corpus' {message}"):
        prepare(config_of(folder), 8)


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text("text\n")
    with pytest.raises(ValueError, match=re.escape("a.csv'; allowed: .txt, .jsonl, .parquet")):
        prepare(config_of(file), 8)


@pytest.mark.parametrize("option", ["source", "valid", "test"])
@pytest.mark.parametrize("name", ["missing.txt", "./missing", "/no/such/folder"])
def test_a_missing_file(tmp_path: Path, option: str, name: str) -> None:
    config = config_of(write(tmp_path / "a.txt", ["text"]), **{option: name})
    with pytest.raises(FileNotFoundError, match=f"{option}: got '{name}'; there is no such file or folder"):
        prepare(config, 8)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("a.b.txt", ".txt"), ("A.TXT.GZ", ".txt"), ("a.parquet.gz", None), ("txt", None), ("a.gz", None)],
)
def test_the_kind_of_a_name(name: str, kind: str | None) -> None:
    assert kind_of(Path(name)) == kind
