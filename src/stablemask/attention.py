"""The operation: causal attention with one zero-valued extra logit per row, behind one contract.

``sink_attention`` takes the logits σ as a tensor, ``stable_attention`` takes a ``PseudoScores`` and derives σ
from the positions of the rows. Both validate their arguments, choose a back end that honours every one of
them, and run it. The maths is in ``stablemask.pseudo``, the rule of visibility in
``stablemask.backends._call``.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal, overload

import torch

from stablemask import _repeats, backends
from stablemask._arguments import Arguments, autocasting, build_call
from stablemask._probe import probe_failure
from stablemask.backends import BackendUnavailable
from stablemask.backends._call import Call
from stablemask.pseudo import PseudoScores
from stablemask.shapes import (
    DocumentIds,
    HeadSlopes,
    KeyMask,
    KeyPositions,
    Keys,
    Output,
    Queries,
    QueryPositions,
    RowLogits,
    ScoreBias,
    Sink,
    Values,
)

Observer = Callable[[Call, RowLogits], None]

_observers: list[Observer] = []


@overload
def sink_attention(
    q: Queries,
    k: Keys,
    v: Values,
    sink: Sink | float | None = None,
    *,
    causal: bool = True,
    positions: QueryPositions | None = None,
    key_positions: KeyPositions | None = None,
    window: int | None = None,
    alibi_slopes: HeadSlopes | None = None,
    bias: ScoreBias | None = None,
    key_mask: KeyMask | None = None,
    document_ids: DocumentIds | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    return_lse: Literal[False] = False,
    backend: str | None = None,
) -> Output: ...


@overload
def sink_attention(
    q: Queries,
    k: Keys,
    v: Values,
    sink: Sink | float | None = None,
    *,
    causal: bool = True,
    positions: QueryPositions | None = None,
    key_positions: KeyPositions | None = None,
    window: int | None = None,
    alibi_slopes: HeadSlopes | None = None,
    bias: ScoreBias | None = None,
    key_mask: KeyMask | None = None,
    document_ids: DocumentIds | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    return_lse: Literal[True],
    backend: str | None = None,
) -> tuple[Output, RowLogits]: ...


def sink_attention(
    q: Queries,
    k: Keys,
    v: Values,
    sink: Sink | float | None = None,
    *,
    causal: bool = True,
    positions: QueryPositions | None = None,
    key_positions: KeyPositions | None = None,
    window: int | None = None,
    alibi_slopes: HeadSlopes | None = None,
    bias: ScoreBias | None = None,
    key_mask: KeyMask | None = None,
    document_ids: DocumentIds | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    return_lse: bool = False,
    backend: str | None = None,
) -> Output | tuple[Output, RowLogits]:
    """Attention whose every row has one more logit, ``sink``, with value zero.

    Layout is ``[B, H, T, D]``; k and v may have fewer heads. Gradients flow to every floating-point tensor
    given.

    Args:
        q: Queries.
        k: Keys.
        v: Values; their width may differ from that of the queries.
        sink: σ by rank: a scalar, (H,), (H, Tq) or (B, H, Tq), sizes of 1 broadcast. None means −∞: plain
            attention.
        causal: Query i sees key j only if j ≤ i + Tk − Tq, aligned at the bottom right.
        positions: 0-based positions of the queries, (B, Tq); only with ``key_positions``.
        key_positions: Positions of the keys in a cache, (B, Tk), in any order; −1 marks an empty slot.
            Visibility and ALiBi then go by positions instead of indices, and a query with a negative
            position is padding.
        window: Each query sees its last ``window`` keys, itself included.
        alibi_slopes: (H,); adds slope · (key position − query position) to the scores.
        bias: (H|1, Tq, Tk) or (B|1, H|1, Tq, Tk), added to the scores after the scale.
        key_mask: (B, Tk), True keeps a key. A query whose own key is dropped is padding and returns 0.
        document_ids: (B, Tk). Each maximal run of equal ids is one document; attention stays inside it.
        scale: Multiplies q·k; 1/sqrt(D) by default.
        softcap: Real scores become ``softcap · tanh(score / softcap)``; σ does not.
        dropout: Probability of dropping an attention weight.
        return_lse: Also return lse' (B, H, Tq), natural log, sink included; differentiable.
        backend: Name of the back end to run; None chooses the fastest that honours every argument.

    Returns:
        out (B, H, Tq, Dv), or (out, lse'). A row without any visible key gives out = 0 and lse' = σ.

    Raises:
        ValueError: An argument is not allowed; the message names it, what was got and what is allowed.
        BackendUnavailable: ``backend`` cannot serve exactly this call.

    Examples:
        >>> q = k = v = torch.ones(1, 2, 3, 4)
        >>> sink_attention(q, k, v, sink=2.0)[0, 0, 0]
        tensor([0.5000, 0.5000, 0.5000, 0.5000])
    """
    args = Arguments(
        positions,
        key_positions,
        window,
        alibi_slopes,
        bias,
        key_mask,
        document_ids,
        scale,
        softcap,
        dropout,
        return_lse,
    )
    return _attend(q, k, v, _not_scores(sink), causal, args, backend)


@overload
def stable_attention(
    q: Queries,
    k: Keys,
    v: Values,
    scores: PseudoScores,
    *,
    positions: QueryPositions | None = None,
    key_positions: KeyPositions | None = None,
    window: int | None = None,
    alibi_slopes: HeadSlopes | None = None,
    bias: ScoreBias | None = None,
    key_mask: KeyMask | None = None,
    document_ids: DocumentIds | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    return_lse: Literal[False] = False,
    backend: str | None = None,
) -> Output: ...


@overload
def stable_attention(
    q: Queries,
    k: Keys,
    v: Values,
    scores: PseudoScores,
    *,
    positions: QueryPositions | None = None,
    key_positions: KeyPositions | None = None,
    window: int | None = None,
    alibi_slopes: HeadSlopes | None = None,
    bias: ScoreBias | None = None,
    key_mask: KeyMask | None = None,
    document_ids: DocumentIds | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    return_lse: Literal[True],
    backend: str | None = None,
) -> tuple[Output, RowLogits]: ...


def stable_attention(
    q: Queries,
    k: Keys,
    v: Values,
    scores: PseudoScores,
    *,
    positions: QueryPositions | None = None,
    key_positions: KeyPositions | None = None,
    window: int | None = None,
    alibi_slopes: HeadSlopes | None = None,
    bias: ScoreBias | None = None,
    key_mask: KeyMask | None = None,
    document_ids: DocumentIds | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    return_lse: bool = False,
    backend: str | None = None,
) -> Output | tuple[Output, RowLogits]:
    """StableMask attention: ``sink_attention`` with the σ of ``scores`` at the positions of the rows.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        scores: The pseudo scores of the model.
        positions: 0-based position of every query in its own document, (B, Tq). By default they are counted
            from ``key_mask`` and ``document_ids`` where given, else they are the last Tq of 0 … Tk − 1.
            Without ``key_positions`` they select σ and nothing else.
        key_positions: As in ``sink_attention``; requires ``positions``.
        window: As in ``sink_attention``; it does not change σ.
        alibi_slopes: As in ``sink_attention``.
        bias: As in ``sink_attention``.
        key_mask: As in ``sink_attention``.
        document_ids: As in ``sink_attention``; positions restart in each document.
        scale: As in ``sink_attention``.
        softcap: As in ``sink_attention``.
        dropout: As in ``sink_attention``.
        return_lse: As in ``sink_attention``.
        backend: As in ``sink_attention``.

    Returns:
        out (B, H, Tq, Dv), or (out, lse').

    Examples:
        >>> scores = PseudoScores(0.5, horizon=128)
        >>> q, k, v = torch.randn(3, 1, 8, 128, 64).unbind(0)
        >>> stable_attention(q, k, v, scores).shape
        torch.Size([1, 8, 128, 64])
    """
    if not isinstance(scores, PseudoScores):
        raise TypeError(f"scores: got {type(scores).__name__}; allowed is a PseudoScores")
    args = Arguments(
        positions,
        key_positions,
        window,
        alibi_slopes,
        bias,
        key_mask,
        document_ids,
        scale,
        softcap,
        dropout,
        return_lse,
    )
    return _attend(q, k, v, scores, True, args, backend)


def available_backends(
    q: Queries,
    k: Keys,
    v: Values,
    sink: PseudoScores | Sink | float | None = None,
    *,
    causal: bool = True,
    positions: QueryPositions | None = None,
    key_positions: KeyPositions | None = None,
    window: int | None = None,
    alibi_slopes: HeadSlopes | None = None,
    bias: ScoreBias | None = None,
    key_mask: KeyMask | None = None,
    document_ids: DocumentIds | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    return_lse: bool = False,
) -> dict[str, str | None]:
    """Every back end, in order of preference, with None or the reason why it cannot serve exactly this call.

    Takes the arguments of ``sink_attention``; a ``PseudoScores`` as ``sink`` stands for a call of
    ``stable_attention``.

    Examples:
        >>> q = k = v = torch.ones(1, 2, 3, 4)
        >>> available_backends(q, k, v, 0.0)["reference"] is None
        True
    """
    args = Arguments(
        positions,
        key_positions,
        window,
        alibi_slopes,
        bias,
        key_mask,
        document_ids,
        scale,
        softcap,
        dropout,
        return_lse,
    )
    call = build_call(q, k, v, sink, causal, args)
    return {name: _why_not(name, call) for name in backends.preference(call.q.device)}


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Show every call of the operation, and its lse', to ``observer``. Not those of compiled code."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def _attend(
    q: Queries,
    k: Keys,
    v: Values,
    sink: PseudoScores | Sink | float | None,
    causal: bool,
    args: Arguments,
    backend: str | None,
) -> Output | tuple[Output, RowLogits]:
    repeatable = backend is None and not _observers
    if repeatable and (out := _repeats.again(q, k, v, sink, causal, args)) is not None:
        return out
    call = build_call(q, k, v, sink, causal, args)
    if _observers:
        call = call._replace(return_lse=True)
    name = _choose(call) if backend is None else backend
    if backend is not None:
        reason = _why_not(name, call)
        if reason is not None:
            raise BackendUnavailable(f"backend: {name!r} cannot serve this call: {reason}")
    module = backends.module(name)
    with _without_autocast(call.q.device.type):
        out, lse = module.run(call)
    for observe in _observers:
        observe(call, lse)
    if repeatable and hasattr(module, "infer"):
        _repeats.keep(call, sink, causal, args, module.infer)
    return (out, lse) if args.return_lse else out


def _choose(call: Call) -> str:
    for name in backends.preference(call.q.device):
        if _why_not(name, call) is None:
            return name
    raise AssertionError("the reference back end serves every call")


def _why_not(name: str, call: Call) -> str | None:
    reason: str | None = backends.module(name).why_not(call)
    return probe_failure(name, call.q.device) if reason is None else reason


def _without_autocast(device_type: str) -> AbstractContextManager[object]:
    if autocasting(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


def _not_scores(sink: Sink | float | None) -> Sink | float | None:
    if isinstance(sink, PseudoScores):
        raise TypeError("sink: got a PseudoScores; pass it to stable_attention, or its row_logits here")
    return sink
