"""The scaled-down study: which models are trained and measured, as data; and the claims asked of them."""

import itertools
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from stablemask.training.recipe import ALTERNATIVES, Precision, Recipe, parse
from stablemask.training.toml import merge

POSITION_TASKS = "position"
_KINDS = ("sizes", "positions", "arms")


class Entry(NamedTuple):
    """One model of the study: of a group, with a seed."""

    group: str
    seed: int


class ClaimTerm(NamedTuple):
    """Weight · metric of a group, in a claim."""

    weight: float
    group: str
    metric: str


@dataclass(frozen=True)
class Claim:
    """That the sum of the terms and the offset is negative, and at least ``smallest`` large."""

    id: str
    items: tuple[str, ...]
    says: str
    terms: tuple[ClaimTerm, ...]
    smallest: float
    seeds: int
    offset: float = 0.0
    exact: bool = False


@dataclass(frozen=True)
class Study:
    """Tables of recipes, and the runs in the order in which they are worked on.

    Attributes:
        code: Of the loop and the measurements; raised when a change of them alters results.
        tables: ``common``, ``sizes``, ``positions`` and ``arms``.
        runs: Groups and how many seeds each needs.
    """

    code: int
    tables: Mapping[str, Any]
    runs: Sequence[tuple[tuple[str, ...], int]]

    def recipe(self, group: str, *, seed: int = 0, precision: Precision = "fp32") -> Recipe:
        """The recipe of a group "size/position/arm"."""
        names = group.split("/")
        if len(names) != len(_KINDS):
            raise ValueError(f"group: got {group!r}; allowed: size/position/arm")
        table: dict[str, Any] = dict(self.tables["common"])
        for kind, name in zip(_KINDS, names, strict=True):
            if name not in self.tables[kind]:
                raise ValueError(f"group: got {group!r}; allowed {kind}: {', '.join(self.tables[kind])}")
            table = merge(table, self.tables[kind][name], ALTERNATIVES)
        own = {"name": group, "train": {"seed": seed, "precision": precision}}
        recipe = parse(Recipe, merge(table, own, ALTERNATIVES), f"study: {group}")
        recipe.check()
        return recipe

    def settings(self, group: str, *, seed: int = 0, precision: Precision = "fp32") -> dict[str, Any]:
        """Everything of that recipe that decides what is learned from a given text."""
        table = self.recipe(group, seed=seed, precision=precision).table()
        table["data"] = {name: table["data"][name] for name in ("tokenizer", "packing")}
        return table

    def entries(self) -> list[Entry]:
        """Every model, what matters most first: within a run, seed by seed, so that pairs are complete."""
        found = [
            Entry(group, seed) for groups, seeds in self.runs for seed in range(seeds) for group in groups
        ]
        return list(dict.fromkeys(found))


def load_study(path: Path | None = None) -> Study:
    """The study of a file; by default the one that comes with the package."""
    table = tomllib.loads(_text("study.toml", path))
    runs = [(tuple(run["groups"]), int(run["seeds"])) for run in table.pop("run")]
    return Study(int(table.pop("code")), table, runs)


def load_claims(path: Path | None = None) -> list[Claim]:
    """The claims of a file; by default those that come with the package."""
    table = tomllib.loads(_text("claims.toml", path))
    claims = [claim for entry in table["claim"] for claim in _expand(entry)]
    doubled = [
        name for name, found in itertools.groupby(sorted(c.id for c in claims)) if len(list(found)) > 1
    ]
    if doubled:
        raise ValueError(f"claims: got {doubled} more than once; allowed: one claim of each id")
    return claims


def _expand(entry: dict[str, Any]) -> list[Claim]:
    """One claim, or one of every name in ``each``."""
    names = entry.pop("each", [""])
    return [
        Claim(
            **{
                **entry,
                "id": entry["id"].replace("{each}", name),
                "says": entry["says"].replace("{each}", name),
                "items": tuple(entry["items"]),
                "terms": tuple(
                    ClaimTerm(float(weight), group.replace("{each}", name), metric)
                    for weight, group, metric in entry["terms"]
                ),
            }
        )
        for name in names
    ]


def _text(name: str, path: Path | None) -> str:
    source = files("stablemask.reproduce").joinpath(name) if path is None else path
    return source.read_text(encoding="utf-8")
