"""``stablemask reproduce``: cells, tables, the page; resuming; refusals."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stablemask.cli import main
from stablemask.reproduce import runner
from tests.reproduce import planted, small

ROOT = Path(__file__).parents[2]


class Place:
    """A folder with a tiny study, and the options that keep everything in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        small.study(folder)
        self.results = folder / "results"
        self.page = folder / "docs" / "results.md"

    def run(self, *arguments: str, text: bool = True) -> int:
        kept = ["--results", str(self.results), "--page", str(self.page), "--work", str(self.folder / "work")]
        prepared = ["--corpus", str(small.corpus_folder())] if text else []
        given = [*kept, "--study", str(self.folder / "study.toml"), "--device", "cpu", *prepared]
        return main(["reproduce", *arguments, *given])

    def cells(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in sorted(self.results.glob("*.json"))}


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_cells_tables_and_page_and_no_work_twice(
    place: Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert place.run("table-2-tokens") == 0
    printed = capsys.readouterr().out
    assert "4 cells, 0 of them finished" in printed
    assert "4/4" in printed
    assert "OpenLLaMA-SM" in printed
    assert "15.4 ± 0.2" in printed
    assert "undecided at this" in printed, "two seeds are too few"
    before = place.cells()
    assert sorted({name.rpartition("-")[0] for name in before}) == [
        *("small-rope-none-0", "small-rope-none-1"),
        *("small-rope-stablemask-0", "small-rope-stablemask-1"),
    ]
    text = place.page.read_text(encoding="utf-8")
    assert "2 of 5" in text
    assert (place.page.parent / "figures" / "results-learning.svg").exists()
    document = planted.read(place.results / next(iter(before)))
    assert document["command"].startswith("stablemask reproduce table-2-tokens --results results")
    assert str(place.folder) not in document["command"]

    monkeypatch.setattr(runner, "work", lambda *_: pytest.fail("trained again"))
    assert place.run("table-2-tokens") == 0
    assert "4 cells, 4 of them finished" in capsys.readouterr().out
    assert place.cells() == before
    (place.results / next(iter(before))).unlink()
    monkeypatch.undo()
    assert place.run("table-2-tokens", "--dry-run") == 0
    planned = capsys.readouterr().out
    assert "at the speed of the 3 cells that are there" in planned
    assert len(place.cells()) == 3
    assert place.run("table-2-tokens") == 0
    assert place.cells().keys() == before.keys()


def test_the_page_from_cells_alone(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    planted.pair(place.results, -0.02)
    whole = ["reproduce", "--report-only", "--results", str(place.results), "--page", str(place.page)]
    assert main(whole) == 0
    printed = capsys.readouterr().out
    assert "holds (5)" in printed
    assert "with 10 figures" in printed.replace("\n", " ")
    assert "| rope-small |" in place.page.read_text(encoding="utf-8")
    assert main([*whole, "table-1"]) == 0
    printed = capsys.readouterr().out
    assert "headline" in printed
    assert "holds" in printed
    assert main([*whole, "--precision", "bf16"]) == 2
    assert (
        "results: got no cell with precision 'bf16'; allowed: cpu, fp32, 0123456789abcdef"
        in capsys.readouterr().err
    )


def test_an_item_that_needs_no_text(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    assert place.run("table-5", "figure-2", text=False) == 0
    printed = capsys.readouterr().out
    assert "5/5" in printed
    assert "1,439" in printed
    assert not (place.folder / "work").exists(), "no text was prepared"
    assert "| 71M | 71 | 71.92 |" in place.page.read_text(encoding="utf-8")


def test_a_model_is_trained_before_its_heads_are_drawn(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("stablemask.reproduce.extras.HEADS_TOKENS", 12)
    assert place.run("figure-f") == 0
    assert "Writing" not in capsys.readouterr().err, "no bar but ours"
    assert "All heads" in place.page.read_text(encoding="utf-8")
    names = [name.rpartition("-")[0] for name in place.cells()]
    assert names == ["heads-small-rope-stablemask-0", "small-rope-stablemask-0"]
    assert list((place.folder / "work").glob("weights-*/small-rope-stablemask/model.safetensors"))
    assert (place.page.parent / "figures" / "results-all-heads.svg").exists()


def test_what_fails_is_named_and_the_rest_goes_on(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    honest = runner.work

    def work(job: Any, entry: Any, on_share: Any) -> Path:
        if entry.group == "sizes/160m":
            raise RuntimeError("no luck")
        return honest(job, entry, on_share)

    monkeypatch.setattr(runner, "work", work)
    assert place.run("table-5", text=False) == 1
    printed = capsys.readouterr().out
    assert "sizes/160m, seed 0: FAILED, RuntimeError: no luck" in printed
    assert "Missing: sizes/160m 0" in printed
    assert len(place.cells()) == 3
    assert "| 160M | 160 | not measured |" in place.page.read_text(encoding="utf-8")


def test_when_time_is_up_finished_cells_are_kept(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    assert place.run("table-5", "--minutes", "0.001", text=False) == 1
    printed = capsys.readouterr().out
    assert "Missing: sizes/71m 0" in printed
    assert place.page.exists()


def test_more_seeds_than_the_study_has(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    assert place.run("table-2-tokens", "--dry-run", "--seeds", "3") == 0
    printed = capsys.readouterr().out
    assert "6 cells, 0 of them finished" in printed
    assert "0, 1, 2" in printed
    assert "known once a cell is finished" in printed


def test_texts_are_prepared_from_files(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    source = small.write_texts(place.folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(place.folder / "cache"))
    texts = [
        part for name in ("data", "valid", "other", "long") for part in (f"--{name}", getattr(source, name))
    ]
    assert place.run("table-2-tokens", "--seeds", "1", *texts, text=False) == 0
    digests = {planted.read(path)["settings"]["corpus"] for path in place.results.glob("*.json")}
    assert digests == {small.corpus().digest}, "the same text as that which was prepared beforehand"


def test_what_there_is(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    assert place.run(text=False) == 0
    listed = capsys.readouterr().out
    assert place.run("--list", text=False) == 0
    assert capsys.readouterr().out == listed
    assert "theorem-b.1" in listed
    assert "not measured" in listed
    assert not place.page.exists()


def test_the_full_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--profile", "paper", "--recipes", str(ROOT / "recipes")]
    assert main(["reproduce", "table-3-tokens", "table-5", "--dry-run", *given]) == 0
    printed = capsys.readouterr().out
    assert "162.1" in printed
    assert "50,000" in printed
    assert f"stablemask train {ROOT}/recipes/ablation-learnable-token.toml" in printed
    assert "nothing to run" in printed
    assert "RECIPE" not in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tabel-1"], "ID: got 'tabel-1'; did you mean table-1"),
        (["table-1", "--jobs", "0"], "jobs, seeds: got 0, None; allowed: from 1 on"),
        (["table-1", "--seeds", "0"], "jobs, seeds: got 1, 0; allowed: from 1 on"),
        (["table-1", "--profile", "paper", "--recipes", "nowhere"], "nowhere/wikitext103-71m-alibi.toml"),
    ],
)
def test_wrong_options(
    place: Place, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert place.run(*arguments) == 2
    assert message in capsys.readouterr().err
    assert not place.results.exists()


def test_a_corpus_that_is_not_there(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    assert place.run("table-1", "--corpus", str(place.folder / "nothing"), text=False) == 2
    assert "allowed: a folder with a prepared corpus" in capsys.readouterr().err


BARE = """
import sys
from importlib.machinery import PathFinder

hidden = {"rich", "tyro", "pyarrow", "datasets", "matplotlib", "lm_eval", "jinja2"}
honest = PathFinder.find_spec
def find(cls, name, path=None, target=None):
    return None if name.split(".")[0] in hidden else honest(name, path, target)

PathFinder.find_spec = classmethod(find)
from stablemask.reproduce import extra_values, worker
code = worker.main(sys.argv[1:])
print(sorted(hidden & set(sys.modules)))
sys.exit(code)
"""


def test_the_worker_needs_little(place: Place) -> None:
    """On a machine without these packages it trains and measures a cell."""
    arguments = ["--corpus", str(small.corpus_folder()), "--results", str(place.results), "--seeds", "1"]
    arguments += [
        "--groups",
        "small/rope/none",
        "--study",
        str(place.folder / "study.toml"),
        "--device",
        "cpu",
    ]
    done = subprocess.run(
        [sys.executable, "-c", BARE, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
    assert len(place.cells()) == 1


def test_a_hidden_package_would_be_missed() -> None:
    """The subprocess above does hide: what it hides cannot be imported."""
    program = BARE.replace("from stablemask.reproduce", "import rich\nfrom stablemask.reproduce")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "No module named 'rich'" in done.stderr


def test_the_results_of_the_documentation_are_current(tmp_path: Path) -> None:
    page = tmp_path / "docs" / "results.md"
    shutil.copytree(ROOT / "docs" / "figures", page.parent / "figures")
    for drawn in (page.parent / "figures").glob("results-*"):
        drawn.unlink()
    assert main(["reproduce", "--report-only", "--results", str(ROOT / "results"), "--page", str(page)]) == 0
    assert page.read_bytes() == (ROOT / "docs" / "results.md").read_bytes()
    for kept in (ROOT / "docs" / "figures").glob("results-*"):
        assert (page.parent / "figures" / kept.name).read_bytes() == kept.read_bytes()
