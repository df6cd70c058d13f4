"""Models make the same call of inference once a layer; what the first one found out serves the others.

Checks, σ and the choice of a back end depend on the sizes, dtypes, devices and options of a call and on its
sink, not on what is in q, k and v. They take longer than the attention of one query to a small cache, and
longest in a model, where the weights of a layer pass through the caches of the processor between two calls.
So the last plain call is kept, without its tensors. From one token to the next, only the number of keys and
σ change.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stablemask._arguments import Arguments, autocasting
from stablemask.backends._call import Call, SinkLogits, accumulate_dtype
from stablemask.pseudo import PseudoScores, tracing
from stablemask.shapes import Keys, Output, Queries, RowLogits, Values

Run = Callable[[Call], tuple[Output, RowLogits]]
Given = PseudoScores | Tensor | float | None


class _Kept(NamedTuple):
    """A call that was served.

    Attributes:
        facts: What tells it from others.
        sink: Its pseudo scores; None where it had a tensor, or none.
        num_keys: How many keys it had.
        logits: σ of the pseudo scores, where the back end reads a tensor.
        rest: What the back end got, from ``scores`` on.
        run: The back end.
    """

    facts: tuple[Any, ...]
    sink: PseudoScores | None
    num_keys: int
    logits: SinkLogits | None
    rest: tuple[Any, ...]
    run: Run


_kept: _Kept | None = None


def repeatable(q: Tensor, k: Tensor, v: Tensor, sink: Given, args: Arguments) -> bool:
    """Whether everything that matters in this call is in ``_facts`` and its sink."""
    return (
        not tracing()
        and not torch.is_grad_enabled()
        and type(q) is type(k) is type(v) is Tensor
        and q.ndim == k.ndim == v.ndim == 4
        and q.layout is k.layout is v.layout is torch.strided
        and not (q.is_nested or k.is_nested or v.is_nested)
        and (sink is None or isinstance(sink, PseudoScores) or _is_row_logits(sink, q))
        and args.positions is None
        and args.key_positions is None
        and args.key_mask is None
        and args.document_ids is None
        and args.alibi_slopes is None
        and args.bias is None
        and args.softcap is None
        and not args.return_lse
        and not autocasting(q.device.type)
    )


def again(q: Queries, k: Keys, v: Values, sink: Given, causal: bool, args: Arguments) -> Output | None:
    """The result, if the call that was kept serves this one too."""
    kept = _kept
    if kept is None or kept.facts != _facts(q, k, v, sink, causal, args):
        return None
    if isinstance(sink, Tensor):
        return kept.run(Call(q, k, v, sink, *kept.rest))[0]
    if sink is not kept.sink and sink != kept.sink:
        return None
    if k.shape[2] != kept.num_keys:
        kept = _keep(kept.facts, sink, Call(q, k, v, None, sink, *kept.rest[1:]), kept.run)
    return kept.run(Call(q, k, v, kept.logits, *kept.rest))[0]


def keep(call: Call, sink: Given, causal: bool, args: Arguments, run: Run) -> None:
    """Keep a repeatable call that ``run`` has served."""
    _keep(
        _facts(call.q, call.k, call.v, sink, causal, args),
        sink if isinstance(sink, PseudoScores) else None,
        call,
        run,
    )


def _keep(facts: tuple[Any, ...], sink: PseudoScores | None, call: Call, run: Run) -> _Kept:
    global _kept  # noqa: PLW0603 - one call, whoever makes it
    scores, *rest = call[4:]
    logits = None
    if scores is not None and call.q.device.type == "cpu":  # elsewhere kernels compute σ
        scores, logits = None, call.sink_logits()
    kept = _Kept(facts, sink, call.k.shape[2], logits, (scores, *rest), run)
    _kept = kept  # other threads may put theirs here at any time
    return kept


def _facts(q: Tensor, k: Tensor, v: Tensor, sink: Given, causal: bool, args: Arguments) -> tuple[Any, ...]:
    """One query sees all keys, so that their number tells nothing, if there are any."""
    grows = q.shape[2] == 1 and args.window is None
    num_keys = k.shape[2] > 0 if grows else k.shape[2]
    sizes = (q.shape, k.shape[:2], num_keys, k.shape[3], v.shape[:2], v.shape[2] == k.shape[2], v.shape[3])
    kinds = (q.dtype, k.dtype, v.dtype, q.device, k.device, v.device)
    sink_facts = (sink.shape, sink.device) if isinstance(sink, Tensor) else ()
    return *sizes, *kinds, *sink_facts, causal, args.window, args.scale, args.dropout


def _is_row_logits(sink: Given, q: Tensor) -> bool:
    """Whether back ends get this very tensor: three dimensions, of the dtype of σ."""
    return (
        type(sink) is Tensor
        and sink.layout is torch.strided
        and sink.ndim == 3
        and sink.dtype == accumulate_dtype(q.dtype)
    )
