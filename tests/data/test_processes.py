"""Preparing a corpus survives being killed, running many times at once and a full disk, in little memory."""

from pathlib import Path

import pytest

from tests import scenes

PROCESSES = "tests.data.processes"
KIB_OF_A_MIB = 2**10


@pytest.mark.slow
def test_killed_at_every_touch_of_the_disk(tmp_path: Path) -> None:
    found = scenes.play(PROCESSES, tmp_path, "killed")["killed"]
    assert found["deaths"] >= 20
    assert found["half-written"] >= 5, "it was killed in the middle of tokenising"
    assert found["same"]


def test_of_several_processes_one_does_the_work(tmp_path: Path) -> None:
    found = scenes.play(PROCESSES, tmp_path, "together")["together"]
    assert found["codes"] == [0] * 4
    assert found["made"] == 3, "each split once"


def test_a_full_disk_is_named_and_survived(tmp_path: Path) -> None:
    found = scenes.play(PROCESSES, tmp_path, "full")["full"]
    failed, again = found["codes"]
    assert failed != 0
    assert again == 0
    assert str(tmp_path / "full" / "cache") in found["message"]
    assert "cannot be written: File too large" in found["message"]
    assert "The same call continues what is begun" in found["message"]
    assert found["same"]


@pytest.mark.slow
def test_memory_does_not_grow_with_the_corpus(tmp_path: Path) -> None:
    """The second corpus is 24 MiB larger, which is what holding it would cost at the very least, as bytes.

    Less than half of that leaves room for what the allocator keeps from one batch to the next.
    """
    small, large = scenes.play(PROCESSES, tmp_path, "memory")["memory"]["rises"]
    assert small > 0
    assert large - small < 12 * KIB_OF_A_MIB


def test_the_built_in_corpus_is_the_same_in_every_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for seed in ("1", "2"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        (tmp_path / seed).mkdir()
        found.append(scenes.play(PROCESSES, tmp_path / seed, "built_in")["built_in"])
    assert found[0].pop("hash") != found[1].pop("hash")
    assert found[0] == found[1]
