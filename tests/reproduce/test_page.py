"""The results page: from cells alone, the same every time, and honest about what is missing."""

import math
import re
from pathlib import Path

import pytest

from stablemask.reproduce import cells, gather, judge, page, pictures
from stablemask.reproduce.paper import load_paper
from stablemask.reproduce.study import Entry, load_claims, load_study
from tests.reproduce import planted

ITEMS = load_paper()
ROOT = Path(__file__).parents[2]


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
    planted.describe(folder)
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
    assert "they are not comparable" in part
    assert "|  | perplexity, paper | measured, text: a text of the tests | parameters here | seeds |" in part
    (claim,) = (line for line in part.splitlines() if line.startswith("| rope-small |"))
    columns = [cell.strip() for cell in claim.split("|")[1:-1]]
    assert columns[3] == "−0.0184 (−1.8 %)", "27.4 and 26.9 in the paper"
    assert float(columns[4].split()[0].replace("−", "-")) == pytest.approx(-0.02, abs=0.002)
    assert "(−2.0 %)" in columns[4] or "(−2.1 %)" in columns[4]
    assert all(" to " in cell for cell in columns[5:7]), "an interval from seeds, and one from documents"
    assert (columns[1], columns[7:]) == ("holds", ["−0.005", "5 of 5"])
    (row,) = (line for line in part.splitlines() if line.startswith("| OpenLLaMA, RoPE, 71M |"))
    assert re.fullmatch(
        r"\| OpenLLaMA, RoPE, 71M \| 27\.4 ± 0\.2 \| \d\d\.\d\d ± \d\.\d\d \| 1\.4M \| 5 \|", row
    )
    assert "stablemask reproduce table-1 --profile paper" in part


def test_what_is_missing_is_said(text: str) -> None:
    part = section(text, "table-1")
    (row,) = (line for line in part.splitlines() if line.startswith("| BLOOM-SM, ALiBi, 71M |"))
    assert row == "| BLOOM-SM, ALiBi, 71M | 29.0 ± 0.1 | not measured |  | 0 |"
    (claim,) = (line for line in part.splitlines() if line.startswith("| alibi-small |"))
    missing = "small/alibi/stablemask, small/alibi/none"
    assert claim.startswith(f"| alibi-small | not measured: no cell of {missing} |")
    assert claim.endswith("| −0.0306 (−3.0 %) | – | – | – | −0.005 | 0 of 3 |")


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
    assert "a command" not in part, "it may be one that nobody can type"
    assert str(results) not in text


def test_it_says_what_the_text_is(text: str) -> None:
    part = text.split("## What was run")[1].partition("\n## ")[0]
    assert f"text is a text of the tests, with the digest `{planted.CONDITIONS.corpus}`" in part
    assert "| training | train.jsonl | what is said of it | 12,345,678 |" in part
    assert "| validation, another source | other.jsonl | – | 99 |" in part
    assert "past the training length" not in part, "there are no long texts"
    assert "tokenizer `bpe:2048`" in part
    assert f"`results/corpora/{planted.CONDITIONS.corpus}.json`" in part
    options = "--data train.jsonl --valid valid.jsonl --other other.jsonl --other-begins '^ = [^=]'"
    assert f"stablemask reproduce table-1 --dry-run {options}\n" in part
    assert "--seeds 5 --groups small/rope/none small/rope/stablemask\n" in part
    assert "\nstablemask reproduce table-4 --device cpu\n" in part


def test_a_text_that_nobody_described_has_a_digest(tmp_path: Path) -> None:
    planted.pair(tmp_path, -0.02, seeds=1)
    text = write(tmp_path, tmp_path / "docs" / "results.md")
    named = f"the text {planted.CONDITIONS.corpus}"
    assert f"measured, text: {named} |" in section(text, "table-1")
    assert "--dry-run --data" not in text
    planted.describe(tmp_path, title=None)
    text = write(tmp_path, tmp_path / "docs" / "results.md")
    assert "measured, text: train.jsonl |" in section(text, "table-1")


def test_every_text_of_our_results_is_described() -> None:
    digests = {d["settings"].get("corpus") for d in cells.read_all(ROOT / "results")} - {None}
    described = {path.stem: planted.read(path) for path in (ROOT / "results" / cells.CORPORA).iterdir()}
    assert digests == set(described), "no more and no fewer"
    for digest, about in described.items():
        assert about["digest"] == digest
        assert all("/" not in str(name) for name in about["source"].values()), "no path of a machine"
        assert set(about["told"]) == {"data", "valid", "other", "long"}


def test_small_models_without_sinks_are_named(results: Path, text: str, tmp_path: Path) -> None:
    said = "these small models have no sinks to begin with"
    assert said not in text, "half of their heads are sinks"
    for seed in range(2):
        entry = Entry("small/rope/none", seed)
        content = planted.pretraining(entry, planted.losses({}), **{"sink rate": 0.0})
        planted.write(tmp_path, entry, content)
    without = write(tmp_path, tmp_path / "docs" / "results.md")
    for item in ("figure-1b", "figure-4d"):
        assert f"In all 2 cells of small/rope/none the sink rate is 0: {said}" in section(without, item)
    assert without.count(said) == 2
    planted.write(tmp_path, entry, {**content, "values": {**content["values"], "sink rate": 0.03}})
    assert said not in write(tmp_path, tmp_path / "docs" / "results.md")


def test_a_claim_without_losses_of_documents_rests_on_its_seeds(text: str) -> None:
    (claim,) = re.findall(r"^\| tokens-1 \|.*$", section(text, "table-2-tokens"), re.MULTILINE)
    columns = [cell.strip() for cell in claim.split("|")[1:-1]]
    assert " to " in columns[5]
    assert columns[6] == "none: seeds alone"
    assert "none: seeds alone" in text.split("## How verdicts are made")[1].partition("\n## ")[0]


def test_a_commit_stands_beside_the_source(tmp_path: Path) -> None:
    planted.write(tmp_path, Entry("sizes/71m", 0), {"values": {"named": 71.9}}, commit="0123abcd")
    assert f"({'0' * 16}, commit 0123abcd) | 1 |" in write(tmp_path, tmp_path / "results.md")


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
