"""One small trial per process of the back ends that lean on private operators: forward and backward against the reference.

A PyTorch release that changes such an operator costs speed, never correctness: the back end is dropped with a warning.
"""

import warnings

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from stablemask import backends
from stablemask.backends._call import Call
from stablemask.pseudo import PseudoScores

_PROBED = ("cpu_flash", "triton")
_TOLERANCE = 1e-4

_failures: dict[tuple[str, str], str | None] = {}


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def probe_failure(name: str, device_type: str) -> str | None:
    """None if the back end agrees with the reference on this kind of device, else what went wrong."""
    if name not in _PROBED:
        return None
    key = (name, device_type)
    if key not in _failures:
        _failures[key] = None  # the trial itself must not be probed again
        _failures[key] = _try(name, device_type)
        if _failures[key] is not None:
            warnings.warn(f"stablemask: back end {name!r} is not used: {_failures[key]}", RuntimeWarning, stacklevel=2)
    return _failures[key]


def _try(name: str, device_type: str) -> str | None:
    try:
        with torch.inference_mode(mode=False), torch.enable_grad(), _disable_current_modes(), torch.autocast(device_type, enabled=False):
            expected, got = (_trial(n, device_type) for n in ("reference", name))
    except Exception as error:  # noqa: BLE001 - whatever a changed private operator raises means: do not use it
        return f"its trial run raised {type(error).__name__}: {error}"
    for what, e, g in zip(("out", "lse", "dq", "dk", "dv"), expected, got, strict=True):
        relative = float((g - e).norm() / e.norm())
        if not relative <= _TOLERANCE:
            return f"in its trial run {what} was off by {relative:.1e} of its norm (PyTorch {torch.__version__})"
    return None


def _trial(name: str, device_type: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 4, 37, 16), (1, 2, 37, 16), (1, 2, 37, 16), (1, 4, 37, 16))
    q, k, v, grad = (torch.randn(s, generator=generator).to(device_type) for s in shapes)
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    call = Call(
        q=q,
        k=k,
        v=v,
        sink=None,
        scores=PseudoScores(0.5, horizon=64),
        causal=True,
        scale=0.25,
        window=23,
        slopes=torch.tensor([0.5, 0.25, 0.125, 0.0625], device=device_type),
        bias=None,
        query_positions=None,
        key_positions=None,
        key_mask=None,
        documents=None,
        softcap=None,
        dropout=0.0,
        return_lse=True,
    )
    out, lse = backends.module(name).run(call)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, (q, k, v), grad)]
