"""A run that is killed goes on with the same command and ends as if it had never been killed, bit by bit."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from stablemask.training import Recipe, checkpoints, train
from stablemask.training import run as running
from tests import scenes
from tests.training import small
from tests.training.small import Updates

PARTS = 100  # at least: weights, two moments of each, counters, rates, the curve
UNFINISHED = "a checkpoint not written to its end"


def play(folder: Path, *names: str) -> dict[str, Any]:
    """Scenes whose runs all end like the one that was never killed."""
    found = scenes.play("tests.training.processes", folder, *names)
    for name in names:
        assert found[name]["parts"] > PARTS
        assert found[name]["differences"], found[name]
        assert all(parts == [] for parts in found[name]["differences"]), found[name]
    return found


@pytest.mark.slow
def test_killed_at_any_moment_and_at_any_touch_of_the_disk(tmp_path: Path) -> None:
    found = play(tmp_path, "killed_at_any_moment", "killed_at_the_disk")
    for scene in found.values():
        assert len(scene["deaths"]) >= 10
    scene = found["killed_at_the_disk"]
    assert scene["deaths"].count(UNFINISHED) >= 5, scene


@pytest.mark.slow
def test_killed_while_the_model_is_put_in_its_place_and_in_the_middle_of_a_file(tmp_path: Path) -> None:
    found = play(tmp_path, "killed_at_the_end", "cut_off")
    scene = found["killed_at_the_end"]
    assert "a model not written to its end" in scene["deaths"]
    assert False in scene["model_there"], "once, between the old one and the new one"
    scene = found["cut_off"]
    assert scene["deaths"] == [UNFINISHED] * 3
    assert {name for left in scene["left"] for name in left} >= {"optimizer.pt"}, scene


@pytest.mark.slow
def test_a_folder_that_may_not_be_written(tmp_path: Path) -> None:
    scene = play(tmp_path, "read_only")["read_only"]
    for name, message in zip(("empty", "begun"), scene["messages"], strict=True):
        assert str(tmp_path / "read_only" / name) in message
        assert "cannot be written: [Errno 13] Permission denied" in message
        assert "allowed: a folder that this user may write, with enough space (" in message
        assert "Traceback" not in message
    assert "There is no checkpoint yet; the same command begins anew" in scene["messages"][0]
    assert f"checkpoint-{small.STEPS} is whole; the same command goes on from there" in scene["messages"][1]


def test_two_runs_are_the_same_and_another_seed_is_another(tmp_path: Path) -> None:
    given = small.recipe(tmp_path)
    first, again, other = (tmp_path / name for name in ("first", "again", "other"))
    train(given, first, progress=False)
    train(given, again, progress=False)
    train(small.recipe(tmp_path, seed=1), other, progress=False)
    outcome = small.outcome(first)
    assert len(outcome) > PARTS
    assert small.different(small.outcome(again), outcome) == []
    differences = small.different(small.outcome(other), outcome)
    assert "curve" in differences
    assert {name for name in outcome if name.startswith("model.")} <= set(differences)


def test_nothing_is_computed_again_but_what_came_after_the_checkpoint(tmp_path: Path) -> None:
    given, run = small.recipe(tmp_path), tmp_path / "run"
    updates = Updates(last=13)
    with pytest.raises(KeyboardInterrupt):
        train(given, run, progress=False, callbacks=[updates])
    assert updates.seen == list(range(1, 14))
    updates = Updates()
    train(given, run, progress=False, callbacks=[updates])
    assert updates.seen == list(range(11, small.STEPS + 1))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run beside its corpus; nobody may change it."""
    folder = tmp_path_factory.mktemp("finished")
    train(small.recipe(folder), folder / "run", progress=False)
    return folder


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> tuple[Recipe, Path]:
    """Its recipe, and a copy of the run that may be changed."""
    return small.recipe(finished), shutil.copytree(finished / "run", tmp_path / "run")


def test_a_finished_run_is_not_repeated(copy: tuple[Recipe, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    given, run = copy
    monkeypatch.setattr(running, "prepare", None)
    summary = train(given, run)
    assert summary.model == run / "model"
    assert summary.steps == small.STEPS
    assert summary.perplexity == small.curve(run)[-1]["perplexity"]


def _lose_the_model(run: Path) -> None:
    shutil.rmtree(run / "model")


def _cut_the_summary(run: Path) -> None:
    summary = run / "summary.json"
    summary.write_text(summary.read_text(encoding="utf-8")[:50], encoding="utf-8")


def _empty_the_summary(run: Path) -> None:
    (run / "summary.json").write_text("{}", encoding="utf-8")


@pytest.mark.parametrize("break_it", [_lose_the_model, _cut_the_summary, _empty_the_summary])
def test_what_a_finished_run_has_lost_is_made_again(
    break_it: Callable[[Path], None], copy: tuple[Recipe, Path]
) -> None:
    given, run = copy
    before = small.outcome(run)
    break_it(run)
    updates = Updates()
    train(given, run, progress=False, callbacks=[updates])
    assert updates.seen == [], "from the last checkpoint"
    assert small.different(small.outcome(run), before) == []


def test_another_recipe_is_refused_by_the_name_of_what_is_different(copy: tuple[Recipe, Path]) -> None:
    given, run = copy
    other = replace(given, train=replace(given.train, learning_rate=0.02))
    with pytest.raises(ValueError, match=r"holds another run \(train\.learning_rate: 0\.01 → 0\.02\)"):
        train(other, run)
    (run / "summary.json").unlink()
    with pytest.raises(ValueError, match=r"train\.learning_rate: 0\.01 → 0\.02"):
        train(other, run)
    train(replace(given, name="other", train=replace(given.train, keep=3)), run, progress=False)


def test_another_text_under_the_same_name_is_refused(copy: tuple[Recipe, Path], tmp_path: Path) -> None:
    given, run = copy
    (run / "summary.json").unlink()
    text = Path(given.data.source)
    before = text.read_bytes()
    try:
        text.write_bytes(before + b'{"text": "one more"}\n')
        with pytest.raises(ValueError, match=r"holds another run \(the text of the data\)"):
            train(given, run, progress=False)
    finally:
        text.write_bytes(before)


@pytest.mark.parametrize("content", ["", '{"recipe": 3, "data": {}}', "[]"])
def test_a_folder_that_does_not_say_what_it_holds_is_refused(content: str, copy: tuple[Recipe, Path]) -> None:
    given, run = copy
    (run / "run.json").write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=r"whose run\.json cannot be read .* allowed: a new folder"):
        train(given, run)
    (run / "run.json").unlink()
    (run / "summary.json").unlink()
    with pytest.raises(ValueError, match=r"has checkpoints but no run\.json; allowed: a new one"):
        train(given, run, progress=False)


def test_two_runs_in_one_folder_are_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    with FileLock(run / ".lock"), pytest.raises(ValueError, match="where another process trains"):
        train(small.recipe(tmp_path), run)
    assert checkpoints.find(run) == []


def test_a_resumed_run_writes_each_line_of_metrics_once(tmp_path: Path) -> None:
    """Also lines cut off by a kill, and those of updates that are computed again."""
    given, run = small.recipe(tmp_path), tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        train(given, run, progress=False, callbacks=[Updates(last=13)])
    with (run / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 12, "lo')
    train(given, run, progress=False)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    losses = [line["step"] for line in lines if "loss" in line]
    assert losses == [2, 4, 5, 6, 8, 10, 12, 14, 15, 16, 18, 20, 22, 24]
    assert [line["step"] for line in lines if "perplexity" in line] == [6, 12, 18, 24]
    seconds = [line["seconds"] for line in lines]
    assert seconds == sorted(seconds)
