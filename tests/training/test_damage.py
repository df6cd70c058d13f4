"""A damaged checkpoint is named and passed over; with what is left the run ends as if nothing had been."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from stablemask.training import checkpoints, train
from tests.training import small
from tests.training.small import Updates

LAST = 17  # the update after which the run breaks off, with checkpoints of updates 10 and 15


@pytest.fixture(scope="module")
def broken_off(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A folder with a run that broke off, and the outcome of the same one that did not; not to be changed."""
    folder = tmp_path_factory.mktemp("broken")
    given = small.recipe(folder)
    with pytest.raises(KeyboardInterrupt):
        train(given, folder / "run", progress=False, callbacks=[Updates(last=LAST)])
    train(given, folder / "whole", progress=False)
    return folder, small.outcome(folder / "whole")


def cut(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def garbage(path: Path) -> None:
    path.write_bytes(b"\xa5" * path.stat().st_size)


def one_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def of_something_else(path: Path) -> None:
    path.write_text("[1, 2]", encoding="utf-8")


KINDS: list[tuple[str, Callable[[Path], None], str]] = [
    ("model.safetensors", cut, r"model\.safetensors has \d+ bytes instead of \d+"),
    ("model.safetensors", one_bit, r"model\.safetensors does not have the content that was written"),
    ("optimizer.pt", garbage, r"optimizer\.pt does not have the content that was written"),
    ("optimizer.pt", Path.unlink, r"optimizer\.pt is missing"),
    ("scheduler.pt", a_folder, r"scheduler\.pt is missing"),
    ("rng_state.pth", empty, r"rng_state\.pth has 0 bytes instead of \d+"),
    ("trainer_state.json", cut, r"trainer_state\.json has \d+ bytes instead of \d+"),
    ("manifest.json", Path.unlink, "it was not written to its end"),
    ("manifest.json", empty, r"manifest\.json cannot be read"),
    ("manifest.json", cut, r"manifest\.json cannot be read"),
    ("manifest.json", garbage, r"manifest\.json cannot be read"),
    ("manifest.json", of_something_else, r"manifest\.json cannot be read"),
]


@pytest.mark.parametrize(
    ("name", "damage", "reason"), KINDS, ids=[f"{name} {damage.__name__}" for name, damage, _ in KINDS]
)
def test_the_checkpoint_before_a_damaged_one_is_taken(
    name: str,
    damage: Callable[[Path], None],
    reason: str,
    broken_off: tuple[Path, dict[str, str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, outcome = broken_off
    run = shutil.copytree(folder / "run", tmp_path / "run")
    newest, before = checkpoints.find(run)
    assert checkpoints.damage(newest) is None
    damage(newest / name)
    updates = Updates()
    train(small.recipe(folder), run, callbacks=[updates])
    expected = rf"^{newest} is damaged: {reason}; it is passed over\ngoing on from {before}$"
    assert re.search(expected, capsys.readouterr().err, re.MULTILINE)
    assert updates.seen == list(range(11, small.STEPS + 1))
    assert small.different(small.outcome(run), outcome) == []


def test_if_all_are_damaged_it_says_so_and_begins_anew(
    broken_off: tuple[Path, dict[str, str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, outcome = broken_off
    given = small.recipe(folder)
    run = shutil.copytree(folder / "run", tmp_path / "run")
    for checkpoint in checkpoints.find(run):
        cut(checkpoint / "model.safetensors")
    updates = Updates(last=8)
    with pytest.raises(KeyboardInterrupt):
        train(given, run, progress=False, callbacks=[updates])
    assert updates.seen[0] == 1
    said = capsys.readouterr().err
    assert re.findall(r"checkpoint-(\d+) is damaged", said) == ["15", "10"]
    assert f"no checkpoint in {run} is whole: the run begins anew" in said
    assert [path.name for path in checkpoints.find(run)] == ["checkpoint-5"], (
        "the damaged ones count for nothing"
    )
    updates = Updates()
    train(given, run, progress=False, callbacks=[updates])
    assert updates.seen[0] == 6
    assert small.different(small.outcome(run), outcome) == []


def test_damage_to_one_that_was_passed_over_before_is_no_reason_to_remove_a_whole_one(
    broken_off: tuple[Path, dict[str, str]], tmp_path: Path
) -> None:
    run = shutil.copytree(broken_off[0] / "run", tmp_path / "run")
    newest, before = checkpoints.find(run)
    for number in (20, 25):
        shutil.copytree(newest, run / f"checkpoint-{number}")
        cut(run / f"checkpoint-{number}" / "optimizer.pt")
    checkpoints.rotate(newest, keep=2)
    assert checkpoints.find(run) == [newest, before]


def test_a_checkpoint_that_is_being_removed_is_not_whole(
    broken_off: tuple[Path, dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = shutil.copytree(broken_off[0] / "run", tmp_path / "run")
    newest, before = checkpoints.find(run)
    monkeypatch.setattr(shutil, "rmtree", lambda _path: None)
    checkpoints.remove(newest)
    found, damaged = checkpoints.newest_whole(run)
    assert found == before
    assert damaged == {newest: "it was not written to its end"}


def test_a_file_that_cannot_be_read_is_damage(
    broken_off: tuple[Path, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    newest, before = checkpoints.find(broken_off[0] / "run")
    honest = checkpoints._checksum

    def failing(path: Path) -> str:
        if path == newest / "optimizer.pt":
            raise OSError(5, "Input/output error")
        return honest(path)

    monkeypatch.setattr(checkpoints, "_checksum", failing)
    found, damaged = checkpoints.newest_whole(newest.parent)
    assert found == before
    assert damaged == {newest: "optimizer.pt cannot be read: Input/output error"}
