"""The forward kernel: plain flash attention over the visible tiles, then σ once per row.

Adding σ after the loop keeps the weights in the loop as large as those of plain attention, whatever σ is.
"""

import triton
import triton.language as tl

from stablemask.backends._closed_form import closed_form
from stablemask.backends.triton._parts import (
    LN2,
    LOG2E,
    keys_of_rows,
    load_bounds,
    load_rows,
    scores,
    split,
    store_rows,
    tile_count,
    tile_start,
    visible,
)

# Sizes that change from call to call: one compilation serves all of them.
SIZES = ("H", "group", "Tq", "Tk", "window", "horizon", "base", "scale")


@triton.jit
def _accumulate(
    acc, total, m, q, K, V, SLOPES, ROWS, KEYS, b, start, position, first, stop,
    k_t, v_t, Tk, window, scale2, slope2,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, HOLES: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    keys = start + tl.arange(0, BN)  # [BN]
    valid = keys < Tk
    if HOLES:
        key_first, key_stop = load_bounds(KEYS, b, keys, Tk)
        valid = valid & (key_first < key_stop)
    distance = keys[None, :] - position[:, None]  # [BM, BN]
    k = load_rows(K, keys, k_t, valid, D, BLOCK_D, MASKED)  # [BN, BLOCK_D]
    s = scores(q, k, distance, scale2, slope2, SLOPES)  # [BM, BN]
    if MASKED:
        ok = visible(
            distance, keys[None, :], first[:, None], stop[:, None], valid[None, :],
            Tk, window, ROWS, CAUSAL, HOLES,
        )  # fmt: skip
        s = tl.where(ok, s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 1))
    shrink = tl.exp2(m - m_new)
    p = tl.exp2(s - m_new[:, None])
    total = total * shrink + tl.sum(p, 1)
    v = load_rows(V, keys, v_t, valid, DV, BLOCK_DV, MASKED)  # [BN, BLOCK_DV]
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")  # [BM, BLOCK_DV]
    return acc, total, m_new


@triton.jit(do_not_specialize=SIZES)
def forward_kernel(
    Q, K, V, OUT, LSE, SINK, GAMMAS, SLOPES, ROWS, KEYS,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, out_b, out_h, out_t, sink_b, sink_h, sink_t,
    H, group, Tq, Tk, window, horizon, base, scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr, HOLES: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(Tq, BM)
    tile = tl.program_id(0) % tiles
    if CAUSAL:
        tile = tiles - 1 - tile  # the longest first
    head = tl.program_id(0) // tiles
    b = (head // H).to(tl.int64)
    h = head % H
    q_base = Q + b * q_b + h.to(tl.int64) * q_h
    k_base = K + b * k_b + (h // group).to(tl.int64) * k_h
    v_base = V + b * v_b + (h // group).to(tl.int64) * v_h

    rows = tile * BM + tl.arange(0, BM)  # [BM]
    inside = rows < Tq
    position = rows + (Tk - Tq)
    first, stop = load_bounds(ROWS, b, rows, Tq)
    q = load_rows(q_base, rows, q_t, inside, D, BLOCK_D, True)  # [BM, BLOCK_D]
    slope2 = 0.0
    if SLOPES is not None:
        slope2 = tl.load(SLOPES + h) * LOG2E

    acc = tl.zeros([BM, BLOCK_DV], tl.float32)
    total = tl.zeros([BM], tl.float32)
    m = tl.full([BM], -1e30, tl.float32)  # finite, so that a tile without visible keys gives no −∞ − −∞
    lowest = tile * BM + (Tk - Tq)
    highest = tl.minimum(tile * BM + BM, Tq) - 1 + (Tk - Tq)
    lo, hi, every_lo, every_hi = keys_of_rows(lowest, highest, first, stop, Tk, window, ROWS, CAUSAL)
    begin, full_begin, full_end, end = split(lo, hi, every_lo, every_hi, BN, HOLES)
    for masked in tl.static_range(2):
        for t in tl.range(0, tile_count(begin, full_begin, full_end, end, BN, masked)):
            start = tile_start(t, begin, full_begin, full_end, BN, masked)
            acc, total, m = _accumulate(
                acc, total, m, q, k_base, v_base, SLOPES, ROWS, KEYS, b, start, position, first, stop,
                k_t, v_t, Tk, window, scale * LOG2E, slope2,
                D, DV, BLOCK_D, BLOCK_DV, BN, CAUSAL, HOLES, masked,
            )  # fmt: skip

    sigma = tl.full([BM], float("-inf"), tl.float32)
    if SINK is not None:
        at = SINK + b * sink_b + h.to(tl.int64) * sink_h + rows.to(tl.int64) * sink_t
        sigma = tl.load(at, mask=inside, other=0.0)
    elif GAMMAS is not None:
        sigma = closed_form(position, tl.load(GAMMAS + h), base, horizon)
    blind = total == 0  # no visible key; a NaN is not blind
    total = tl.where(blind, 1.0, total)
    lse = m * LN2 + tl.log(total)  # [BM], finite where blind
    ahead = sigma - lse
    ratio = tl.exp(-tl.abs(ahead))
    share = tl.where(ahead > 0, ratio, 1.0) / (1.0 + ratio)
    out = acc * (share / total)[:, None]
    lse = tl.where(blind, sigma, tl.maximum(lse, sigma) + tl.log(1.0 + ratio))
    out_base = OUT + b * out_b + h.to(tl.int64) * out_h
    store_rows(out_base, rows, out_t, out, inside, DV, BLOCK_DV)
    tl.store(LSE + head.to(tl.int64) * Tq + rows, lse, mask=inside)
