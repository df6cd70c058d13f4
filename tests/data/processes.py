"""Scenes of processes that prepare the same corpus, and die of it."""

import hashlib
import json
import os
import resource
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from stablemask.data import DataConfig, builtin, prepare, tokens
from stablemask.data.progress import Bar
from tests import scenes

_DOCUMENTS = 60


def corpus(folder: Path) -> DataConfig:
    """A corpus whose tokens are written in many steps, with a tokenizer to train."""
    file = folder / "text.jsonl"
    texts = [f"document {n} of {'many ' * (n % 11)}words" * 4 for n in range(_DOCUMENTS)]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return DataConfig(str(file), tokenizer="bpe:300", held_out=0.2, cache=str(folder / "cache"))


def killed(folder: Path) -> dict[str, object]:
    """SIGKILL before the first touch of the disk, the second, … of what is left, until one comes through."""
    config = corpus(folder)
    deaths, seen = 0, []
    while scenes.killed(scenes.forked(partial(_doomed, config, touch=1 + deaths))):
        deaths += 1
        seen.append(sorted(path.name for path in (folder / "cache" / "tokens").glob("*.begun")) != [])
        assert deaths < 500
    return {"deaths": deaths, "half-written": sum(seen), "same": _streams(config) == _never_killed(config)}


def together(folder: Path) -> dict[str, object]:
    """Several at once: how many of them did the work."""
    config = corpus(folder)
    work = folder / "work"

    def one() -> None:
        make = tokens._make
        log = work.open("a", buffering=1, encoding="utf-8")

        def logged(*given: Any, **named: Any) -> Any:
            log.write("made\n")
            return make(*given, **named)

        tokens._make = logged
        prepare(config, 8, progress=False)

    children = [scenes.fork(one) for _ in range(4)]
    codes = [os.waitpid(child, 0)[1] for child in children]
    return {"codes": codes, "made": work.read_text(encoding="utf-8").count("made")}


def full(folder: Path) -> dict[str, object]:
    """A disk on which no file can grow past a few bytes, and then one on which it can."""
    config = corpus(folder)
    message = folder / "message"

    def one() -> None:
        try:
            prepare(config, 8, progress=False)
        except OSError as error:
            message.write_text(str(error)[:400], encoding="utf-8")
            raise

    def limited() -> None:
        tokens._BATCH, tokens._SAVED_EVERY = 2**8, 0.0
        prepare(replace(config, tokenizer="bytes", cache=str(folder / "other")), 8, progress=False)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
        one()

    config = replace(config, tokenizer="bytes")
    codes = [scenes.forked(limited), scenes.forked(one)]
    return {
        "codes": codes,
        "message": message.read_text(encoding="utf-8"),
        "same": _streams(config) == _never_killed(config),
    }


def memory(folder: Path) -> dict[str, object]:
    """By how much the memory of a process rises while it tokenises a corpus, and one four times as large."""
    rises = []
    for megabytes in (8, 32):
        file = folder / f"{megabytes}.txt"
        numbers = np.random.default_rng(0).integers(0, 10**9, (megabytes << 20) // 10)
        file.write_text(" ".join(f"{n:09d}" for n in numbers), encoding="utf-8")
        small = folder / "small.txt"
        small.write_text("text " * 99, encoding="utf-8")
        config = DataConfig(
            str(file), valid=str(small), test=str(small), tokenizer="bytes", cache=str(folder)
        )
        report = folder / "report"

        def one(config: DataConfig = config, report: Path = report) -> None:
            tokens._BATCH = 2**18
            before = _highest(reset=True)
            blocks = prepare(config, 64, progress=False).train
            rise = _highest() - before
            assert isinstance(blocks._stream, np.memmap)
            report.write_text(str(rise), encoding="utf-8")

        assert scenes.forked(one) == 0
        rises.append(int(report.read_text(encoding="utf-8")))
    return {"rises": rises}


def built_in(folder: Path) -> dict[str, object]:
    """What the corpus without a download is, and the blocks of a part of it, tokenised from nothing."""
    whole = builtin.StandardLibrary().fingerprint(Bar(shown=False))
    modules = builtin._modules
    builtin._modules = lambda folder: sorted(modules(folder))[::40]
    splits = prepare(DataConfig(tokenizer="bpe:500", cache=str(folder)), 64, progress=False)
    return {
        "hash": hash("text"),  # of Python, which differs between processes
        "texts": whole,
        "blocks": [blocks.fingerprint for blocks in splits[:3]],
        "tokens": [hashlib.blake2b(blocks.tokens.stream().tobytes()).hexdigest() for blocks in splits[:3]],
    }


def _highest(*, reset: bool = False) -> int:
    """The most memory that this process held, in KiB, of its own and not of mapped files."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def _doomed(config: DataConfig, *, touch: int) -> None:
    tokens._BATCH, tokens._SAVED_EVERY = 2**10, 0.0
    scenes.die_at(touch, Path(config.cache))
    prepare(config, 8, progress=False)


def _streams(config: DataConfig) -> list[object]:
    splits = prepare(config, 8, progress=False)
    return [
        (b.num_bytes, b.tokens.stream().tolist(), b.tokens.starts().tolist(), b.fingerprint)
        for b in splits[:3]
    ]


def _never_killed(config: DataConfig) -> list[object]:
    return _streams(replace(config, cache=config.cache + "-never-killed"))


if __name__ == "__main__":
    scenes.main(killed, together, full, memory, built_in)
