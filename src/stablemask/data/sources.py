"""Which source a name means, and what of it belongs to which split."""

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from stablemask.data import builtin, files
from stablemask.data.config import DataConfig
from stablemask.data.fragments import Fragment, Reading, Source, pieces
from stablemask.data.progress import Bar

SPLITS = ("train", "valid", "test")


class Part(NamedTuple):
    """One split: a source, and the share of its documents, by their hash, that belong to the split."""

    source: Source
    share: tuple[float, float] = (0.0, 1.0)

    def pieces(self) -> Iterator[Fragment]:
        """Its text in pieces, without empty documents."""
        everything = pieces(self.source.fragments())
        return everything if self.share == (0.0, 1.0) else _chosen(everything, self.share)

    def fingerprint(self, bar: Bar) -> str:
        """A key of its content."""
        return f"{self.source.fingerprint(bar)} {self.share}"


def parts(config: DataConfig, cache: Path) -> dict[str, Part]:
    """The three splits: their own sources, the source's own splits, else documents held out of training."""
    own = open_source(config, "source", cache)
    given = {name: config.valid if name == "valid" else config.test for name in SPLITS[1:]}
    found: dict[str, Part] = {}
    held: list[str] = []
    for name, source in given.items():
        if source is not None:
            found[name] = Part(_only(open_source(config, name, cache), name))
        elif name in own:
            found[name] = Part(own[name])
        else:
            held.append(name)
    start = 0.0
    for name in held:
        found[name] = Part(own["train"], (start, start + config.held_out))
        start += config.held_out
    found["train"] = Part(own["train"], (start, 1.0))
    return {name: found[name] for name in SPLITS}


def open_source(config: DataConfig, option: str, cache: Path) -> dict[str, Source]:
    """The splits of the source that an option of the configuration names; of ``source``, ``train`` is one."""
    value = {"source": config.source, "valid": config.valid, "test": config.test}[option]
    assert value is not None
    if value == "builtin":
        return {"train": builtin.StandardLibrary()}
    begins = None if config.begins is None else re.compile(config.begins)
    reading = Reading(option, config.text, begins, cache)
    path = Path(value).expanduser()
    if path.exists() and not files.is_saved_dataset(path):
        return files.open_local(path, reading)
    if files.is_path(value) and not path.exists():
        raise FileNotFoundError(f"{option}: got {value!r}; there is no such file or folder")
    from stablemask.data import hub  # noqa: PLC0415 - importing datasets takes its time

    return hub.open_saved(path, reading) if path.exists() else hub.open_named(value, reading)


def _only(splits: dict[str, Source], name: str) -> Source:
    """Of a source given for one split: that split of it if it has splits, else all of it."""
    if name not in splits and "train" not in splits:
        raise ValueError(f"{name}: got a source with the splits {sorted(splits)}; allowed: one with {name!r}")
    return splits[name] if name in splits else splits["train"]


def _chosen(everything: Iterator[Fragment], share: tuple[float, float]) -> Iterator[Fragment]:
    keep = False
    for piece in everything:
        if piece.starts:
            digest = hashlib.blake2b(piece.text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
            keep = share[0] <= int.from_bytes(digest, "big") / 2**64 < share[1]
        if keep:
            yield piece
