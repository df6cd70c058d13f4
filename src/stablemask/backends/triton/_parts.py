"""What the kernels share: loads, scores, visibility, and which tiles need a mask at all.

Shapes: [BM] query rows and [BN] keys of one tile; scores are [BM, BN], and [BN, BM] in dk/dv, in base 2.
Arguments that a call does not have are None, a constant to the compiler: their code vanishes.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def load_rows(base, rows, stride, valid, WIDTH: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """[rows, BLOCK], the last stride being 1; zeros beyond WIDTH and, if MASKED, where a row is not valid."""
    columns = tl.arange(0, BLOCK)
    at = base + rows[:, None].to(tl.int64) * stride + columns[None, :]
    if MASKED:
        if WIDTH < BLOCK:
            tile = tl.load(at, mask=valid[:, None] & (columns < WIDTH)[None, :], other=0.0)
        else:
            tile = tl.load(at, mask=valid[:, None], other=0.0)
    elif WIDTH < BLOCK:
        tile = tl.load(at, mask=(columns < WIDTH)[None, :], other=0.0)
    else:
        tile = tl.load(at)
    return tile


@triton.jit
def store_rows(base, rows, stride, value, valid, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """The counterpart of ``load_rows`` with MASKED."""
    columns = tl.arange(0, BLOCK)
    at = base + rows[:, None].to(tl.int64) * stride + columns[None, :]
    mask = valid[:, None]
    if WIDTH < BLOCK:
        mask = mask & (columns < WIDTH)[None, :]
    tl.store(at, value.to(base.dtype.element_ty), mask=mask)


@triton.jit
def load_bounds(BOUNDS, b, index, length):
    """First and stop [index] from (B, 2, length) at sequence b; past the end the last is repeated."""
    first = index
    stop = index
    if BOUNDS is not None:
        at = BOUNDS + b * 2 * length + tl.minimum(index, length - 1)
        first = tl.load(at)
        stop = tl.load(at + length)
    return first, stop


@triton.jit
def scores(a, b, distance, scale2, slope2, SLOPES):
    """a·bᵀ in base 2 with ALiBi; ``distance`` (key − query position) broadcasts to it."""
    s = tl.dot(a, tl.trans(b), input_precision="ieee") * scale2
    if SLOPES is not None:
        s += slope2 * distance.to(tl.float32)
    return s


@triton.jit
def visible(distance, keys, first, stop, kept, Tk, window, ROWS, CAUSAL: tl.constexpr, HOLES: tl.constexpr):
    """Which scores of a tile are visible; the arguments broadcast to its shape."""
    ok = keys < Tk
    if CAUSAL:
        ok = ok & (distance <= 0)
    if window is not None:
        ok = ok & (distance > -window)
    if ROWS is not None:
        ok = ok & (first <= keys) & (keys < stop)
    if HOLES:
        ok = ok & kept
    return ok


@triton.jit
def keys_of_rows(head, tail, first, stop, Tk, window, ROWS, CAUSAL: tl.constexpr):
    """Rows at positions head … tail see keys of [lo, hi) only, and each sees all of [every_lo, every_hi)."""
    lo = Tk * 0
    hi = Tk
    every_lo = lo
    every_hi = Tk
    if CAUSAL:
        hi = tl.minimum(hi, tail + 1)
        every_hi = tl.minimum(every_hi, head + 1)
    if window is not None:
        lo = tl.maximum(lo, head - window + 1)
        every_lo = tl.maximum(every_lo, tail - window + 1)
    if ROWS is not None:
        lo = tl.maximum(lo, tl.min(first, 0))
        hi = tl.minimum(hi, tl.max(stop, 0))
        every_lo = tl.maximum(every_lo, tl.max(first, 0))
        every_hi = tl.minimum(every_hi, tl.min(stop, 0))
    return lo, hi, every_lo, every_hi


@triton.jit
def rows_of_keys(head, tail, first, stop, offset, Tq, window, KEYS, CAUSAL: tl.constexpr):
    """Keys head … tail are seen by rows of [lo, hi) only, and each by all of [every_lo, every_hi)."""
    lo = Tq * 0
    hi = Tq
    every_lo = lo
    every_hi = Tq
    if CAUSAL:
        lo = tl.maximum(lo, head - offset)
        every_lo = tl.maximum(every_lo, tail - offset)
    if window is not None:
        hi = tl.minimum(hi, tail + window - offset)
        every_hi = tl.minimum(every_hi, head + window - offset)
    if KEYS is not None:
        lo = tl.maximum(lo, tl.min(first, 0))
        hi = tl.minimum(hi, tl.max(stop, 0))
        every_lo = tl.maximum(every_lo, tl.max(first, 0))
        every_hi = tl.minimum(every_hi, tl.min(stop, 0))
    return lo, hi, every_lo, every_hi


@triton.jit
def split(lo, hi, every_lo, every_hi, STEP: tl.constexpr, HOLES: tl.constexpr):
    """Tiles of STEP from ``begin`` to ``end``; those of [full_begin, full_end) need no mask."""
    if HOLES:
        every_hi = every_lo
    begin = lo // STEP * STEP
    full_begin = tl.maximum(tl.cdiv(every_lo, STEP) * STEP, begin)
    full_end = every_hi // STEP * STEP
    empty = full_end <= full_begin
    full_begin = tl.where(empty, begin, full_begin)
    full_end = tl.where(empty, begin, full_end)
    return begin, full_begin, full_end, tl.maximum(hi, full_end)


@triton.jit
def tile_count(begin, full_begin, full_end, end, STEP: tl.constexpr, MASKED: tl.constexpr):
    if MASKED:
        count = (full_begin - begin) // STEP + tl.cdiv(end - full_end, STEP)
    else:
        count = (full_end - full_begin) // STEP
    return count


@triton.jit
def tile_start(t, begin, full_begin, full_end, STEP: tl.constexpr, MASKED: tl.constexpr):
    """The t-th tile without a mask, or with one: first those before the full ones, then those after."""
    start = full_begin + t * STEP
    if MASKED:
        before = (full_begin - begin) // STEP
        start = tl.where(t < before, begin + t * STEP, full_end + (t - before) * STEP)
    return start
