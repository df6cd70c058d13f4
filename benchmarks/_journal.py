"""What a run leaves behind: JSON lines, from which an interrupted run goes on."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stablemask.benchmark import Result, Timing
from stablemask.measuring import Comparison, Ratio

_ABOUT_THE_RUN = ("date", "command")


class Journal:
    """The environment in the first line of a file, then a line for each result."""

    def __init__(self, path: Path, environment: dict[str, Any], *, resume: bool) -> None:
        self.path = path
        self.results: dict[tuple[str, str], Result] = {}
        self.notes: dict[str, dict[str, Any]] = {}
        if path.exists() and not resume:
            raise FileExistsError(f"output: {path} exists; give --resume to go on with it, or another path")
        if path.exists():
            self._read(environment)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._append({"kind": "environment", **environment})

    def once(self, case: str, backend: str, measure: Callable[[], Result]) -> Result:
        """The result of a case on a back end: as written down, or measured now and written down."""
        if (case, backend) not in self.results:
            result = self.results[case, backend] = measure()
            self._append({"kind": "result", "verdict": result.verdict, **asdict(result)})
        return self.results[case, backend]

    def note(self, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Anything else that JSON can hold: as written down, or made now and written down."""
        if name not in self.notes:
            note = self.notes[name] = make()
            self._append({"kind": "note", "name": name, "content": note})
        return self.notes[name]

    def _append(self, record: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def _read(self, environment: dict[str, Any]) -> None:
        for line in self.path.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            kind = record.pop("kind")
            if kind == "environment":
                _check_same(self.path, record, environment)
            elif kind == "note":
                self.notes[record["name"]] = record["content"]
            else:
                result = _result(record)
                self.results[result.case, result.backend] = result


def _check_same(path: Path, recorded: dict[str, Any], now: dict[str, Any]) -> None:
    changed = [
        f"{name} was {recorded.get(name)!r} and is {value!r}"
        for name, value in now.items()
        if name not in _ABOUT_THE_RUN and recorded.get(name) != value
    ]
    if changed:
        raise ValueError(f"resume: {path} was measured elsewhere: {'; '.join(changed)}")


def _result(record: dict[str, Any]) -> Result:
    del record["verdict"]
    timings = []
    for timing in record.pop("timings"):
        comparison = timing.pop("comparison")
        ratio, noise = Ratio(**comparison.pop("ratio")), Ratio(**comparison.pop("noise"))
        timings.append(Timing(comparison=Comparison(ratio, noise, **comparison), **timing))
    return Result(**record, timings=timings)
