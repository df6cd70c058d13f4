"""Command lines that make the cells of the page anywhere: from what cells are of, not what was typed."""

import shlex
from collections.abc import Iterable, Sequence

from stablemask.reproduce import extras
from stablemask.reproduce.cells import is_position
from stablemask.reproduce.corpus import Source, source_digest
from stablemask.reproduce.gather import Found
from stablemask.reproduce.paper import Item, entries_of
from stablemask.reproduce.study import Claim, Entry, Study

_TEXTS = ("data", "valid", "other", "other_begins", "long")
_FOLDER = "runs/reproduce"  # where the command line puts a text that it prepares
_UNKNOWN = "corpus"


def commands(items: Sequence[Item], claims: Sequence[Claim], study: Study, found: Found) -> list[str]:
    """The text, the language models, what looks at them, and all that reads no text."""
    looking = {entry for entry in found.cells if extras.model_entry(entry) is not None}
    free = {entry for entry in found.cells if not reads_text(entry)}
    entries = {item.id: set(entries_of([item], claims, study)) for item in items}
    on_models = _ids(entries, looking)
    lines = [*_preparing(found), *_training(found)]
    if on_models:
        lines.append(shlex.join(["stablemask", "reproduce", *on_models, *_text_options(found)]))
    devices = {entry: str(found.cells[entry]["settings"]["device"]) for entry in free}
    for device in sorted(set(devices.values())):
        ids = _ids(entries, [entry for entry in free if devices[entry] == device])
        lines.append(shlex.join(["stablemask", "reproduce", *ids, "--device", device]))
    return lines


def reads_text(entry: Entry) -> bool:
    """Whether a cell is of a model of language, or looks at one."""
    if is_position(entry):
        return False
    return not extras.is_extra(entry) or extras.model_entry(entry) is not None


def _source(found: Found) -> Source | None:
    """Files of the names that the text was made from; None where nobody has described it."""
    if "source" not in found.text:
        return None
    given = {**found.text["source"], "other_begins": found.text.get("other_begins")}
    return Source(**{name: value for name, value in given.items() if name in (*_TEXTS, "tokenizer")})


def _preparing(found: Found) -> list[str]:
    source = _source(found)
    if source is None:
        return []
    words = ["stablemask", "reproduce", "table-1", "--dry-run"]
    for name in _TEXTS:
        value = getattr(source, name)
        if value is not None:
            words += [f"--{name.replace('_', '-')}", value]
    return [shlex.join(words)]


def _text_options(found: Found) -> list[str]:
    """What the cells of the text have in common."""
    source = _source(found)
    folder = _UNKNOWN if source is None else f"{_FOLDER}/corpus-{source_digest(source)}"
    conditions = found.conditions
    return ["--corpus", folder, "--device", conditions.device, "--precision", conditions.precision]


def _training(found: Found) -> list[str]:
    """The language models, those of most seeds first."""
    groups: dict[int, list[str]] = {}
    trained = (entry for entry in found.cells if reads_text(entry) and not extras.is_extra(entry))
    for group in sorted({entry.group for entry in trained}):
        groups.setdefault(max(found.seeds(group)) + 1, []).append(group)
    begin = ["python", "-m", "stablemask.reproduce.worker", *_text_options(found)]
    return [
        shlex.join([*begin, "--seeds", str(seeds), "--groups", *own])
        for seeds, own in sorted(groups.items(), reverse=True)
    ]


def _ids(entries: dict[str, set[Entry]], wanted: Iterable[Entry]) -> list[str]:
    """Items whose cells these are, in the order of the paper; none that adds nothing to those before it."""
    left, ids = set(wanted), []
    for name, own in entries.items():
        if left & own:
            ids.append(name)
            left -= own
    return ids
