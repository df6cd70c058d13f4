"""How a call is cut into tiles that the CPU flash kernel computes right and fast.

A tile is a rectangle of query rows × keys that holds every visible key of its rows. In a *reversed* plan the
kernel sees the rows of a tile from its last query backwards: then row r and key j of a band whose last query
owns its last key have j − i = j + r + const, and a mask that depends on j − i alone is a view with strides
(1, 1) of one vector, whatever the size of the band. Tiles are turned one by one, while they are in the cache.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from stablemask.backends._call import (
    Call,
    accumulate_dtype,
    additive_bias,
    finite_keys_values,
    kept_keys,
    visible,
)
from stablemask.shapes import Keys, Output, Queries, RowLogits, Values

_FLASH = "_scaled_dot_product_flash_attention_for_cpu"
flash: Any = getattr(torch, _FLASH, None)  # called in a microsecond less than torch.ops.aten's
flash_backward: Any = getattr(torch.ops.aten, f"{_FLASH}_backward", None)

_EVERY = slice(None)

_FEW = 64  # numbers that Python looks through faster than PyTorch

_LONGEST_IN_BANDS = 2048  # keys; ALiBi forward in half precision: longer ones are faster whole

_BAND_ROWS = 192  # from here on the kernel takes its larger blocks

Segment = tuple[int, int]


class Tile(NamedTuple):
    """Query rows × keys of some sequences, with an additive mask or the kernel's own causal one, or none."""

    batch: slice
    rows: slice
    keys: slice
    mask: Annotated[Tensor, "B|1 H|1 rows keys"] | None = None
    causal: bool = False
    alive: Annotated[Tensor, "B|1 H|1 rows"] | None = None


class Plan(NamedTuple):
    """Tiles in the order in which they run; or ``whole``: no tiles, the kernel takes the entire call.

    ``documents`` are the lengths of causal squares that follow each other without a gap, in all sequences.
    A whole call may carry ALiBi as slope · key index. Its scores exceed the true ones by ``row_shift``, slope
    · query index.
    """

    tiles: Iterator[Tile] = iter(())
    reversed: bool = False
    whole: bool = False
    causal: bool = False
    key_bias: Annotated[Tensor, "1 H 1 Tk"] | None = None
    row_shift: Annotated[Tensor, "H Tq"] | None = None
    documents: tuple[int, ...] = ()


_WHOLE, _WHOLE_TRIANGLE = Plan(whole=True), Plan(whole=True, causal=True)


def forward(call: Call) -> tuple[Output, RowLogits]:
    """Plain attention of the call, without its sink: out, and lse = −∞ with out = 0 where a row sees no key.

    Of reversed plans out is in ``accumulate_dtype``: it is rounded once, after the sink has taken its share.
    """
    if call.q.numel() == 0 or call.k.numel() == 0:
        return _empty_rows(call.q)
    plan = make_plan(call)
    q, k, v = _inputs(call, plan)
    if plan.whole:
        out, lse = flash(q, k, v, 0.0, plan.causal, attn_mask=plan.key_bias, scale=call.scale)
        if plan.row_shift is not None:
            lse.sub_(plan.row_shift)
    elif plan.documents:
        out, lse = empty_results(q)
        for *given, out_part, lse_part in _split(plan, q, k, v, out, lse):
            out_tile, lse_tile = flash(*given, 0.0, True, scale=call.scale)
            out_part.copy_(out_tile)
            lse_part.copy_(lse_tile)
    else:
        out, lse = _empty_rows(q)
        for tile in plan.tiles:
            out_tile, lse_tile = flash(
                _rows(q, tile, plan),
                _part(k, tile, tile.keys),
                _part(v, tile, tile.keys),
                0.0,
                tile.causal,
                attn_mask=tile.mask,
                scale=call.scale,
            )
            if tile.alive is not None:
                lse_tile = lse_tile.where(tile.alive, -torch.inf)
            _part(out, tile, tile.rows).copy_(_turned(out_tile, plan))
            _part(lse, tile, tile.rows).copy_(_turned(lse_tile, plan))
    _restore_nans(call.q, k, out, lse)
    return out, lse


def backward(call: Call, grad: Output, out: Output, lse: RowLogits) -> tuple[Queries, Keys, Values]:
    """Exact dq, dk, dv from out' and lse' of the attention with its sink."""
    if call.q.numel() == 0 or call.k.numel() == 0:
        return empty_gradient(call.q).zero_(), empty_gradient(call.k).zero_(), empty_gradient(call.v).zero_()
    plan = make_plan(call, backward=True)
    q, k, v = _inputs(call, plan._replace(reversed=False))
    grad = _unit_stride(grad)
    if plan.whole:
        lse = lse if plan.row_shift is None else lse + plan.row_shift
        dq, dk, dv = flash_backward(
            grad, q, k, v, out, lse, 0.0, plan.causal, attn_mask=plan.key_bias, scale=call.scale
        )
        return dq, dk, dv
    if plan.documents:
        dq, dk, dv = (empty_gradient(t) for t in (q, k, v))
        for *given, dq_part, dk_part, dv_part in _split(plan, grad, q, k, v, out, lse, dq, dk, dv):
            dq_tile, dk_tile, dv_tile = flash_backward(*given, 0.0, True, scale=call.scale)
            dq_part.copy_(dq_tile)
            dk_part.copy_(dk_tile)
            dv_part.copy_(dv_tile)
        return dq, dk, dv
    grad, out = grad.to(q.dtype), out.to(q.dtype)
    dq = empty_gradient(q).zero_()
    dk, dv = (empty_gradient(t, call.accumulate_dtype).zero_() for t in (k, v))
    for tile in plan.tiles:
        lse_tile = _rows(lse, tile, plan)
        dq_tile, dk_tile, dv_tile = flash_backward(
            _rows(grad, tile, plan),
            _rows(q, tile, plan),
            _part(k, tile, tile.keys),
            _part(v, tile, tile.keys),
            _rows(out, tile, plan),
            lse_tile if tile.alive is None else lse_tile.where(tile.alive, torch.inf),
            0.0,
            tile.causal,
            attn_mask=tile.mask,
            scale=call.scale,
        )
        _part(dq, tile, tile.rows).copy_(_turned(dq_tile, plan))
        _part(dk, tile, tile.keys).add_(dk_tile)
        _part(dv, tile, tile.keys).add_(dv_tile)
    return dq.to(call.q.dtype), dk.to(call.k.dtype), dv.to(call.v.dtype)


def _split(plan: Plan, *given: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The rows of one document after the other."""
    return zip(*(t.split(plan.documents, 2) for t in given), strict=True)


def _rows(t: Tensor, tile: Tile, plan: Plan) -> Tensor:
    """Those of a tile, as the kernel has to see them."""
    return _turned(_part(t, tile, tile.rows), plan)


def _part(t: Tensor, tile: Tile, span: slice) -> Tensor:
    """In half the time of an index."""
    of_sequences = t if tile.batch is _EVERY else t[tile.batch]
    return of_sequences.narrow(2, span.start, span.stop - span.start)


def _turned(rows: Tensor, plan: Plan) -> Tensor:
    return rows.flip(2) if plan.reversed else rows


def empty_results(q: Queries) -> tuple[Output, RowLogits]:
    """Room for out and lse in the layouts in which the kernel returns them."""
    batch, heads, num_queries, _ = q.shape
    lse = q.new_empty((batch, num_queries, heads), dtype=accumulate_dtype(q.dtype)).transpose(1, 2)
    return torch.empty_like(_unit_stride(q)), lse


def _empty_rows(q: Queries) -> tuple[Output, RowLogits]:
    out, lse = empty_results(q)
    return out.zero_(), lse.fill_(-torch.inf)


def empty_gradient(t: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Room for a gradient in the layout in which the kernel returns it: [B, T, heads, D] in memory."""
    batch, heads, length, width = t.shape
    return t.new_empty((batch, length, heads, width), dtype=dtype or t.dtype).transpose(1, 2)


def make_plan(call: Call, *, backward: bool = False) -> Plan:
    """The cheapest way to cut the call. Reads the values of ``key_mask`` and ``documents``."""
    num_queries, num_keys = call.q.shape[2], call.k.shape[2]
    single = num_queries == 1
    all_keys = call.window is None or call.window >= num_keys
    plain = not call.structured and call.slopes is None and call.bias is None and all_keys
    if plain and (whole := _whole(call)) is not None:
        return whole
    if call.key_positions is not None or call.bias is not None:
        return Plan(_dense_bands(call))
    if not call.causal and (call.key_mask is not None or call.slopes is not None):
        return Plan(_dense_bands(call))
    segments = _segments(call)
    if segments is None:
        return Plan(_dense_bands(call))
    longest = max((stop - start for row in segments for start, stop in row), default=0)
    seen_back = call.window is None or call.window >= longest
    unmasked = call.slopes is None and seen_back
    undivided = segments == [[(0, num_keys)]]
    if unmasked and undivided and (whole := _whole(call)) is not None:
        return whole
    square = call.causal and not single and num_queries == num_keys
    long = backward or num_keys > _LONGEST_IN_BANDS
    if call.slopes is not None and seen_back and undivided and square and long and _fits_16_bits(call):
        key_bias = call.slopes[:, None] * torch.arange(num_keys, device=call.q.device)
        return Plan(whole=True, causal=True, key_bias=key_bias[None, :, None, :], row_shift=key_bias)
    if call.causal and not single and not (unmasked and square):
        return Plan(_bands(call, segments), reversed=True)
    if square and len(segments) == 1 and sum(stop - start for start, stop in segments[0]) == num_keys:
        return Plan(documents=tuple(stop - start for start, stop in segments[0]))
    return Plan(_rectangles(call, segments))


def _whole(call: Call) -> Plan | None:
    """The kernel takes all rows at once: without a mask, or with its own, which is aligned top left."""
    if call.q.shape[2] == 1 or not call.causal:
        return _WHOLE
    return _WHOLE_TRIANGLE if call.q.shape[2] == call.k.shape[2] else None


def _fits_16_bits(call: Call) -> bool:
    """slope · key index costs a score slope · Tk · 2⁻²⁴: nothing to half precision, too much to float32."""
    if call.slopes is None or call.q.dtype not in (torch.bfloat16, torch.float16):
        return False
    largest = float(call.slopes.abs().max()) * call.k.shape[2]
    return largest * 2.0**-24 <= torch.finfo(call.q.dtype).eps / 4


def _inputs(call: Call, plan: Plan) -> tuple[Queries, Keys, Values]:
    """q, k, v as the tiles want them. Bands of half precision run in float32, which is no slower in bands."""
    q, k, v = call.q, call.k, call.v
    kept = kept_keys(call)
    if kept is not None and not bool(kept.all()):
        k, v = finite_keys_values(call)
    if plan.reversed:
        dtype = call.accumulate_dtype
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    return _unit_stride(q), _unit_stride(k), _unit_stride(v)


def _segments(call: Call) -> list[list[Segment]] | None:
    """Key ranges that attend among themselves: one list for all, or one each; None if one has holes."""
    if call.documents is None and call.key_mask is None:
        return [[(0, call.k.shape[2])]]
    per_sequence = []
    for b in range(call.k.shape[0]):
        bounds = [0, call.k.shape[2]]
        if call.documents is not None:
            lengths = torch.unique_consecutive(call.documents[b], return_counts=True)[1]
            bounds = [0, *lengths.cumsum(0).tolist()]
        ranges = list(pairwise(bounds))
        if call.key_mask is not None:
            trimmed = [_trim(call.key_mask[b], *r) for r in ranges]
            if None in trimmed:
                return None
            ranges = [r for r in trimmed if r is not None and r[0] < r[1]]
        per_sequence.append(ranges)
    return per_sequence[:1] if all(r == per_sequence[0] for r in per_sequence) else per_sequence


def _trim(keep: Annotated[Tensor, "Tk"], start: int, stop: int) -> Segment | None:
    """The kept part of a range if it is one run (possibly empty), else None."""
    kept = keep[start:stop].nonzero()
    if kept.numel() == 0:
        return (start, start)
    first, last = start + int(kept[0]), start + int(kept[-1])
    return (first, last + 1) if kept.numel() == last + 1 - first else None


def _placed(call: Call, segments: list[list[Segment]]) -> Iterator[tuple[slice, int, int, int]]:
    """(sequences, first key, first own key of a query, end) of every segment that holds a query."""
    offset = call.k.shape[2] - call.q.shape[2]
    for b, ranges in enumerate(segments):
        sequences = _EVERY if len(segments) == 1 else slice(b, b + 1)
        for start, stop in ranges:
            if max(start, offset) < stop:
                yield sequences, start, max(start, offset), stop


def _rectangles(call: Call, segments: list[list[Segment]]) -> Iterator[Tile]:
    """One tile per segment: causal square, single query, or everything visible."""
    offset = call.k.shape[2] - call.q.shape[2]
    mask_vector = None if call.slopes is None else _BandMask(call, call.k.shape[2], 1)
    for sequences, start, own, stop in _placed(call, segments):
        square = call.causal and call.q.shape[2] > 1
        low = start if call.window is None else max(start, stop - call.window)
        first_row = own - offset if offset >= 0 else 0
        rows = slice(first_row, stop - offset)
        keys = slice(start if square else low, stop)
        mask = None if mask_vector is None else mask_vector.view(1, stop - low)
        yield Tile(sequences, rows, keys, mask, causal=square)


def _bands(call: Call, segments: list[list[Segment]]) -> Iterator[Tile]:
    """Bands of rows of every segment, masked by a view of one vector."""
    longest = max((stop - start for row in segments for start, stop in row), default=0)
    reach = longest if call.window is None else min(longest, call.window + _BAND_ROWS - 1)
    masks = _BandMask(call, reach, _BAND_ROWS)
    offset = call.k.shape[2] - call.q.shape[2]
    for sequences, start, own, stop in _placed(call, segments):
        for first in range(own, stop, _BAND_ROWS):
            last = min(first + _BAND_ROWS, stop)
            low = start if call.window is None else max(start, first - call.window + 1)
            rows = slice(first - offset, last - offset)
            yield Tile(sequences, rows, slice(low, last), masks.view(last - first, last - low))


class _BandMask:
    """ALiBi, window and causality as a function of key index − query index, one number per distance."""

    def __init__(self, call: Call, reach: int, height: int) -> None:
        self.reach = reach
        relative = torch.arange(1 - reach, height, device=call.q.device)
        slopes = (
            call.slopes if call.slopes is not None else relative.new_zeros(1, dtype=call.accumulate_dtype)
        )
        values = slopes[:, None] * relative.to(slopes.dtype)
        hidden = relative > 0
        if call.window is not None:
            hidden = hidden | (relative <= -call.window)
        self.values = values.masked_fill(hidden, -torch.inf)  # (H|1, reach + height − 1)

    def view(self, rows: int, keys: int) -> Annotated[Tensor, "1 H|1 rows keys"]:
        heads, length = self.values.shape
        return self.values.as_strided((1, heads, rows, keys), (0, length, 1, 1), self.reach - keys)


def _dense_bands(call: Call) -> Iterator[Tile]:
    """Bands of rows with a dense mask: O(rows · Tk) numbers at a time."""
    num_queries, num_keys = call.q.shape[2], call.k.shape[2]
    ordered = call.causal and call.key_positions is None
    for first in range(0, num_queries, _BAND_ROWS):
        rows = slice(first, min(first + _BAND_ROWS, num_queries))
        keys = slice(0, rows.stop + num_keys - num_queries if ordered else num_keys)
        bias, seen = additive_bias(call, rows), visible(call, rows)
        mask = call.q.new_zeros((1, 1, 1, 1), dtype=call.accumulate_dtype) if bias is None else bias
        if seen is not None:
            mask = mask.masked_fill(~seen, -torch.inf)
        mask = mask.expand(-1, -1, rows.stop - rows.start, num_keys)[..., keys].contiguous()
        yield Tile(_EVERY, rows, keys, mask, alive=(mask > -torch.inf).any(-1))


def _unit_stride(t: Tensor) -> Tensor:
    return t if t.stride(-1) == 1 else t.contiguous()


def _restore_nans(q: Queries, k: Keys, out: Output, lse: RowLogits) -> None:
    """Write NaN into rows whose every score was NaN: the kernel reports them as out = 0, lse = 0."""
    few = lse.numel() <= _FEW
    if (0.0 not in lse.flatten().tolist()) if few else bool(lse.all()):
        return
    suspect = (lse == 0) & (out == 0).all(-1)
    broken_key = ~k.isfinite().all(-1).all(-1)  # (B, G)
    broken = ~q.isfinite().all(-1) | broken_key.repeat_interleave(q.shape[1] // k.shape[1], 1).unsqueeze(-1)
    suspect &= broken
    out.masked_fill_(suspect.unsqueeze(-1), torch.nan)
    lse.masked_fill_(suspect, torch.nan)
