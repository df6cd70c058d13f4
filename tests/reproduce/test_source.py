"""Which code made a cell: the digest of its files, and the commit of the checkout that has them."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

import stablemask
from stablemask.reproduce import cells
from stablemask.reproduce.study import Entry
from tests.reproduce import small

GIT = shutil.which("git")
COMMIT = ("-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "--message", "one")


def test_the_digest_of_the_source_is_of_every_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "stablemask"
    shutil.copytree(Path(stablemask.__file__).parent, package)
    monkeypatch.setattr(stablemask, "__file__", str(package / "__init__.py"))
    digest = cells.source_digest.__wrapped__
    before = digest()
    assert before == cells.source_digest()
    (package / "model" / "note.txt").write_text("no code", encoding="utf-8")
    assert digest() == before
    with (package / "model" / "loss.py").open("a", encoding="utf-8") as file:
        file.write("#")
    assert digest() != before


def git(folder: Path, *words: str) -> str:
    assert GIT is not None
    done = subprocess.run([GIT, "-C", str(folder), *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.skipif(GIT is None, reason="there is no git on this machine")
def test_the_commit_is_of_the_checkout_that_has_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "src" / "stablemask" / "__init__.py"
    file.parent.mkdir(parents=True)
    file.touch()
    monkeypatch.setattr(stablemask, "__file__", str(file))
    commit = cells.source_commit.__wrapped__
    assert commit() is None, "no checkout"
    (tmp_path / "other.py").touch()
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", "other.py")
    git(tmp_path, *COMMIT)
    assert commit() is None, "a checkout of something else, as around an environment"
    git(tmp_path, "add", "src")
    git(tmp_path, *COMMIT)
    git(tmp_path, "tag", "v1")
    head = git(tmp_path, "rev-parse", "HEAD")
    assert len(head) == 40
    assert commit() == head
    file.write_text("#", encoding="utf-8")
    assert commit() == f"{head}-dirty"
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert commit() is None, "no git"


@pytest.mark.parametrize("commit", ["0123abcd", None])
def test_a_cell_names_the_commit_if_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commit: str | None
) -> None:
    job, entry = small.job(tmp_path), Entry("small/rope/none", 0)
    before = job.path(entry)
    monkeypatch.setattr(cells, "_pretraining", lambda *_: {})
    monkeypatch.setattr(cells, "source_commit", lambda: commit)
    path = cells.work(job, entry)
    document = json.loads(path.read_text(encoding="utf-8"))
    assert path == before, "the key is of the settings alone"
    assert ("commit" in document, document.get("commit")) == (commit is not None, commit)
