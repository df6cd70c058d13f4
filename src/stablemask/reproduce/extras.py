"""Cells beside the study: what tables and figures of the paper need and no training of the study gives.

A group is "kind/what". Each has one cell, of seed 0:

* ``sizes/160m``: million parameters of a named size, and of the widths that the paper prints for it;
* ``theory/…``: the theorems, see ``reproduce.theory``;
* ``latency/16+32``: generation, prompt 16 and output 32, with the larger model of the study;
* ``heads/small/rope/none``: attention of a trained model of the study on the first tokens of a document;
* ``downstream/small/rope/none``: its accuracies in downstream tasks.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stablemask.analysis.enumeration import TOKENS
from stablemask.model.sizes import SIZES
from stablemask.reproduce import theory
from stablemask.reproduce.study import Entry, Study

if TYPE_CHECKING:
    from stablemask.reproduce.cells import Conditions

LATENCY_MODEL = "medium/rope/stablemask"
LATENCY_ROUNDS = 20
LATENCY_SECONDS = 30.0
HEADS_TOKENS = 24
DOWNSTREAM_LIMIT = 500
DOWNSTREAM_TASKS = ("lambada_openai", "piqa", "arc_easy", "arc_challenge", "openbookqa", "winogrande")
_ON_MODELS = ("heads", "downstream")
_PAIR = ("small/rope/none", "small/rope/stablemask")
_PLACES = ((16, 8), (16, 32), (64, 32), (256, 8), (256, 32))

Settings = dict[str, Any]

_SETTINGS: Mapping[str, Callable[[Study, Entry, "Conditions"], Settings]] = {
    "sizes": lambda *_: {"device": "cpu", "vocabulary": 50257},
    "theory": lambda *_: {
        "device": "cpu",
        "length": theory.CONSTRUCTION_LENGTH,
        "tokens": TOKENS,
        "steps": theory.FIT_STEPS,
    },
    "latency": lambda study, entry, _: {
        "model": study.settings(LATENCY_MODEL)["model"],
        **dict(zip(("prompt", "output"), lengths(entry), strict=True)),
        "rounds": LATENCY_ROUNDS,
        "seconds": LATENCY_SECONDS,
    },
    "heads": lambda *given: {**_model(*given), "tokens": HEADS_TOKENS},
    "downstream": lambda *given: {**_model(*given), "limit": DOWNSTREAM_LIMIT},
}

GROUPS: tuple[str, ...] = (
    *(f"sizes/{size}" for size in SIZES),
    *(f"theory/{name}" for name in theory.NAMES),
    *(f"heads/{group}" for group in _PAIR),
    *(f"latency/{prompt}+{output}" for prompt, output in _PLACES),
    *(f"downstream/{group}" for group in _PAIR),
)


METRICS: Mapping[str, tuple[str, ...]] = {
    "sizes": ("named", "printed/plain", "printed/gated"),
    "theory": theory.METRICS,
    "latency": ("ratio/SM-I", "ratio/SM", "ratio/A/A", "seconds/baseline"),
    "heads": ("first", "pseudo"),
    "downstream": tuple(f"{task}/acc" for task in DOWNSTREAM_TASKS),
}
"""What the cells of each kind have; a ratio has its interval as well."""
COSTS: Mapping[str, float] = {
    "sizes": 1e9,
    "theory": 4e10,
    "latency": 4e11,
    "heads": 4e10,
    "downstream": 2e12,
}
"""Roughly how long a cell takes, on the scale of ``cells.updates``."""


def entries() -> list[Entry]:
    """One of each group, quick ones first."""
    return [Entry(group, 0) for group in GROUPS]


def kind(entry: Entry) -> str:
    """What sort of cell it is: the beginning of its group."""
    return entry.group.split("/")[0]


def is_extra(entry: Entry) -> bool:
    """Whether it is beside the study."""
    return kind(entry) in _SETTINGS


def model_entry(entry: Entry) -> Entry | None:
    """The model of the study that it looks at, if it does."""
    return Entry(entry.group.partition("/")[2], 0) if kind(entry) in _ON_MODELS else None


def is_late(entry: Entry) -> bool:
    """Whether it comes after all others: it looks at their models, or needs the machine for itself."""
    return kind(entry) in (*_ON_MODELS, "latency")


def settings(study: Study, entry: Entry, conditions: "Conditions") -> Settings:
    """What decides its values, beside what all cells have."""
    if entry not in entries():
        raise ValueError(
            f"group: got {entry.group!r}, seed {entry.seed}; allowed: seed 0 of {', '.join(GROUPS)}"
        )
    return _SETTINGS[kind(entry)](study, entry, conditions)


def weights_of(weights: Path, entry: Entry) -> Path:
    """The folder of a trained model."""
    return weights / entry.group.replace("/", "-")


def lengths(entry: Entry) -> tuple[int, int]:
    """Prompt and output of a group of latencies."""
    prompt, output = entry.group.partition("/")[2].split("+")
    return int(prompt), int(output)


def _model(study: Study, entry: Entry, conditions: "Conditions") -> Settings:
    seen = model_entry(entry)
    assert seen is not None
    recipe = study.settings(seen.group, seed=seen.seed, precision=conditions.precision)
    return {"recipe": recipe, "corpus": conditions.corpus}
