"""The paper's equation, dense and literal: the oracle of the library. Any device, any dtype, every argument.

Scores, softmax and mask are built in float32 (float64 for float64 inputs) with the pseudo columns merged into
the one logit σ.
"""

import torch
from torch import Tensor

from stablemask.backends._call import Call, additive_bias, finite_keys_values, visible
from stablemask.shapes import Output, RowLogits


def why_not(call: Call) -> str | None:
    """None: the reference serves every call."""
    return None


def run(call: Call) -> tuple[Output, RowLogits]:
    """softmax over the visible scores and σ, then the mask, then V."""
    dtype = call.accumulate_dtype
    batch, heads, num_queries, _ = call.q.shape
    k, v = finite_keys_values(call)
    repeats = heads // k.shape[1] if k.shape[1] else 1
    k, v = k.to(dtype).repeat_interleave(repeats, 1), v.to(dtype).repeat_interleave(repeats, 1)

    scores = call.q.to(dtype) @ k.transpose(-1, -2) * call.scale  # (B, H, Tq, Tk)
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    bias, mask = additive_bias(call), visible(call)
    if bias is not None:
        scores = scores + bias
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)

    sink = call.sink_logits()
    column = scores.new_full((1, 1, 1), -torch.inf) if sink is None else sink
    row = torch.cat([scores, column.expand(batch, heads, num_queries).unsqueeze(-1)], -1)
    lse = _logsumexp(row)  # (B, H, Tq)
    weights = torch.exp(scores - torch.where(lse == -torch.inf, 0.0, lse).unsqueeze(-1))
    if call.dropout:
        weights = torch.nn.functional.dropout(weights, call.dropout)
    return (weights @ v).to(call.q.dtype), lse


def _logsumexp(row: Tensor) -> Tensor:
    """logsumexp over the last dimension whose gradient is 0, not NaN, where the whole row is −∞."""
    empty = (row == -torch.inf).all(-1)
    return torch.where(empty, -torch.inf, row.masked_fill(empty.unsqueeze(-1), 0.0).logsumexp(-1))
