"""``stablemask theory``: every statement has its verdict, and a control that fails is seen."""

from pathlib import Path
from typing import Any

import pytest

from stablemask.cli import main
from stablemask.cli import theory as module

QUICK = ["theory", "--length", "48", "--gammas", "0", "0.5", "--steps", "3"]


@pytest.fixture(autouse=True)
def _short_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TOKENS", 5)


def test_statements_and_what_was_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(QUICK) == 0
    printed = capsys.readouterr().out
    for title in ("Appendix C: positions", "Proposition 1:", "Appendix A and B.1", "The paper's statements"):
        assert title in printed
    rows = [line.split() for line in printed.splitlines() if line.split()[:1] in (["float32"], ["float64"])]
    assert [row[:2] for row in rows] == [[d, g] for d in ("float32", "float64") for g in ("0", "0.5")]
    assert [row[2:6] for row in rows if row[1] == "0"] == [["48"] * 4] * 2
    assert int(rows[1][5]) < 28
    assert rows[1][6:9] == [str(int(rows[1][5]) + 1), "→", rows[1][5]]
    verdicts = printed.split("The paper's statements")[1]
    assert [verdicts.count(v) for v in ("holds", "in part", "does not hold")] == [4, 5, 2]


def test_a_control_that_fails_is_seen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    honest = module.limits

    def short(*arguments: Any) -> module.Limits:
        return honest(*arguments)._replace(fitted=5, beyond=5.0)

    monkeypatch.setattr(module, "limits", short)
    assert main(QUICK) == 1
    assert "A control failed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--length", "1"], "length: got 1; allowed: from 2 on"),
        (["--steps", "0"], "steps: got 0; allowed: from 1 on"),
        (["--gammas", "0.5", "-1"], "gammas: got -1.0; allowed: finite numbers ≥ 0"),
    ],
)
def test_wrong_options(capsys: pytest.CaptureFixture[str], options: list[str], message: str) -> None:
    assert main(["theory", *options]) == 2
    assert message in capsys.readouterr().err


def test_the_page_shows_the_command() -> None:
    page = (Path(__file__).parents[2] / "docs" / "theory.md").read_text(encoding="utf-8")
    assert "stablemask theory" in page
