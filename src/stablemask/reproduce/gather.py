"""Finished cells that may be compared with each other: of the study as it is, under one set of Conditions.

A cell counts if all its settings are what the study says now. Which version of the package made it does not
matter here: a change of the code that alters results raises ``code`` of the study, which is a setting.
"""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import stablemask
from stablemask.reproduce.cells import CORPORA, PRETRAINING, Conditions, Document, cell_of, read_all
from stablemask.reproduce.study import Entry, Study

_NOTHING = Conditions("cpu", "fp32", "")


@dataclass(frozen=True)
class Wanted:
    """Which Conditions a reader wants; None where any will do."""

    device: str | None = None
    precision: str | None = None
    corpus: str | None = None

    def fits(self, conditions: Conditions) -> bool:
        """Whether these are such."""
        pairs = (
            (getattr(self, name), getattr(conditions, name)) for name in ("device", "precision", "corpus")
        )
        return all(wanted in (None, got) for wanted, got in pairs)


@dataclass(frozen=True)
class Found:
    """Finished cells.

    Attributes:
        conditions: Of all that learned from the text.
        cells: By model.
        left_out: How many others there are: of other Conditions, or of a study that was changed since.
        text: What the text is, as the file of its digest says in the folder ``corpora`` beside the cells.
    """

    conditions: Conditions
    cells: dict[Entry, Document]
    left_out: int
    text: Document = field(default_factory=dict)

    @property
    def text_name(self) -> str:
        """What a reader calls the text."""
        named = self.text.get("title") or self.text.get("source", {}).get("data")
        return str(named) if named else f"the text {self.conditions.corpus}"

    def seeds(self, group: str) -> list[int]:
        """Of which a group has finished cells."""
        return sorted(entry.seed for entry in self.cells if entry.group == group)


def gather(results: Path, study: Study, wanted: Wanted | Conditions = Wanted()) -> Found:
    """The cells of a folder under some Conditions, by default those that most of its cells have.

    Raises:
        ValueError: Trained models have cells there, but none under such Conditions as are wanted.
    """
    documents = sorted((d for d in read_all(results) if "settings" in d), key=_age)
    conditions = wanted if isinstance(wanted, Conditions) else _choose(documents, study, wanted)
    cells = {_entry(d): d for d in documents if _is_cell(d, study, conditions)}
    for suite in sorted({d["suite"] for d in documents} - {d["suite"] for d in cells.values()}):
        cells |= _of_another_device(suite, documents, study, conditions)
    return Found(conditions, cells, len(documents) - len(cells), _text(results, conditions.corpus))


def _text(results: Path, digest: str) -> Document:
    path = results / CORPORA / f"{digest}.json"
    found: Document = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found


def _choose(documents: Sequence[Document], study: Study, wanted: Wanted) -> Conditions:
    counts = Counter[Conditions]()
    for document in documents:
        conditions = _conditions(document)
        if conditions is not None and _is_cell(document, study, conditions):
            counts[conditions] += 1
    fitting = {conditions: count for conditions, count in counts.items() if wanted.fits(conditions)}
    if fitting:
        return min(fitting, key=lambda c: (-fitting[c], str(c)))
    if counts:
        got = ", ".join(f"{name} {value!r}" for name, value in vars(wanted).items() if value is not None)
        allowed = "; ".join(sorted(f"{c.device}, {c.precision}, {c.corpus}" for c in counts))
        raise ValueError(f"results: got no cell with {got}; allowed: {allowed}")
    return _NOTHING


def _of_another_device(
    suite: str, documents: Iterable[Document], study: Study, conditions: Conditions
) -> dict[Entry, Document]:
    """Cells that learn from no text stand for themselves: better those of another device than none."""
    return {
        _entry(d): d
        for d in documents
        if d["suite"] == suite
        and "corpus" not in d["settings"]
        and _is_cell(d, study, replace(conditions, device=d["settings"]["device"]))
    }


def _conditions(document: Document) -> Conditions | None:
    if document["suite"] != PRETRAINING:
        return None
    settings = document["settings"]
    return Conditions(settings["device"], settings["recipe"]["train"]["precision"], settings["corpus"])


def _is_cell(document: Document, study: Study, conditions: Conditions) -> bool:
    try:
        cell = cell_of(study, _entry(document), conditions)
    except (KeyError, ValueError):  # no such group in the study
        return False
    return bool(
        [document["suite"], document["settings"]] == json.loads(json.dumps([cell.suite, cell.settings]))
    )


def _entry(document: Document) -> Entry:
    return Entry(document["settings"]["group"], document["settings"]["seed"])


def _age(document: Document) -> tuple[bool, str]:
    """Of several cells with the same settings the last in this order counts."""
    return document["version"] == stablemask.__version__, document["environment"]["date"]
