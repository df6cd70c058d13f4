"""Local files and folders of text: .txt, .jsonl and .parquet, also compressed."""

import bz2
import gzip
import io
import json
import lzma
import os
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from stablemask.data import cache as disk
from stablemask.data.fragments import PIECE, Fragment, Reading, Source
from stablemask.data.progress import Bar

KINDS = (".txt", ".jsonl", ".parquet")
COMPRESSIONS = (".gz", ".zst", ".xz", ".bz2")
ALLOWED = f"{', '.join(KINDS)}; .txt and .jsonl also compressed ({', '.join(COMPRESSIONS)})"
SPLIT_NAMES = {
    "train": "train",
    "training": "train",
    "valid": "valid",
    "validation": "valid",
    "val": "valid",
    "dev": "valid",
    "test": "test",
}
_BROKEN = (EOFError, OSError, lzma.LZMAError, zlib.error)


@dataclass(frozen=True)
class Files:
    """Files of one kind, one after the other."""

    name: str
    paths: tuple[Path, ...]
    reading: Reading

    @property
    def total(self) -> int:
        """Bytes on disk."""
        return sum(path.stat().st_size for path in self.paths)

    def fingerprint(self, bar: Bar) -> str:
        """The hashes of the files' contents, in order, and what is read of them."""
        hashes = [disk.file_hash(path, self.reading.cache, bar) for path in self.paths]
        return disk.key(hashes, [path.suffixes[-2:] for path in self.paths], self.reading.key())

    def fragments(self) -> Iterator[Fragment]:
        """The text of all files."""
        before = 0
        for path in self.paths:
            kind = kind_of(path)
            assert kind is not None
            first = True  # of the file: documents end with their file
            for text, starts, read in _READERS[kind](path, self.reading):
                yield Fragment(text, starts or first, before + read)
                first = False
            before += path.stat().st_size


def is_path(value: str) -> bool:
    """Whether a name that does not exist was meant as a path, not as a name on the hub."""
    return value.startswith((".", "/", "~")) or value.count("/") > 2 or kind_of(Path(value)) is not None


def kind_of(path: Path) -> str | None:
    """The kind of a file by its name, below a compression."""
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
        return suffixes[-1] if suffixes and suffixes[-1] in KINDS[:2] else None
    return suffixes[-1] if suffixes and suffixes[-1] in KINDS else None


def is_saved_dataset(path: Path) -> bool:
    """Whether a folder was written by ``save_to_disk`` of datasets."""
    return (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()


def open_local(path: Path, reading: Reading) -> dict[str, Source]:
    """The splits of a file or folder: a folder may have them as files or folders named after them."""

    def files(paths: list[Path]) -> Source:
        return Files(str(path), tuple(paths), reading)

    if path.is_file():
        if kind_of(path) is None:
            raise ValueError(f"{reading.option}: got {str(path)!r}; allowed: {ALLOWED}")
        return {"train": files([path])}
    found = _walk(path)
    usable = [file for file in found if kind_of(file) is not None]
    kinds = sorted({kind_of(file) or "" for file in usable})
    if not usable:
        suffixes = sorted({"".join(file.suffixes[-2:]) or file.name for file in found})
        raise ValueError(
            f"{reading.option}: got the folder {str(path)!r} with {', '.join(suffixes[:9]) or 'no files'}; "
            f"allowed: {ALLOWED}"
        )
    if len(kinds) > 1:
        raise ValueError(
            f"{reading.option}: got the folder {str(path)!r} with {' and '.join(kinds)}; allowed: one of them"
        )
    splits: dict[str, list[Path]] = {}
    for file in usable:
        splits.setdefault(_split_of(file.relative_to(path)), []).append(file)
    if set(splits) == {""}:
        return {"train": files(splits[""])}
    if "" in splits or (reading.option == "source" and "train" not in splits):
        named = {split or "no split": files[0].name for split, files in sorted(splits.items())}
        raise ValueError(
            f"{reading.option}: got the folder {str(path)!r} with files of "
            f"{', '.join(f'{split} ({name})' for split, name in named.items())}; allowed: every file, or the "
            "folder it is in, is named after a split (train, valid or test), or none is; train must be there"
        )
    return {name: files(paths) for name, paths in splits.items()}


def _walk(folder: Path) -> list[Path]:
    """All files below a folder, by name, without hidden ones and what a link leads to a second time."""
    found: list[Path] = []
    seen: set[str] = set()
    for parent, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(parent)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            path = Path(parent, name)
            real = os.path.realpath(path)
            if not name.startswith(".") and path.is_file() and real not in seen:
                seen.add(real)
                found.append(path)
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


def _split_of(path: Path) -> str:
    """The split that a word of a file's name says, or else the name of a folder above it; '' if none."""
    for part in (*re.split(r"[^A-Za-z]+", path.name), *reversed(path.parts[:-1])):
        if split := SPLIT_NAMES.get(part.lower()):
            return split
    return ""


def _zstandard(file: BinaryIO) -> io.BufferedReader:
    import pyarrow as pa  # noqa: PLC0415 - tokens that are on the disk are read without it

    return io.BufferedReader(cast("io.RawIOBase", pa.CompressedInputStream(pa.PythonFile(file), "zstd")))


@contextmanager
def _opened(path: Path) -> Iterator[tuple[BinaryIO, Callable[[], int]]]:
    """A file's content without its compression, and how many bytes of the file were read so far."""
    with path.open("rb") as raw:
        opener: dict[str, Callable[[BinaryIO], object]] = {
            ".gz": gzip.open,
            ".bz2": bz2.open,
            ".xz": lzma.open,
            ".zst": _zstandard,
        }
        suffix = path.suffix.lower()
        content = cast("BinaryIO", opener[suffix](raw)) if suffix in opener else raw
        try:
            yield content, raw.tell
        except _BROKEN as error:
            raise ValueError(f"{path}: cannot be read as a {suffix} file: {error}") from error


def _txt(path: Path, reading: Reading) -> Iterator[Fragment]:
    with _opened(path) as (content, tell):
        file = io.TextIOWrapper(content, encoding="utf-8-sig", newline="")
        line_starts = True
        while True:
            try:
                text = file.read(PIECE) if reading.begins is None else file.readline(PIECE)
            except UnicodeDecodeError as error:
                raise ValueError(f"{path}: is not UTF-8: {error}") from error
            if not text:
                return
            starts = line_starts and reading.begins is not None and reading.begins.match(text) is not None
            line_starts = text.endswith("\n")
            yield Fragment(text, starts, tell())


def _jsonl(path: Path, reading: Reading) -> Iterator[Fragment]:
    with _opened(path) as (content, tell):
        for number, line in enumerate(content, 1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{where}: is not JSON: {error}") from error
            if not isinstance(row, dict):
                raise TypeError(
                    f"{where}: got {type(row).__name__}; allowed: an object with text in {reading.column!r}"
                )
            if reading.column not in row:
                raise missing_column(where, reading, list(row))
            yield from row_fragments(row[reading.column], where, reading, tell())


def _parquet(path: Path, reading: Reading) -> Iterator[Fragment]:
    import pyarrow.parquet  # noqa: PLC0415 - as above

    size = path.stat().st_size
    try:
        file = pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path}: cannot be read as a .parquet file: {error}") from error
    with file:
        if reading.column not in file.schema_arrow.names:
            raise missing_column(str(path), reading, file.schema_arrow.names)
        rows = file.metadata.num_rows
        number = 0
        for batch in file.iter_batches(batch_size=256, columns=[reading.column]):
            for value in batch.column(0):
                number += 1
                where = f"{path}, row {number}"
                yield from row_fragments(value.as_py(), where, reading, size * number // rows)


_READERS = {".txt": _txt, ".jsonl": _jsonl, ".parquet": _parquet}


def row_fragments(value: object, where: str, reading: Reading, read: int) -> Iterator[Fragment]:
    """The fragment of a row; none where the text is null."""
    if value is None:
        return
    if not isinstance(value, str):
        raise TypeError(f"{where}: got {type(value).__name__} as text; allowed: a string")
    yield Fragment(value, reading.begins is None or reading.begins.match(value) is not None, read)


def missing_column(where: str, reading: Reading, names: list[str]) -> ValueError:
    """The error that lists the columns there are."""
    listed = ", ".join(map(repr, sorted(names))) or "none"
    return ValueError(
        f"{where}: there is no column {reading.column!r} (option `text`); the columns are: {listed}"
    )
