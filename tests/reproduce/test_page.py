"""The results page: from cells alone, the same every time, and honest about what is missing."""

import math
import re
from pathlib import Path

import pytest

from stablemask.reproduce import gather, judge, page, pictures
from stablemask.reproduce.paper import load_paper
from stablemask.reproduce.study import Entry, load_claims, load_study
from tests.reproduce import planted

ITEMS = load_paper()


def write(results: Path, target: Path) -> str:
    study = load_study()
    found = gather.gather(results, study)
    judged = [judge.judge(claim, found) for claim in load_claims()]
    page.write_page(target, ITEMS, judged, found, study)
    return target.read_text(encoding="utf-8")


def section(text: str, anchor: str) -> str:
    (found,) = re.findall(rf"^## [^\n]*{{ #{anchor} }}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    return str(found)


def heads(results: Path) -> None:
    """A small model with a sink in one head of each layer, and the same without."""
    for group, sink in (("none", 0.9), ("stablemask", 0.1)):
        maps, mass = {}, {}
        for layer in range(2):
            for head in range(2):
                rest = 0.25 if group == "stablemask" else 0.0
                first = sink if head == layer else 0.3
                maps[f"{layer}/{head}"] = [
                    [1 - rest] if i == 0 else [first * (1 - rest)] + [(1 - first) * (1 - rest) / i] * i
                    for i in range(5)
                ]
                mass[f"{layer}/{head}"] = [rest] * 5
        content = {
            "values": {"first": 0.5, "pseudo": 0.1},
            "tokens": list("abc|$"),
            "maps": maps,
            "pseudo mass": mass,
        }
        planted.write(results, Entry(f"heads/small/rope/{group}", 0), content)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The headline pair, the position tasks of one encoding, heads."""
    folder = tmp_path_factory.mktemp("cells")
    planted.pair(folder, -0.02)
    for remedy, value in (("none", 0.4), ("stablemask", 0.99)):
        for seed in range(3):
            values = {"mapping": value + seed / 1000, "identification": value, "odd_even": value}
            planted.write(folder, Entry(f"position/rope/{remedy}", seed), {"values": values})
    heads(folder)
    return folder


@pytest.fixture(scope="module")
def written(results: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("docs") / "results.md"
    write(results, target)
    return target


@pytest.fixture(scope="module")
def text(written: Path) -> str:
    return written.read_text(encoding="utf-8")


def test_the_index_comes_first_and_has_every_item(text: str) -> None:
    index = text.split("## At a glance")[1].partition("## How verdicts are made")[0]
    rows = [line for line in index.splitlines() if line.startswith("| [")]
    assert len(rows) == len(ITEMS)
    assert text.index("## At a glance") < text.index("## How verdicts are made") < text.index("{ #table-1 }")
    outcome = {re.match(r"\| \[(.*?)\]", row)[1]: row.split("|")[-2].strip() for row in rows}  # type: ignore[index]
    assert outcome["table-2-tokens"] == "holds (5)"
    assert outcome["table-1"] == "holds (2), not measured (3)"
    assert outcome["table-5"] == "not measured"
    assert outcome["table-6"] == "nothing to measure"
    assert outcome["figure-1a"] == "measured"


def test_links_lead_somewhere(text: str, written: Path) -> None:
    anchors = set(re.findall(r"\{ #(\S+) \}", text))
    assert set(re.findall(r"\]\(#(.*?)\)", text)) == anchors
    images = re.findall(r"\]\((figures/.*?\.svg)#only-(?:light|dark)\)", text)
    assert {name.removeprefix("figures/") for name in images} == {
        p.name for p in written.parent.glob("figures/*")
    }
    assert len(images) == len(set(images)) == 2 * sum(name.endswith("-dark.svg") for name in images)


def test_an_item_has_the_papers_words_the_numbers_and_the_verdict(text: str) -> None:
    part = section(text, "table-1")
    assert "Models with StableMask have the lower perplexity, with ALiBi and RoPE, at every size." in part
    assert "perplexities are not comparable" in part
    (claim,) = (line for line in part.splitlines() if line.startswith("| rope-small |"))
    cells = [cell.strip() for cell in claim.split("|")[1:-1]]
    assert float(cells[3].split()[0].replace("−", "-")) == pytest.approx(-0.02, abs=0.002)
    assert "(−2.0 %)" in cells[3] or "(−2.1 %)" in cells[3]
    assert all(" to " in cell for cell in cells[4:6]), "an interval from seeds, and one from documents"
    assert (cells[1], cells[6:]) == ("holds", ["−0.005", "5 of 5"])
    (row,) = (line for line in part.splitlines() if line.startswith("| OpenLLaMA, RoPE, 71M |"))
    assert re.fullmatch(r"\| OpenLLaMA, RoPE, 71M \| 27\.4 ± 0\.2 \| \d\d\.\d\d ± \d\.\d\d \| 5 \|", row)
    assert "stablemask reproduce table-1 --profile paper" in part


def test_what_is_missing_is_said(text: str) -> None:
    part = section(text, "table-1")
    (row,) = (line for line in part.splitlines() if line.startswith("| BLOOM-SM, ALiBi, 71M |"))
    assert row == "| BLOOM-SM, ALiBi, 71M | 29.0 ± 0.1 | not measured | 0 |"
    (claim,) = (line for line in part.splitlines() if line.startswith("| alibi-small |"))
    missing = "small/alibi/stablemask, small/alibi/none"
    assert claim.startswith(f"| alibi-small | not measured: no cell of {missing} |")
    assert claim.endswith("| – | – | – | −0.005 | 0 of 3 |")


def test_positions(text: str) -> None:
    part = section(text, "table-4")
    assert "| RoPE + StableMask | measured | 99.1 ± 0.1 | 99.0 ± 0.0 | 99.0 ± 0.0 | 3 |" in part
    verdicts = dict(re.findall(r"^\| (position-\S+-rope) \| (.*?) \|", part, re.MULTILINE))
    assert verdicts == dict.fromkeys(verdicts, "holds")
    assert len(verdicts) == 6


def test_it_says_where_and_with_what(text: str, results: Path) -> None:
    part = text.split("## What was run")[1].partition("\n## ")[0]
    count = len(list(results.glob("*.json")))
    assert f"{count} cells" in part
    assert "2026-01-02" in part
    assert f"`{planted.CONDITIONS.corpus}`" in part
    assert "| a processor | 2 | none | 2.13.0 | 5.23.0 | 3.11.7 |" in part
    assert "a command" in part
    assert str(results) not in text


def test_the_same_cells_give_the_same_files(results: Path, written: Path, tmp_path: Path) -> None:
    write(results, tmp_path / "results.md")
    for path in [written, *written.parent.glob("figures/*.svg")]:
        again = tmp_path / path.relative_to(written.parent)
        assert path.read_bytes() == again.read_bytes(), path.name
    assert len(list(tmp_path.glob("figures/*.svg"))) >= 14


def test_without_cells(tmp_path: Path) -> None:
    (tmp_path / "figures").mkdir()
    for name in ("results-old.svg", "construction.svg", "construction-dark.svg"):
        (tmp_path / "figures" / name).write_text("<svg/>", encoding="utf-8")
    text = write(tmp_path / "nothing", tmp_path / "results.md")
    assert "Nothing yet: there is no finished cell." in text
    assert "holds (" not in text.split("## How verdicts")[0]
    kept = sorted(path.name for path in (tmp_path / "figures").iterdir())
    assert kept == ["construction-dark.svg", "construction.svg"], (
        "an old figure of the page is removed, no other"
    )
    assert "figures/construction.svg#only-light" in section(text, "figure-2")


def test_cells_that_do_not_count_are_counted(results: Path, tmp_path: Path) -> None:
    for path in results.glob("position-*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    entry = Entry("position/t5/none", 0)
    planted.write(tmp_path, entry, {"values": {"mapping": 1.0}}, study=planted.other_study())
    text = write(tmp_path, tmp_path / "docs" / "results.md")
    assert "Of the cells in that folder 1 is not on this page" in text
    assert "| T5 | paper | 22.4 | 24.5 | 42.7 |  |\n|  | measured | not measured |" in section(
        text, "table-4"
    )


def test_figures_show_what_the_cells_have(results: Path) -> None:
    study = load_study()
    found = gather.gather(results, study)
    judged = [judge.judge(claim, found) for claim in load_claims()]
    drawn = {each.name: each for each in pictures.pictures(found, judged, study)}
    assert list(drawn) == [
        "effects",
        "learning",
        "heads",
        "all-heads",
        "sinks-first",
        "sinks-pseudo",
        "lengths",
    ]
    (curve,) = drawn["learning"].draw.args  # type: ignore[attr-defined]
    loss = [planted.read(p)["values"]["curve/2"] for p in sorted(results.glob("small-rope-none-*"))]
    values = [math.exp(value) for value in loss]
    assert curve.series[0].y[1] == pytest.approx(sum(values) / 5)
    assert (curve.series[0].low[1], curve.series[0].high[1]) == (min(values), max(values))
    models, chosen = drawn["heads"].draw.args  # type: ignore[attr-defined]
    assert chosen == [(0, 0), (1, 1)], "in each layer the head with the strongest sink"
    assert float(models[0].attention(0, 0)[3, 0]) == pytest.approx(0.9)
    assert float(models[1].pseudo_mass[0, 0, 2]) == pytest.approx(0.25)


def test_the_size_of_models_is_on_the_axis() -> None:
    assert pictures._millions(load_study(), "small/rope/none") == pytest.approx(1.4, abs=0.2)
    assert pictures._millions(load_study(), "medium/rope/none") == pytest.approx(6.1, abs=0.8)
