"""Datasets by their name on the Hugging Face hub, or saved by ``save_to_disk``, through ``datasets``."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import datasets

from stablemask.data.files import missing_column, row_fragments
from stablemask.data.sources import Fragment, Source

_SPLIT_NAMES = {
    "train": "train",
    "validation": "valid",
    "valid": "valid",
    "val": "valid",
    "dev": "valid",
    "test": "test",
}


@dataclass(frozen=True)
class Rows:
    """One split of a dataset, memory-mapped by ``datasets``."""

    name: str
    rows: datasets.Dataset
    column: str
    begins: re.Pattern[str] | None

    @property
    def total(self) -> int:
        """Rows."""
        return len(self.rows)

    def fingerprint(self) -> str:
        """That of ``datasets``, which stands for the revision and everything done to it since."""
        begins = "" if self.begins is None else self.begins.pattern
        return f"{self.rows._fingerprint} {self.column} {begins}"  # noqa: SLF001 - there is no public name

    def fragments(self) -> Iterator[Fragment]:
        """The text of all rows."""
        number = 0
        for batch in self.rows.select_columns([self.column]).iter(batch_size=256):
            for value in batch[self.column]:
                number += 1
                yield from row_fragments(value, f"{self.name}, row {number}", self.begins, number)


def open_dataset(name: str, option: str, column: str, begins: re.Pattern[str] | None) -> dict[str, Source]:
    """The splits of ``owner/name`` or ``owner/name/configuration``."""
    owner, *rest = name.split("/")
    try:
        found = datasets.load_dataset("/".join([owner, *rest[:1]]), *rest[1:])
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{option}: got {name!r}, which is not on this disk and cannot be loaded from the hub: {error}"
        ) from error
    return named_splits(found, name, option, column, begins)


def named_splits(
    found: datasets.DatasetDict, name: str, option: str, column: str, begins: re.Pattern[str] | None
) -> dict[str, Source]:
    """The splits of a dataset under our names."""
    splits: dict[str, Source] = {}
    for own, rows in found.items():
        if own not in _SPLIT_NAMES:
            continue
        if column not in rows.column_names:
            raise missing_column(f"{name}, split {own}", column, rows.column_names)
        splits[_SPLIT_NAMES[own]] = Rows(f"{name}, split {own}", rows, column, begins)
    if "train" not in splits:
        raise ValueError(
            f"{option}: got {name!r} with the splits {sorted(found)}; allowed: one with a split 'train'"
        )
    return splits
