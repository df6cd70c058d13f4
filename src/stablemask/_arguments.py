"""From the arguments of a call to a validated ``Call``: every check and every normalisation of the contract.

Checks read shapes, dtypes and devices, never values, so that nothing here waits for a device or breaks a
graph.
"""

import math
from typing import Annotated, NamedTuple, NoReturn

import torch
from torch import Tensor

from stablemask.backends._call import Call, accumulate_dtype
from stablemask.pseudo import INTEGERS, PseudoScores, tracing
from stablemask.shapes import (
    DocumentIds,
    HeadSlopes,
    KeyMask,
    KeyPositions,
    Keys,
    Queries,
    QueryPositions,
    ScoreBias,
    Values,
)

_LARGEST = torch.iinfo(torch.int64).max
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Arguments(NamedTuple):
    """The keyword arguments that ``sink_attention`` and ``stable_attention`` share."""

    positions: QueryPositions | None
    key_positions: KeyPositions | None
    window: int | None
    alibi_slopes: HeadSlopes | None
    bias: ScoreBias | None
    key_mask: KeyMask | None
    document_ids: DocumentIds | None
    scale: float | None
    softcap: float | None
    dropout: float
    return_lse: bool


def build_call(
    q: Queries, k: Keys, v: Values, sink: PseudoScores | Tensor | float | None, causal: bool, args: Arguments
) -> Call:
    """Check everything, then bring q, k, v, σ, biases and document ids into the one form back ends know."""
    q, k, v = _autocast(_check_tensors(q, k, v))
    _check_flags(causal, args)
    _check_masks(q, k, causal, args)
    dtype = accumulate_dtype(q.dtype)
    documents = None if args.document_ids is None else _run_numbers(args.document_ids)
    position_form = args.key_positions is not None
    logits, scores = _resolve_sink(q, k.shape[2], sink, args, documents)
    return Call(
        q=q,
        k=k,
        v=v,
        sink=logits,
        scores=scores,
        causal=causal,
        scale=1.0 / math.sqrt(q.shape[-1]) if args.scale is None else float(args.scale),
        window=args.window,
        slopes=None if args.alibi_slopes is None else args.alibi_slopes.to(dtype),
        bias=None if args.bias is None else (args.bias if args.bias.ndim == 4 else args.bias.unsqueeze(0)),
        query_positions=args.positions.to(torch.int64)
        if args.positions is not None and position_form
        else None,
        key_positions=None if args.key_positions is None else args.key_positions.to(torch.int64),
        key_mask=args.key_mask,
        documents=documents,
        softcap=None if args.softcap is None else float(args.softcap),
        dropout=float(args.dropout),
        return_lse=args.return_lse,
    )


def count_positions(
    key_mask: KeyMask | None, documents: DocumentIds | None, num_queries: int
) -> Annotated[Tensor, "B Tq"]:
    """0-based position of every query among the kept keys of its document; 0 on padding before the first."""
    given = key_mask if key_mask is not None else documents
    assert given is not None
    kept = torch.ones_like(given, dtype=torch.int64) if key_mask is None else key_mask.to(torch.int64)
    counted = kept.cumsum(-1)
    if documents is not None:
        starts = torch.nn.functional.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
        counted = counted - torch.where(starts, counted - kept, 0).cummax(-1).values
    positions = (counted - 1).clamp(min=0)
    return positions[:, positions.shape[1] - num_queries :]


def autocasting(device_type: str) -> bool:
    """True under autocast; devices such as ``meta`` have none and do not know the question."""
    return torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)


def _run_numbers(document_ids: DocumentIds) -> DocumentIds:
    changes = (document_ids[:, 1:] != document_ids[:, :-1]).to(torch.int64).cumsum(-1)
    return torch.nn.functional.pad(changes, (min(1, document_ids.shape[1]), 0))


def _resolve_sink(
    q: Tensor,
    num_keys: int,
    sink: PseudoScores | Tensor | float | None,
    args: Arguments,
    documents: Tensor | None,
) -> tuple[Tensor | None, PseudoScores | None]:
    batch, heads, num_queries, _ = q.shape
    if isinstance(sink, PseudoScores):
        if args.positions is not None:
            rows = args.positions
        elif args.key_mask is not None or documents is not None:
            rows = count_positions(args.key_mask, documents, num_queries)
            if not tracing():
                return sink.counted_logits(rows, num_keys, heads, q.dtype), None
        else:
            return None, sink
        return sink.row_logits(rows, heads, q.dtype), None
    if args.positions is not None and args.key_positions is None:
        _reject(
            "positions",
            "positions without key_positions",
            "only with key_positions: here σ is the sink argument",
        )
    if sink is None:
        return None, None
    if isinstance(sink, bool) or not isinstance(sink, Tensor | float | int):
        raise TypeError(f"sink: got {type(sink).__name__}; allowed are a tensor, a number or None")
    if not isinstance(sink, Tensor):
        return torch.full((1, 1, 1), float(sink), dtype=accumulate_dtype(q.dtype), device=q.device), None
    _dense("sink", sink)
    shape = {0: (1, 1, 1), 1: (1, -1, 1), 2: (1, *sink.shape), 3: tuple(sink.shape)}.get(sink.ndim)
    if shape is None or not sink.is_floating_point():
        _reject("sink", _describe(sink), "floating point of shape (), (H,), (H, Tq) or (B, H, Tq)")
    _same_device("sink", sink, q)
    logits = sink.reshape(shape).to(accumulate_dtype(q.dtype))
    for size, full in zip(logits.shape, (batch, heads, num_queries), strict=True):
        if size not in (1, full):
            _reject(
                "sink",
                _describe(sink),
                f"sizes 1 or (B, H, Tq) = {(batch, heads, num_queries)}, aligned by rank",
            )
    return logits, None


def _check_tensors(q: object, k: object, v: object) -> tuple[Tensor, Tensor, Tensor]:
    for name, t in (("q", q), ("k", k), ("v", v)):
        if not isinstance(t, Tensor):
            raise TypeError(f"{name}: got {type(t).__name__}; allowed is a tensor of shape [B, heads, T, D]")
        _dense(name, t)
        if t.ndim != 4:
            _reject(name, _describe(t), "rank 4: [B, heads, T, D]")
        if t.dtype not in _DTYPES:
            _reject(name, str(t.dtype), ", ".join(str(d) for d in _DTYPES))
    assert isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)
    for name, t in (("k", k), ("v", v)):
        _same_device(name, t, q)
        if t.shape[0] != q.shape[0]:
            _reject(name, _describe(t), f"the batch size of q, {q.shape[0]}")
        if t.dtype != q.dtype and not autocasting(q.device.type):
            _reject(name, str(t.dtype), f"the dtype of q, {q.dtype}")
    if v.shape[1:3] != k.shape[1:3]:
        _reject("v", _describe(v), f"the heads and keys of k, {tuple(k.shape[1:3])}")
    if k.shape[3] != q.shape[3] or q.shape[3] == 0:
        _reject("k", _describe(k), f"the head dimension of q, {q.shape[3]}, at least 1")
    heads, kv_heads = q.shape[1], k.shape[1]
    if heads != kv_heads and (kv_heads == 0 or heads % kv_heads):
        _reject("k", f"{kv_heads} heads", f"a divisor of the {heads} heads of q")
    return q, k, v


def _autocast(qkv: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    device = qkv[0].device.type
    if not autocasting(device):
        return qkv
    if any(t.dtype == torch.float64 for t in qkv):
        if len({t.dtype for t in qkv}) > 1:
            _reject(
                "q, k, v", ", ".join(str(t.dtype) for t in qkv), "one dtype; autocast leaves float64 alone"
            )
        return qkv
    dtype = torch.get_autocast_dtype(device)
    q, k, v = qkv
    return q.to(dtype), k.to(dtype), v.to(dtype)


def _check_flags(causal: object, args: Arguments) -> None:
    for name, flag in (("causal", causal), ("return_lse", args.return_lse)):
        if not isinstance(flag, bool):
            raise TypeError(f"{name}: got {flag!r}; allowed are True and False")
    if args.window is not None and not (_is_int(args.window) and 1 <= args.window <= _LARGEST):
        _reject("window", repr(args.window), f"integers from 1 to {_LARGEST}, or None")
    if args.window is not None and not causal:
        _reject(
            "window", repr(args.window), "None without causal attention: a window counts back from the query"
        )
    if args.scale is not None and not _is_finite_number(args.scale):
        _reject("scale", repr(args.scale), "finite numbers, or None for 1/sqrt(D)")
    if args.softcap is not None and not (_is_finite_number(args.softcap) and args.softcap > 0):
        _reject("softcap", repr(args.softcap), "finite numbers > 0, or None")
    if not (_is_finite_number(args.dropout) and 0 <= args.dropout < 1):
        _reject("dropout", repr(args.dropout), "probabilities from 0 to below 1")


def _check_masks(q: Tensor, k: Tensor, causal: bool, args: Arguments) -> None:
    batch, heads, num_queries, num_keys = q.shape[0], q.shape[1], q.shape[2], k.shape[2]
    if causal and num_queries > num_keys and args.key_positions is None:
        _reject(
            "q",
            f"{num_queries} queries for {num_keys} keys",
            "at most as many queries as keys in causal attention",
        )
    _check_ints("positions", args.positions, q, (batch, num_queries), "(B, Tq)")
    _check_ints("key_positions", args.key_positions, q, (batch, num_keys), "(B, Tk)")
    _check_ints("document_ids", args.document_ids, q, (batch, num_keys), "(B, Tk)")
    if args.key_positions is not None and args.positions is None:
        _reject("positions", "None", "the position of every query, required with key_positions")
    if args.document_ids is not None and args.key_positions is not None:
        _reject(
            "document_ids",
            "document_ids together with key_positions",
            "either: a cache has no document of its query",
        )
    if args.document_ids is not None and num_queries > num_keys:
        _reject(
            "document_ids", f"{num_queries} queries for {num_keys} keys", "at most as many queries as keys"
        )
    if args.key_mask is not None:
        _check_tensor("key_mask", args.key_mask, q)
        if args.key_mask.dtype != torch.bool or args.key_mask.shape != (batch, num_keys):
            _reject(
                "key_mask", _describe(args.key_mask), f"torch.bool of shape (B, Tk) = {(batch, num_keys)}"
            )
    if args.alibi_slopes is not None:
        _check_tensor("alibi_slopes", args.alibi_slopes, q)
        if not args.alibi_slopes.is_floating_point() or args.alibi_slopes.shape != (heads,):
            _reject(
                "alibi_slopes", _describe(args.alibi_slopes), f"floating point of shape (H,) = {(heads,)}"
            )
    if args.bias is not None:
        _check_bias(args.bias, q, num_keys)


def _check_bias(bias: Tensor, q: Tensor, num_keys: int) -> None:
    _check_tensor("bias", bias, q)
    batch, heads, num_queries, _ = q.shape
    shape = tuple(bias.shape) if bias.ndim == 4 else (1, *bias.shape)
    fits = (
        bias.ndim in (3, 4)
        and bias.is_floating_point()
        and shape[0] in (1, batch)
        and shape[1] in (1, heads)
        and shape[2:] == (num_queries, num_keys)
    )
    if not fits:
        sizes = (batch, heads, num_queries, num_keys)
        allowed = f"floating point of shape (H|1, Tq, Tk) or (B|1, H|1, Tq, Tk), B, H, Tq, Tk = {sizes}"
        _reject("bias", _describe(bias), allowed)


def _check_ints(name: str, t: Tensor | None, q: Tensor, shape: tuple[int, int], legend: str) -> None:
    if t is None:
        return
    _check_tensor(name, t, q)
    if t.dtype not in INTEGERS or t.shape != shape:
        _reject(name, _describe(t), f"integers of shape {legend} = {shape}")


def _check_tensor(name: str, t: object, q: Tensor) -> None:
    if not isinstance(t, Tensor):
        raise TypeError(f"{name}: got {type(t).__name__}; allowed is a tensor, or None")
    _dense(name, t)
    _same_device(name, t, q)


def _dense(name: str, t: Tensor) -> None:
    if t.is_nested or t.layout != torch.strided:
        _reject(name, "a nested tensor" if t.is_nested else str(t.layout), "dense tensors")


def _same_device(name: str, t: Tensor, q: Tensor) -> None:
    if t.device != q.device:
        _reject(name, f"device {t.device}", f"the device of q, {q.device}")


def _is_int(value: object) -> bool:
    return isinstance(value, int | torch.SymInt) and not isinstance(value, bool)


def _is_finite_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf


def _describe(t: Tensor) -> str:
    return f"{t.dtype} of shape {tuple(t.shape)}"


def _reject(name: str, got: str, allowed: str) -> NoReturn:
    raise ValueError(f"{name}: got {got}; allowed: {allowed}")
