"""PyTorch's own CPU flash kernel, forward and backward, fed (out', lse') in place of (out, lse).

``aten::_scaled_dot_product_flash_attention_for_cpu`` gives out and lse of plain attention. The sink then
costs O(T): lse' and out'. Its backward computes dS = P (dP − rowsum(dout ⊙ out)) with P = exp(S − lse), so
out' and lse' make it exact for the attention with the sink. ``_cpu_tiles`` cuts each call into tiles: one for
plain causal attention, one per document or unpadded sequence, bands of rows for a window, ALiBi or Tq < Tk,
bands with a dense mask for the rest.

The operator is private to PyTorch. Everything it gets wrong is kept from it: zero sizes kill the process, a
last stride other than 1 gives wrong numbers, ``is_causal`` aligns top left, rows without visible keys report
lse = 0, an all-NaN row is swallowed.
"""

from typing import Any

import torch
from torch import Tensor

from stablemask.backends import _cpu_tiles as tiles
from stablemask.backends._call import Call
from stablemask.backends._eager import make_eager, watched, watched_backward
from stablemask.backends._stock import sink_gradient, through_lse
from stablemask.pseudo import in_function_transform
from stablemask.shapes import Output, RowLogits

_GEOMETRY = (
    "Tensor? slopes, Tensor? bias, Tensor? query_positions, Tensor? key_positions, Tensor? key_mask, "
    "Tensor? documents, bool causal, float scale, SymInt? window"
)


def why_not(call: Call) -> str | None:
    """The kernel has no softcap, no dropout, no gradient for biases, and one head width for q, k and v."""
    if call.q.device.type != "cpu":
        return f"it runs on CPU tensors, got {call.q.device.type}"
    if tiles.flash is None or tiles.flash_backward is None:
        return f"PyTorch {torch.__version__} has no CPU flash operator"
    if in_function_transform():
        return "torch.func transforms see through PyTorch's own operators only"
    if call.softcap is not None:
        return "the CPU flash kernel cannot cap scores (softcap)"
    if call.scale <= 0.0:
        return f"the CPU flash kernel multiplies its causal mask by the scale, so not by {call.scale}"
    if call.dropout:
        return "the CPU flash kernel has no dropout"
    if call.v.shape[-1] != call.q.shape[-1]:
        widths = f"{call.v.shape[-1]} and {call.q.shape[-1]}"
        return f"the CPU flash kernel needs values as wide as queries, got {widths}"
    if torch.is_grad_enabled():
        if call.bias is not None and call.bias.requires_grad:
            return "the CPU flash kernel has no gradient for bias"
        if call.slopes is not None and call.slopes.requires_grad:
            return "the CPU flash kernel has no gradient for alibi_slopes"
    return None


def run(call: Call) -> tuple[Output, RowLogits]:
    """out' and, where it is wanted, lse', differentiable in q, k, v and the sink."""
    if not call.needs_grad() and not watched(call.q):
        return _compute(call)
    out, lse = _flash(call.q, call.k, call.v, call.sink_logits(), *_geometry(call))
    return out, lse


def infer(call: Call) -> Output:
    """out' alone."""
    return _compute(call)[0]


def _geometry(call: Call) -> tuple[Any, ...]:
    tensors = (
        call.slopes,
        call.bias,
        call.query_positions,
        call.key_positions,
        call.key_mask,
        call.documents,
    )
    return (*tensors, call.causal, call.scale, call.window)


def _call(q: Tensor, k: Tensor, v: Tensor, geometry: tuple[Any, ...]) -> Call:
    slopes, bias, query_positions, key_positions, key_mask, documents, causal, scale, window = geometry
    return Call(
        q=q,
        k=k,
        v=v,
        sink=None,
        scores=None,
        causal=causal,
        scale=scale,
        window=window,
        slopes=slopes,
        bias=bias,
        query_positions=query_positions,
        key_positions=key_positions,
        key_mask=key_mask,
        documents=documents,
        softcap=None,
        dropout=0.0,
        return_lse=True,
    )


def _forward(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, *geometry: Any) -> tuple[Tensor, Tensor]:
    return _compute(_call(q, k, v, geometry)._replace(sink=sink))


def _compute(call: Call) -> tuple[Tensor, Tensor]:
    """out' and lse'; without ``return_lse`` lse as it is without the sink, which nobody reads."""
    sink = call.sink_logits()
    out, lse = tiles.forward(call)
    if sink is None:
        return out.to(call.q.dtype), lse
    ahead = lse - sink
    share = torch.sigmoid(ahead)
    may_be_empty = call.structured or call.bias is not None or call.k.shape[2] == 0
    dead = lse == -torch.inf if may_be_empty else None
    if dead is not None:
        share.masked_fill_(dead & ~sink.isnan(), 0.0)
    out = out if out.dtype == share.dtype else out.to(share.dtype)
    out.mul_(share.unsqueeze(-1))
    out = out if out.dtype == call.q.dtype else out.to(call.q.dtype)
    if not call.return_lse:
        return out, lse
    # logaddexp(lse, sink), which takes 95 µs at 8 × 1024 rows; these take 20
    new_lse = ahead.abs_().neg_().exp_().log1p_().add_(torch.maximum(lse, sink))
    return out, new_lse if dead is None else sink.where(dead, new_lse)


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *geometry: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return tiles.backward(_call(q, k, v, geometry), grad, out, lse)


def _fake_forward(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, *geometry: Any
) -> tuple[Tensor, Tensor]:
    return tiles.empty_results(q)


def _fake_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *geometry: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return tiles.empty_gradient(q), tiles.empty_gradient(k), tiles.empty_gradient(v)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sink, *geometry = inputs
    ctx.save_for_backward(q, k, v, sink, *output, *geometry[:6])
    ctx.scalars = geometry[6:]
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, sink, out, lse, *tensors = ctx.saved_tensors
    geometry = (*tensors, *ctx.scalars)

    def backward(*operands: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if watched_backward(q):
            dq, dk, dv = torch.ops.stablemask.cpu_flash_backward(*operands, *geometry)
            return dq, dk, dv
        return _backward(*operands, *geometry)

    unused: tuple[None, ...] = (None,) * len(geometry)
    dq = dk = dv = dsink = None
    if grad is not None:
        dq, dk, dv = backward(grad, q, k, v, out, lse)
    if grad_lse is not None:
        dq_lse, dk_lse = through_lse(backward, grad_lse, q, k, v, out, lse)
        dq, dk = (dq_lse, dk_lse) if dq is None or dk is None else (dq + dq_lse, dk + dk_lse)
    if ctx.needs_input_grad[3]:
        dsink = sink_gradient(sink, grad, grad_lse, out, lse)
    return dq, dk, dv, dsink, *unused


def _refuse_double_backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
    raise RuntimeError(
        "double backward: the CPU flash kernel has no second derivative; use backend='reference'"
    )


def _register() -> None:
    library = torch.library
    library.define(
        "stablemask::cpu_flash",
        f"(Tensor q, Tensor k, Tensor v, Tensor? sink, {_GEOMETRY}) -> (Tensor, Tensor)",
    )
    library.define(
        "stablemask::cpu_flash_backward",
        f"(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_GEOMETRY})"
        " -> (Tensor, Tensor, Tensor)",
    )
    library.impl("stablemask::cpu_flash", "cpu", _forward)
    library.impl("stablemask::cpu_flash_backward", "cpu", _backward)
    library.register_fake("stablemask::cpu_flash", _fake_forward)
    library.register_fake("stablemask::cpu_flash_backward", _fake_backward)
    library.register_autograd("stablemask::cpu_flash", _differentiate, setup_context=_setup)
    library.register_autograd(
        "stablemask::cpu_flash_backward", _refuse_double_backward, setup_context=lambda *_, **__: None
    )


_register()
_flash = make_eager(torch.ops.stablemask.cpu_flash, _forward, _setup, _differentiate)
