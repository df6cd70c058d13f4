"""One model of the study, trained and measured: one JSON file, complete or not there.

A file is named by its group and seed and by a key of everything that decides its values: the recipe, the
corpus, the device type, the version of the package and ``code`` of the study. Metrics that a claim can name:

* ``valid/all``, ``valid/0-31`` …, ``other/all``: mean loss a token, of documents, by position in the window;
* ``curve/1`` … ``curve/5``: mean loss on the first validation documents after each fifth of the training;
* ``full/1`` … ``window/16``, ``pinned/16``: mean loss in sequences of so many training lengths;
* ``first/64``, ``first/last``, ``punctuation/64`` …, ``pseudo/64``, ``sink rate``: shares of attention;
* ``mapping``, ``identification``, ``odd_even``: accuracy in the position tasks.
"""

import hashlib
import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

import stablemask
from stablemask.evaluation.cells import Cell, write_text
from stablemask.evaluation.position_tasks import TASKS, Encoding, Setting, position_task
from stablemask.measuring import environment, threads
from stablemask.model import StableMaskForCausalLM
from stablemask.reproduce import extra_values, extras, measurements
from stablemask.reproduce.corpus import Corpus, open_corpus
from stablemask.reproduce.loop import make_model, save_model, train
from stablemask.reproduce.study import POSITION_TASKS, Entry, Study
from stablemask.training.recipe import Precision, Recipe

PRETRAINING = "pretraining"
CORPORA = "corpora"  # the folder beside cells that says what their texts are
POSITION_LENGTH = 64
_POSITION_UPDATES = 600

OnShare = Callable[[float], object]
Document = dict[str, Any]


@dataclass(frozen=True)
class Conditions:
    """What is the same for all cells that may be compared with each other.

    Attributes:
        device: "cpu" or "cuda".
        precision: Of the products in training; measurements are always in float32.
        corpus: The digest of the text.
    """

    device: str
    precision: Precision
    corpus: str


@dataclass(frozen=True)
class Job:
    """What the cells of a run share.

    Attributes:
        study: The models.
        conditions: Device, precision and text.
        corpus: Folder of the prepared text.
        results: Folder of the finished cells.
        command: What the reader of a result can type.
        weights: Folder for the trained models of seed 0, for figures of their attention; None drops them.
        downstream: Folder with the questions of downstream tasks; None: from the hub.
    """

    study: Study
    conditions: Conditions
    corpus: Path
    results: Path
    command: str
    weights: Path | None = None
    downstream: Path | None = None

    def path(self, entry: Entry) -> Path:
        """The file of a cell."""
        return path_of(self.results, cell_of(self.study, entry, self.conditions))


def cell_of(study: Study, entry: Entry, conditions: Conditions) -> Cell:
    """The cell of a model: its settings decide its values."""
    common = {"group": entry.group, "seed": entry.seed, "device": conditions.device, "code": study.code}
    if is_position(entry):
        setting = {"length": POSITION_LENGTH, "updates": _POSITION_UPDATES}
        return Cell(POSITION_TASKS, {**common, **setting})
    if extras.is_extra(entry):
        return Cell(extras.kind(entry), {**common, **extras.settings(study, entry, conditions)})
    recipe = study.settings(entry.group, seed=entry.seed, precision=conditions.precision)
    return Cell(PRETRAINING, {**common, "recipe": recipe, "corpus": conditions.corpus})


def path_of(results: Path, cell: Cell) -> Path:
    """Where the file of a cell is: the name says what it is, its end is the key."""
    name = re.sub("[^0-9a-zA-Z_.]+", "-", str(cell.settings["group"]))  # of any file system
    return results / f"{name}-{cell.settings['seed']}-{cell.key[-8:]}.json"


def is_position(entry: Entry) -> bool:
    """Whether it is a model of the position tasks and not of language."""
    return entry.group.startswith(f"{POSITION_TASKS}/")


def updates(study: Study, entry: Entry) -> float:
    """Roughly how long a cell takes, in relation to others: work of its training."""
    if is_position(entry):
        return _POSITION_UPDATES * 1e9 / 8
    if extras.is_extra(entry):
        return extras.COSTS[extras.kind(entry)]
    recipe = study.recipe(entry.group)
    settings = recipe.model.settings(recipe.train.length)
    weights = (
        settings["num_hidden_layers"]
        * settings["hidden_size"]
        * (4 * settings["hidden_size"] + 3 * settings["intermediate_size"])
    )
    count = 1.0 if recipe.train.steps is None else float(recipe.train.steps)
    return count * (float(weights) * recipe.train.sequences * recipe.train.length + 1e9)


def work(job: Job, entry: Entry, on_share: OnShare = lambda _: None) -> Path:
    """Train and measure one model and write its file.

    Args:
        job: Where and on what.
        entry: Which model.
        on_share: Called now and then with the share of the work that is done.
    """
    began, source, commit = time.perf_counter(), source_digest(), source_commit()
    cell = cell_of(job.study, entry, job.conditions)
    with threads(1):
        if is_position(entry):
            found: Document = {"values": dict(_position(entry, job.conditions, on_share))}
        elif extras.is_extra(entry):
            found = extra_values.measure(job, entry, on_share)
        else:
            found = _pretraining(job, entry, on_share)
    document = {
        "suite": cell.suite,
        "settings": dict(cell.settings),
        **found,
        "version": stablemask.__version__,
        "source": source,
        **({} if commit is None else {"commit": commit}),
        "command": job.command,
        "seconds": round(time.perf_counter() - began, 1),
        "environment": {**environment(), "transformers": transformers.__version__},
    }
    path = job.path(entry)
    write_text(path, to_text(document))
    if cell.suite == PRETRAINING:
        _keep_corpus(job.results, _opened(job.corpus))
    return path


def read_all(results: Path) -> list[Document]:
    """Every finished cell of a folder, whatever its conditions."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(results.glob("*.json"))]


def to_text(document: Mapping[str, Any]) -> str:
    """JSON with one line for each entry of the first two levels, and none for each number."""
    lines = []
    for name, value in document.items():
        if isinstance(value, dict):
            inner = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in value.items())
            lines.append(f"{json.dumps(name)}: {{\n{inner}\n}}")
        else:
            lines.append(f"{json.dumps(name)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


@cache
def source_digest() -> str:
    """Of the Python files of the package: says exactly which code made a result."""
    total = hashlib.sha256()
    root = Path(stablemask.__file__).parent
    for path in sorted(root.rglob("*.py")):
        total.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return total.hexdigest()[:16]


@cache
def source_commit() -> str | None:
    """Of the git checkout that the package lies in, "-dirty" behind it after a change; else None."""
    git, root = shutil.which("git"), Path(stablemask.__file__).parent
    if git is None or _git(git, root, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    return _git(git, root, "describe", "--always", "--dirty", "--exclude=*", "--abbrev=40")


def _git(git: str, root: Path, *words: str) -> str | None:
    """What git answers; None where it refuses."""
    command = [git, "-C", str(root), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - all words are ours
    return None if done.returncode else done.stdout.strip()


@cache
def _opened(folder: Path) -> Corpus:
    return open_corpus(folder)


def _keep_corpus(results: Path, corpus: Corpus) -> None:
    """What the text is, for readers of the results; one that was described before is left as it is."""
    path = results / CORPORA / f"{corpus.digest}.json"
    if not path.exists():
        write_text(path, json.dumps(corpus.about, indent=1) + "\n")


def _pretraining(job: Job, entry: Entry, on_share: OnShare) -> Document:
    corpus = _opened(job.corpus)
    if corpus.digest != job.conditions.corpus:
        raise ValueError(f"corpus: got {corpus.digest}; allowed: {job.conditions.corpus}, as the cell says")
    recipe = job.study.recipe(entry.group, seed=entry.seed, precision=job.conditions.precision)
    model = make_model(recipe, corpus.vocabulary)
    torch.nn.Module.to(model, job.conditions.device)
    blocks = corpus.blocks(recipe.train.length, recipe.data.packing)
    total = recipe.train.updates(len(blocks))
    points = {
        round(total * k / measurements.CURVE_POINTS): k for k in range(1, measurements.CURVE_POINTS + 1)
    }
    values: dict[str, float] = {}

    def on_update(done: int) -> None:
        if done in points:
            values[f"curve/{points[done]}"] = measurements.mean_loss(
                model, corpus.documents["valid"], recipe.train.length
            )
            model.train()
        if done % 20 == 0:
            on_share(0.9 * done / total)

    losses = train(model, recipe, blocks, on_update=on_update)
    if job.weights is not None and entry.seed == 0:
        save_model(model, extras.weights_of(job.weights, entry))
    return _measured(model, recipe, corpus, values, losses)


def _measured(
    model: StableMaskForCausalLM,
    recipe: Recipe,
    corpus: Corpus,
    values: dict[str, float],
    losses: Sequence[float],
) -> Document:
    length = recipe.train.length
    sets = {name: corpus.documents[name] for name in ("valid", "other") if corpus.documents[name]}
    tables = {name: measurements.by_document(model, found, length) for name, found in sets.items()}
    long = corpus.documents["long"] or corpus.documents["valid"]
    values = {**values, **dict(measurements.past_training(model, long, length))}
    shares, curves = measurements.attention(model, corpus, length)
    return {
        "values": {name: round(value, 6) for name, value in {**values, **shares}.items()},
        "curves": {"training loss": [round(loss, 4) for loss in losses], **curves},
        "documents": tables,
    }


def _position(entry: Entry, conditions: Conditions, on_share: OnShare) -> Iterator[tuple[str, float]]:
    _, encoding, remedy = entry.group.split("/")
    for number, task in enumerate(TASKS):
        found = position_task(
            task,
            Encoding(encoding, remedy),
            length=POSITION_LENGTH,
            seed=entry.seed,
            setting=Setting(steps=_POSITION_UPDATES),
            device=conditions.device,
        )
        for name, value in found:
            if name != "loss":
                yield task + name.removeprefix("accuracy").replace("_beyond", " beyond"), value
        on_share((number + 1) / len(TASKS))


def table_of(document: Document, name: str) -> tuple[Tensor, Tensor, list[str]]:
    """Losses and tokens of each document and range of positions, (documents, ranges), and the ranges."""
    table = document["documents"][name]
    nats, tokens = (torch.tensor(table[key], dtype=torch.float64) for key in ("nats", "tokens"))
    return nats, tokens, table["positions"]
