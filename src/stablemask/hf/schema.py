"""What a model's config says about its StableMask: ``config.stablemask``, a versioned table of JSON values.

::

    {"version": 1, "gamma": 0.5, "headwise": true, "horizon": 2048, "base": 0.0}

``gamma`` may be a list, one value per head; a ``horizon`` of null means infinite; a base of −∞ is "-inf".
"""

import math
from collections.abc import Mapping
from typing import Any

import torch

from stablemask.pseudo import PseudoScores

VERSION = 1
_KEYS = {"version", "gamma", "headwise", "horizon", "base"}


def to_table(scores: PseudoScores) -> dict[str, Any]:
    """The table of pseudo scores."""
    return {
        "version": VERSION,
        "gamma": list(scores.gamma) if isinstance(scores.gamma, tuple) else scores.gamma,
        "headwise": scores.headwise,
        "horizon": scores.horizon,
        "base": "-inf" if scores.base == -math.inf else scores.base,
    }


def from_table(table: object) -> PseudoScores:
    """The pseudo scores of a table; anything that is not exactly a table of this version is an error."""
    if not isinstance(table, Mapping):
        raise TypeError(
            f"config.stablemask: got {table!r}; allowed is the table that stablemask.hf.enable writes"
        )
    if table.get("version") != VERSION:
        got = table.get("version")
        raise ValueError(f"config.stablemask: got version {got!r}; this release reads version {VERSION}")
    if set(table) != _KEYS:
        raise ValueError(
            f"config.stablemask: got the keys {sorted(table)}; allowed are exactly {sorted(_KEYS)}"
        )
    base = -math.inf if table["base"] == "-inf" else table["base"]
    return PseudoScores(table["gamma"], horizon=table["horizon"], headwise=table["headwise"], base=base)


def split_base(table: object) -> tuple[PseudoScores, float | None]:
    """The pseudo scores of a table, and what has to be added to their logits.

    Compiled code gets a finite base apart, as a number that only ever meets tensors: it is then an input of
    the graph, and raising it at every update of a training run compiles nothing anew.
    """
    if torch.compiler.is_compiling() and isinstance(table, Mapping) and isinstance(table.get("base"), float):
        return from_table({**table, "base": 0.0}), table["base"]
    return from_table(table), None
