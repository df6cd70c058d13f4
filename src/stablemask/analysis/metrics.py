"""Attention in numbers: sinks, pseudo mass, entropy, classes of tokens, by layer, head and position.

Everything comes from blocks of rows, so memory is O(T·block) whatever the length of the text.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Annotated

import torch
from torch import Tensor

from stablemask.analysis.capture import BLOCK, Capture, LayerAttention, Weights
from stablemask.analysis.classes import CLASSES, TokenClasses

PerRow = Annotated[Tensor, "L H T"]
PerHead = Annotated[Tensor, "L H"]

SINK_THRESHOLD = 0.3
"""ε of the sink rate where nobody says otherwise; the value that the literature on sinks uses."""
EARLY_ROW = 64
"""The early position, from 1, at which attention on classes of tokens is read; the other is the last."""


@dataclass(frozen=True, eq=False)
class Metrics:
    """The attention of every layer and head on one text, or the mean over several of one length.

    L layers, H heads, T rows. Row 0 is the first token, which sees nothing but itself.

    Attributes:
        first: What each row gives to the first token.
        pseudo: What it gives to no token, 1 − α.
        artificial: What it gives to artificial tokens.
        entropy: Of where the rest goes, in nats: weights on tokens, made to sum to 1.
        class_rows: The positions, from 1, at which classes are read.
        by_class: What those rows give to the tokens of each class, (L, H, rows, classes). The first token is
            in none.
        class_shares: Which share of the tokens before and at those rows is of that class, (rows, classes).
    """

    first: PerRow
    pseudo: PerRow
    artificial: PerRow
    entropy: PerRow
    class_rows: tuple[int, ...]
    by_class: Annotated[Tensor, "L H rows classes"]
    class_shares: Annotated[Tensor, "rows classes"]

    def sink_scores(self) -> PerHead:
        """What the rows of a text give to its first token on average, itself included."""
        return self.first.mean(-1)

    def sink_rate(self, threshold: float = SINK_THRESHOLD) -> float:
        """Share of all heads whose sink score is above the threshold ε (Gu et al., 2024)."""
        if not 0 <= threshold < 1:
            raise ValueError(f"threshold: got {threshold}; allowed: 0 ≤ ε < 1")
        return float((self.sink_scores() > threshold).double().mean())

    def cpu(self) -> "Metrics":
        """The same in main memory."""
        moved = {f.name: getattr(self, f.name).cpu() for f in fields(self) if f.name != "class_rows"}
        return Metrics(**moved, class_rows=self.class_rows)


def measure(layers: Capture, classes: TokenClasses | None = None, *, block: int = BLOCK) -> Metrics:
    """Metrics of one text: one sequence, not padded, not packed, without a cache.

    Args:
        layers: The captured pass.
        classes: Class of every token, from ``classify``; without it, every token is an other.
        block: Rows of weights that exist at a time.
    """
    length = layers[0].num_rows
    if classes is None:
        classes = torch.full((length,), len(CLASSES) - 1)
    _check(layers, classes)
    rows = tuple(sorted({min(EARLY_ROW, length), length}))
    members = torch.nn.functional.one_hot(classes, len(CLASSES)).to(layers[0].lse)  # (T, classes)
    members[0] = 0.0
    counts = members.cumsum(0)[[row - 1 for row in rows]]
    shares = counts / counts.new_tensor(rows).sub(1).clamp(min=1).unsqueeze(-1)
    found = [_measure_layer(layer, rows, members, block) for layer in layers]
    stacked = [torch.stack(parts) for parts in zip(*found, strict=True)]
    first, entropy, by_class = stacked
    pseudo = torch.stack([layer.pseudo_mass() for layer in layers])
    artificial = torch.stack([layer.artificial_mass() for layer in layers])
    return Metrics(first, pseudo, artificial, entropy, rows, by_class, shares)


def average(several: Sequence[Metrics]) -> Metrics:
    """The mean over texts of one length."""
    if len({metrics.class_rows for metrics in several}) != 1:
        raise ValueError(f"several: got lengths {[m.first.shape[-1] for m in several]}; allowed: one length")
    means = {
        field.name: torch.stack([getattr(m, field.name) for m in several]).mean(0)
        for field in fields(Metrics)
        if field.name != "class_rows"
    }
    return Metrics(**means, class_rows=several[0].class_rows)


def _measure_layer(
    layer: LayerAttention, class_rows: tuple[int, ...], members: Annotated[Tensor, "T classes"], block: int
) -> tuple[Annotated[Tensor, "H T"], Annotated[Tensor, "H T"], Annotated[Tensor, "H rows classes"]]:
    first, entropy, by_class = [], [], {}
    for rows, weights in layer.blocks(block=block):
        first.append(weights[:, :, 0])
        entropy.append(entropy_of(weights))
        for row in class_rows:
            if rows.start < row <= rows.stop:
                by_class[row] = weights[:, row - 1 - rows.start] @ members
    return torch.cat(first, 1), torch.cat(entropy, 1), torch.stack([by_class[r] for r in class_rows], 1)


def entropy_of(weights: Weights) -> Annotated[Tensor, "H rows"]:
    """−Σ p log p of p = weights / Σ weights; 0 where nothing is left."""
    total = weights.sum(-1)
    spread = total.log() - torch.special.xlogy(weights, weights).sum(-1) / total
    return torch.where(total > 0, spread, 0.0).clamp(min=0)  # rounding makes of 0 a little less


def _check(layers: Capture, classes: TokenClasses) -> None:
    for layer in layers:
        call = layer.call
        if call.structured or call.q.shape[0] != 1 or call.q.shape[2] != call.k.shape[2] or not call.causal:
            got = f"{call.q.shape[0]} sequences, {call.q.shape[2]} queries, {call.k.shape[2]} keys"
            raise ValueError(f"layers: got {got}; allowed: one sequence without padding, packing or cache")
    if classes.shape != (layers[0].num_rows,):
        got = f"shape {tuple(classes.shape)}"
        raise ValueError(f"classes: got {got}; allowed: one per token, ({layers[0].num_rows},)")
