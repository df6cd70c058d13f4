"""``stablemask theory``: every statement has its verdict, and a control that fails is seen."""

import re
from pathlib import Path
from typing import Any

import pytest

from stablemask.cli import main, terminal
from stablemask.cli import theory as module

QUICK = ["theory", "--length", "48", "--gammas", "0", "0.5", "--steps", "3"]
WITHOUT_TRAINING = {
    "The first layer recovers": "in part",
    "Embeddings need a 1 and ": "in part",
    "W_Q = W_K = 0 makes ever": "in part",
    "Past the training length": "holds",  # of 2 × 48 tokens; not of 2 × 1024 in float32
    "Proposition 1: (1) alway": "holds",
    "I(X≤i)/I(X≤n) ≥ I(Ω≤i)/I": "in part",
    "softCopyLast is causally": "holds",
}


@pytest.fixture(autouse=True)
def _short_sequences_on_long_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TOKENS", 5)
    monkeypatch.setattr(terminal, "_WIDTH_OF_A_PIPE", 600)


def claims(printed: str) -> dict[str, tuple[str, str]]:
    """Verdict and what was found, by how a statement begins."""
    rows = [re.split(r" {2,}", line.strip()) for line in printed.splitlines()]
    stated = [row for row in rows if len(row) == 4 and row[0].startswith(("Appendix", "§"))]
    return {statement[:24]: (verdict, found) for _, statement, verdict, found in stated}


def numbers(text: str, pattern: str) -> list[float]:
    found = re.search(pattern.replace("#", r"(\d\.\d{3})"), text)
    assert found is not None
    return [float(number) for number in found.groups()]


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
    found = claims(printed)
    assert len(found) == len(WITHOUT_TRAINING) + 4
    assert {statement: found[statement][0] for statement in WITHOUT_TRAINING} == WITHOUT_TRAINING


def test_verdicts_on_trained_decoders_follow_from_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    """What three steps of training lead to is another matter."""
    assert main(QUICK) == 0
    found = claims(capsys.readouterr().out)

    verdict, text = found["Any regular decoder is p"]
    weak = [*numbers(text, "# trained, # trained with StableMask"), *numbers(text, "# with steep RoPE")]
    assert weak == [1.0, 1.0, 0.0]
    assert verdict == "in part"

    verdict, text = found["… and disproportional by"]
    low, high = numbers(text, "from # to #")
    assert low <= high
    assert verdict == ("holds" if low > 0.5 else "does not hold")

    verdict, text = found["Pseudo scores handle dis"]
    without, with_pseudo_scores = numbers(text, "# without, # with")
    assert verdict == ("holds" if with_pseudo_scores <= without / 2 else "does not hold")

    verdict, text = found["On identical tokens a re"]
    assert numbers(text, "by # with StableMask")[0] > 0
    assert verdict == "holds"


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


def test_the_page_has_the_command_and_its_verdicts(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "theory.md").read_text(encoding="utf-8")
    assert "```sh\nstablemask theory\n```" in page
    said = dict(re.findall(r"^\| (?:Appendix|§)[^|]* \| (.{24})[^|]*\| ([^|:]*)[^|]*\|$", page, re.MULTILINE))
    assert main(QUICK) == 0
    assert said.keys() == claims(capsys.readouterr().out).keys()
    expected = {s: verdict for s, verdict in WITHOUT_TRAINING.items() if not s.startswith("Past")}
    assert {s: said[s].strip() for s in expected} == expected
