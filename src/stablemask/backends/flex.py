"""``flex_attention`` and its differentiable lse.

out' = out · sigmoid(lse − σ) and lse' = logaddexp(lse, σ), all through autograd.

On CUDA it is compiled, skips blocks that hold no visible key and gives gradients to everything, captured
biases included. On CPU PyTorch runs its forward without gradient, densely; that is for checking, not for
speed.
"""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from stablemask.backends._call import Call, finite_keys_values, kept_keys, kept_queries, positions_of
from stablemask.pseudo import in_function_transform
from stablemask.shapes import Output, RowLogits

_Modifier = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
_MaskModifier = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

_NARROWEST = 16


def why_not(call: Call) -> str | None:
    """Flex has no dropout; gradients and speed only on CUDA."""
    device = call.q.device.type
    if device not in ("cpu", "cuda"):
        return f"flex_attention runs on cuda, and forward on cpu; got {device}"
    if in_function_transform():
        return "torch.func transforms do not see through flex_attention with a lse"
    if device == "cpu" and call.needs_grad():
        return "flex_attention has no backward on CPU"
    if device == "cpu" and torch.compiler.is_compiling():
        return "flex_attention under torch.compile returns no lse on CPU"
    if device == "cuda" and call.q.dtype == torch.float64:
        return "flex_attention on cuda has no float64"
    if device == "cuda" and min(call.q.shape[3], call.v.shape[3]) < _NARROWEST:
        got = f"{call.q.shape[3]} and {call.v.shape[3]}"
        return f"flex_attention on cuda needs q and v at least {_NARROWEST} wide, got {got}"
    if call.dropout:
        return "flex_attention has no dropout"
    if call.q.numel() == 0 or call.k.numel() == 0 or call.v.numel() == 0:
        return "flex_attention needs at least one query and one key"
    return None


def run(call: Call) -> tuple[Output, RowLogits]:
    """out' and lse'."""
    k, v = finite_keys_values(call)
    q = call.q
    if q.device.type == "cpu":
        q, k, v = q.detach(), k.detach(), v.detach()
    as_they_are = q.device.type == "cpu" or torch.compiler.is_compiling()
    attend, find_blocks = (flex_attention, create_block_mask) if as_they_are else _compiled()
    mask = _mask_modifier(call)
    block_mask = None
    if mask is not None:
        block_mask = find_blocks(mask, q.shape[0], None, q.shape[2], k.shape[2], device=q.device)
    with warnings.catch_warnings() if q.device.type == "cpu" else nullcontext():
        if q.device.type == "cpu":
            warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
        out, aux = attend(
            q,
            k,
            v,
            score_mod=_score_modifier(call),
            block_mask=block_mask,
            scale=call.scale,
            enable_gqa=call.grouped,
            return_aux=AuxRequest(lse=True),
        )
    lse = aux.lse.to(call.accumulate_dtype)
    sink = call.sink_logits()
    if sink is None:
        return out, lse
    share = torch.where(lse == -torch.inf, 0.0, torch.sigmoid(lse - sink))
    return (out * share.unsqueeze(-1)).to(q.dtype), torch.logaddexp(lse, sink)


@cache
def _compiled() -> tuple[Any, Any]:
    """Not compiled, both would compute the whole square of scores."""
    return torch.compile(flex_attention, dynamic=None), torch.compile(create_block_mask, dynamic=None)


def _score_modifier(call: Call) -> _Modifier | None:
    if call.softcap is None and call.slopes is None and call.bias is None:
        return None
    cap, slopes, bias = call.softcap, call.slopes, call.bias
    p_q, p_k = _expanded_positions(call)
    if bias is not None:
        bias = bias.expand(call.q.shape[0], call.q.shape[1], -1, -1)

    def modify(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if cap is not None:
            score = cap * torch.tanh(score / cap)
        if slopes is not None:
            score = score + slopes[h] * (p_k[b, j] - p_q[b, i])
        if bias is not None:
            score = score + bias[b, h, i, j]
        return score

    return modify


def _mask_modifier(call: Call) -> _MaskModifier | None:
    keys, queries = kept_keys(call), kept_queries(call)
    if not call.causal and keys is None and queries is None and call.documents is None:
        return None
    p_q, p_k = _expanded_positions(call)
    window, documents, offset = call.window, call.documents, call.k.shape[2] - call.q.shape[2]

    def see(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        ahead = p_q[b, i] - p_k[b, j]
        seen = ahead >= 0 if call.causal else torch.ones_like(ahead, dtype=torch.bool)
        if window is not None:
            seen = seen & (ahead < window)
        if documents is not None:
            seen = seen & (documents[b, i + offset] == documents[b, j])
        if keys is not None:
            seen = seen & keys[b, j]
        if queries is not None:
            seen = seen & queries[b, i]
        return seen

    return see


def _expanded_positions(call: Call) -> tuple[Tensor, Tensor]:
    p_q, p_k = positions_of(call)
    batch = call.q.shape[0]
    return p_q.expand(batch, -1), p_k.expand(batch, -1)
