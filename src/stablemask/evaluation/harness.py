"""The paper's downstream tasks, without examples in the prompt, as the lm-evaluation-harness defines them.

Prompts and scoring are those of the installed ``lm_eval``. What is ours is reading the questions from local
files, so that a machine without access to the hub gives the same figures.
"""

import gzip
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet
import torch
from datasets import Dataset
from lm_eval.api.model import LM
from lm_eval.api.task import Task
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import stablemask.hf
import stablemask.model  # noqa: F401 - both let the Auto classes open our folders

Row = dict[str, Any]
_ENDINGS = (".jsonl", ".jsonl.gz", ".parquet")


class _Form(NamedTuple):
    """The columns of a task on the hub and in llm-foundry, and how to make the first of the second."""

    hub: tuple[str, ...]
    foundry: tuple[str, ...]
    convert: Callable[[Row], Row]


def _last_word(row: Row) -> Row:
    if " " in row["continuation"]:
        raise ValueError(f"continuation: got {row['continuation']!r}; allowed: one word")
    return {"text": f"{row['context']} {row['continuation']}"}


def _two_solutions(row: Row) -> Row:
    first, second = row["choices"]
    return {"goal": _question(row), "sol1": first, "sol2": second, "label": row["gold"]}


def _labelled(name: str) -> Callable[[Row], Row]:
    def convert(row: Row) -> Row:
        labels = [chr(ord("A") + i) for i in range(len(row["choices"]))]
        choices = {"text": row["choices"], "label": labels}
        return {name: _question(row), "choices": choices, "answerKey": labels[row["gold"]]}

    return convert


def _two_beginnings(row: Row) -> Row:
    first, second = row["context_options"]
    sentence = f"_ {row['continuation']}"  # a harness prompt is what stands before "_", then an option
    return {"sentence": sentence, "option1": first, "option2": second, "answer": str(row["gold"] + 1)}


def _question(row: Row) -> str:
    """llm-foundry has the beginning of the prompt in the row; the harness adds it itself."""
    query: str = row["query"]
    return query.removeprefix("Question: ").rstrip("\n")


_CHOICES = ("query", "choices", "gold")
_ARC = _Form(("question", "choices", "answerKey"), _CHOICES, _labelled("question"))
_FORMS = {
    "lambada_openai": _Form(("text",), ("context", "continuation"), _last_word),
    "piqa": _Form(("goal", "sol1", "sol2", "label"), _CHOICES, _two_solutions),
    "arc_easy": _ARC,
    "arc_challenge": _ARC,
    "openbookqa": _Form(("question_stem", "choices", "answerKey"), _CHOICES, _labelled("question_stem")),
    "winogrande": _Form(
        ("sentence", "option1", "option2", "answer"),
        ("context_options", "continuation", "gold"),
        _two_beginnings,
    ),
}
_OTHER_FILE_NAMES = {"openbookqa": "openbook_qa"}
TASKS = tuple(_FORMS)


def run_downstream(
    model: PreTrainedModel | LM | str | PathLike[str],
    tokenizer: PreTrainedTokenizerBase | str | PathLike[str] | None = None,
    *,
    tasks: Sequence[str] = TASKS,
    data: str | PathLike[str] | None = None,
    limit: int | None = None,
    batch_size: int = 8,
) -> Iterator[tuple[str, float]]:
    """Score a model on downstream tasks, one after the other.

    Args:
        model: A model; the folder or the name on the hub of one, with StableMask or without; or anything else
            that can score text for the harness.
        tokenizer: Of the model, or where it is. Not needed where the model's folder has it.
        tasks: Any of lambada_openai, piqa, arc_easy, arc_challenge, openbookqa and winogrande.
        data: A folder with a file for each task, named like it, ending in .jsonl, .jsonl.gz or .parquet. Its
            rows are what the hub has for the task, or what llm-foundry has. None: from the hub.
        limit: Only the first so many questions of each task.
        batch_size: Sequences scored at once. It changes no figure beyond rounding.

    Yields:
        ``("piqa/acc", 0.61)`` and so on: every metric that the harness has for the task.

    Examples:
        >>> dict(run_downstream("runs/stable-71m", tasks=["piqa"], data="data/downstream"))
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit: got {limit!r}; allowed: integers ≥ 1, or None")
    if batch_size < 1:
        raise ValueError(f"batch_size: got {batch_size!r}; allowed: integers ≥ 1")
    return _run(model, tokenizer, tasks, find_files(tasks, data), limit, batch_size)


def find_files(tasks: Sequence[str], data: str | PathLike[str] | None) -> dict[str, Path] | None:
    """The file of each task in a folder; None where they come from the hub."""
    unknown = [task for task in tasks if task not in _FORMS]
    if unknown:
        raise ValueError(f"tasks: got {', '.join(unknown)}; allowed: {', '.join(TASKS)}")
    return None if data is None else {task: _find_file(Path(data), task) for task in tasks}


def _run(
    model: PreTrainedModel | LM | str | PathLike[str],
    tokenizer: PreTrainedTokenizerBase | str | PathLike[str] | None,
    tasks: Sequence[str],
    files: dict[str, Path] | None,
    limit: int | None,
    batch_size: int,
) -> Iterator[tuple[str, float]]:
    if isinstance(model, (str, PathLike)):
        tokenizer = model if tokenizer is None else tokenizer
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model = AutoModelForCausalLM.from_pretrained(model, device_map=device)
    training = isinstance(model, PreTrainedModel) and model.training
    scorer = model if isinstance(model, LM) else _scorer(model, tokenizer, batch_size)
    try:
        for task in tasks:
            built = _hub_task(task) if files is None else _local_task(task, files[task])
            results = evaluate(
                scorer, {"tasks": {task: built}}, limit=limit, log_samples=False, bootstrap_iters=0
            )
            if results is None:  # another process of a distributed run has them
                continue
            for metric, value in results["results"][task].items():
                if isinstance(value, float):
                    yield f"{task}/{metric.removesuffix(',none')}", value
    finally:
        if training:
            model.train()


def _scorer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | str | PathLike[str] | None,
    batch_size: int,
) -> LM:
    if tokenizer is None:
        raise ValueError("tokenizer: got None; allowed: a tokenizer, or where it is, beside a model")
    if isinstance(tokenizer, (str, PathLike)):
        tokenizer = AutoTokenizer.from_pretrained(tokenizer)
    return HFLM(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=batch_size)


@cache
def _task_manager() -> TaskManager:
    return TaskManager()


def _hub_task(name: str) -> Task:
    return _task_manager().load(name)["tasks"][name]


def _local_task(name: str, file: Path) -> Task:
    """The harness's task with other rows. A group is its way to say so."""
    rows = Dataset.from_list(list(_hub_rows(name, file)))
    changes = {
        "task": name,
        "training_split": None,
        "validation_split": None,
        "test_split": "test",
        "custom_dataset": lambda **_: {"test": rows},
    }
    return _task_manager().load([{"group": "local", "task": [changes]}])["tasks"][name]


def _find_file(folder: Path, task: str) -> Path:
    names = [task, *filter(None, [_OTHER_FILE_NAMES.get(task)])]
    found = [folder / (name + ending) for name in names for ending in _ENDINGS]
    existing = [path for path in found if path.is_file()]
    if len(existing) != 1:
        got = ", ".join(path.name for path in existing) or f"no file for {task}"
        raise ValueError(f"data: {folder} has {got}; allowed: one of {', '.join(p.name for p in found)}")
    return existing[0]


def _hub_rows(task: str, file: Path) -> Iterator[Row]:
    form = _FORMS[task]
    for number, row in enumerate(_read(file), 1):
        if row.keys() >= set(form.hub):
            yield {name: row[name] for name in form.hub}
        elif row.keys() >= set(form.foundry):
            try:
                yield form.convert(row)
            except (ValueError, IndexError) as error:
                raise ValueError(f"data: {file}, row {number}: {error}") from error
        else:
            allowed = f"{', '.join(form.hub)} as on the hub, or {', '.join(form.foundry)} as in llm-foundry"
            raise ValueError(
                f"data: {file}, row {number}: got the columns {', '.join(row)}; allowed: {allowed}"
            )


def _read(file: Path) -> Iterable[Row]:
    if file.suffix == ".parquet":
        rows: list[Row] = pyarrow.parquet.read_table(file).to_pylist()
        return rows
    opened = gzip.open if file.suffix == ".gz" else open
    with opened(file, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines if line.strip()]
