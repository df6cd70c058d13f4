"""Command lines of the page: whoever types them gets the cells that are on it."""

import shlex
from pathlib import Path

import pytest

from stablemask.cli import main
from stablemask.cli.reproduce import Options, parse
from stablemask.reproduce import commands, extras, runner, worker
from stablemask.reproduce.cells import Conditions
from stablemask.reproduce.corpus import open_corpus
from stablemask.reproduce.gather import Found, gather
from stablemask.reproduce.paper import choose, entries_of, load_paper
from stablemask.reproduce.study import Entry, load_claims, load_study
from tests.reproduce import planted, small

ITEMS, CLAIMS, STUDY = load_paper(), load_claims(), load_study()
PAIR = ("small/rope/none", "small/rope/stablemask")
WORKER = ["python", "-m", "stablemask.reproduce.worker"]
CONDITIONS = Conditions("cuda", "bf16", planted.CONDITIONS.corpus)


def lines_of(found: Found) -> list[list[str]]:
    return [shlex.split(line) for line in commands.commands(ITEMS, CLAIMS, STUDY, found)]


def options_of(words: list[str]) -> Options:
    assert words[:2] == ["stablemask", "reproduce"]
    return parse(words[2:], "stablemask reproduce").options


def entries_of_line(words: list[str]) -> set[Entry]:
    if words[:3] == WORKER:
        given = worker._parser().parse_args(words[3:])
        return set(runner.select(STUDY, given.groups, given.seeds, given.first_seed))
    return set(entries_of(choose(ITEMS, options_of(words).ids), CLAIMS, STUDY))


@pytest.fixture
def found(tmp_path: Path) -> Found:
    """Models of language with five seeds and with two, heads of one, all of one encoding, theorems, sizes."""
    planted.pair(tmp_path, -0.02, conditions=CONDITIONS)
    trained = [Entry("small/rope/pseudo_0", seed) for seed in (0, 1)]
    for entry in [*trained, Entry("heads/small/rope/stablemask", 0)]:
        planted.write(tmp_path, entry, {"values": {}}, conditions=CONDITIONS)
    free = [Entry("sizes/71m", 0), *(entry for entry in extras.entries() if entry.group[:6] == "theory")]
    for entry in [*free, *(Entry("position/rope/none", seed) for seed in range(3))]:
        planted.write(tmp_path, entry, {"values": {}})
    planted.describe(tmp_path)
    return gather(tmp_path, STUDY)


def test_models_of_language_are_those_that_there_are(found: Found) -> None:
    lines = [words for words in lines_of(found) if words[:3] == WORKER]
    assert [words[words.index("--seeds") + 1] for words in lines] == ["5", "2"]
    made = [entries_of_line(words) for words in lines]
    assert set.union(*made) == {entry for entry in found.cells if entry.group.startswith("small/")}
    for words in lines:
        given = worker._parser().parse_args(words[3:])
        assert (given.device, given.precision) == ("cuda", "bf16")


def test_all_cells_are_made_and_each_where_it_was(found: Found) -> None:
    prepared, *lines = lines_of(found)
    made = {entry: words for words in reversed(lines) for entry in entries_of_line(words)}
    assert set(found.cells) <= set(made)
    for entry, words in made.items():
        if words[:3] != WORKER and entry in found.cells and not commands.reads_text(entry):
            assert options_of(words).device == found.cells[entry]["settings"]["device"], entry
    assert prepared[:2] == ["stablemask", "reproduce"]
    heads, free = (options_of(words) for words in lines[-2:])
    assert heads.ids == ("figure-1a",), "figure-f adds nothing to it"
    assert str(heads.corpus) == lines[0][lines[0].index("--corpus") + 1]
    assert {"table-4", "table-5", "theorem-4.1"} <= set(free.ids)
    assert not any(map(commands.reads_text, entries_of_line(lines[-1]))), "no text is prepared for these"
    assert "algorithm-1" not in free.ids, "its cell is that of figure-2"


def test_the_text_is_prepared_where_the_other_lines_look_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first line, run with files of the names that it has, makes the folder of the second."""
    small.write_texts(tmp_path)
    small.study(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    corpus = small.corpus()
    found = Found(Conditions("cpu", "fp32", corpus.digest), {Entry(PAIR[0], 0): {}}, 0, corpus.about)
    first, second = lines_of(found)
    assert main([*first[1:], "--study", "study.toml"]) == 0
    folder = Path(second[second.index("--corpus") + 1])
    assert open_corpus(folder).digest == corpus.digest
    assert not Path("results").exists(), "nothing is trained"


def test_what_begins_a_document_is_part_of_the_line(found: Found) -> None:
    given = options_of(lines_of(found)[0])
    assert given.dry_run
    assert (given.data, given.valid, given.other) == ("train.jsonl", "valid.jsonl", "other.jsonl")
    assert (given.other_begins, given.long) == ("^ = [^=]", None)


def test_a_text_that_nobody_described_is_not_prepared(found: Found) -> None:
    undescribed = Found(found.conditions, found.cells, 0)
    lines = lines_of(undescribed)
    assert lines[0][:3] == WORKER
    assert lines[0][lines[0].index("--corpus") + 1] == "corpus"


def test_without_cells_there_are_no_lines() -> None:
    assert lines_of(Found(CONDITIONS, {}, 0)) == []
