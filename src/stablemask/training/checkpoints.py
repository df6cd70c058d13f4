"""Checkpoints that say whether they are whole.

A checkpoint is a folder with a manifest of its files, their sizes and checksums. The manifest is written when
everything else is on the disk, and appears as a whole: without it a checkpoint was never finished.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from stablemask.data.cache import sync

MANIFEST = "manifest.json"
PREFIX = "checkpoint-"
_CHUNK = 2**22


def seal(checkpoint: Path) -> None:
    """Bring all files of a checkpoint to the disk and write its manifest."""
    flush(checkpoint)
    files = {
        path.name: {"bytes": path.stat().st_size, "blake2b": _checksum(path)}
        for path in sorted(checkpoint.iterdir())
    }
    write_atomically(checkpoint / MANIFEST, json.dumps({"files": files}, indent=1))
    sync(checkpoint.parent)


def damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint; None if it is whole."""
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
        files = {str(name): (int(file["bytes"]), file["blake2b"]) for name, file in manifest["files"].items()}
    except FileNotFoundError:
        return "it was not written to its end"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} cannot be read"
    for name, (size, checksum) in files.items():
        path = checkpoint / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
        try:
            found = _checksum(path)
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
        if found != checksum:
            return f"{name} does not have the content that was written"
    return None


def find(folder: Path) -> list[Path]:
    """All checkpoints of a run, whole or not, the newest first."""
    numbered = [
        (int(path.name.removeprefix(PREFIX)), path)
        for path in folder.glob(f"{PREFIX}*")
        if path.name.removeprefix(PREFIX).isdecimal()
    ]
    return [path for _, path in sorted(numbered, reverse=True)]


def newest_whole(folder: Path) -> tuple[Path | None, dict[Path, str]]:
    """The newest checkpoint that is whole, and what is wrong with those after it."""
    damaged: dict[Path, str] = {}
    for checkpoint in find(folder):
        reason = damage(checkpoint)
        if reason is None:
            return checkpoint, damaged
        damaged[checkpoint] = reason
    return None, damaged


def rotate(written: Path, keep: int) -> None:
    """Keep the checkpoint just written and the newest of those before it, remove the others.

    Those after it are what the run has passed over; what was never finished counts for nothing.
    """
    found = find(written.parent)
    finished = [path for path in found[found.index(written) :] if (path / MANIFEST).is_file()]
    for path in found:
        if path not in finished[:keep]:
            remove(path)


def remove(checkpoint: Path) -> None:
    """Remove a checkpoint, its manifest first: what is left of it if this is interrupted is not whole."""
    (checkpoint / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(checkpoint)


@contextmanager
def writing(path: Path, folder: Path) -> Iterator[None]:
    """Errors while something is written for the run in a folder, with what to do about them."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        there = next(place for place in (folder, *folder.parents) if place.is_dir())
        free = shutil.disk_usage(there).free / 2**20  # torch does not say that a disk is full
        raise OSError(
            f"{path} cannot be written: {error}; allowed: a folder that this user may write, with enough "
            f"space ({free:,.0f} MiB are free). {kept(folder)}"
        ) from error


def kept(folder: Path) -> str:
    """From where the run in a folder would go on."""
    found, _ = newest_whole(folder)
    if found is None:
        return "There is no checkpoint yet; the same command begins anew"
    return f"{found.name} is whole; the same command goes on from there"


def write_atomically(path: Path, text: str) -> None:
    """A file that is the old one or the new one, never a part of it, also after a loss of power."""
    new = path.with_name(f".{path.name}.new")
    with new.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    sync(path.parent)


def flush(folder: Path) -> None:
    """Bring all files of a folder to the disk."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _checksum(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
