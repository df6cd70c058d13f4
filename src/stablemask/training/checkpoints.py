"""Checkpoints that say whether they are whole.

A checkpoint is a folder with a manifest of its files, their sizes and checksums. The manifest is written when
everything else is on the disk, and appears as a whole: without it a checkpoint was never finished.
"""

import hashlib
import json
import os
import shutil
from pathlib import Path

MANIFEST = "manifest.json"
PREFIX = "checkpoint-"
_CHUNK = 2**22


def seal(checkpoint: Path) -> None:
    """Bring all files of a checkpoint to the disk and write its manifest."""
    files = {}
    for path in sorted(checkpoint.iterdir()):
        if path.name != MANIFEST:
            with path.open("rb") as file:
                os.fsync(file.fileno())
            files[path.name] = {"bytes": path.stat().st_size, "blake2b": _checksum(path)}
    write_atomically(checkpoint / MANIFEST, json.dumps({"files": files}, indent=1))
    sync(checkpoint.parent)


def damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint; None if it is whole."""
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
        files = {str(name): (int(file["bytes"]), file["blake2b"]) for name, file in manifest["files"].items()}
    except FileNotFoundError:
        return "it was not written to its end"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} cannot be read"
    for name, (size, checksum) in files.items():
        path = checkpoint / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
        if _checksum(path) != checksum:
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


def rotate(folder: Path, keep: int) -> None:
    """Remove all but the newest checkpoints; what was never finished counts for nothing."""
    finished = [path for path in find(folder) if (path / MANIFEST).is_file()]
    for path in find(folder):
        if path not in finished[:keep]:
            remove(path)


def remove(checkpoint: Path) -> None:
    """Remove a checkpoint, its manifest first: what is left of it if this is interrupted is not whole."""
    (checkpoint / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(checkpoint)


def write_atomically(path: Path, text: str) -> None:
    """A file that is the old one or the new one, never a part of it, also after a loss of power."""
    new = path.with_name(f".{path.name}.new")
    with new.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    sync(path.parent)


def sync(folder: Path) -> None:
    """Let a rename inside the folder survive a loss of power."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _checksum(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
