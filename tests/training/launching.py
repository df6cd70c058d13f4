"""The commands that start a run in several processes, as they are printed."""

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "recipes" / "launch"


def of_configuration(name: str) -> list[str]:
    """The command in the comment at the head of a configuration for accelerate."""
    text = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
    lines = [line.removeprefix("#").strip() for line in text.splitlines() if line.startswith("#   ")]
    return shlex.split(" ".join(line.removesuffix("\\") for line in lines))


def of_the_page() -> list[list[str]]:
    """All commands of the page on recipes that start several processes."""
    page = (ROOT / "docs" / "how-to" / "recipes.md").read_text(encoding="utf-8").replace("\\\n", "")
    return [
        shlex.split(line) for line in re.findall(r"^(?:torchrun|accelerate launch) .+$", page, re.MULTILINE)
    ]
