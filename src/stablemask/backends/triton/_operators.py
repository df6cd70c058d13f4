"""The kernels as PyTorch operators: schemas, shapes for tracing, gradients.

Importing this needs no Triton, running the operators does.
"""

from typing import Any

import torch
from torch import Tensor

from stablemask.backends._eager import make_eager, watched_backward

_GEOMETRY = "bool causal, float scale, SymInt? window, bool holes"
_FORWARD = (
    "Tensor q, Tensor k, Tensor v, Tensor? sink, Tensor? slopes, Tensor? rows, Tensor? keys, "
    f"float[]? gammas, int? horizon, float base, {_GEOMETRY}"
)
_BACKWARD = (
    "Tensor grad, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"Tensor? slopes, Tensor? rows, Tensor? keys, {_GEOMETRY}"
)


def _forward(*args: Any) -> tuple[Tensor, Tensor]:
    from stablemask.backends.triton import _launch

    return _launch.forward(*args)


def _backward(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from stablemask.backends.triton import _launch

    return _launch.backward(*args)


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    batch, heads, num_queries, _ = q.shape
    out = q.new_empty((batch, num_queries, heads, v.shape[3])).transpose(1, 2)
    return out, q.new_empty(q.shape[:3], dtype=torch.float32)


def _fake_backward(
    grad: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), torch.empty_like(lse)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sink, slopes, rows, keys, _, _, _, *ctx.geometry = inputs
    ctx.save_for_backward(q, k, v, sink, *output, slopes, rows, keys)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, sink, out, lse, slopes, rows, keys = ctx.saved_tensors
    dq = dk = dv = dsink = None
    if grad is not None or grad_lse is not None:
        grad = torch.zeros_like(out) if grad is None else grad
        backward = torch.ops.stablemask.triton_backward if watched_backward(q) else _backward
        dq, dk, dv, delta = backward(grad, grad_lse, q, k, v, out, lse, slopes, rows, keys, *ctx.geometry)
        if ctx.needs_input_grad[3]:
            mass = torch.exp(sink - lse).masked_fill(sink == -torch.inf, 0.0)
            dsink = (-mass * delta).sum_to_size(sink.shape)
    unused: tuple[None, ...] = (None,) * 10
    return dq, dk, dv, dsink, *unused


def _refuse_double_backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
    raise RuntimeError(
        "double backward: the Triton kernels have no second derivative; use backend='reference'"
    )


def _register() -> None:
    library = torch.library
    library.define("stablemask::triton_forward", f"({_FORWARD}) -> (Tensor, Tensor)")
    library.define("stablemask::triton_backward", f"({_BACKWARD}) -> (Tensor, Tensor, Tensor, Tensor)")
    library.impl("stablemask::triton_forward", ("cpu", "cuda"), _forward)
    library.impl("stablemask::triton_backward", ("cpu", "cuda"), _backward)
    library.register_fake("stablemask::triton_forward", _fake_forward)
    library.register_fake("stablemask::triton_backward", _fake_backward)
    library.register_autograd("stablemask::triton_forward", _differentiate, setup_context=_setup)
    library.register_autograd(
        "stablemask::triton_backward", _refuse_double_backward, setup_context=lambda *_, **__: None
    )


_register()
attend = make_eager(torch.ops.stablemask.triton_forward, _forward, _setup, _differentiate)
