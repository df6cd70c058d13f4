"""Datasets of the hub, by name and as folders of ``save_to_disk``: splits, documents and errors, offline."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest
from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError

from stablemask.data import DataConfig, prepare
from stablemask.data.sources import SPLITS, parts
from stablemask.training import load_recipe
from tests.data.corpus import documents, write

RECIPES = Path(__file__).parents[2] / "recipes"
NAMES = ("train", "validation", "test")  # of splits on the hub
Columns = dict[str, list[Any]]
_load_dataset = datasets.load_dataset


def texts(split: str, count: int = 9) -> list[str]:
    """Articles in the form of WikiText."""
    return [f" = {split} {n} = \n Text of {n} . \n = = Section = = \n More . \n" for n in range(count)]


def wikitext(split: str) -> Columns:
    """Rows are lines of articles, with empty ones between them."""
    lines = "".join(texts(split)).splitlines(keepends=True)
    return {"text": [row for line in lines for row in ("", line)]}


def minipile(split: str) -> Columns:
    return {"text": texts(split)}


def pile(split: str) -> Columns:
    return {"text": texts(split), "meta": [{"pile_set_name": "Pile-CC"}] * len(texts(split))}


CORPORA: dict[str, tuple[Callable[[str], Columns], tuple[str, ...]]] = {
    "wikitext103-71m-rope": (wikitext, ("Salesforce/wikitext", "wikitext-103-raw-v1")),
    "minipile-160m-rope": (minipile, ("JeanKaddour/minipile",)),
    "pile-160m-rope": (pile, ("monology/pile-uncopyrighted",)),
}


class Hub:
    """Has datasets as files of parquet, as the real one, by the arguments of ``load_dataset``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.has: dict[tuple[str, ...], dict[str, Columns]] = {}

    def load_dataset(self, *asked: str) -> Any:
        if asked not in self.has:
            raise DatasetNotFoundError(
                f"Dataset '{asked[0]}' doesn't exist on the Hub or cannot be accessed."
            )
        files = {split: str(self.folder / f"{split}.parquet") for split in self.has[asked]}
        for split, columns in self.has[asked].items():
            datasets.Dataset.from_dict(columns).to_parquet(files[split])
        return _load_dataset("parquet", data_files=files, cache_dir=str(self.folder / "cache"))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    folder = tmp_path / "hub"
    folder.mkdir()
    found = Hub(folder)
    monkeypatch.setattr(datasets, "load_dataset", found.load_dataset)
    return found


def saved(folder: Path, splits: dict[str, Columns]) -> str:
    """What ``save_to_disk`` writes of a dataset with splits."""
    made = {name: datasets.Dataset.from_dict(columns) for name, columns in splits.items()}
    datasets.DatasetDict(made).save_to_disk(folder)
    return str(folder)


def config_of(source: str, tmp_path: Path, **options: Any) -> DataConfig:
    return DataConfig(source=source, tokenizer="bytes", cache=str(tmp_path / "cache"), **options)


@pytest.mark.parametrize("way", ["by name", "from a folder"])
@pytest.mark.parametrize("recipe", CORPORA)
def test_what_recipes_read_of_their_corpora(recipe: str, way: str, hub: Hub, tmp_path: Path) -> None:
    columns, asked = CORPORA[recipe]
    splits = {name: columns(name) for name in NAMES}
    data = load_recipe(RECIPES / f"{recipe}.toml").data
    data = replace(data, tokenizer="bytes", cache=str(tmp_path / "cache"))
    if way == "by name":
        hub.has[asked] = splits
    else:
        data = replace(data, source=saved(tmp_path / "saved", splits))
    assert {split: documents(data, split) for split in SPLITS} == {
        split: texts(name) for split, name in zip(SPLITS, NAMES, strict=True)
    }
    source = parts(data, Path(data.cache))["train"].source
    assert [fragment.read for fragment in source.fragments()][-1] == source.total

    found = prepare(data, 16, progress=False)
    ids = found.test.tokens.stream().tolist()
    assert bytes(i if i < 256 else 0xFF for i in ids) == b"".join(t.encode() + b"\xff" for t in texts("test"))


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("wikitext/wikitext-103-raw-v1", ("Salesforce/wikitext", "wikitext-103-raw-v1")),
        ("Salesforce/wikitext/wikitext-2-raw-v1", ("Salesforce/wikitext", "wikitext-2-raw-v1")),
        ("owner/name", ("owner/name",)),
        ("name", ("name",)),
    ],
)
def test_names(name: str, asked: tuple[str, ...], hub: Hub, tmp_path: Path) -> None:
    hub.has[asked] = {"train": minipile("train")}
    assert documents(config_of(name, tmp_path, test=name, valid=name)) == texts("train")


@pytest.mark.parametrize("way", ["by name", "from a folder"])
def test_rows_are_tokenised_once_and_again_when_they_change(
    way: str, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def source(last: str) -> str:
        splits = {name: {"text": [*texts(name), last]} for name in NAMES}
        hub.has[("owner/name",)] = splits
        return "owner/name" if way == "by name" else saved(tmp_path / last, splits)

    config = config_of(source("one"), tmp_path)
    first = prepare(config, 16, progress=False)
    monkeypatch.setattr("stablemask.data.tokens._batches", None)
    again = prepare(replace(config, source=source("one")), 48, progress=False)
    assert again.train.tokens == first.train.tokens
    with pytest.raises(TypeError, match="NoneType"):
        prepare(replace(config, source=source("two")), 16, progress=False)


@pytest.mark.parametrize("own", [("train", "validation"), ("train", "test"), ("train",)])
def test_missing_splits_are_held_out_of_training(own: tuple[str, ...], tmp_path: Path) -> None:
    source = saved(tmp_path / "saved", {name: {"text": texts(name, 99)} for name in own})
    config = config_of(source, tmp_path, held_out=0.2)
    found = {name: documents(config, split) for name, split in zip(NAMES, SPLITS, strict=True)}
    held = [text for name in NAMES if name not in own for text in found[name]]
    assert all(found.values())
    assert {name: found[name] for name in own[1:]} == {name: texts(name, 99) for name in own[1:]}
    assert sorted(found["train"] + held) == sorted(texts("train", 99))


def test_a_dataset_without_splits_is_text_for_training(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"text": texts("train", 99)}).save_to_disk(tmp_path / "saved")
    config = config_of(str(tmp_path / "saved"), tmp_path)
    found = [text for split in SPLITS for text in documents(config, split)]
    assert sorted(found) == sorted(texts("train", 99))


def test_other_names_of_splits(tmp_path: Path) -> None:
    names = ("train", "dev", "test", "unsupervised")
    source = saved(tmp_path / "saved", {name: minipile(name) for name in names})
    found = [documents(config_of(source, tmp_path), split) for split in SPLITS]
    assert found == [texts(name) for name in names[:3]]


def test_a_source_of_one_split_may_have_splits_or_none(tmp_path: Path) -> None:
    whole = saved(tmp_path / "whole", {name: minipile(name) for name in NAMES})
    datasets.Dataset.from_dict(minipile("plain")).save_to_disk(tmp_path / "plain")
    mine = str(write(tmp_path / "a.jsonl", ["mine"]))
    config = config_of(mine, tmp_path, valid=whole, test=str(tmp_path / "plain"))
    found = [documents(config, split) for split in SPLITS]
    assert found == [["mine"], texts("validation"), texts("plain")]


def test_null_is_no_text(tmp_path: Path) -> None:
    source = saved(tmp_path / "saved", {name: {"text": [None, "one", "", "two", None]} for name in NAMES})
    assert documents(config_of(source, tmp_path)) == ["one", "two"]


# What is refused


@pytest.mark.parametrize(
    ("option", "own", "message"),
    [
        (
            "source",
            ("test", "validation"),
            r"source: got .* with the splits \['test', 'validation'\]; allowed: one with 'tr",
        ),
        ("valid", ("test",), r"valid: got a source with the splits \['test'\]; allowed: one with 'valid'"),
    ],
)
def test_a_dataset_without_the_split(option: str, own: Sequence[str], message: str, tmp_path: Path) -> None:
    source = saved(tmp_path / "saved", {name: minipile(name) for name in own})
    config = config_of(str(write(tmp_path / "a.jsonl", ["mine"])), tmp_path)
    with pytest.raises(ValueError, match=f"^{message}"):
        prepare(replace(config, **{option: source}), 16, progress=False)  # type: ignore[arg-type]


@pytest.mark.parametrize("way", ["by name", "from a folder"])
def test_a_missing_column_is_named_with_those_there_are(way: str, hub: Hub, tmp_path: Path) -> None:
    splits: dict[str, Columns] = {name: {"id": [1], "content": [f"text of {name}"]} for name in NAMES}
    hub.has[("owner/name",)] = splits
    source = "owner/name" if way == "by name" else saved(tmp_path / "saved", splits)
    config = config_of(source, tmp_path)
    message = (
        f"{source}, split train: there is no column 'text' .option `text`.; the columns are: 'content', 'id'"
    )
    with pytest.raises(ValueError, match=f"^{message}$"):
        prepare(config, 8, progress=False)
    assert documents(replace(config, text="content")) == ["text of train"]


def test_a_column_of_something_else(tmp_path: Path) -> None:
    source = saved(tmp_path / "saved", {name: {"text": [None, 7]} for name in NAMES})
    with pytest.raises(TypeError, match="saved, split train, row 2: got int as text; allowed: a string"):
        prepare(config_of(source, tmp_path), 8, progress=False)


def test_rows_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {name: datasets.Dataset.from_dict(minipile(name)) for name in NAMES}
    monkeypatch.setattr(datasets, "load_dataset", lambda _: rows)
    with pytest.raises(
        ValueError, match=r"^owner/name, split train: is held in memory; allowed: a dataset that"
    ):
        prepare(config_of("owner/name", tmp_path), 8, progress=False)


@pytest.mark.parametrize("option", ["source", "valid", "test"])
def test_an_unknown_name(option: str, hub: Hub, tmp_path: Path) -> None:
    config = config_of(str(write(tmp_path / "a.jsonl", ["mine"])), tmp_path)
    message = (
        f"^{option}: got 'no/such', which is not on disk and cannot be had from the hub: "
        "Dataset 'no/such' doesn't exist on the Hub or cannot be accessed.$"
    )
    with pytest.raises(ValueError, match=message):
        prepare(replace(config, **{option: "no/such"}), 8, progress=False)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "error",
    [
        ValueError("BuilderConfig 'b' not found. Available: ['c']"),
        RuntimeError("Dataset scripts are no longer supported, but found a.py"),
        DatasetGenerationError("An error occurred while generating the dataset"),
    ],
)
def test_what_else_the_hub_may_answer(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: str) -> None:
        raise error

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(
        ValueError, match=r"^source: got 'owner/a/b', which is not on disk and cannot"
    ) as refused:
        prepare(config_of("owner/a/b", tmp_path), 8, progress=False)
    assert str(refused.value).endswith(f"from the hub: {error}")


def test_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    message = "cannot be had from the hub: Couldn't reach 'no/such' on the Hub"
    with pytest.raises(ValueError, match=f"^source: got 'no/such', which is not on disk and {message}"):
        prepare(config_of("no/such", tmp_path), 8, progress=False)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("train/data-00000-of-00001.arrow", b"no table"),
        ("train/data-00000-of-00001.arrow", None),
        ("train/state.json", b"{"),
        ("dataset_dict.json", b"{}"),
    ],
)
def test_a_damaged_folder_is_named(file: str, content: bytes | None, tmp_path: Path) -> None:
    source = saved(tmp_path / "saved", {name: minipile(name) for name in NAMES})
    (tmp_path / "saved" / file).unlink()
    if content is not None:
        (tmp_path / "saved" / file).write_bytes(content)
    with pytest.raises(ValueError, match=f"^source: got '{source}', which datasets cannot open: ."):
        prepare(config_of(source, tmp_path), 8, progress=False)
