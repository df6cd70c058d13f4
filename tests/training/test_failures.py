"""What ends a run from outside or inside: a clear error, and nothing lost."""

import errno
import json
import re
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from stablemask.cli import main as command
from stablemask.training import checkpoints, train
from stablemask.training.toml import write_table
from tests.training import small


class At(TrainerCallback):
    """Does something after an update, or at the end."""

    def __init__(self, work: Callable[[Any], object], step: int | None = None) -> None:
        self.work = work
        self.step = step

    def on_step_end(self, _args: Any, state: Any, _control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step == self.step:
            self.work(model)

    def on_train_end(self, _args: Any, _state: Any, _control: Any, model: Any = None, **_: Any) -> None:
        if self.step is None:
            self.work(model)


@contextmanager
def full_disk_later() -> Iterator[Callable[[int], None]]:
    """A function after which no file can grow past some bytes, as far as the kernel is concerned."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    assert signal.getsignal(signal.SIGXFSZ) == signal.SIG_IGN, "Python gets an error, not a signal"
    try:
        yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, dict[str, str]]]:
    """A recipe, and what its run comes to if nothing happens to it."""
    folder = tmp_path_factory.mktemp("given")
    recipe = small.recipe(folder)
    train(recipe, folder / "run", progress=False)
    return recipe, small.outcome(folder / "run")


# A tokenizer has some 9 kB, weights some 50 kB, an optimizer's state some 110 kB.
# What torch says of it is not much.
@pytest.mark.parametrize(
    ("size", "reason"), [(4_000, "File too large"), (40_000, "File too large"), (90_000, "")]
)
def test_a_full_disk_at_a_checkpoint(size: int, reason: str, given: Any, tmp_path: Path) -> None:
    recipe, outcome = given
    with (
        full_disk_later() as fill,
        pytest.raises(OSError, match=rf"checkpoint-10 cannot be written: .*{reason}") as caught,
    ):
        train(recipe, tmp_path, progress=False, callbacks=[At(lambda _: fill(size), step=8)])
    message = str(caught.value)
    assert str(tmp_path / "checkpoint-10") in message
    assert "allowed: a folder that this user may write, with enough space (" in message
    assert "checkpoint-5 is whole; the same command goes on from there" in message
    assert checkpoints.find(tmp_path) == [tmp_path / "checkpoint-5"], "what was half written takes no space"
    train(recipe, tmp_path, progress=False)
    assert small.different(small.outcome(tmp_path), outcome) == []


def test_a_full_disk_at_the_metrics(given: Any, tmp_path: Path) -> None:
    recipe, outcome = given
    metrics = tmp_path / "metrics.jsonl"

    def fill(_: object) -> None:
        metrics.rename(tmp_path / "away")
        metrics.symlink_to("/dev/full")

    with pytest.raises(
        OSError, match=r"metrics\.jsonl cannot be written: \[Errno 28\] No space left"
    ) as caught:
        train(recipe, tmp_path, progress=False, callbacks=[At(fill, step=7)])
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.ENOSPC
    assert "checkpoint-5 is whole; the same command goes on from there" in str(caught.value)
    train(recipe, tmp_path, progress=False)
    assert small.different(small.outcome(tmp_path), outcome) == []


def test_a_full_disk_before_the_first_update(given: Any, tmp_path: Path) -> None:
    recipe, outcome = given
    (tmp_path / ".run.json.new").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"run\.json cannot be written: \[Errno 28\] No space left") as caught:
        train(recipe, tmp_path, progress=False)
    assert "There is no checkpoint yet; the same command begins anew" in str(caught.value)
    (tmp_path / ".run.json.new").unlink()
    train(recipe, tmp_path, progress=False)
    assert small.different(small.outcome(tmp_path), outcome) == []


def test_a_full_disk_at_the_trained_model(given: Any, tmp_path: Path) -> None:
    recipe, outcome = given
    with (
        full_disk_later() as fill,
        pytest.raises(OSError, match=r"model cannot be written: .*too large") as caught,
    ):
        train(recipe, tmp_path, progress=False, callbacks=[At(lambda _: fill(30_000))])
    assert f"checkpoint-{small.STEPS} is whole; the same command goes on from there" in str(caught.value)
    assert not (tmp_path / "model").exists()
    assert not (tmp_path / ".model.new").exists()
    train(recipe, tmp_path, progress=False)
    assert small.different(small.outcome(tmp_path), outcome) == []


def test_an_old_checkpoint_that_cannot_be_removed_costs_no_new_one(
    given: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, outcome = given
    honest = checkpoints.remove

    def failing(checkpoint: Path) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted", str(checkpoint))

    monkeypatch.setattr(checkpoints, "remove", failing)
    with pytest.raises(OSError, match=r"Operation not permitted: .*checkpoint-5") as caught:
        train(recipe, tmp_path, progress=False)
    assert "checkpoint-15 is whole; the same command goes on from there" in str(caught.value)
    assert checkpoints.newest_whole(tmp_path) == (tmp_path / "checkpoint-15", {})
    monkeypatch.setattr(checkpoints, "remove", honest)
    train(recipe, tmp_path, progress=False)
    assert small.different(small.outcome(tmp_path), outcome) == []


@pytest.mark.parametrize("inside", ["", "/of/it"])
def test_a_file_where_the_folder_should_be(inside: str, given: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    folder = f"{tmp_path}/file{inside}"
    with pytest.raises(OSError, match=f"{folder} cannot be written: .*; allowed: a folder"):
        train(given[0], folder)
    assert (tmp_path / "file").read_text(encoding="utf-8") == "mine"


# Text


@pytest.fixture
def by_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Trains a recipe by the command line: its exit code and what it says on standard error."""

    def run(recipe: Any) -> tuple[int, str]:
        file = tmp_path / "recipe.toml"
        file.write_text(write_table(recipe.table()), encoding="utf-8")
        code = command(["train", str(file), "--out", str(tmp_path / "run")])
        return code, capsys.readouterr().err

    return run


@pytest.mark.parametrize("texts", [[], ["", ""], ["a single document"]])
def test_a_corpus_without_text(
    texts: list[str], tmp_path: Path, by_command: Callable[..., tuple[int, str]]
) -> None:
    recipe = small.recipe(tmp_path)
    file = Path(recipe.data.source)
    rows = file.read_text(encoding="utf-8")
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    code, said = by_command(recipe)
    assert code == 2
    expected = (
        rf"stablemask train: (train|valid): got '{file}', which has no text for this split; allowed: a "
        r"source with more documents, or one for each split \(options `valid` and `test`\)\n"
    )
    assert re.fullmatch(expected, said), said
    file.write_text(rows, encoding="utf-8")
    assert by_command(recipe)[0] == 0, "the same command, when there is text"


def test_a_corpus_shorter_than_a_block(tmp_path: Path, by_command: Callable[..., tuple[int, str]]) -> None:
    recipe = small.recipe(tmp_path, length=4096)
    code, said = by_command(recipe)
    assert code == 2
    expected = (
        r"stablemask train: length: got 4096, but the (train|valid) split has only \d+ tokens; allowed: at"
    )
    assert re.match(expected, said), said
    assert len(said.splitlines()) == 1


# Numbers that are none


def poison(model: Any) -> None:
    with torch.no_grad():
        next(model.parameters()).fill_(torch.nan)


def test_a_loss_that_is_no_number(given: Any, tmp_path: Path) -> None:
    recipe, outcome = given
    with pytest.raises(FloatingPointError, match=r"^loss: got nan at update 8; allowed: ") as caught:
        train(recipe, tmp_path, progress=False, callbacks=[At(poison, step=7)])
    message = str(caught.value)
    assert "lower learning_rate, more warmup_steps or precision fp32, in a new folder" in message
    assert "checkpoint-5 is whole; the same command goes on from there" in message
    assert [line["step"] for line in small.curve(tmp_path)] == [2, 4, 5, 6, 6]
    train(recipe, tmp_path, progress=False)
    assert small.different(small.outcome(tmp_path), outcome) == []


def test_weights_that_are_no_numbers_are_not_saved(given: Any, tmp_path: Path) -> None:
    """The loss of the update was finite; the next one's will not be."""
    recipe, outcome = given
    with pytest.raises(FloatingPointError, match=r"embed_tokens\.weight: got nan at update 10; allowed: "):
        train(recipe, tmp_path, progress=False, callbacks=[At(poison, step=10)])
    assert checkpoints.find(tmp_path) == [tmp_path / "checkpoint-5"]
    train(recipe, tmp_path, progress=False)
    assert small.different(small.outcome(tmp_path), outcome) == []


def test_a_recipe_that_diverges(tmp_path: Path, by_command: Callable[..., tuple[int, str]]) -> None:
    recipe = small.recipe(tmp_path, learning_rate=1e30, warmup_steps=0, clipping=0.0)
    code, said = by_command(recipe)
    assert code == 1
    last = said.splitlines()[-1]
    assert re.match(r"stablemask train: \w+: got (nan|inf) at update \d+; allowed: a recipe that stays", last)
    assert "Traceback" not in said
