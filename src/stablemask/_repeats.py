"""Models make the same call of inference once a layer; what the first one found out serves the others.

Checks, σ and the choice of a back end depend on the sizes, dtypes, devices and options of a call and on its
sink, not on what is in q, k and v. They take longer than the attention of one query to a small cache, and
longest in a model, where the weights of a layer pass through the caches of the processor between two calls.
So the last plain call is kept, one for each window, as layers of two kinds alternate in some models. Of its
tensors only σ of a single query stays. From one token to the next, only the number of keys and σ change.
"""

from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stablemask._arguments import Arguments
from stablemask.backends._call import Call, accumulate_dtype
from stablemask.pseudo import PseudoScores, tracing
from stablemask.shapes import Keys, Output, Queries, Values

Infer = Callable[[Call], Output]
Given = PseudoScores | Tensor | float | None

_PLAIN = Arguments(None, None, None, None, None, None, None, None, None, 0.0, False)
_MAX_KEPT = 8

# All that matters of a tensor, read in one call. The shape comes first.
_traits: Callable[[Tensor], tuple[Any, ...]] = attrgetter(
    "shape", "dtype", "device", "layout", "requires_grad"
)


class _Kept(NamedTuple):
    """A call that was served.

    Attributes:
        args: Its options, all of them numbers or None.
        types: Of the options: True is no 1.
        causal: Another option.
        q: Traits of the queries.
        k: Traits of the keys.
        v: Traits of the values.
        differentiating: Whether gradients were on.
        scores: Its pseudo scores; None where it had a tensor, or none.
        sink: Traits of that tensor.
        call: What the back end gets from σ on: σ, its pseudo scores, and so on.
        infer: Of the back end.
    """

    args: Arguments
    types: tuple[type, ...]
    causal: bool
    q: tuple[Any, ...]
    k: tuple[Any, ...]
    v: tuple[Any, ...]
    differentiating: bool
    scores: PseudoScores | None
    sink: tuple[Any, ...] | None
    call: tuple[Any, ...]
    infer: Infer


_kept: dict[int | None, _Kept] = {}


def again(q: Queries, k: Keys, v: Values, sink: Given, causal: bool, args: Arguments) -> Output | None:
    """The result, if a call that was kept serves this one too."""
    window = args.window
    if tracing() or not (window is None or type(window) is int):
        return None
    kept = _kept.get(window)
    if (
        kept is None
        or not (type(q) is type(k) is type(v) is Tensor)
        or (q.is_nested or k.is_nested or v.is_nested)  # those have no shape
        or tuple(map(type, args)) != kept.types  # before values, as a tensor equals nothing
        or args != kept.args
        or causal is not kept.causal
        or _traits(q) != kept.q
        or torch.is_grad_enabled() is not kept.differentiating
        or torch.is_autocast_enabled(q.device.type)
    ):
        return None
    same = _traits(k) == kept.k and _traits(v) == kept.v
    if not same and not _of_other_length(kept, k, v):
        return None
    if kept.sink is not None:
        if type(sink) is not Tensor or sink.is_nested or _traits(sink) != kept.sink:
            return None
        return kept.infer(Call(q, k, v, sink, *kept.call[1:]))
    if sink is not kept.scores and not (isinstance(sink, PseudoScores) and sink == kept.scores):
        return None
    if not same:
        kept = _keep(kept, Call(q, k, v, None, kept.scores, *kept.call[2:]))
    return kept.infer(Call(q, k, v, *kept.call))


def keep(call: Call, sink: Given, causal: bool, args: Arguments, infer: Infer) -> None:
    """Keep a call that was served, if everything that matters in it can be kept."""
    q, k, v = call[:3]
    given = sink is None or isinstance(sink, PseudoScores) or _is_row_logits(sink, q)
    if (
        tracing()
        or not given
        or not (type(q) is type(k) is type(v) is Tensor)
        or call.needs_grad()
        or args._replace(window=None, scale=None) != _PLAIN
        or torch.is_autocast_enabled(q.device.type)
    ):
        return
    kept = _Kept(
        args,
        tuple(map(type, args)),
        causal,
        _traits(q),
        _traits(k),
        _traits(v),
        torch.is_grad_enabled(),
        sink if isinstance(sink, PseudoScores) else None,
        _traits(sink) if isinstance(sink, Tensor) else None,
        (),
        infer,
    )
    _keep(kept, call)


def _keep(kept: _Kept, call: Call) -> _Kept:
    if kept.sink is not None:
        call = call._replace(sink=None)
    elif call.scores is not None and call.q.shape[2] == 1:
        logits = call.sink_logits()
        assert logits is not None
        call = call._replace(sink=logits.clone(), scores=None)  # a view would hold its whole table
    if len(_kept) >= _MAX_KEPT:
        _kept.clear()
    kept = kept._replace(k=_traits(call.k), v=_traits(call.v), call=call._replace(return_lse=False)[3:])
    _kept[kept.args.window] = kept  # other threads may put theirs here at any time
    return kept


def _of_other_length(kept: _Kept, k: Tensor, v: Tensor) -> bool:
    """One query sees all keys, so that their number matters to nothing but σ, if there are any."""
    window = kept.args.window
    return (
        kept.q[0][2] == 1
        and (k.ndim == v.ndim == 4)
        and (k.shape[2] == v.shape[2] > 0 < kept.k[0][2])
        and (window is None or window >= max(k.shape[2], kept.k[0][2]))
        and _but_length(_traits(k)) == _but_length(kept.k)
        and _but_length(_traits(v)) == _but_length(kept.v)
    )


def _but_length(traits: tuple[Any, ...]) -> tuple[Any, ...]:
    (batch, heads, _, width), *rest = traits
    return batch, heads, width, *rest


def _is_row_logits(sink: Given, q: Tensor) -> bool:
    """Whether back ends get this very tensor: three dimensions, of the dtype of σ."""
    return type(sink) is Tensor and sink.ndim == 3 and sink.dtype == accumulate_dtype(q.dtype)
