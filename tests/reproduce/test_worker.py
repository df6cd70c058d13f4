"""The command for machines with little on them: its codes, what it says, and going on after a kill."""

import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from stablemask.reproduce import cells, runner, worker
from tests.reproduce import small

NONE, STABLE = "small/rope/none", "small/rope/stablemask"

RUNS = """
[[run]]
groups = ["small/rope/{}"]
seeds = 1
"""


def options(folder: Path, *more: str, runs: str = "", jobs: int = 1) -> list[str]:
    path = folder / "study.toml"
    path.write_text(small.STUDY + small.ARMS.format(long=2_000) + runs, encoding="utf-8")
    places = (
        "--corpus",
        str(small.corpus_folder()),
        "--results",
        str(folder / "results"),
        "--study",
        str(path),
    )
    machine = ("--device", "cpu", "--precision", "fp32", "--jobs", str(jobs))
    return [*places, *machine, *more]


def finished(folder: Path) -> set[str]:
    return {d["settings"]["group"] for d in cells.read_all(folder / "results")}


def test_all_cells_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = options(tmp_path, "--groups", NONE, "small/alibi/*", "--seeds", "1")
    assert worker.main(given) == 0
    out, told = capsys.readouterr()
    assert out == ""
    lines = told.splitlines()
    assert lines[0] == "2 cells, 0 finished before; 1 processes"
    assert lines[-1].split() == ["100.0", "%", "left", "0.0", "min", "2/2", "small/alibi/none,", "seed", "0"]
    assert finished(tmp_path) == {NONE, "small/alibi/none"}
    (document,) = (d for d in cells.read_all(tmp_path / "results") if d["settings"]["group"] == NONE)
    assert document["command"].startswith("python -m stablemask.reproduce.worker --corpus ")
    assert document["command"].endswith("--seeds 1")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "results").iterdir()}
    assert worker.main(given) == 0
    assert capsys.readouterr().err.splitlines() == ["2 cells, 2 finished before; 1 processes"]
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "results").iterdir()} == before


def test_a_cell_that_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = options(tmp_path, "--groups", NONE, "*/broken", "--seeds", "1", runs=RUNS.format("broken"))
    assert worker.main(given) == 1
    told = capsys.readouterr().err
    assert "small/rope/broken, seed 0: FAILED, ValueError: length: got 1000000, but the train split" in told
    assert told.splitlines()[-1] == "missing: small/rope/broken 0"
    assert finished(tmp_path) == {NONE}


def test_time_was_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = options(tmp_path, "--minutes", "0", "--groups", "*/long", runs=RUNS.format("long"))
    assert worker.main(given) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "missing: small/rope/long 0"
    assert finished(tmp_path) == set()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("--corpus", "nowhere"), "corpus: got 'nowhere'; allowed: a folder with a prepared corpus"),
        (("--groups", "small/nothing"), "groups: got 'small/nothing'; allowed: patterns of small/alibi/none"),
        (("--study", "no.toml"), "No such file or directory: 'no.toml'"),
        (("--jobs", "0"), "jobs: got 0; allowed: from 1 on"),
        (("--seeds", "0"), "seeds: got 0; allowed: from 1 on"),
    ],
)
def test_a_wrong_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: tuple[str, str], message: str
) -> None:
    assert worker.main(options(tmp_path, *change)) == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith("reproduce: ")
    assert message in told
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(
    "given",
    [
        [],
        *(["--corpus", "x", *more] for more in (["--precision", "fp8"], ["--device", "abacus"], ["--fast"])),
    ],
)
def test_options_that_do_not_exist(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        worker.main(given)
    assert stopped.value.code == 2
    assert "usage: python -m stablemask.reproduce.worker" in capsys.readouterr().err


def test_a_corpus_that_is_not_whole_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(small.corpus_folder(), tmp_path / "copy")
    (tmp_path / "copy" / "meta.json").unlink()
    assert worker.main([*options(tmp_path), "--corpus", str(tmp_path / "copy")]) == 2
    assert "allowed: a folder with a prepared corpus" in capsys.readouterr().err


def test_lines_come_now_and_then(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(worker.time, "monotonic", lambda: now[0])
    lines = worker._Lines()
    for passed, share in ((1, 0.1), (14, 0.2), (15, 0.3), (16, 0.4), (31, 0.5)):
        now[0] = 100.0 + passed
        lines(runner.State(share, 90.0, ""))
    lines(runner.State(0.6, None, "1/2  a, seed 0"))
    told = [line.split() for line in capsys.readouterr().err.splitlines()]
    assert told == [
        ["30.0", "%", "left", "1.5", "min"],
        ["50.0", "%", "left", "1.5", "min"],
        ["60.0", "%", "1/2", "a,", "seed", "0"],
    ]


WITHOUT = """
import builtins, sys
missing = {"rich", "pyarrow", "datasets", "matplotlib", "jinja2", "tyro", "lm_eval", "psutil"}
found = builtins.__import__

def refuse(name, globals=None, locals=None, fromlist=(), level=0):
    asking = (globals or {}).get("__name__", "")
    if level == 0 and name.partition(".")[0] in missing and asking.startswith(("stablemask", "__main__")):
        raise ModuleNotFoundError(f"{asking} imports {name}")
    return found(name, globals, locals, fromlist, level)

builtins.__import__ = refuse
"""


def python(code: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", WITHOUT + code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=250)


@pytest.mark.slow
def test_it_runs_without_what_it_does_not_need(tmp_path: Path) -> None:
    code = "from stablemask.reproduce.worker import main\nsys.exit(main())"
    done = python(
        code, *options(tmp_path, "--groups", STABLE, "--seeds", "1", "--weights", str(tmp_path / "weights"))
    )
    assert done.returncode == 0, done.stderr
    assert finished(tmp_path) == {STABLE}
    assert (tmp_path / "weights" / "small-rope-stablemask" / "model.safetensors").exists()


@pytest.mark.parametrize("name", ["stablemask.data.hub", "stablemask.analysis.figures"])
def test_a_part_that_needs_one_of_them_would_be_found(name: str) -> None:
    done = python(f"import {name}")
    assert done.returncode == 1
    assert f"ModuleNotFoundError: {name} imports" in done.stderr


@pytest.mark.slow
def test_a_killed_run_goes_on_with_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It also leaves no process behind that works on and then waits for ever."""
    groups = ("--groups", NONE, "*/long", "--seeds", "1")
    given = options(tmp_path, *groups, runs=RUNS.format("long"))
    command = [sys.executable, "-m", "stablemask.reproduce.worker", *given, "--minutes", "60"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as run:
        assert run.stderr is not None
        assert any(f"1/2  {NONE}, seed 0" in line for line in run.stderr)
        processes = psutil.Process(run.pid).children(recursive=True)
        assert processes
        run.kill()
    assert psutil.wait_procs(processes, timeout=30)[1] == []
    (first,) = (tmp_path / "results").glob("*.json")
    before = first.stat().st_mtime_ns
    assert worker.main(given) == 0
    assert capsys.readouterr().err.splitlines()[0] == "2 cells, 1 finished before; 1 processes"
    assert first.stat().st_mtime_ns == before
    assert finished(tmp_path) == {NONE, "small/rope/long"}
    assert all(document["values"] for document in cells.read_all(tmp_path / "results"))
