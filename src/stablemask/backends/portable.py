"""Public ``F.scaled_dot_product_attention`` with one more key whose value is zero.

Any device, no private operator.

Where plain causal attention is all there is, the extra key stands first and its score is σ by one more width:
q' = [q, σ/scale], k' = [k, 0], with k' = [0, 1] for the sink; a dummy query in front keeps the causal
diagonal in place, so SDPA needs no mask. Otherwise the extra key stands last and σ is its column of a dense
additive mask.

Half precision: σ is split into three bfloat16 parts in three more widths, which is exact; float16 and every
dense mask are computed in float32. SDPA does not return lse.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from stablemask.backends._call import Call, additive_bias, finite_keys_values, visible
from stablemask.shapes import Output, Queries

_NEVER = -1e30
_BFLOAT16_PARTS = 3
_WIDTH_MULTIPLE = 8


def why_not(call: Call) -> str | None:
    """SDPA has no lse and no softcap."""
    if call.return_lse:
        return "public SDPA does not return the log-sum-exp"
    if call.softcap is not None:
        return "public SDPA cannot cap scores (softcap)"
    return None


def run(call: Call) -> tuple[Output, None]:
    """out', differentiable in everything through SDPA; no lse'."""
    plain_causal = (
        call.causal
        and not call.structured
        and call.window is None
        and call.slopes is None
        and call.bias is None
        and call.q.shape[2] == call.k.shape[2]
        and call.scale > 0.0  # the stock kernel multiplies its causal mask by the scale
    )
    return (_sink_first(call) if plain_causal else _sink_last(call)), None


def _sink_first(call: Call) -> Output:
    sink = call.sink_logits()
    dtype = torch.float32 if call.q.dtype == torch.float16 else call.q.dtype
    q, k, v = call.q.to(dtype), call.k.to(dtype), call.v.to(dtype)
    if sink is None:
        out = scaled_dot_product_attention(
            q, k, v, dropout_p=call.dropout, is_causal=True, scale=call.scale, enable_gqa=call.grouped
        )
        return _nan_where_nan(out, q).to(call.q.dtype)
    width = q.shape[-1]
    parts = _split(sink.clamp(min=_NEVER).expand(q.shape[:3]) / call.scale, dtype)  # (B, H, T, parts)
    wide = -(-(width + parts.shape[-1]) // _WIDTH_MULTIPLE) * _WIDTH_MULTIPLE
    q = pad(torch.cat([q, parts], -1), (0, wide - width - parts.shape[-1], 1, 0))  # (B, H, 1 + T, wide)
    k = pad(k, (0, wide - width, 1, 0))  # (B, G, 1 + T, wide)
    k[:, :, 0, width : width + parts.shape[-1]] = 1.0
    v = pad(v, (0, max(0, wide - v.shape[-1]), 1, 0))
    out = scaled_dot_product_attention(
        q, k, v, dropout_p=call.dropout, is_causal=True, scale=call.scale, enable_gqa=call.grouped
    )
    return _nan_where_nan(out, q)[:, :, 1:, : call.v.shape[-1]].to(call.q.dtype)


def _sink_last(call: Call) -> Output:
    dtype = call.accumulate_dtype
    num_queries = call.q.shape[2]
    k, v = finite_keys_values(call)
    bias, seen, sink = additive_bias(call), visible(call), call.sink_logits()
    mask = call.q.new_zeros((1, 1, num_queries, k.shape[2]), dtype=dtype) if bias is None else bias
    if seen is not None:
        mask = mask.masked_fill(~seen, -torch.inf)
    column = call.q.new_full((1, 1, 1), _NEVER, dtype=dtype) if sink is None else sink.clamp(min=_NEVER)
    shape = torch.broadcast_shapes(mask.shape[:3], (*column.shape[:2], num_queries))
    mask = torch.cat([mask.expand(*shape, -1), column.expand(shape).unsqueeze(-1)], -1)
    out = scaled_dot_product_attention(
        call.q.to(dtype),
        pad(k.to(dtype), (0, 0, 0, 1)),
        pad(v.to(dtype), (0, 0, 0, 1)),
        attn_mask=mask,
        dropout_p=call.dropout,
        scale=call.scale,
        enable_gqa=call.grouped,
    )
    return out.to(call.q.dtype)


def _nan_where_nan(out: Output, q: Queries) -> Output:
    """SDPA takes a row without a single finite score for one that is masked and returns zeros."""
    return out.masked_fill(q.isnan().any(-1, keepdim=True), torch.nan)


def _split(logits: Tensor, dtype: torch.dtype) -> Tensor:
    """Summands in ``dtype`` along a new last dimension whose sum is ``logits``."""
    if dtype != torch.bfloat16:
        return logits.to(dtype).unsqueeze(-1)
    parts: list[Tensor] = []
    rest = logits
    for _ in range(_BFLOAT16_PARTS):
        parts.append(rest.to(dtype))
        rest = rest - parts[-1]
    return torch.stack(parts, -1)
