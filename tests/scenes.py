"""Scenes of processes that are killed: one interpreter imports everything and forks, as often as it likes.

A module of scenes is run by a test, ``python -m tests.…processes FOLDER SCENE …``, before anything in it has
started a thread; what a scene returns is what the test gets.
"""

import gc
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_TOUCHING_DISK = ("open", "os.rename", "os.truncate", "os.mkdir", "os.remove", "shutil.rmtree")

Scene = Callable[[Path], Mapping[str, object]]


def play(module: str, folder: Path, *names: str) -> dict[str, Any]:
    """What scenes return, by their names, all played by one new interpreter."""
    done = subprocess.run(
        [sys.executable, "-m", module, str(folder), *names],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(*scenes: Scene) -> None:
    """Play the scenes that the command line names, each in a folder of its own."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    gc.freeze()  # a child that collects garbage would copy all pages of its parent
    folder, *names = sys.argv[1:]
    found = {}
    for name in names:
        (scene,) = (scene for scene in scenes if getattr(scene, "__name__", "") == name)
        own = Path(folder) / name
        own.mkdir()
        found[name] = scene(own)
    print(json.dumps(found))  # noqa: T201 - read by the test
    gc.unfreeze()


def forked(work: Callable[[], object]) -> int:
    """The status with which a child ends that does some work."""
    return os.waitpid(fork(work), 0)[1]


def fork(work: Callable[[], object]) -> int:
    """A child that does some work and ends."""
    child = os.fork()
    if child:
        return child
    try:
        work()
    except BaseException:  # noqa: BLE001 - whatever it is, the child must not go on as its parent
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def killed(status: int) -> bool:
    """Whether a child was killed; a child that ended is done with its work, one that failed is a defect."""
    assert status == 0 or os.WIFSIGNALED(status), f"not killed but failed: {status}"
    return status != 0


def die_at(touch: int, folder: Path) -> None:
    """SIGKILL for this process, before its n-th touch of the disk in a folder."""
    touches = 0

    def hook(event: str, args: tuple[object, ...]) -> None:
        nonlocal touches
        if event in _TOUCHING_DISK and str(folder) in str(args[0]):
            touches += 1
            if touches == touch:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
