"""What the paper prints for its downstream tasks, and the settings of a run; the harness itself is heavy."""

import json
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Downstream:
    """How to score downstream tasks.

    Args:
        tasks: Any of lambada_openai, piqa, arc_easy, arc_challenge, openbookqa and winogrande; by default
            all of them.
        data: A folder with a file for each task, as on the hub or as in llm-foundry; by default the hub.
        limit: Only the first so many questions of each task.
        batch_size: Sequences scored at once.
    """

    tasks: tuple[str, ...] = ()
    data: Path | None = None
    limit: int | None = None
    batch_size: int = 8


def printed() -> dict[str, Any]:
    """The paper's table: where it stands, and its accuracies by model and task."""
    text = files("stablemask.evaluation").joinpath("downstream_table.json").read_text(encoding="utf-8")
    table: dict[str, Any] = json.loads(text)
    return table
