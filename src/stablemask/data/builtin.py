"""The corpus that needs no download: documentation and source of the running Python's standard library."""

import hashlib
import os
import sys
import sysconfig
import tokenize
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from stablemask.data.fragments import Fragment
from stablemask.data.progress import Bar

# Not every distribution has the tests; what was installed beside the library is not part of it.
_LEFT_OUT = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


class _Document(NamedTuple):
    name: str
    text: str


class StandardLibrary:
    """Every help topic and every module is a document; the order is that of their names."""

    name = "builtin"

    @cached_property
    def documents(self) -> list[_Document]:
        """Topics first, then modules, without what depends on the machine that built this Python."""
        from pydoc_data.topics import topics  # noqa: PLC0415 - half a megabyte, read when it is needed

        documents = [_Document(f"topic {name}", text) for name, text in sorted(topics.items())]
        folder = Path(sysconfig.get_path("stdlib"))
        for path in sorted(_modules(folder)):
            with tokenize.open(folder / path) as file:  # by the file's own encoding; ends of line become \n
                documents.append(_Document(path, file.read()))
        return documents

    @property
    def total(self) -> int:
        """Characters."""
        return sum(len(document.text) for document in self.documents)

    def fingerprint(self, bar: Bar) -> str:  # noqa: ARG002 - it is quick
        """The hash of all names and texts."""
        digest = hashlib.blake2b(digest_size=16)
        for name, text in self.documents:
            digest.update(f"{name}\0{len(text)}\0".encode())
            digest.update(text.encode())
        return digest.hexdigest()

    def fragments(self) -> Iterator[Fragment]:
        """Every document whole."""
        read = 0
        for _, text in self.documents:
            read += len(text)
            yield Fragment(text, starts=True, read=read)


def _modules(folder: Path) -> list[str]:
    """Paths of the modules, relative to the folder of the library, with slashes."""
    found = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in _LEFT_OUT]
        relative = Path(parent).relative_to(folder)
        found += [(relative / name).as_posix() for name in names if _is_library(name, relative)]
    if not found:
        raise FileNotFoundError(
            f"source: got 'builtin', but {folder} has no modules of Python {sys.version.split()[0]} as "
            "files; allowed here: a source of your own"
        )
    return found


def _is_library(name: str, folder: Path) -> bool:
    """Not what is made by the build, nor the topics, which are read as documents."""
    made = name.startswith("_sysconfigdata") or (folder.name == "pydoc_data" and name == "topics.py")
    return name.endswith(".py") and not made
