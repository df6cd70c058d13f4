"""Many cells: their order, failures, the end of time, and going on after a kill."""

import json
import multiprocessing
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from stablemask.reproduce import runner
from stablemask.reproduce.cells import Job
from stablemask.reproduce.runner import State, missing, run, select
from stablemask.reproduce.study import Entry, load_study
from tests.reproduce import small

NONE, STABLE, ALIBI = "small/rope/none", "small/rope/stablemask", "small/alibi/none"
QUICK, OTHER = Entry(NONE, 0), Entry(STABLE, 0)
BROKEN, LONG = Entry("small/rope/broken", 0), Entry("small/rope/long", 0)


def job_of(folder: Path) -> Job:
    """A study with an arm that needs more text than there is, and one that takes a minute."""
    given, path = small.job(folder), folder / "study.toml"
    path.write_text(small.STUDY + small.ARMS.format(long=20_000), encoding="utf-8")
    return replace(given, study=load_study(path))


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return job_of(tmp_path)


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[Entry]:
    """What was worked on; nothing is computed."""
    found: list[Entry] = []

    def work(job: Job, entry: Entry, on_share: Callable[[float], object]) -> None:
        found.append(entry)
        on_share(0.5)
        if entry == BROKEN:
            raise FloatingPointError("no such luck")
        job.results.mkdir(exist_ok=True)
        job.path(entry).write_text("{}", encoding="utf-8")

    monkeypatch.setattr(runner, "work", work)
    return found


def test_entries_are_worked_on_in_their_order(job: Job, done: list[Entry]) -> None:
    entries = [OTHER, QUICK, Entry(ALIBI, 0), Entry(NONE, 1)]
    assert run(job, entries) == []
    assert done == entries
    assert missing(job, entries) == []


def test_only_what_is_missing_is_made(job: Job, done: list[Entry]) -> None:
    entries = select(job.study)
    assert missing(job, entries) == entries
    run(job, entries[1:3])
    assert missing(job, entries) == [entries[0], *entries[3:]]
    done.clear()
    run(job, missing(job, entries))
    assert done == [entries[0], *entries[3:]]


def test_a_failing_cell_is_told_and_does_not_stop_the_others(job: Job, done: list[Entry]) -> None:
    states: list[State] = []
    assert run(job, [QUICK, BROKEN, OTHER], on_state=states.append) == [BROKEN]
    assert done == [QUICK, BROKEN, OTHER]
    assert [state.message for state in states if state.message] == [
        f"1/3  {NONE}, seed 0",
        "2/3  small/rope/broken, seed 0: FAILED, FloatingPointError: no such luck",
        f"3/3  {STABLE}, seed 0",
    ]


def test_the_share_of_the_work_grows_to_all_of_it(job: Job, done: list[Entry]) -> None:
    states: list[State] = []
    run(job, [QUICK, OTHER], on_state=states.append)
    shares = [state.share for state in states]
    assert shares == pytest.approx([0.25, 0.5, 0.75, 1.0]), "models of one size and as many updates"
    assert states[-1].left == 0.0
    assert all(state.left is not None and state.left >= 0 for state in states)


def test_a_larger_model_is_a_larger_share_and_says_more_about_the_time_left(
    job: Job, done: list[Entry], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(100))
    monkeypatch.setattr(runner, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    states: list[State] = []
    run(job, [LONG, QUICK], on_state=states.append)
    assert states[0].share == pytest.approx(0.5, abs=1e-3)
    assert states[0].left == pytest.approx(1.0, abs=1e-2), "half in one second"
    assert states[1].share == pytest.approx(1.0, abs=1e-3)


def test_nothing_to_do(job: Job) -> None:
    assert run(job, []) == []
    assert run(job, [], jobs=3) == []
    assert not job.results.exists()


def test_the_number_of_processes_is_checked(job: Job) -> None:
    with pytest.raises(ValueError, match="jobs: got 0; allowed: from 1 on"):
        run(job, [QUICK], jobs=0)


@pytest.mark.slow
def test_several_processes(job: Job) -> None:
    """The one that fails is told, the others have the values that one process gives."""
    states: list[State] = []
    entries = [QUICK, BROKEN, OTHER]
    assert run(job, entries, jobs=2, on_state=states.append) == [BROKEN]
    messages = sorted(state.message.partition("  ")[2] for state in states if state.message)
    assert messages[0].startswith("small/rope/broken, seed 0: FAILED, ValueError: length: got 1000000")
    assert messages[1:] == [f"{NONE}, seed 0", f"{STABLE}, seed 0"]
    assert states[-1].share == 1.0
    assert not multiprocessing.active_children()
    here = replace(job, results=job.results.with_name("here"))
    assert run(here, [OTHER]) == []
    one, two = (json.loads(j.path(OTHER).read_text(encoding="utf-8")) for j in (here, job))
    for part in ("settings", "values", "documents", "curves"):
        assert one[part] == two[part]


@pytest.mark.slow
def test_cells_being_worked_on_are_given_up_when_time_is_up(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock jumps when the second cell has told that it is on its way."""
    began, late = time.monotonic(), [0.0]
    monkeypatch.setattr(runner, "time", SimpleNamespace(monotonic=lambda: time.monotonic() - began + late[0]))
    states: list[State] = []

    def on_state(state: State) -> None:
        states.append(state)
        if state.share > 0.01:
            late[0] = 1e6

    last = Entry(ALIBI, 0)
    assert run(job, [QUICK, LONG, last], seconds=1e5, on_state=on_state) == [LONG, last]
    assert missing(job, [QUICK, LONG, last]) == [LONG, last]
    left = [path for path in job.results.iterdir() if path.is_file()]
    assert left == [job.path(QUICK)], "nothing half-written either"
    assert [state.message for state in states if state.message] == [f"1/3  {NONE}, seed 0"]
    assert states[-1].share < 0.9
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, [(NONE, 0), (STABLE, 0), (NONE, 1), (STABLE, 1), (ALIBI, 0)]),
        ({"patterns": ["small/rope/*"]}, [(NONE, 0), (STABLE, 0), (NONE, 1), (STABLE, 1)]),
        ({"patterns": ["*/none"]}, [(NONE, 0), (NONE, 1), (ALIBI, 0)]),
        ({"patterns": [ALIBI, STABLE]}, [(STABLE, 0), (STABLE, 1), (ALIBI, 0)]),
        ({"seeds": 1}, [(NONE, 0), (STABLE, 0), (ALIBI, 0)]),
        ({"patterns": ["*/alibi/*"], "seeds": 3}, [(ALIBI, 0), (ALIBI, 1), (ALIBI, 2)]),
        ({"patterns": ["*/alibi/*"], "seeds": 3, "first_seed": 1}, [(ALIBI, 1), (ALIBI, 2)]),
        ({"first_seed": 1}, [(NONE, 1), (STABLE, 1)]),
        ({"first_seed": 2}, []),
    ],
)
def test_select(job: Job, given: dict[str, object], expected: list[tuple[str, int]]) -> None:
    assert select(job.study, **given) == [Entry(*pair) for pair in expected]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"patterns": ["small/rope"]},
            f"groups: got 'small/rope'; allowed: patterns of {ALIBI}, {NONE}, {STABLE}",
        ),
        ({"patterns": [NONE, "large/*"]}, "groups: got 'large/.'; allowed: patterns of"),
        ({"seeds": 0}, "seeds: got 0; allowed: from 1 on"),
        ({"first_seed": -1}, "first_seed: got -1; allowed: from 0 on"),
    ],
)
def test_a_wrong_selection_is_refused(job: Job, given: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        select(job.study, **given)  # type: ignore[arg-type]
