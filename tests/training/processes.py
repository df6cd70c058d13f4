"""Scenes of a training run that is killed, again and again, and goes on with the same command.

Every scene says in which parts its runs differ from the one that was never killed.
"""

import contextlib
import ctypes
import os
import random
import resource
import shutil
import signal
import struct
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

import stablemask.backends.cpu_flash  # noqa: F401 - imported once, here, and not by every child
from stablemask.cli import main as command
from stablemask.training import checkpoints
from stablemask.training.run import MODEL, SUMMARY
from stablemask.training.toml import write_table
from tests import scenes
from tests.training import small

DEATHS = 10
_UNFINISHED = "a checkpoint not written to its end"
_TOUCHES = 90  # of the disk by a third of a run
_LAST_TOUCHES = 44  # reading the checkpoint takes fewer
_CUT_AT = (8_000, 40_000, 90_000)  # bytes: in the tokenizer, the weights and the optimizer's state


class Runs:
    """Runs of one recipe in a folder, the first of them never killed."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        self.folder = folder
        self.file = folder / "small.toml"
        self.file.write_text(write_table(small.recipe(folder).table()), encoding="utf-8")
        self.never_killed = folder / "never-killed"
        began = time.monotonic()
        assert not scenes.killed(scenes.forked(partial(self.go, self.never_killed)))
        self.seconds = time.monotonic() - began
        self.outcome = small.outcome(self.never_killed)
        self.seed = time.time_ns()
        self.random = random.Random(self.seed)  # noqa: S311 - it chooses moments, not secrets
        self.deaths: list[str] = []

    def go(self, run: Path) -> None:
        """What every child does, the first one and those after a kill: the same command."""
        code = command(["train", str(self.file), "--out", str(run)])
        assert code == 0, f"it ended with {code}"

    def until_done(self, run: Path, child: Callable[[], int]) -> list[str]:
        """Let children work on a run until one comes through; in what it differs."""
        while scenes.killed(child()):
            self.deaths.append(_state(run))
            assert len(self.deaths) < 100 * DEATHS, "it does not come forward"
        return small.different(small.outcome(run), self.outcome)

    def report(self, **more: object) -> dict[str, object]:
        """What the test gets to see."""
        return {"seed": self.seed, "deaths": self.deaths, "parts": len(self.outcome), **more}


def killed_at_any_moment(folder: Path) -> dict[str, object]:
    """SIGKILL from outside, after a random time."""
    runs = Runs(folder)
    differences = []

    def child(run: Path) -> int:
        process = scenes.fork(partial(runs.go, run))
        # Later and later: the machine may have become busier.
        longest = runs.seconds * (4 + len(runs.deaths)) / 12
        time.sleep(runs.random.uniform(0, longest))
        os.kill(process, signal.SIGKILL)
        return os.waitpid(process, 0)[1]

    while len(runs.deaths) < DEATHS:
        run = folder / f"run-{len(differences)}"
        differences.append(runs.until_done(run, partial(child, run)))
    return runs.report(differences=differences)


def killed_at_the_disk(folder: Path) -> dict[str, object]:
    """SIGKILL before a random touch of the run's folder, most of which are those of a checkpoint."""
    runs = Runs(folder)
    differences, touches = [], []

    def doomed(run: Path, touch: int) -> None:
        scenes.die_at(touch, run)
        runs.go(run)

    def child(run: Path) -> int:
        touches.append(runs.random.randrange(1, _TOUCHES))
        return scenes.forked(partial(doomed, run, touches[-1]))

    while len(runs.deaths) < DEATHS or runs.deaths.count(_UNFINISHED) < DEATHS // 2:
        run = folder / f"run-{len(differences)}"
        differences.append(runs.until_done(run, partial(child, run)))
    return runs.report(differences=differences, touches=touches)


def killed_at_the_end(folder: Path) -> dict[str, object]:
    """SIGKILL while the trained model is put where an older one is: before each of the last touches."""
    runs = Runs(folder)
    run = folder / "run"
    shutil.copytree(runs.never_killed, run)
    (run / SUMMARY).unlink()
    (run / MODEL / "model.safetensors").write_bytes(b"of an older one")
    seen = []

    def doomed(touch: int) -> None:
        scenes.die_at(touch, run)
        runs.go(run)

    def child() -> int:
        seen.append((run / MODEL).is_dir())
        return scenes.forked(partial(doomed, _LAST_TOUCHES + len(runs.deaths)))

    return runs.report(differences=[runs.until_done(run, child)], model_there=seen)


def read_only(folder: Path) -> dict[str, object]:
    """Two folders that may not be written: one without a run, and one with a run that is not finished."""
    runs = Runs(folder)
    empty, begun = folder / "empty", folder / "begun"
    empty.mkdir()
    shutil.copytree(runs.never_killed, begun)
    (begun / SUMMARY).unlink()
    messages = []

    def refused(run: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)  # without the capabilities by which root may write anything
        assert libc.capset(struct.pack("=Ii", 0x20080522, 0), bytes(24)) == 0, ctypes.get_errno()
        with (folder / "said").open("w") as said, contextlib.redirect_stderr(said):
            code = command(["train", str(runs.file), "--out", str(run)])
        assert code == 1, code

    for run in (empty, begun):
        run.chmod(0o555)
        assert scenes.forked(partial(refused, run)) == 0
        messages.append((folder / "said").read_text(encoding="utf-8"))
        run.chmod(0o755)
    differences = [
        runs.until_done(run, partial(scenes.forked, partial(runs.go, run))) for run in (empty, begun)
    ]
    return runs.report(messages=messages, differences=differences)


def cut_off(folder: Path) -> dict[str, object]:
    """The kernel kills in the middle of writing a file, at a size that no file of a checkpoint may pass."""
    runs = Runs(folder)
    run = folder / "run"
    left: list[dict[str, int]] = []

    def doomed(size: int) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        runs.go(run)

    def child() -> int:
        if len(runs.deaths) == len(_CUT_AT):
            return scenes.forked(partial(runs.go, run))
        size = _CUT_AT[len(runs.deaths)]
        status = scenes.forked(partial(doomed, size))
        left.append({p.name: p.stat().st_size for p in run.rglob("*") if p.stat().st_size == size})
        return status

    return runs.report(differences=[runs.until_done(run, child)], left=left)


def _state(run: Path) -> str:
    """What a killed process left behind."""
    found = checkpoints.find(run)
    if (run / f".{MODEL}.new").exists():
        return "a model not written to its end"
    if found and checkpoints.damage(found[0]) is not None:
        return _UNFINISHED
    return f"whole checkpoints: {len(found)}"


if __name__ == "__main__":
    scenes.main(killed_at_any_moment, killed_at_the_disk, killed_at_the_end, cut_off, read_only)
