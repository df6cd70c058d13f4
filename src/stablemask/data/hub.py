"""Datasets of the Hugging Face hub, by name, and those saved by ``save_to_disk``, through ``datasets``."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import datasets
from datasets.exceptions import DatasetsError

from stablemask.data import cache as disk
from stablemask.data.files import SPLIT_NAMES, missing_column, row_fragments
from stablemask.data.fragments import Fragment, Reading, Source
from stablemask.data.progress import Bar

# Papers and recipes call it by the name it had before the hub gave every dataset an owner.
_OWNERS = {"wikitext": "Salesforce/wikitext"}
# What datasets raises where a name is unknown, the hub is out of reach, or a file is damaged.
_REFUSALS = (OSError, ValueError, KeyError, RuntimeError, DatasetsError)


@dataclass(frozen=True)
class Rows:
    """One split of a dataset, memory-mapped by ``datasets``."""

    name: str
    rows: datasets.Dataset
    reading: Reading

    @property
    def total(self) -> int:
        """Rows."""
        return len(self.rows)

    def fingerprint(self, bar: Bar) -> str:
        """The hashes of the files that hold the rows, and what is read of them."""
        hashes = [
            disk.file_hash(Path(file["filename"]), self.reading.cache, bar) for file in self.rows.cache_files
        ]
        if not hashes:
            raise ValueError(
                f"{self.name}: is held in memory; allowed: a dataset that datasets keeps on disk"
            )
        return disk.key(hashes, self.reading.key())

    def fragments(self) -> Iterator[Fragment]:
        """The text of all rows."""
        number = 0
        column = self.reading.column
        for batch in self.rows.select_columns([column]).iter(batch_size=256):
            for value in batch[column]:
                number += 1
                yield from row_fragments(value, f"{self.name}, row {number}", self.reading, number)


def open_named(name: str, reading: Reading) -> dict[str, Source]:
    """The splits of ``owner/name`` or ``owner/name/configuration``."""
    first, *rest = name.split("/")
    owned = [*_OWNERS.get(first, first).split("/"), *rest]
    try:
        found = datasets.load_dataset("/".join(owned[:2]), *owned[2:])
    except _REFUSALS as error:
        raise ValueError(
            f"{reading.option}: got {name!r}, which is not on disk and cannot be had from the hub: {error}"
        ) from error
    return _splits(found, name, reading)


def open_saved(folder: Path, reading: Reading) -> dict[str, Source]:
    """The splits of a folder that ``save_to_disk`` wrote."""
    try:
        found = datasets.load_from_disk(str(folder))
    except _REFUSALS as error:
        raise ValueError(
            f"{reading.option}: got {str(folder)!r}, which datasets cannot open: {error}; allowed: a "
            "folder as `save_to_disk` wrote it"
        ) from error
    splits = found if isinstance(found, datasets.DatasetDict) else {"train": found}
    return _splits(splits, str(folder), reading)


def _splits(found: Mapping[str, datasets.Dataset], name: str, reading: Reading) -> dict[str, Source]:
    splits: dict[str, Source] = {}
    for own, rows in found.items():
        if own not in SPLIT_NAMES:
            continue
        if reading.column not in rows.column_names:
            raise missing_column(f"{name}, split {own}", reading, rows.column_names)
        splits[SPLIT_NAMES[own]] = Rows(f"{name}, split {own}", rows, reading)
    if reading.option == "source" and "train" not in splits:
        raise ValueError(
            f"{reading.option}: got {name!r} with the splits {sorted(found)}; allowed: one with 'train'"
        )
    return splits
