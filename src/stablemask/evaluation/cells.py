"""Finished pieces of an evaluation, one JSON file each, so that work goes on where it stopped."""

import hashlib
import json
import math
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import stablemask
from stablemask.measuring import environment

LINES = "results.jsonl"

Values = dict[str, float]


@dataclass(frozen=True)
class Cell:
    """One piece of work: what is measured, and everything that decides its values, as JSON."""

    suite: str
    settings: Mapping[str, object]

    @property
    def key(self) -> str:
        """The name of its file: of the suite, and of the settings and the version of this package."""
        text = json.dumps([stablemask.__version__, self.settings], sort_keys=True)
        return f"{self.suite}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


class Results:
    """A folder of finished cells. Files are replaced as a whole: what is there is complete."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find(self, cell: Cell) -> Values | None:
        """The values of a finished cell; None where it is not finished."""
        path = self._path(cell)
        if not path.exists():
            return None
        values = json.loads(path.read_text(encoding="utf-8"))["values"]
        return {name: math.nan if value is None else float(value) for name, value in values.items()}

    def save(self, cell: Cell, values: Iterable[tuple[str, float]], seconds: float) -> None:
        """Keep the values of a cell, with the machine and the time they took."""
        entry = {
            "suite": cell.suite,
            "settings": cell.settings,
            "values": {name: _to_json(value) for name, value in values},
            "version": stablemask.__version__,
            "seconds": round(seconds, 1),
            "environment": environment(),
        }
        write_text(self._path(cell), json.dumps(entry, indent=1, ensure_ascii=False) + "\n")

    def write_lines(self, cells: Sequence[Cell]) -> Path:
        """Write the values of finished cells as JSON lines into ``results.jsonl`` of the folder."""
        lines = [
            json.dumps(
                {"suite": cell.suite, "name": name, "value": _to_json(value), "settings": cell.settings},
                ensure_ascii=False,
            )
            for cell in cells
            for name, value in (self.find(cell) or {}).items()
        ]
        path = self.folder / LINES
        write_text(path, "".join(line + "\n" for line in lines))
        return path

    def _path(self, cell: Cell) -> Path:
        return self.folder / f"{cell.key}.json"


def write_text(path: Path, text: str) -> None:
    """Write a file as a whole: a reader finds the old text or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _to_json(value: float) -> float | str | None:
    """JSON knows no infinity (here a string, which ``float`` reads) and no NaN (here null)."""
    if math.isnan(value):
        return None
    return value if math.isfinite(value) else str(value)
