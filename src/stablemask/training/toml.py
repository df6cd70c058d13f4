"""TOML files that build on one another."""

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Alternatives = Mapping[str, Sequence[tuple[str, ...]]]


def read_tables(path: Path, alternatives: Alternatives, inside: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The tables of a file over those of the files that it ``extends``."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {error}") from error
    inside = (*inside, path.resolve())
    extends = tables.pop("extends", [])
    names = [extends] if isinstance(extends, str) else extends
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{path}: extends: got {extends!r}; allowed: the name of a file, or a list of them")
    merged: dict[str, Any] = {}
    for name in names:
        other = path.parent / name
        if other.resolve() in inside:
            raise ValueError(f"{path}: extends: got {name!r}, which builds on this file itself")
        merged = merge(merged, read_tables(other, alternatives, inside), alternatives)
    return merge(merged, tables, alternatives)


def merge(below: Mapping[str, Any], above: Mapping[str, Any], alternatives: Alternatives) -> dict[str, Any]:
    """Nested tables: those above win, key by key. Of alternatives, one given above replaces all below."""
    merged = dict(below)
    for name, value in above.items():
        if isinstance(value, Mapping) and isinstance(merged.get(name), Mapping):
            hidden = {
                key
                for group in alternatives.get(name, ())
                if any(value.get(key) is not None for key in group)
                for key in group
            }
            kept = {key: old for key, old in merged[name].items() if key not in hidden}
            merged[name] = merge(kept, value, {})
        else:
            merged[name] = value
    return merged


def write_table(table: Mapping[str, Any], name: str = "") -> str:
    """Nested tables as TOML; what is None is left out."""
    own = {key: value for key, value in table.items() if value is not None and not isinstance(value, Mapping)}
    lines = ([f"[{name}]"] if name else []) + [f"{key} = {_value(value)}" for key, value in own.items()]
    inner = [write_table(value, key) for key, value in table.items() if isinstance(value, Mapping)]
    return "\n\n".join(["\n".join(lines), *inner])


def _value(value: object) -> str:
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return str(value).lower() if isinstance(value, bool) else repr(value)
