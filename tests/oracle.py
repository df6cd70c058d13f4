"""The second oracle: the paper's A⊙C + P, softmax and the second mask, in float64, from the raw arguments.

It imports nothing of the library and shares no formula with it: visibility is decided key by key, every
pseudo score has its own column, positions are counted one by one. Slow and literal on purpose.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Dense(NamedTuple):
    """What the dense computation knows; everything but ``out`` and ``lse`` serves to judge errors."""

    out: Tensor  # (B, H, Tq, Dv)
    lse: Tensor  # (B, H, Tq), with the pseudo columns
    weights: Tensor  # (B, H, Tq, Tk), after the second mask
    mass: Tensor  # (B, H, Tq), what the pseudo columns take
    slope: Tensor  # (B, H, Tq, Tk), d(score after softcap) / d(score before)
    distance: Tensor  # (B, Tq, Tk), P_k − P_q
    visible: Tensor  # (B, Tq, Tk)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    sink: Tensor | float | None = None,
    gammas: Tensor | None = None,
    horizon: int | None = None,
    base: Tensor | float = 0.0,
    causal: bool = True,
    positions: Tensor | None = None,
    key_positions: Tensor | None = None,
    window: int | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    key_mask: Tensor | None = None,
    document_ids: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> Dense:
    """Attention with explicit pseudo columns (``gammas`` given) or with the one column ``sink``."""
    batch, heads, num_queries, width = q.shape
    num_keys = k.shape[2]
    kept = _kept(batch, num_keys, key_positions, key_mask)
    k, v = (t.double().masked_fill(~kept[:, None, :, None], 0.0) for t in (k, v))
    group = [h // (heads // k.shape[1]) for h in range(heads)]
    k, v = k[:, group], v[:, group]

    raw = torch.einsum("bhid,bhjd->bhij", q.double(), k) * (1 / math.sqrt(width) if scale is None else scale)
    scores, slope = raw, torch.ones_like(raw)
    if softcap is not None:
        scores, slope = softcap * torch.tanh(raw / softcap), 1 - torch.tanh(raw / softcap) ** 2
    seen, distance = _geometry(
        batch, num_queries, num_keys, causal, positions, key_positions, window, key_mask, document_ids
    )
    if alibi_slopes is not None:
        scores = scores + alibi_slopes.double()[:, None, None] * distance[:, None].double()
    if bias is not None:
        scores = scores + bias.double()

    if gammas is not None:
        rows = row_positions(batch, num_queries, num_keys, positions, key_mask, document_ids)
        pseudo = pseudo_columns(gammas, rows, horizon, base)
    else:
        pseudo = _sink_column(sink, batch, heads, num_queries)
    visible = seen[:, None].expand_as(scores)
    row = torch.cat([torch.where(visible, scores, -math.inf), pseudo], -1)
    empty = (row == -math.inf).all(-1, keepdim=True)
    lse = torch.where(empty, 0.0, row).logsumexp(-1, keepdim=True)
    share = torch.where(empty, 0.0, torch.exp(row - lse))
    weights = torch.where(visible, share[..., :num_keys], 0.0)
    out = torch.einsum("bhij,bhjd->bhid", weights, v)
    lse = torch.where(empty, -math.inf, lse).squeeze(-1)
    return Dense(out, lse, weights, share[..., num_keys:].sum(-1), slope, distance, seen)


def pseudo_columns(gammas: Tensor, rows: Tensor, horizon: int | None, base: Tensor | float) -> Tensor:
    """P of every row, column by column: (B, H, Tq, columns), −∞ where the row has no such column.

    The pseudo score of column j is base − (j − 1)·γ. Row i (from 1) owns the columns i + 1 … N of the matrix;
    a row beyond the horizon owns the single score base − iγ; without a horizon they form a geometric series.
    """
    gammas = gammas.double()[:, None, None]  # (H, 1, 1)
    base = torch.as_tensor(base, dtype=torch.float64)
    i = (rows + 1)[:, None, :, None]  # (B, 1, Tq, 1)
    if horizon is None:
        series = -torch.log(-torch.expm1(-gammas)) if base > -math.inf else torch.zeros_like(gammas)
        return base - i * gammas + series
    first = min(1, int(rows.min()) + 1) if rows.numel() else 1
    column = torch.arange(first + 1, horizon + 1)  # from 1
    inside = torch.where(column > i, base - (column - 1) * gammas, -math.inf)
    beyond = torch.where(i > horizon, base - i * gammas, -math.inf)
    return torch.cat([inside, beyond], -1)


def row_positions(
    batch: int,
    num_queries: int,
    num_keys: int,
    positions: Tensor | None,
    key_mask: Tensor | None,
    document_ids: Tensor | None,
) -> Tensor:
    """0-based position of every query row: given, or the number of kept keys before it in its document."""
    if positions is not None:
        return positions
    keep = _keep(batch, num_keys, key_mask)
    counted = torch.zeros(batch, num_queries, dtype=torch.int64)
    for b in range(batch):
        runs = _runs(document_ids, b, num_keys)
        for i in range(num_queries):
            own = i + num_keys - num_queries
            earlier = [j for j in range(own + 1) if runs[j] == runs[own] and keep[b][j]]
            counted[b, i] = max(len(earlier) - 1, 0)
    return counted


def _geometry(
    batch: int,
    num_queries: int,
    num_keys: int,
    causal: bool,
    positions: Tensor | None,
    key_positions: Tensor | None,
    window: int | None,
    key_mask: Tensor | None,
    document_ids: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Which key each query sees, and P_k − P_q."""
    seen = [[[False] * num_keys for _ in range(num_queries)] for _ in range(batch)]
    distance = [[[0] * num_keys for _ in range(num_queries)] for _ in range(batch)]
    keep = _keep(batch, num_keys, key_mask)
    there_of = key_positions.tolist() if key_positions is not None else [list(range(num_keys))] * batch
    here_of = positions.tolist() if positions is not None else []
    for b in range(batch):
        runs = _runs(document_ids, b, num_keys)
        for i in range(num_queries):
            own = i + num_keys - num_queries
            if key_positions is None:
                here = own
                padded = own >= 0 and not keep[b][own]
            else:
                here = here_of[b][i]
                padded = here < 0
            for j, there in enumerate(there_of[b]):
                kept = keep[b][j] and there >= 0
                same_document = document_ids is None or runs[own] == runs[j]
                reached = (not causal or there <= here) and (window is None or here - there < window)
                seen[b][i][j] = kept and same_document and reached and not padded
                distance[b][i][j] = there - here
    shape = (batch, num_queries, num_keys)
    return torch.tensor(seen, dtype=torch.bool).reshape(shape), torch.tensor(
        distance, dtype=torch.int64
    ).reshape(shape)


def _kept(batch: int, num_keys: int, key_positions: Tensor | None, key_mask: Tensor | None) -> Tensor:
    """Keys that exist: kept by the mask and no empty slot of a cache."""
    kept = torch.ones(batch, num_keys, dtype=torch.bool) if key_mask is None else key_mask
    return kept if key_positions is None else kept & (key_positions >= 0)


def _keep(batch: int, num_keys: int, key_mask: Tensor | None) -> list[list[bool]]:
    return [[True] * num_keys] * batch if key_mask is None else key_mask.tolist()


def _runs(document_ids: Tensor | None, b: int, num_keys: int) -> list[int]:
    """Number of the maximal run of equal ids that each key lies in."""
    ids: list[Any] = [0] * num_keys if document_ids is None else document_ids[b].tolist()
    runs: list[int] = []
    for j, document in enumerate(ids):
        runs.append(0 if j == 0 else runs[-1] + (document != ids[j - 1]))
    return runs


def _sink_column(sink: Tensor | float | None, batch: int, heads: int, num_queries: int) -> Tensor:
    column = torch.as_tensor(-math.inf if sink is None else sink).double()
    if column.ndim == 1:
        column = column[:, None]
    return column.expand(batch, heads, num_queries).unsqueeze(-1)
