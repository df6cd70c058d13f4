"""Finished cells with planted values: what a reader of results meets, without any training."""

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import stablemask
from stablemask.reproduce.cells import CORPORA, Conditions, cell_of, path_of, to_text
from stablemask.reproduce.study import Entry, Study, load_study

CONDITIONS = Conditions("cpu", "fp32", "0123456789abcdef")
POSITIONS = ["0-31", "32-63", "64-127", "128-255"]
DOCUMENTS = 40
TOKENS = [31, 32, 64, 128]
ENVIRONMENT = {
    "cpu": "a processor",
    "cores": 2,
    "gpu": "none",
    "torch": "2.13.0",
    "python": "3.11.7",
    "system": "Linux",
    "date": "2026-01-02",
    "transformers": "5.23.0",
}

TEXT = {
    "title": "a text of the tests",
    "told": {"data": "what is said of it"},
    "source": {
        "data": "train.jsonl",
        "valid": "valid.jsonl",
        "other": "other.jsonl",
        "long": None,
        "tokenizer": "bpe:2048",
        "text": "0" * 32,
    },
    "other_begins": "^ = [^=]",
    "tokens": {"train": 12345678, "valid": 4321, "other": 99, "long": 0},
    "train_bytes": 1,
    "digest": CONDITIONS.corpus,
}

Losses = Callable[[Entry, str], float]


def losses(
    effects: Mapping[str, float], *, mean: float = 3.5, seed_spread: float = 0.02, noise: float = 0.001
) -> Losses:
    """Mean loss of a model in a range: one value for all groups of a seed, and the effect of the group.

    ``noise`` is what differs between groups of one seed beside it.
    """

    def loss(entry: Entry, place: str) -> float:
        shared = random.Random(f"{entry.seed} {place}").gauss(0, seed_spread)  # noqa: S311 - losses, not secrets
        own = random.Random(f"{entry.group} {entry.seed} {place}").gauss(0, noise)  # noqa: S311 - as above
        return mean + shared + own + effects.get(entry.group, 0.0)

    return loss


def table(entry: Entry, name: str, loss: Losses, *, spread: float = 0.5) -> dict[str, Any]:
    """Losses of documents: some are harder than others, the same ones for all models."""
    nats = []
    for document in range(DOCUMENTS):
        hard = random.Random(f"{name} {document}").gauss(0, spread)  # noqa: S311 - as above
        nats.append(
            [
                round(n * (loss(entry, f"{name}/{p}") + hard), 2)
                for n, p in zip(TOKENS, POSITIONS, strict=True)
            ]
        )
    return {"positions": POSITIONS, "tokens": [TOKENS] * DOCUMENTS, "nats": nats}


def pretraining(entry: Entry, loss: Losses, **values: float) -> dict[str, Any]:
    """What a cell of the study holds beside its settings."""
    found = {f"curve/{k}": loss(entry, "curve") + 0.1 * (5 - k) for k in range(1, 6)}
    for method in ("full", "window", "pinned"):
        found |= {f"{method}/{times}": loss(entry, method) for times in (1, 2, 4, 8, 16)}
    for place in ("64", "last"):
        found |= {f"first/{place}": 0.3, f"pseudo/{place}": 0.1, f"punctuation/{place}": 0.2}
        found |= {f"function words/{place}": 0.1, f"digits/{place}": 0.1, f"others/{place}": 0.2}
    found |= {"sink rate": 0.5, **values}
    curve = [round(1 / (i + 1), 4) for i in range(256)]
    return {
        "values": found,
        "curves": {"training loss": [4.0, 3.6], "first": curve, "pseudo": curve, "entropy": curve},
        "documents": {name: table(entry, name, loss) for name in ("valid", "other")},
    }


def write(
    results: Path,
    entry: Entry,
    content: Mapping[str, Any],
    *,
    study: Study | None = None,
    conditions: Conditions = CONDITIONS,
    **about: Any,
) -> Path:
    """Put a cell where the study would have put it."""
    cell = cell_of(study or load_study(), entry, conditions)
    document = {
        "suite": cell.suite,
        "settings": dict(cell.settings),
        **content,
        "version": stablemask.__version__,
        "source": "0" * 16,
        "command": "a command",
        "seconds": 12.5,
        "environment": ENVIRONMENT,
        **about,
    }
    path = path_of(results, cell)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(to_text(document), encoding="utf-8")
    return path


def pair(
    results: Path, effect: float, seeds: int = 5, *, conditions: Conditions = CONDITIONS, **noise: float
) -> None:
    """The headline pair, StableMask ahead by −effect everywhere."""
    loss = losses({"small/rope/stablemask": effect}, **noise)
    for seed in range(seeds):
        for group in ("small/rope/none", "small/rope/stablemask"):
            entry = Entry(group, seed)
            write(results, entry, pretraining(entry, loss), conditions=conditions)


def describe(results: Path, **about: Any) -> None:
    """Say what the text of the planted cells is."""
    path = results / CORPORA / f"{CONDITIONS.corpus}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**TEXT, **about}), encoding="utf-8")


def other_study() -> Study:
    """The study after a change that alters results."""
    return replace(load_study(), code=99)


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found
