"""The backward kernels: Δ per row, dk and dv per key tile, dq per row tile. No atomics: deterministic.

dS = P' ⊙ (dP − Δ) with P' = exp(S − lse') and Δ = rowsum(dout ⊙ out') − dlse'.
"""

import triton
import triton.language as tl

from stablemask.backends.triton._parts import (
    LOG2E,
    keys_of_rows,
    load_bounds,
    load_rows,
    rows_of_keys,
    scores,
    split,
    store_rows,
    tile_count,
    tile_start,
    visible,
)

SIZES = ("H", "group", "Tq", "Tk", "window", "scale")


@triton.jit(do_not_specialize=("H", "Tq"))
def delta_kernel(
    OUT, GRAD, GRAD_LSE, DELTA,
    out_b, out_h, out_t, grad_b, grad_h, grad_t, H, Tq,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(Tq, BM)
    head = tl.program_id(0) // tiles
    b = (head // H).to(tl.int64)
    h = (head % H).to(tl.int64)
    rows = (tl.program_id(0) % tiles) * BM + tl.arange(0, BM)  # [BM]
    inside = rows < Tq
    out = load_rows(OUT + b * out_b + h * out_h, rows, out_t, inside, DV, BLOCK_DV, True)  # [BM, BLOCK_DV]
    grad = load_rows(GRAD + b * grad_b + h * grad_h, rows, grad_t, inside, DV, BLOCK_DV, True)
    delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    at = head.to(tl.int64) * Tq + rows
    if GRAD_LSE is not None:
        delta -= tl.load(GRAD_LSE + at, mask=inside, other=0.0)
    tl.store(DELTA + at, delta, mask=inside)


@triton.jit
def _add_rows(
    dk, dv, k, v, Q, GRAD, LSE, DELTA, SLOPES, ROWS, b, start, keys, kept,
    q_t, grad_t, Tq, Tk, window, scale2, slope2,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BM: tl.constexpr,
    CAUSAL: tl.constexpr, HOLES: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    rows = start + tl.arange(0, BM)  # [BM]
    inside = rows < Tq
    distance = keys[:, None] - (rows + (Tk - Tq))[None, :]  # [BN, BM]
    q = load_rows(Q, rows, q_t, inside, D, BLOCK_D, MASKED)  # [BM, BLOCK_D]
    if MASKED:
        lse = tl.load(LSE + rows, mask=inside, other=float("inf"))  # +∞: rows past the end weigh nothing
        delta = tl.load(DELTA + rows, mask=inside, other=0.0)
    else:
        lse = tl.load(LSE + rows)
        delta = tl.load(DELTA + rows)
    p = tl.exp2(scores(k, q, distance, scale2, slope2, SLOPES) - lse[None, :] * LOG2E)  # [BN, BM]
    if MASKED:
        first, stop = load_bounds(ROWS, b, rows, Tq)
        ok = visible(
            distance, keys[:, None], first[None, :], stop[None, :], kept[:, None],
            Tk, window, ROWS, CAUSAL, HOLES,
        )  # fmt: skip
        p = tl.where(ok, p, 0.0)
    grad = load_rows(GRAD, rows, grad_t, inside, DV, BLOCK_DV, MASKED)  # [BM, BLOCK_DV]
    dv = tl.dot(p.to(grad.dtype), grad, dv, input_precision="ieee")  # [BN, BLOCK_DV]
    dp = tl.dot(v, tl.trans(grad), input_precision="ieee")  # [BN, BM]
    ds = p * (dp - delta[None, :])
    dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")  # [BN, BLOCK_D]
    return dk, dv


@triton.jit(do_not_specialize=SIZES)
def dkdv_kernel(
    Q, K, V, GRAD, LSE, DELTA, DK, DV_OUT, SLOPES, ROWS, KEYS,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, grad_b, grad_h, grad_t, dk_b, dk_h, dk_t, dv_b, dv_h, dv_t,
    H, group, Tq, Tk, window, scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr, HOLES: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(Tk, BN)
    tile = tl.program_id(0) % tiles
    G = H // group
    b = (tl.program_id(0) // tiles // G).to(tl.int64)
    g = tl.program_id(0) // tiles % G
    keys = tile * BN + tl.arange(0, BN)  # [BN]
    inside = keys < Tk
    first, stop = load_bounds(KEYS, b, keys, Tk)
    kept = inside
    if HOLES:
        kept = kept & (first < stop)
    k = load_rows(K + b * k_b + g.to(tl.int64) * k_h, keys, k_t, kept, D, BLOCK_D, True)  # [BN, BLOCK_D]
    v = load_rows(V + b * v_b + g.to(tl.int64) * v_h, keys, v_t, kept, DV, BLOCK_DV, True)  # [BN, BLOCK_DV]

    dk = tl.zeros([BN, BLOCK_D], tl.float32)
    dv = tl.zeros([BN, BLOCK_DV], tl.float32)
    last = tl.minimum(tile * BN + BN, Tk) - 1
    lo, hi, every_lo, every_hi = rows_of_keys(tile * BN, last, first, stop, Tk - Tq, Tq, window, KEYS, CAUSAL)
    every_hi = tl.where(tile * BN + BN > Tk, 0, every_hi)  # keys past the end must weigh nothing
    begin, full_begin, full_end, end = split(lo, hi, every_lo, every_hi, BM, HOLES)
    slope2 = 0.0
    for member in tl.range(0, group):
        h = (g * group + member).to(tl.int64)
        q_base = Q + b * q_b + h * q_h
        grad_base = GRAD + b * grad_b + h * grad_h
        lse_base = LSE + (b * H + h) * Tq
        delta_base = DELTA + (b * H + h) * Tq
        if SLOPES is not None:
            slope2 = tl.load(SLOPES + h) * LOG2E
        for masked in tl.static_range(2):
            for t in tl.range(0, tile_count(begin, full_begin, full_end, end, BM, masked)):
                start = tile_start(t, begin, full_begin, full_end, BM, masked)
                dk, dv = _add_rows(
                    dk, dv, k, v, q_base, grad_base, lse_base, delta_base, SLOPES, ROWS, b, start, keys, kept,
                    q_t, grad_t, Tq, Tk, window, scale * LOG2E, slope2,
                    D, DV, BLOCK_D, BLOCK_DV, BM, CAUSAL, HOLES, masked,
                )  # fmt: skip
    g = g.to(tl.int64)
    store_rows(DK + b * dk_b + g * dk_h, keys, dk_t, dk * scale, inside, D, BLOCK_D)
    store_rows(DV_OUT + b * dv_b + g * dv_h, keys, dv_t, dv, inside, DV, BLOCK_DV)


@triton.jit
def _add_keys(
    dq, q, grad, lse, delta, K, V, SLOPES, ROWS, KEYS, b, start, position, first, stop,
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
    v = load_rows(V, keys, v_t, valid, DV, BLOCK_DV, MASKED)  # [BN, BLOCK_DV]
    p = tl.exp2(scores(q, k, distance, scale2, slope2, SLOPES) - lse[:, None] * LOG2E)  # [BM, BN]
    if MASKED:
        ok = visible(
            distance, keys[None, :], first[:, None], stop[:, None], valid[None, :],
            Tk, window, ROWS, CAUSAL, HOLES,
        )  # fmt: skip
        p = tl.where(ok, p, 0.0)
    dp = tl.dot(grad, tl.trans(v), input_precision="ieee")  # [BM, BN]
    ds = p * (dp - delta[:, None])
    return tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")  # [BM, BLOCK_D]


@triton.jit(do_not_specialize=SIZES)
def dq_kernel(
    Q, K, V, GRAD, LSE, DELTA, DQ, SLOPES, ROWS, KEYS,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, grad_b, grad_h, grad_t, dq_b, dq_h, dq_t,
    H, group, Tq, Tk, window, scale,
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
    k_base = K + b * k_b + (h // group).to(tl.int64) * k_h
    v_base = V + b * v_b + (h // group).to(tl.int64) * v_h
    slope2 = 0.0
    if SLOPES is not None:
        slope2 = tl.load(SLOPES + h) * LOG2E

    rows = tile * BM + tl.arange(0, BM)  # [BM]
    inside = rows < Tq
    position = rows + (Tk - Tq)
    first, stop = load_bounds(ROWS, b, rows, Tq)
    h = h.to(tl.int64)
    q = load_rows(Q + b * q_b + h * q_h, rows, q_t, inside, D, BLOCK_D, True)  # [BM, BLOCK_D]
    grad = load_rows(
        GRAD + b * grad_b + h * grad_h, rows, grad_t, inside, DV, BLOCK_DV, True
    )  # [BM, BLOCK_DV]
    at = head.to(tl.int64) * Tq + rows
    lse = tl.load(LSE + at, mask=inside, other=float("inf"))  # +∞: rows past the end weigh nothing
    delta = tl.load(DELTA + at, mask=inside, other=0.0)

    dq = tl.zeros([BM, BLOCK_D], tl.float32)
    lowest = tile * BM + (Tk - Tq)
    highest = tl.minimum(tile * BM + BM, Tq) - 1 + (Tk - Tq)
    lo, hi, every_lo, every_hi = keys_of_rows(lowest, highest, first, stop, Tk, window, ROWS, CAUSAL)
    begin, full_begin, full_end, end = split(lo, hi, every_lo, every_hi, BN, HOLES)
    for masked in tl.static_range(2):
        for t in tl.range(0, tile_count(begin, full_begin, full_end, end, BN, masked)):
            start = tile_start(t, begin, full_begin, full_end, BN, masked)
            dq = _add_keys(
                dq, q, grad, lse, delta, k_base, v_base, SLOPES, ROWS, KEYS, b, start, position, first, stop,
                k_t, v_t, Tk, window, scale * LOG2E, slope2,
                D, DV, BLOCK_D, BLOCK_DV, BN, CAUSAL, HOLES, masked,
            )  # fmt: skip
    store_rows(DQ + b * dq_b + h * dq_h, rows, dq_t, dq * scale, inside, D, BLOCK_D)
