"""PyTorch's own GPU kernels, cuDNN's or FlashAttention, fed (out', lse') in place of (out, lse).

Plain causal attention, and attention of one or more queries to all keys, at the speed of stock
``scaled_dot_product_attention``: the same kernel runs, the one that stock attention would choose, and one
small kernel adds the sink (``_rescale``). Windows, ALiBi, padding and packed documents are left to others.

The operators are private to PyTorch, as those of ``cpu_flash`` are, and tried before first use.
"""

import importlib.util
from typing import Any

import torch
from torch import Tensor

from stablemask.backends._call import Call
from stablemask.backends._eager import make_eager, watched_backward
from stablemask.backends._stock import sink_gradient, through_lse
from stablemask.pseudo import in_function_transform
from stablemask.shapes import Keys, Output, Queries, RowLogits, Values

_WIDEST = 128
_ALIGNMENT = 8  # numbers: the kernels read 16 bytes at a time
_CUDNN = 3  # SDPBackend.CUDNN_ATTENTION as torch._fused_sdp_choice returns it
_GEOMETRY = "bool causal, float scale"
_SINK = "Tensor? sink, float[]? gammas, int? horizon, float base"


def why_not(call: Call) -> str | None:
    """Plain calls in 16 bits only."""
    if call.q.device.type != "cuda" or torch.version.hip is not None:
        return f"it runs on NVIDIA GPUs, got {call.q.device.type if torch.version.hip is None else 'ROCm'}"
    if in_function_transform():
        return "torch.func transforms see through PyTorch's own operators only"
    if call.q.dtype not in (torch.bfloat16, torch.float16):
        return f"the stock GPU kernels compute in bfloat16 and float16, got {call.q.dtype}"
    if call.q.dtype == torch.float16 and call.needs_grad():
        return "weights beside a strong sink are too small for float16 in the stock backward"
    for name, value in (("softcap", call.softcap), ("bias", call.bias), ("alibi_slopes", call.slopes)):
        if value is not None:
            return f"the stock GPU kernels take no {name}"
    if call.dropout:
        return "the stock GPU kernels drop from plain attention only (dropout)"
    if call.structured:
        return "the stock GPU kernels take no key_mask, document_ids or key_positions"
    return _why_not_these_shapes(call) or _obstacle(call.q.device)


def _why_not_these_shapes(call: Call) -> str | None:
    num_queries, num_keys, width = call.q.shape[2], call.k.shape[2], call.q.shape[3]
    if call.window is not None and not (call.causal and call.window >= num_keys):
        return "the stock GPU kernels take no window"
    if width != call.v.shape[3] or width % _ALIGNMENT or not 0 < width <= _WIDEST:
        got = f"{width} and {call.v.shape[3]}"
        return f"the stock GPU kernels need q and v of one width, a multiple of 8 up to {_WIDEST}; got {got}"
    if call.q.numel() == 0 or call.k.numel() == 0:
        return "the stock GPU kernels need at least one query and one key"
    if call.causal and num_queries not in (1, num_keys):
        got = f"{num_queries} and {num_keys}"
        return f"the stock GPU kernels align their causal mask at the top left: Tq = Tk or Tq = 1, got {got}"
    return None


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _obstacle(device: torch.device) -> str | None:
    """What on this machine prevents the kernels from running."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton, for the kernel that adds the sink, is not installed"
    if not torch.cuda.is_available():
        return None  # only a fake tensor can be on a device that is not there: traced, not run
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return f"it needs compute capability 8.0 or higher, got {capability[0]}.{capability[1]}"
    return None


def run(call: Call) -> tuple[Output, RowLogits]:
    """out' and lse', differentiable in q, k, v and the sink."""
    causal = call.causal and call.q.shape[2] > 1
    scores = call.scores if call.scores is not None and call.scores.base > -torch.inf else None
    gammas = None if scores is None else scores.gamma_values(call.q.shape[1])
    horizon, base = (None, 0.0) if scores is None else (scores.horizon, scores.base)
    out, lse = _flash(call.q, call.k, call.v, call.sink, gammas, horizon, base, causal, call.scale)
    return out, lse


def _forward(
    q: Queries,
    k: Keys,
    v: Values,
    sink: Tensor | None,
    gammas: list[float] | None,
    horizon: int | None,
    base: float,
    causal: bool,
    scale: float,
) -> tuple[Output, RowLogits]:
    from stablemask.backends._rescale import rescale

    leaf, (q, k, v) = q, (_aligned(t) for t in (q, k, v))
    if _stock_choice(q, k, v, causal, scale) == _CUDNN:
        plain, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, causal, False, scale=scale
        )
    else:
        plain, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, causal, False, scale=scale
        )
    lse = lse.view(q.shape[:3])
    if sink is None and gammas is None:
        return _laid_out_like(plain, leaf), lse
    out = torch.empty_like(leaf)
    return out, rescale(plain, lse, out, sink, gammas, horizon, base, k.shape[2] - q.shape[2])


def _backward(
    grad: Output,
    q: Queries,
    k: Keys,
    v: Values,
    out: Output,
    lse: RowLogits,
    causal: bool,
    scale: float,
) -> tuple[Queries, Keys, Values]:
    aten = torch.ops.aten
    leaves, (q, k, v, grad) = (q, k, v), (_aligned(t) for t in (q, k, v, grad))
    sizes = (q.shape[2], k.shape[2], 0.0, causal)
    unused = lse.new_zeros(2, dtype=torch.int64)  # a random state: there is no dropout
    if _stock_choice(q, k, v, causal, scale) == _CUDNN:
        # PyTorch keeps plans by the strides of q, k and v, and takes those of out and grad for granted.
        out, grad = _laid_out_like(out, q), _laid_out_like(grad, q)
        found = aten._scaled_dot_product_cudnn_attention_backward(
            grad, q, k, v, out, lse.unsqueeze(-1), unused[0], unused[1], None, None, None, *sizes, scale=scale
        )
    else:
        found = aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse, None, None, *sizes, unused, unused[0], scale=scale
        )
    dq, dk, dv = (_laid_out_like(gradient, leaf) for gradient, leaf in zip(found, leaves, strict=True))
    return dq, dk, dv


def _stock_choice(q: Queries, k: Keys, v: Values, causal: bool, scale: float) -> int:
    """The kernel that stock attention would take here, as a number of ``SDPBackend``."""
    grouped = q.shape[1] != k.shape[1]
    return int(torch._fused_sdp_choice(q, k, v, None, 0.0, causal, scale=scale, enable_gqa=grouped))


def _aligned(t: Tensor) -> Tensor:
    """Rows that begin at multiples of 16 bytes, their numbers side by side, and no row twice."""
    steps = t.stride()
    fits = steps[-1] == 1 and all(s % _ALIGNMENT == 0 and s for s in steps[:-1]) and t.data_ptr() % 16 == 0
    return t if fits else t.clone(memory_format=torch.contiguous_format)


def _laid_out_like(t: Tensor, leaf: Tensor) -> Tensor:
    """As ``torch.empty_like(leaf)`` lies in memory: as stock attention does it, and tracing promised."""
    wanted = torch.empty_like(leaf, device="meta").stride()
    return t if t.stride() == wanted else torch.empty_like(leaf).copy_(t)


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


def _fake_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sink, _, _, _, *ctx.geometry = inputs
    ctx.save_for_backward(q, k, v, sink, *output)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, sink, out, lse = ctx.saved_tensors

    def backward(*operands: Any) -> tuple[Tensor, Tensor, Tensor]:
        if watched_backward(q):
            dq, dk, dv = torch.ops.stablemask.cuda_flash_backward(*operands, *ctx.geometry)
            return dq, dk, dv
        return _backward(*operands, *ctx.geometry)

    dq = dk = dv = dsink = None
    if grad is not None:
        dq, dk, dv = backward(grad, q, k, v, out, lse)
    if grad_lse is not None:
        dq_lse, dk_lse = through_lse(backward, grad_lse, q, k, v, out, lse)
        dq, dk = (dq_lse, dk_lse) if dq is None or dk is None else (dq + dq_lse, dk + dk_lse)
    if ctx.needs_input_grad[3]:
        dsink = sink_gradient(sink, grad, grad_lse, out, lse)
    return dq, dk, dv, dsink, None, None, None, None, None


def _refuse_double_backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
    raise RuntimeError(
        "double backward: the stock GPU kernels have no second derivative; use backend='reference'"
    )


def _register() -> None:
    library = torch.library
    library.define(
        "stablemask::cuda_flash",
        f"(Tensor q, Tensor k, Tensor v, {_SINK}, {_GEOMETRY}) -> (Tensor, Tensor)",
    )
    library.define(
        "stablemask::cuda_flash_backward",
        f"(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_GEOMETRY})"
        " -> (Tensor, Tensor, Tensor)",
    )
    library.impl("stablemask::cuda_flash", "cuda", _forward)
    library.impl("stablemask::cuda_flash_backward", "cuda", _backward)
    library.register_fake("stablemask::cuda_flash", _fake_forward)
    library.register_fake("stablemask::cuda_flash_backward", _fake_backward)
    library.register_autograd("stablemask::cuda_flash", _differentiate, setup_context=_setup)
    library.register_autograd(
        "stablemask::cuda_flash_backward", _refuse_double_backward, setup_context=lambda *_, **__: None
    )


_register()
_flash = make_eager(torch.ops.stablemask.cuda_flash, _forward, _setup, _differentiate)
