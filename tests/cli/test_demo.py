"""``stablemask demo``, shortened: its table, its page, and that it goes on where it was stopped."""

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest

from stablemask.cli import demo, demo_pair, main
from tests import scenes
from tests.cli import demos

pytestmark = pytest.mark.slow
PAIR = ("none", "stablemask")
Found = dict[str, Any]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return scenes.play("tests.cli.demos", tmp_path_factory.mktemp("demos"), "demos")["demos"]


def rows(printed: str) -> dict[str, list[str]]:
    """The lines of the table, by what they name."""
    lines = [line for line in printed.splitlines() if line.startswith("│")]
    cells = ([cell.strip() for cell in line.strip("│").split("│")] for line in lines)
    return {name: values for name, *values in cells}


def rows_of(page: str) -> list[list[str]]:
    """The lines of all tables of a page."""
    lines = re.findall(r"<tr\b.*?</tr>", page, re.DOTALL)
    cells = (re.findall(r"<t[dh]\b[^>]*>(.*?)</t[dh]>", line, re.DOTALL) for line in lines)
    return [[html.unescape(re.sub(r"<[^>]*>", "", cell)).strip() for cell in line] for line in cells]


def number(cell: str) -> float:
    return float(cell.replace(",", ""))


def shown(values: list[float]) -> list[str]:
    return [f"{value:,.2f}" for value in values]


def test_the_table_has_what_was_measured(found: Found) -> None:
    table = rows(found["printed"]["whole"])
    measured, summaries = found["measured"], found["summaries"]
    assert table["parameters"] == [f"{summaries[r]['parameters']:,}" for r in PAIR]
    assert table["validation perplexity"] == shown([summaries[r]["perplexity"] for r in PAIR])
    assert table["training, s"] == shown([summaries[r]["seconds"] for r in PAIR])
    longer = "perplexity at 4 × the training length of 32"
    for name, key in (
        (f"{longer}, a window of 32 keys", "longer/window"),
        (f"{longer}, all keys", "longer/full"),
        ("perplexity of the same text at the training length", "longer/trained length"),
    ):
        assert table[name] == shown([measured[f"demo-longer/{r}"][key] for r in PAIR])
    for name, task in (("which row am I?", "mapping"), ("is my row odd?", "odd_even")):
        accuracies = [100 * measured[f"demo-{task}/{r}"][f"{task}/accuracy"] for r in PAIR]
        assert table[f"position task: {name} accuracy, %"] == shown(accuracies)
    decoding = measured["demo-decoding/pair"]
    milliseconds = 1000 * decoding["seconds a token"]
    assert table["decoding, ms a token"] == shown([milliseconds, milliseconds * decoding["ratio"]])
    assert milliseconds > 0.01
    assert sum(found["took"]) > 0
    assert len(table) == 12


def test_what_cannot_be_otherwise(found: Found) -> None:
    printed = rows(found["printed"]["whole"]).items()
    table = {name: [number(value) for value in values] for name, values in printed}
    assert len(set(table["parameters"])) == 1
    assert table["position task: which row am I? accuracy, %"][0] == 1.56, "1/64 without StableMask"
    assert table["position task: is my row odd? accuracy, %"][0] == 50
    assert table["attention on no token (pseudo mass), %"][0] == 0
    assert 5 < table["attention on no token (pseudo mass), %"][1] < 100
    plain, ours = table["attention on the first token, %"]
    assert 0 < ours < plain < 100
    assert all(1 < value < 2048 for value in table["validation perplexity"])
    assert "6,144 tokens of training" in found["printed"]["whole"]


def test_the_page_has_the_table_the_curves_and_the_heads(found: Found) -> None:
    page = found["page"]
    for name, values in rows(found["printed"]["whole"]).items():
        (cells,) = (cells for cells in rows_of(page) if cells[0] == name)
        assert [number(c) for c in cells[1:]] == pytest.approx(
            [number(v) for v in values], rel=1e-3, abs=0.006
        )
    data = json.loads(
        re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[0]
    )
    names = list(demo_pair.PAIR.values())
    assert [(m["name"], m["layers"], m["heads"]) for m in data["models"]] == [(name, 4, 8) for name in names]
    assert [m["horizon"] for m in data["models"]] == [None, 32]
    curves = {curve["title"]: curve["series"] for curve in data["curves"]}
    for title, key in (("Training loss", "loss"), ("Validation perplexity", "perplexity")):
        for series, name, remedy in zip(curves[title], names, PAIR, strict=True):
            lines = [line for line in found["curves"][remedy] if key in line]
            assert (series["name"], series["x"]) == (name, [line["step"] for line in lines])
            assert series["y"] == pytest.approx([line[key] for line in lines], rel=1e-3)
            assert len(lines) >= 2


def test_a_demo_that_was_killed_goes_on(found: Found) -> None:
    assert found["codes"]["whole"] == found["codes"]["killed"] == 0
    assert found["updates"] == {"whole": [demos.STEPS] * 2, "killed": [demos.STEPS] * 2}
    assert all(0 < at < demos.STEPS for at in found["begun"])
    assert found["different"] == {"none": [], "stablemask": []}
    whole, killed = (rows(found["printed"][name]) for name in ("whole", "killed"))
    timed = ("decoding, ms a token", "training, s")
    assert [name for name in whole if whole[name] != killed[name]] in ([*timed], [timed[1]], [timed[0]], [])


def test_an_interruption_is_answered(found: Found) -> None:
    assert found["codes"]["interrupted"] == 130
    said, free = found["interruption"]
    assert said == "stablemask demo: interrupted; the same command goes on from here\n"
    assert free, "no process is left that works on it"


def test_a_finished_demo_is_shown_again(found: Found) -> None:
    assert found["codes"]["again"] == 0
    assert found["again"], "nothing was trained"


def test_what_fails_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("RoPE: its process ended with -9; run it again")

    monkeypatch.setattr(demo, "grow_pair", broken)
    monkeypatch.setattr(demo, "prepare", lambda *_: None)
    assert main(["demo", "--folder", str(tmp_path / "demo")]) == 2
    assert "stablemask demo: RoPE: its process ended with -9; run it again\n" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert main(["demo", "--folder", str(tmp_path / "file")]) == 2
    assert "file" in capsys.readouterr().err


def test_the_pair_differs_in_the_remedy_alone() -> None:
    plan = demo_pair.Plan()
    plain, ours = (demo_pair.recipe(remedy, plan).table() for remedy in demo_pair.PAIR)
    assert (plain.pop("name"), ours.pop("name")) == ("demo-none", "demo-stablemask")
    assert (plain["model"].pop("remedy"), ours["model"].pop("remedy")) == PAIR
    assert plain == ours
    assert plain["data"]["source"] == "builtin"
