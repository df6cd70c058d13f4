"""Finished cells: what is found again, what is written."""

import json
import math
from pathlib import Path

import pytest

import stablemask
from stablemask.evaluation.cells import Cell, Results, write_text


def test_a_cell_is_found_by_everything_that_decides_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results, cell = Results(tmp_path / "new"), Cell("speed", {"length": 5, "seed": 0})
    assert results.find(cell) is None
    results.save(cell, [("a", 1.5), ("b", math.inf), ("c", math.nan)], 0.1)
    found = results.find(Cell("speed", {"seed": 0, "length": 5}))
    assert found is not None
    assert (found["a"], found["b"], math.isnan(found["c"])) == (1.5, math.inf, True)
    assert results.find(Cell("speed", {"length": 5, "seed": 1})) is None
    assert results.find(Cell("speech", {"length": 5, "seed": 0})) is None
    monkeypatch.setattr(stablemask, "__version__", "another")
    assert results.find(cell) is None


def test_lines(tmp_path: Path) -> None:
    results, cells = Results(tmp_path), [Cell("x", {"i": i}) for i in range(3)]
    for i in (0, 2):
        results.save(cells[i], [("value", i / 2), ("inf", math.inf)], 0.0)
    lines = [json.loads(line) for line in results.write_lines(cells).read_text(encoding="utf-8").splitlines()]
    assert lines[2] == {"suite": "x", "name": "value", "value": 1.0, "settings": {"i": 2}}
    assert [line["value"] for line in lines] == [0.0, "inf", 1.0, "inf"]


def test_a_file_is_never_written_in_part(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_text(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "new \ud800")
    assert path.read_text(encoding="utf-8") == "old"
    assert list(tmp_path.iterdir()) == [path]
