"""Small corpora on disk in every form that is read, and ways to read them back."""

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from stablemask.data import DataConfig
from stablemask.data.sources import parts

# Windows and old Mac ends of line, NUL, a line separator inside a line, combining and astral characters.
ODD = [
    "one\r\ntwo\rthree",
    "nul \0 byte",
    "a\u2028b\x85c\x0bd",
    "e\u0301 語 🏳️‍🌈 \U0010ffff",
    "  spaces \n\n",
    "last",
]
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    # Two frames in a file, as parallel compressors write them.
    ".zst": lambda data: b"".join(
        pa.compress(half, codec="zstd", asbytes=True)
        for half in (data[: len(data) // 2], data[len(data) // 2 :])
    ),
}


def write(path: Path, texts: list[str], column: str = "text") -> Path:
    """The texts as a file of the kind that its name says; as .txt there can be one only."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if ".parquet" in path.name:
        pq.write_table(pa.table({"id": list(range(len(texts))), column: texts}), path)
        return path
    if ".jsonl" in path.name:
        content = "".join(json.dumps({"id": i, column: text}) + "\n" for i, text in enumerate(texts))
    else:
        (content,) = texts
    suffix = path.suffix if path.suffix in COMPRESS else ""
    path.write_bytes(COMPRESS[suffix](content.encode()))
    return path


def documents(config: DataConfig, split: str = "train") -> list[str]:
    """The documents of a split, before they are tokenised."""
    found: list[str] = []
    for piece in parts(config, Path(config.cache))[split].pieces():
        if piece.starts:
            found.append("")
        found[-1] += piece.text
    return found
