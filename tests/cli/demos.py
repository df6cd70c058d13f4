"""Scenes of a shortened demo: whole, killed midway, interrupted.

Everything that is changed here before a fork holds in the processes of the pair as well.
"""

import contextlib
import io
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from filelock import FileLock, Timeout

import stablemask.backends.cpu_flash  # noqa: F401 - imported once, here, and not by every child
from stablemask.cli import demo_pair, main
from stablemask.data import builtin
from stablemask.training import checkpoints
from stablemask.training.trainer import PretrainingTrainer
from tests import scenes
from tests.training import small

STEPS = 24  # a checkpoint every third
SHORTENED = [
    *("--plan.steps", str(STEPS), "--plan.length", "32", "--plan.batch-size", "8"),
    *("--plan.task.steps", "4", "--plan.long-tokens", "512"),
    *("--plan.decoding.prompts", "4", "--plan.decoding.outputs", "2"),
    *("--plan.decoding.rounds", "2", "--plan.decoding.max-seconds", "0"),
]
_PATIENCE = 120.0


def prepare(folder: Path) -> None:
    """A small part of the corpus, and children that are forks; the updates of the pair are counted."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin by ignoring it
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    fork = multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda _: fork  # type: ignore[assignment]
    honest_modules, honest_step = builtin._modules, PretrainingTrainer.training_step
    builtin._modules = lambda stdlib: sorted(honest_modules(stdlib))[::40]

    def counted(trainer: PretrainingTrainer, *args: object, **kwargs: object) -> object:
        with (Path(str(trainer.args.output_dir)) / "updates").open("a", encoding="utf-8") as file:
            file.write(".")
        return honest_step(trainer, *args, **kwargs)

    PretrainingTrainer.training_step = counted


def updates(folder: Path) -> list[int]:
    """Of each of the pair, by all processes that worked on it."""
    return [len((folder / remedy / "updates").read_text(encoding="utf-8")) for remedy in demo_pair.PAIR]


def run(folder: Path) -> int:
    """The command; what it prints is in a file beside the folder."""
    said, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(errors):
        code = main(["demo", "--folder", str(folder), *SHORTENED])
    folder.with_suffix(".out").write_text(said.getvalue(), encoding="utf-8")
    folder.with_suffix(".err").write_text(errors.getvalue(), encoding="utf-8")
    return code


def started(folder: Path) -> int:
    """The process of a demo that has written a checkpoint of each of the pair."""
    child = scenes.fork(lambda: os._exit(run(folder)))
    wait(lambda: all(checkpoints.newest_whole(folder / remedy)[0] for remedy in demo_pair.PAIR))
    return child


def wait(until: Callable[[], object]) -> None:
    begin = time.monotonic()
    while not until():
        assert time.monotonic() - begin < _PATIENCE
        time.sleep(0.01)


def is_free(folder: Path) -> bool:
    """Whether no process works on either of the pair any more."""
    try:
        for remedy in demo_pair.PAIR:
            FileLock(folder / remedy / ".lock").acquire(timeout=0).lock.release(force=True)
    except Timeout:
        return False
    return True


def demos(folder: Path) -> dict[str, object]:
    """A demo from begin to end; one that is killed and one that is interrupted, both of which go on."""
    prepare(folder)
    whole, killed, interrupted = (folder / name for name in ("whole", "killed", "interrupted"))
    codes = {"whole": os.waitstatus_to_exitcode(scenes.forked(lambda: os._exit(run(whole))))}
    done = {"whole": updates(whole)}

    child = started(killed)
    os.kill(child, signal.SIGKILL)
    assert scenes.killed(os.waitpid(child, 0)[1])
    wait(partial(is_free, killed))
    begun = [int(checkpoints.newest_whole(killed / r)[0].name.split("-")[1]) for r in demo_pair.PAIR]
    before = updates(killed)
    codes["killed"] = os.waitstatus_to_exitcode(scenes.forked(lambda: os._exit(run(killed))))
    done["killed"] = [after - b + at for after, b, at in zip(updates(killed), before, begun, strict=True)]

    child = started(interrupted)
    os.kill(child, signal.SIGINT)
    codes["interrupted"] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    said = interrupted.with_suffix(".err").read_text(encoding="utf-8")
    free = is_free(interrupted)

    cells = [
        json.loads(path.read_text(encoding="utf-8")) for path in (whole / "measured").glob("demo-*.json")
    ]
    again = updates(whole)
    codes["again"] = os.waitstatus_to_exitcode(scenes.forked(lambda: os._exit(run(whole))))
    return {
        "codes": codes,
        "updates": done,
        "begun": begun,
        "interruption": [said, free],
        "again": updates(whole) == again,
        "printed": {path.stem: path.read_text(encoding="utf-8") for path in folder.glob("*.out")},
        "different": {
            remedy: small.different(small.outcome(killed / remedy), small.outcome(whole / remedy))
            for remedy in demo_pair.PAIR
        },
        "measured": {f"{cell['suite']}/{cell['settings']['subject']}": cell["values"] for cell in cells},
        "took": [cell["seconds"] for cell in cells],
        "curves": {remedy: small.curve(whole / remedy) for remedy in demo_pair.PAIR},
        "summaries": {
            remedy: json.loads((whole / remedy / "summary.json").read_text(encoding="utf-8"))
            for remedy in demo_pair.PAIR
        },
        "page": (whole / "report.html").read_text(encoding="utf-8"),
    }


if __name__ == "__main__":
    scenes.main(demos)
