"""From tensors to kernel launches: layouts, tiles and grids."""

import torch
import triton
from torch import Tensor

from stablemask.backends._closed_form import gammas_on
from stablemask.backends.triton import _tiles
from stablemask.backends.triton._backward import delta_kernel, dkdv_kernel, dq_kernel
from stablemask.backends.triton._forward import forward_kernel
from stablemask.shapes import Keys, Output, Queries, RowLogits, Values


def forward(
    q: Queries,
    k: Keys,
    v: Values,
    sink: Tensor | None,
    slopes: Tensor | None,
    rows: Tensor | None,
    keys: Tensor | None,
    gammas: list[float] | None,
    horizon: int | None,
    base: float,
    causal: bool,
    scale: float,
    window: int | None,
    holes: bool,
) -> tuple[Output, RowLogits]:
    """out' and lse'. ``rows`` and ``keys`` are those of ``_bounds``; ``holes``: keys may be dropped."""
    q, k, v = (_unit_stride(t) for t in (q, k, v))
    (batch, heads, num_queries, width), num_keys = q.shape, k.shape[2]
    out, lse = empty_output(q, v), empty_lse(q)
    if lse.numel() == 0:
        return out, lse
    tile = _tiles.tiles_for(q.device, q.dtype, max(width, v.shape[3])).forward
    with torch.cuda.device_of(q):
        forward_kernel[(batch * heads * triton.cdiv(num_queries, tile.rows),)](
            q,
            k,
            v,
            out,
            lse,
            sink,
            None if gammas is None else gammas_on(tuple(gammas), q.device),
            slopes,
            rows,
            keys,
            *q.stride()[:3],
            *k.stride()[:3],
            *v.stride()[:3],
            *out.stride()[:3],
            *_broadcast_strides(sink),
            heads,
            heads // k.shape[1],
            num_queries,
            num_keys,
            _effective(window, num_keys),
            horizon,
            base,
            scale,
            **_widths(q, v),
            BM=tile.rows,
            BN=tile.keys,
            CAUSAL=causal,
            HOLES=holes,
            **_options(tile.warps, tile.stages),
        )
    return out, lse


def backward(
    grad: Output,
    grad_lse: RowLogits | None,
    q: Queries,
    k: Keys,
    v: Values,
    out: Output,
    lse: RowLogits,
    slopes: Tensor | None,
    rows: Tensor | None,
    keys: Tensor | None,
    causal: bool,
    scale: float,
    window: int | None,
    holes: bool,
) -> tuple[Queries, Keys, Values, RowLogits]:
    """dq, dk, dv and Δ = rowsum(dout ⊙ out') − dlse'."""
    dq, dk, dv, delta = (torch.empty_like(t) for t in (q, k, v, lse))
    q, k, v, grad, out = (_unit_stride(t) for t in (q, k, v, grad, out))
    (batch, heads, num_queries, width), num_keys = q.shape, k.shape[2]
    tiles = _tiles.tiles_for(q.device, q.dtype, max(width, v.shape[3]))
    inputs = (q, k, v, grad, lse, delta)
    strides = [stride for t in (q, k, v, grad) for stride in t.stride()[:3]]
    sizes = (heads, heads // max(k.shape[1], 1), num_queries, num_keys, _effective(window, num_keys), scale)
    with torch.cuda.device_of(q):
        if lse.numel():
            _delta(out, grad, grad_lse, delta)
        if k.shape[0] * k.shape[1] * num_keys:
            tile = tiles.dkdv
            dkdv_kernel[(batch * k.shape[1] * triton.cdiv(num_keys, tile.keys),)](
                *inputs,
                dk,
                dv,
                slopes,
                rows,
                keys,
                *strides,
                *dk.stride()[:3],
                *dv.stride()[:3],
                *sizes,
                **_widths(q, v),
                BM=tile.rows,
                BN=tile.keys,
                CAUSAL=causal,
                HOLES=holes,
                **_options(tile.warps, tile.stages),
            )
        if lse.numel():
            tile = tiles.dq
            dq_kernel[(batch * heads * triton.cdiv(num_queries, tile.rows),)](
                *inputs,
                dq,
                slopes,
                rows,
                keys,
                *strides,
                *dq.stride()[:3],
                *sizes,
                **_widths(q, v),
                BM=tile.rows,
                BN=tile.keys,
                CAUSAL=causal,
                HOLES=holes,
                **_options(tile.warps, tile.stages),
            )
    return dq, dk, dv, delta


def _delta(out: Output, grad: Output, grad_lse: RowLogits | None, delta: RowLogits) -> None:
    batch, heads, num_queries, width = out.shape
    delta_kernel[(batch * heads * triton.cdiv(num_queries, _tiles.DELTA_ROWS),)](
        out,
        grad,
        None if grad_lse is None else grad_lse.contiguous(),
        delta,
        *out.stride()[:3],
        *grad.stride()[:3],
        heads,
        num_queries,
        DV=width,
        BLOCK_DV=_block(width),
        BM=_tiles.DELTA_ROWS,
        **_options(_tiles.DELTA_WARPS, 1),
    )


def empty_output(q: Queries, v: Values) -> Output:
    """[B, T, H, Dv] in memory, seen as [B, H, T, Dv]: joining the heads afterwards needs no copy."""
    batch, heads, num_queries, _ = q.shape
    return q.new_empty((batch, num_queries, heads, v.shape[3])).transpose(1, 2)


def empty_lse(q: Queries) -> RowLogits:
    """(B, H, Tq) in float32."""
    return q.new_empty(q.shape[:3], dtype=torch.float32)


def _unit_stride(t: Tensor) -> Tensor:
    return t if t.stride(-1) == 1 else t.contiguous()


def _broadcast_strides(sink: Tensor | None) -> list[int]:
    if sink is None:
        return [0, 0, 0]
    return [0 if size == 1 else stride for size, stride in zip(sink.shape, sink.stride(), strict=True)]


def _effective(window: int | None, num_keys: int) -> int | None:
    """A window that reaches past the first key is none."""
    return None if window is None or window >= num_keys else window


def _widths(q: Queries, v: Values) -> dict[str, int]:
    return {"D": q.shape[3], "DV": v.shape[3], "BLOCK_D": _block(q.shape[3]), "BLOCK_DV": _block(v.shape[3])}


def _block(width: int) -> int:
    """Matrix instructions need at least 16; tiles have powers of two."""
    return max(16, 1 << (width - 1).bit_length())


def _options(warps: int, stages: int) -> dict[str, int | bool]:
    # Triton 3.10 changes the default of enable_fp_fusion; without it scaling a score takes two instructions
    return {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
