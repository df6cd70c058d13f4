"""Bars of long work: drawn on a terminal with share and time left, and nowhere else."""

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from stablemask.data import DataConfig, prepare
from stablemask.data.progress import Bar
from tests.data.corpus import write

WIDTH = 40  # of a full bar


class Terminal:
    """Standard error as a terminal without colours, whose clock stands still until it is moved."""

    def __init__(self) -> None:
        self.file = io.StringIO()
        self.now = 0.0

    def console(self, *, stderr: bool) -> Console:
        assert stderr, "standard output is for results"
        return Console(
            file=self.file,
            width=120,
            color_system=None,
            force_terminal=True,
            force_interactive=True,
            get_time=lambda: self.now,
        )

    def last(self) -> dict[str, str]:
        """How each line of the screen, named by its words before the bar, was last drawn."""
        drawn = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.file.getvalue())
        lines = [line.strip() for line in re.split(r"[\r\n]", drawn)]
        found = [re.match(r"(?:[^\w\s] )?(.+?) +(━.*)", line) for line in lines]
        return {match[1]: match[2] for match in found if match is not None}


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    made = Terminal()
    monkeypatch.setattr("rich.console.Console", made.console)
    return made


def corpus(folder: Path) -> DataConfig:
    """A source for each split, which is read to its end."""
    files = {
        split: str(write(folder / f"{name}.jsonl", [f"text of {name}", "more " * 9]))
        for split, name in (("source", "train"), ("valid", "valid"), ("test", "test"))
    }
    return DataConfig(**files, tokenizer="bpe:260", cache=str(folder / "cache"))  # type: ignore[arg-type]


def test_the_bar_shows_the_share_and_the_time_left(terminal: Terminal) -> None:
    with Bar(shown=True).task("tokenising train", 100) as advance:
        for terminal.now, read in ((10.0, 10), (20.0, 25)):
            advance(read, "1.5 M tokens")
    line = terminal.last()["tokenising train"]
    assert line.count("━") == WIDTH * 25 // 100
    assert "1.5 M tokens" in line
    assert line.endswith("0:00:20 left 0:00:50"), "75 at 15 in 10 seconds"


def test_the_bar_disappears(terminal: Terminal) -> None:
    with Bar(shown=True).task("tokenising train", 100) as advance:
        advance(50, "")
    assert terminal.file.getvalue().endswith("\x1b[1A\x1b[2K"), "a line up, which is erased"


def test_the_bar_disappears_after_an_error(terminal: Terminal) -> None:
    with pytest.raises(OSError, match="full"), Bar(shown=True).task("tokenising train", 100):
        raise OSError("full")
    assert terminal.file.getvalue().endswith("\x1b[1A\x1b[2K")


def test_all_of_a_corpus_is_read_where_the_bar_is_full(terminal: Terminal, tmp_path: Path) -> None:
    prepare(corpus(tmp_path), 8)
    lines = terminal.last()
    assert list(lines) == [
        "hashing train.jsonl",
        "training 260 entries of a tokenizer",
        "tokenising train",
        "hashing valid.jsonl",
        "tokenising valid",
        "hashing test.jsonl",
        "tokenising test",
    ]
    assert [line.count("━") for line in lines.values()] == [WIDTH] * len(lines)
    assert re.search(r"━ +0\.0 M tokens +0:00:00 left 0:00:00$", lines["tokenising train"])


def test_nothing_is_drawn_where_it_is_not_wanted(terminal: Terminal, tmp_path: Path) -> None:
    prepare(corpus(tmp_path), 8, progress=False)
    assert terminal.file.getvalue() == ""


def test_nothing_is_drawn_without_a_terminal(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    prepare(corpus(tmp_path), 8)
    assert capfd.readouterr() == ("", "")
