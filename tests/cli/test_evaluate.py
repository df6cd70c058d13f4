"""``stablemask eval``: what it writes, that it resumes, what it refuses."""

import json
from pathlib import Path

import pytest

from stablemask.cli import main
from stablemask.evaluation import perplexity
from tests.evaluation import small


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("A text, read in windows. " * 5, encoding="utf-8")
    return small.save(tmp_path / "model")


def command(folder: Path, *more: str) -> list[str]:
    return ["eval", str(folder), "--text", str(folder.parent / "text.txt"), "--device", "cpu", *more]


def test_values_as_a_table_and_as_lines(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(folder, "--perplexity.stride", "5")) == 0
    lines = (folder / "evaluation" / "results.jsonl").read_text(encoding="utf-8").splitlines()
    values = {line["name"]: line["value"] for line in map(json.loads, lines)}
    assert list(values) == ["perplexity", "bits_per_byte", "perplexity/positions 0-15", "tokens"]
    assert values["tokens"] == 125
    printed = capsys.readouterr().out
    assert f"{values['perplexity']:,.4f}" in printed
    assert "windows of 16, stride 5" in printed


def test_finished_cells_are_not_computed_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(folder)) == 0
    before = capsys.readouterr().out.splitlines()[2:]

    def never(*_: object, **__: object) -> None:
        raise AssertionError

    monkeypatch.setattr(perplexity, "_batch_losses", never)
    assert main(command(folder)) == 0
    assert capsys.readouterr().out.splitlines()[2:] == before
    with pytest.raises(AssertionError):
        main(command(folder, "--perplexity.stride", "3"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--suite", "perplexity,beauty"], "suite: got 'beauty'; allowed: perplexity"),
        (["--perplexity.stride", "99"], "stride: got 99"),
        (["--text", "nowhere.txt"], "got 'nowhere.txt'"),
    ],
)
def test_what_cannot_be(
    folder: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert main(command(folder, *options)) == 2
    assert message in capsys.readouterr().err
