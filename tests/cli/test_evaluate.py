"""``stablemask eval``: what it writes, that it resumes, what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from stablemask.analysis import figures
from stablemask.analysis.figures import curve_figure
from stablemask.analysis.views import Curve
from stablemask.cli import main
from stablemask.evaluation import perplexity
from stablemask.evaluation.models import describe
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


def test_extrapolation(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quick = "--extrapolation.length 8 --extrapolation.times 1 4 --extrapolation.pinned 2"
    options = ["--suite", "extrapolation", *quick.split()]
    assert main(command(folder, *options)) == 0
    found = lines(folder)
    places = [(line["settings"]["method"], line["settings"]["length"]) for line in found[::3]]
    assert places == [(method, length) for method in ("full", "window", "pinned") for length in (8, 32)]
    values = [line["value"] for line in found if line["name"] == "perplexity"]
    assert values[0] == pytest.approx(values[2]) == pytest.approx(values[4])
    printed = capsys.readouterr().out
    (row,) = (line.split() for line in printed.splitlines() if line.strip().startswith("32 "))
    assert row[1::2] == [f"{value:,.2f}" for value in values[1::2]]
    assert main(command(folder, *options, "--out", str(folder / "evaluation"))) == 0
    assert lines(folder) == found


def test_curves_of_all_models_come_into_one_figure_a_suite(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: dict[str, Curve] = {}

    def draw(curve: Curve) -> Figure:
        drawn[curve.title] = curve
        return curve_figure(curve)

    monkeypatch.setattr(figures, "curve_figure", draw)
    plain = small.save(folder.parent / "plain", "none")
    quick = "--extrapolation.times 1 2 --latency.prompts 4 --latency.outputs 1 3 --latency.rounds 2"
    options = ["--suite", "extrapolation,latency", *quick.split(), "--latency.max-seconds", "0"]
    out = folder.parent / "out"
    both = command(folder, *options, "--out", str(out))
    both.insert(2, str(plain))
    assert main(both) == 0
    for name in ("extrapolation", "latency"):
        assert (out / f"{name}.svg").read_text(encoding="utf-8").startswith("<?xml")

    lengths = drawn["Perplexity against length"]
    names, kinds = [describe(str(folder)), "plain"], ["full", "window", "pinned"]
    assert [line.name for line in lengths.series] == [f"{name}, {kind}" for name in names for kind in kinds]
    text = (out / "plain" / "results.jsonl").read_text(encoding="utf-8")
    found = [value["value"] for value in map(json.loads, text.splitlines()) if value["name"] == "perplexity"]
    assert [y for line in lengths.series[3:] for y in line.y] == found
    assert [list(line.x) for line in lengths.series] == [[16, 32]] * 6
    assert lengths.marks == [(16, "training length")]

    ratios = drawn["Latency of generation, as a ratio to the baseline"].series
    assert [line.name for line in ratios[:2]] == [f"{names[0]}, {kind}, prompt 4" for kind in ("SM-I", "SM")]
    assert all(line.low is not None and list(line.x) == [1, 3] for line in ratios)


def test_a_method_that_a_model_cannot_do_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text("A text, read in windows. " * 5, encoding="utf-8")
    model = tmp_path / "model"
    small.model(position="learned").float().save_pretrained(model)
    small.tokenizer().save_pretrained(model)
    options = ["--suite", "extrapolation", "--extrapolation.times", "1", "2"]
    assert main(command(model, *options)) == 0
    assert {line["settings"]["length"] for line in lines(model)} == {16}
    printed = capsys.readouterr().out
    assert (
        "Not everything with full: its table of 'learned' positions or of 'stablemask' ends at 16." in printed
    )
    assert (
        "Not everything with pinned: keys with 'learned' positions cannot be given other places." in printed
    )


def test_streaming(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(folder, "--suite", "streaming", "--streaming.tokens", "100")) == 0
    found = [line for line in lines(folder) if line["name"] == "cache MiB/tokens 100"]
    assert [line["settings"]["method"] for line in found] == ["window", "pinned"]
    assert found[0]["value"] == found[1]["value"] > 0
    assert "100 tokens in one stream; 16 keys are kept" in capsys.readouterr().out
    assert main(command(folder, "--suite", "streaming")) == 2
    assert "text: got 125 tokens; allowed: 100000 or more" in capsys.readouterr().err


def test_latency(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quick = "--latency.prompts 4 --latency.outputs 1 3 --latency.rounds 2 --latency.max-seconds 0"
    assert main(command(folder, "--suite", "latency", *quick.split())) == 0
    found = [line for line in lines(folder) if line["name"] == "ratio/SM-I"]
    assert [line["settings"]["output"] for line in found] == [1, 3]
    assert all(line["value"] > 0 for line in found)
    printed = capsys.readouterr().out
    assert f"{found[1]['value']:.3f} ±" in printed


def test_downstream_beside_the_paper(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = folder.parent / "data"
    data.mkdir()
    rows = [{"query": "Question: What?", "choices": ["a", "b"], "gold": i % 2} for i in range(4)]
    for task in ("piqa", "arc_easy"):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (data / f"{task}.jsonl").write_text(text, encoding="utf-8")
    options = [
        "--suite",
        "downstream",
        "--downstream.tasks",
        "piqa",
        "arc_easy",
        "--downstream.data",
        str(data),
    ]
    assert main(command(folder, *options)) == 0
    values = {line["name"]: line["value"] for line in lines(folder)}
    assert values["piqa/acc"] == values["arc_easy/acc"] == 0.5, "the same answer to every question"
    printed = capsys.readouterr().out
    (row,) = (line.split() for line in printed.splitlines() if line.strip().startswith("arc_easy"))
    assert row[1] == "50.0"
    assert row[-2:] == ["51.4", "51.7"]


def lines(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "evaluation" / "results.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]
