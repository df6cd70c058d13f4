"""``stablemask eval position``: the table, the control, resuming, several processes."""

import json
from pathlib import Path

import pytest

from stablemask.cli import evaluate_position as module
from stablemask.cli import main


def command(folder: Path, *more: str) -> list[str]:
    quick = "--lengths 6 --device cpu --setting.steps 2 --setting.width 16 --setting.heads 2 --jobs 1"
    return ["eval", "position", "--out", str(folder), *quick.split(), *more]


def lines(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text(encoding="utf-8").splitlines()]


def test_the_table_has_what_was_measured_beside_what_was_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ["--encodings", "rope", "rope+stablemask", "--seeds", "2"]
    assert main(command(tmp_path, *few)) == 0
    printed = capsys.readouterr().out
    (rope,) = (line.split() for line in printed.splitlines() if line.strip().startswith("rope "))
    assert [cell for cell in rope if cell in ("25.3", "24.7", "43.1")] == ["25.3", "24.7", "43.1"]
    (ours,) = (line.split() for line in printed.splitlines() if line.strip().startswith("rope+stablemask "))
    assert ours.count("–") == 3
    assert "Control: all 4 models" in printed
    found = [line for line in lines(tmp_path) if line["name"] == "accuracy"]
    assert len(found) == 2 * 2 * 3
    assert {line["settings"]["seed"] for line in found} == {0, 1}  # type: ignore[index]


def test_finished_models_are_not_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = ["--tasks", "mapping", "--encodings", "none"]
    assert main(command(tmp_path, *few)) == 0
    before = lines(tmp_path)
    trained: list[object] = []
    monkeypatch.setattr(
        module, "_train", lambda e, *_: (trained.append(e), ({"accuracy": 1.0, "loss": 0.0}, 0.0))[1]
    )
    assert main(command(tmp_path, *few)) == 0
    assert (trained, lines(tmp_path)) == ([], before)
    assert main(command(tmp_path, *few, "--seeds", "2")) == 1, "above the ceiling of 1/6"
    assert [e.seed for e in trained] == [1]  # type: ignore[attr-defined]


def test_processes_give_the_same_values(tmp_path: Path) -> None:
    few = ["--tasks", "mapping", "odd_even", "--encodings", "rope+stablemask"]
    assert main(command(tmp_path / "one", *few)) == 0
    assert main(command(tmp_path / "two", *few, "--jobs", "2")) == 0
    assert lines(tmp_path / "one") == lines(tmp_path / "two")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--encodings", "rope", "rape"], "encodings: got 'rape'; allowed: learned, sinusoidal"),
        (["--seeds", "0"], "seeds: got 0"),
        (["--jobs", "0"], "jobs: got 0"),
        (["--lengths", "1"], "lengths: got"),
    ],
)
def test_wrong_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert main(command(tmp_path, *options)) == 2
    assert message in capsys.readouterr().err
