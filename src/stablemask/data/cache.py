"""The cache on disk: entries named by their content, which appear whole or not at all."""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from stablemask.data.progress import Bar

# A file changed this recently, in seconds, can change again without its time stamps showing it.
_UNSETTLED = 3.0
_CHUNK = 2**23


def entry(
    folder: Path, name: str, is_whole: Callable[[Path], bool], make: Callable[[Path], None], bar: Bar
) -> Path:
    """The entry of a name, made by ``make`` in a folder of its own if it is not there.

    Of several processes that ask at once, one makes it and the others wait. What a process that died has
    begun is given to the next one, in the folder that ``make`` receives.
    """
    final = folder / name
    if is_whole(final):
        return final
    lock = FileLock(folder / f"{name}.lock")
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        _wait(lock, bar)
    try:
        if is_whole(final):
            return final
        begun = folder / f"{name}.begun"
        with writing(folder):
            begun.mkdir(exist_ok=True)
        make(begun)
        with writing(folder):
            if final.exists():  # damaged after it was made
                shutil.rmtree(final)
            begun.rename(final)
            sync(folder)
    finally:
        lock.release()
    return final


def _wait(lock: FileLock, bar: Bar) -> None:
    try:
        lock.acquire(timeout=0)
    except Timeout:
        with bar.task("waiting for another process that makes the same", None):
            lock.acquire()


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Errors of the file system, with what to do about them."""
    try:
        yield
    except OSError as error:
        raise OSError(
            error.errno,
            f"cache: {str(folder)!r} cannot be written: {error.strerror or error}; allowed: a folder with "
            "enough space that this user may write (option `cache`). The same call continues what is begun",
        ) from error


def write_atomically(path: Path, text: str) -> None:
    """A file that is the old one or the new one, never a part of it."""
    new = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        with new.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def sync(folder: Path) -> None:
    """Let a rename inside the folder survive a loss of power."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def key(*parts: object) -> str:
    """A short name of everything that determines an entry."""
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


def file_hash(path: Path, cache: Path, bar: Bar) -> str:
    """The hash of a file's content, read again only if the file changed since it was last asked for."""
    status = path.stat()
    state = [os.path.realpath(path), status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
    memory = cache / "hashes" / f"{key(state)}.txt"
    if memory.is_file():
        return memory.read_text(encoding="utf-8")
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file, bar.task(f"hashing {path.name}", status.st_size) as advance:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            advance(file.tell(), "")
    found = digest.hexdigest()
    if time.time() - status.st_ctime > _UNSETTLED and os.access(cache, os.W_OK):
        memory.parent.mkdir(exist_ok=True)
        write_atomically(memory, found)
    return found
