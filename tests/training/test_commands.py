"""The printed commands, run for real: on a CPU, two processes of a launcher train what one process does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stablemask.training import train
from stablemask.training.toml import write_table
from tests.training import small, two_processes
from tests.training.launching import FOLDER, ROOT, of_configuration, of_the_page

TOLERANCE = 1e-5
PRINTED = "recipes/pile-1.4b-rope-stablemask.toml"  # the recipe of the commands


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a small recipe; the run of it in one process is beside it."""
    folder = tmp_path_factory.mktemp("one")
    made = two_processes.plain(folder)
    train(made, folder / "one", progress=False)
    path = folder / "small.toml"
    path.write_text(write_table(made.table()), encoding="utf-8")
    return path


def printed(launcher: str, folder: Path) -> tuple[list[str], dict[str, str]]:
    """The command for one machine, and the words of it that two processes on a free port need instead."""
    if launcher == "torchrun":
        commands = [command for command in of_the_page() if command[0] == "torchrun"]
        return next(command for command in commands if "--nnodes" not in command), {"8": "2"}
    text = (FOLDER / "one-machine.yaml").read_text(encoding="utf-8")
    for old, new in (("num_processes: 8", "num_processes: 2"), ("port: 29500", "port: 0")):
        assert old in text
        text = text.replace(old, new)
    config = folder / "two-processes.yaml"
    config.write_text(text, encoding="utf-8")
    return of_configuration("one-machine"), {"recipes/launch/one-machine.yaml": str(config)}


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "distribution"), [("torchrun", "ddp"), ("accelerate", "fsdp")])
def test_two_processes_of_a_launcher_have_the_losses_of_one(
    launcher: str, distribution: str, recipe: Path, tmp_path: Path
) -> None:
    words, others = printed(launcher, tmp_path)
    others[PRINTED] = str(recipe)
    assert set(others) <= set(words)
    program, *options = [others.get(word, word) for word in words]
    module = options.index("-m")
    options[module:module] = ["--log_dir", str(tmp_path / "logs")]
    options += ["--train.distribution", distribution, "--out", str(tmp_path / "run")]
    done = subprocess.run(
        [str(Path(sys.executable).with_name(program)), *options],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    started = [path.name for path in (tmp_path / "logs").glob("*/attempt_0/*") if path.is_dir()]
    assert sorted(started) == ["0", "1"]
    assert done.stdout.count("validation perplexity") == 1, "one of the two says it"
    found, expected = (small.curve(run) for run in (tmp_path / "run", recipe.parent / "one"))
    assert two_processes.apart(found, expected) <= TOLERANCE
