"""What every back end receives: one validated call, and the visibility rule that several of them share.

Key j is visible to query i iff both are kept, they are in the same document, and 0 ≤ P_q(i) − P_k(j) <
window, where P are indices (*index form*: P_k(j) = j, P_q(i) = i + Tk − Tq) or the given positions (*position
form*, for caches). Without ``causal`` the lower bound falls away. A row without any visible key gives out = 0
and lse' = σ.
"""

from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from stablemask.pseudo import PseudoScores
from stablemask.shapes import HeadSlopes, KeyMask, KeyPositions, Keys, Queries, QueryPositions, Values

SinkLogits = Annotated[Tensor, "B|1 H|1 Tq|1"]
Bias = Annotated[Tensor, "B|1 H|1 Tq Tk"]
Documents = Annotated[Tensor, "B Tk"]
ALL_ROWS = slice(None)


class Call(NamedTuple):
    """A validated call of the operation. Nothing in it may be ignored by a back end that accepts it.

    At most one of ``sink`` and ``scores`` is given. ``scores`` stands for the consecutive rows Tk − Tq … Tk −
    1, so that a kernel may compute σ itself; ``sink_logits()`` gives the tensor in every case. ``documents``
    numbers the maximal runs of equal document ids. ``query_positions`` and ``key_positions`` are given
    together (position form) or not at all.
    """

    q: Queries
    k: Keys
    v: Values
    sink: SinkLogits | None
    scores: PseudoScores | None
    causal: bool
    scale: float
    window: int | None
    slopes: HeadSlopes | None
    bias: Bias | None
    query_positions: QueryPositions | None
    key_positions: KeyPositions | None
    key_mask: KeyMask | None
    documents: Documents | None
    softcap: float | None
    dropout: float
    return_lse: bool

    def sink_logits(self) -> SinkLogits | None:
        """σ broadcastable to (B, H, Tq), in ``accumulate_dtype``; None means −∞."""
        if self.scores is None:
            return self.sink
        start, stop = self.k.shape[2] - self.q.shape[2], self.k.shape[2]
        return self.scores.consecutive_logits(
            start, stop, self.q.shape[1], dtype=self.q.dtype, device=self.q.device
        ).unsqueeze(0)

    @property
    def accumulate_dtype(self) -> torch.dtype:
        return accumulate_dtype(self.q.dtype)

    @property
    def structured(self) -> bool:
        """True where visibility depends on more than indices and the window."""
        return self.key_mask is not None or self.documents is not None or self.key_positions is not None

    @property
    def grouped(self) -> bool:
        """True where several query heads share a key head."""
        if self.q.shape[1] == self.k.shape[1]:  # noqa: SIM103 - of symbolic sizes only a branch makes a bool
            return False
        return True

    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor of the call."""
        given = (
            self.q,
            self.k,
            self.v,
            self.sink,
            self.slopes,
            self.bias,
            self.query_positions,
            self.key_positions,
        )
        return tuple(t for t in (*given, self.key_mask, self.documents) if t is not None)

    def needs_grad(self) -> bool:
        return torch.is_grad_enabled() and any(t.requires_grad for t in self.tensors())


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of σ and lse: float32, or float64 for float64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def positions_of(call: Call) -> tuple[Annotated[Tensor, "B|1 Tq"], Annotated[Tensor, "B|1 Tk"]]:
    """P_q and P_k of the visibility rule."""
    if call.query_positions is not None and call.key_positions is not None:
        return call.query_positions, call.key_positions
    keys = torch.arange(call.k.shape[2], device=call.q.device)
    queries = torch.arange(call.q.shape[2], device=call.q.device) + (call.k.shape[2] - call.q.shape[2])
    return queries.unsqueeze(0), keys.unsqueeze(0)


def kept_keys(call: Call) -> Annotated[Tensor, "B Tk"] | None:
    """Which keys are kept; None where all are."""
    if call.key_positions is None:
        return call.key_mask
    filled = call.key_positions >= 0
    return filled if call.key_mask is None else filled & call.key_mask


def kept_queries(call: Call) -> Annotated[Tensor, "B Tq"] | None:
    """Which query rows are not padding; None where all are. One before every key has no key of its own."""
    if call.query_positions is not None:
        return call.query_positions >= 0
    if call.key_mask is None:
        return None
    return _own_key(call.key_mask, call.q.shape[2], fill=True)


def visible(call: Call, rows: slice = ALL_ROWS) -> Annotated[Tensor, "B|1 1 rows Tk"] | None:
    """The visibility rule as a mask for the query rows ``rows``; None where every query sees every key."""
    p_q, p_k = positions_of(call)
    ahead = p_q[:, rows, None] - p_k[:, None, :]  # (B|1, rows, Tk)
    conditions = []
    if call.causal:
        conditions.append(ahead >= 0)
    if call.window is not None:
        conditions.append(ahead < call.window)
    if call.documents is not None:
        own = _own_key(call.documents, call.q.shape[2], fill=0)
        conditions.append(own[:, rows, None] == call.documents[:, None, :])
    keys, queries = kept_keys(call), kept_queries(call)
    if keys is not None:
        conditions.append(keys[:, None, :])
    if queries is not None:
        conditions.append(queries[:, rows, None])
    mask: Tensor | None = None
    for condition in conditions:
        mask = condition if mask is None else mask & condition
    return None if mask is None else mask.unsqueeze(1)


def additive_bias(call: Call, rows: slice = ALL_ROWS) -> Annotated[Tensor, "B|1 H|1 rows Tk"] | None:
    """ALiBi in its relative form plus the given bias, in ``accumulate_dtype``; None without either."""
    bias = None if call.bias is None else call.bias[:, :, rows].to(call.accumulate_dtype)
    if call.slopes is None:
        return bias
    p_q, p_k = positions_of(call)
    distance = (p_k[:, None, :] - p_q[:, rows, None]).to(call.accumulate_dtype).unsqueeze(1)
    alibi = call.slopes.to(call.accumulate_dtype)[:, None, None] * distance
    return alibi if bias is None else alibi + bias


def finite_keys_values(call: Call) -> tuple[Keys, Values]:
    """k and v with zeros where a key is not kept, so that what lies there (NaN included) reaches no row."""
    keys = kept_keys(call)
    if keys is None:
        return call.k, call.v
    drop = ~keys[:, None, :, None]
    return call.k.masked_fill(drop, 0.0), call.v.masked_fill(drop, 0.0)


def _own_key(
    per_key: Annotated[Tensor, "B Tk"], num_queries: int, *, fill: int | bool
) -> Annotated[Tensor, "B Tq"]:
    """The entry of each query's own key; ``fill`` for queries that precede every key (Tq > Tk)."""
    missing = num_queries - per_key.shape[1]
    if missing <= 0:
        return per_key[:, -missing:]
    return torch.nn.functional.pad(per_key, (missing, 0), value=fill)
