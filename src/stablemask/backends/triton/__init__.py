"""Fused Triton kernels: forward, Δ, dk/dv and dq, with σ computed inside or given. CUDA and ROCm.

Nothing of size Tq × Tk is ever stored. A window, padding and packed documents skip the tiles nobody sees:
padding and documents reach the kernels as two ranges, the keys that a row may see and the rows that may see
a key. On CPU the kernels run in Triton's interpreter, for tests.
"""

import importlib.util

import torch

from stablemask.backends._call import Call
from stablemask.backends.triton import _operators
from stablemask.backends.triton._bounds import bounds
from stablemask.backends.triton._tiles import MAX_WIDTH
from stablemask.pseudo import in_function_transform
from stablemask.shapes import Output, RowLogits

_MINIMUM_CAPABILITY = (8, 0)


def why_not(call: Call) -> str | None:
    """No dense bias, softcap, dropout, cache positions or float64; no gradient for slopes."""
    if in_function_transform():
        return "torch.func transforms see through PyTorch's own operators only"
    if call.q.dtype == torch.float64:
        return "the Triton kernels compute in float32, got float64"
    if call.softcap is not None:
        return "the Triton kernels cannot cap scores (softcap)"
    if call.dropout:
        return "the Triton kernels have no dropout"
    if call.bias is not None:
        return "the Triton kernels take no dense bias"
    if call.key_positions is not None:
        return "the Triton kernels go by indices, not by key_positions"
    if call.slopes is not None and call.slopes.requires_grad and torch.is_grad_enabled():
        return "the Triton kernels have no gradient for alibi_slopes"
    widest = max(call.q.shape[-1], call.v.shape[-1])
    if widest > MAX_WIDTH:
        return f"the Triton kernels serve heads up to {MAX_WIDTH} wide, got {widest}"
    obstacle: str | None = _obstacle(call.q.device, call.q.dtype)
    return obstacle


def run(call: Call) -> tuple[Output, RowLogits]:
    """out' and lse', differentiable in q, k, v and the sink."""
    rows, keys = bounds(call)
    scores = call.scores if call.scores is not None and call.scores.base > -torch.inf else None
    out, lse = _operators.attend(
        call.q,
        call.k,
        call.v,
        call.sink,
        call.slopes,
        rows,
        keys,
        None if scores is None else scores.gamma_values(call.q.shape[1]),
        None if scores is None else scores.horizon,
        0.0 if scores is None else scores.base,
        call.causal,
        call.scale,
        call.window,
        call.key_mask is not None and keys is not None,
    )
    return out, lse


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    """What on this machine prevents the kernels from running."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    from triton import knobs

    interpreted = bool(knobs.runtime.interpret)
    if device.type == "cpu":
        if not interpreted:
            return "it runs on CUDA and ROCm; on CPU tensors only if interpreted (TRITON_INTERPRET=1)"
        if dtype == torch.bfloat16:
            return "Triton's interpreter computes bfloat16 wrongly"
        return None
    if device.type != "cuda":
        return f"it runs on CUDA and ROCm, got {device.type}"
    if not torch.cuda.is_available():
        return None  # only a fake tensor can be on a device that is not there: traced, not run
    if interpreted:
        return "TRITON_INTERPRET=1 is set: the interpreter takes CPU tensors"
    capability = torch.cuda.get_device_capability(device)
    if torch.version.hip is None and capability < _MINIMUM_CAPABILITY:
        return f"it needs compute capability 8.0 or higher, got {capability[0]}.{capability[1]}"
    return None
