"""One Triton kernel that adds the sink to the results of plain attention: (out, lse) → (out', lse').

    lse' = logaddexp(lse, σ)        out' = out · sigmoid(lse − σ)

It reads and writes O(T) numbers; σ is given, or computed from (i, γ, horizon, base).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from stablemask.backends._closed_form import closed_form, gammas_on
from stablemask.shapes import Output, RowLogits

_ROWS = 64
_WARPS = 4


@triton.jit(do_not_specialize=("H", "Tq", "first", "base", "horizon"))
def rescale_kernel(
    OUT, LSE, NEW_OUT, NEW_LSE, SINK, GAMMAS,
    out_b, out_h, out_t, new_b, new_h, new_t, sink_b, sink_h, sink_t,
    H, Tq, first, base, horizon,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(Tq, BM)
    head = (tl.program_id(0) // tiles).to(tl.int64)
    b, h = head // H, head % H
    rows = (tl.program_id(0) % tiles) * BM + tl.arange(0, BM)  # [BM]
    inside = rows < Tq
    rows64 = rows.to(tl.int64)
    if GAMMAS is not None:
        sigma = closed_form(rows + first, tl.load(GAMMAS + h), base, horizon)  # [BM]
    else:
        sigma = tl.load(SINK + b * sink_b + h * sink_h + rows64 * sink_t, mask=inside, other=0.0)
    lse = tl.load(LSE + head * Tq + rows, mask=inside, other=0.0)
    ahead = sigma - lse
    ratio = tl.exp(-tl.abs(ahead))
    share = tl.where(ahead > 0, ratio, 1.0) / (1.0 + ratio)
    tl.store(NEW_LSE + head * Tq + rows, tl.maximum(lse, sigma) + tl.log(1.0 + ratio), mask=inside)
    columns = tl.arange(0, BLOCK_D)
    mask = inside[:, None] & (columns < D)[None, :]
    at = OUT + b * out_b + h * out_h + rows64[:, None] * out_t + columns[None, :]
    out = tl.load(at, mask=mask, other=0.0).to(tl.float32) * share[:, None]  # [BM, BLOCK_D]
    new = NEW_OUT + b * new_b + h * new_h + rows64[:, None] * new_t + columns[None, :]
    tl.store(new, out.to(NEW_OUT.dtype.element_ty), mask=mask)


def rescale(
    out: Output,
    lse: RowLogits,
    new_out: Output,
    sink: Tensor | None,
    gammas: list[float] | None,
    horizon: int | None,
    base: float,
    first: int,
) -> RowLogits:
    """Write out' to ``new_out`` (which may be ``out``) and return lse'.

    Args:
        out: Result of plain attention; its last stride is 1.
        lse: Contiguous.
        new_out: Its last stride is 1.
        sink: σ broadcastable to (B, H, Tq); None: from the next arguments.
        gammas: One for every head.
        horizon: That of the pseudo scores.
        base: Likewise.
        first: Position of the first row.
    """
    batch, heads, num_queries, width = out.shape
    new_lse = torch.empty_like(lse)
    strides = (0, 0, 0) if sink is None else sink.expand(batch, heads, num_queries).stride()
    with torch.cuda.device_of(out):
        rescale_kernel[(batch * heads * triton.cdiv(num_queries, _ROWS),)](
            out,
            lse,
            new_out,
            new_lse,
            sink,
            None if gammas is None else gammas_on(tuple(gammas), out.device),
            *out.stride()[:3],
            *new_out.stride()[:3],
            *strides,
            heads,
            num_queries,
            first,
            base,
            horizon,
            D=width,
            BLOCK_D=triton.next_power_of_2(width),
            BM=_ROWS,
            num_warps=_WARPS,
        )
    return new_lse
