"""One small trial per process of the back ends that lean on private operators.

It holds forward and backward against the reference. A PyTorch release that changes such an operator costs
speed, never correctness: the back end is dropped with a warning.
"""

import threading
import warnings

import torch
from torch import Tensor

from stablemask import backends
from stablemask.backends._call import Call
from stablemask.pseudo import PseudoScores

_PROBED = ("cpu_flash", "cuda_flash", "triton")
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}

_failures: dict[tuple[str, str], str | None] = {}


def probe_failure(name: str, device: torch.device) -> str | None:
    """None if the back end agrees with the reference on this kind of device, else what went wrong.

    The trial runs in a thread of its own, where no autocast, inference, fake-tensor, tracing or transform
    mode of the caller holds.
    """
    if name not in _PROBED or (device.type == "cuda" and not torch.cuda.is_available()):
        return None  # on a device that is not there only fake tensors can be: traced, not run
    key = (name, device.type)
    if key not in _failures:
        results: list[str | None] = []
        trial = threading.Thread(target=lambda: results.append(_try(name, device)), name="stablemask-probe")
        trial.start()
        trial.join()
        _failures[key] = results[0]
        if results[0] is not None:
            warnings.warn(
                f"stablemask: back end {name!r} is not used: {results[0]}", RuntimeWarning, stacklevel=2
            )
    return _failures[key]


# What torch.compiler.assume_constant_result does, which first imports the compiler: too dear for an import.
probe_failure._dynamo_marked_constant = True  # type: ignore[attr-defined]  # noqa: SLF001


def _try(name: str, device: torch.device) -> str | None:
    make = _plain_call if name == "cuda_flash" else _rich_call
    try:
        expected, got = (_results(n, make(device)) for n in ("reference", name))
    except Exception as error:  # noqa: BLE001 - whatever a changed private operator raises means: do not use it
        return f"its trial run raised {type(error).__name__}: {error}"
    tolerance = _TOLERANCE[expected[0].dtype]
    for what, e, g in zip(("out", "lse", "dq", "dk", "dv"), expected, got, strict=True):
        relative = float((g.float() - e.float()).norm() / e.float().norm())
        if not relative <= tolerance:
            return (
                f"in its trial run {what} was off by {relative:.1e} of its norm (PyTorch {torch.__version__})"
            )
    return None


def _results(name: str, call: Call) -> list[Tensor]:
    out, lse = backends.module(name).run(call)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, (call.q, call.k, call.v), grad)]


def _plain_call(device: torch.device) -> Call:
    """What the stock GPU kernels can serve."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 4, 128, 64), (1, 2, 128, 64), (1, 2, 128, 64))
    q, k, v = (torch.randn(s, generator=generator).to(device, torch.bfloat16) for s in shapes)
    return Call(
        q=q.requires_grad_(),
        k=k.requires_grad_(),
        v=v.requires_grad_(),
        sink=None,
        scores=PseudoScores(0.5, horizon=200),
        causal=True,
        scale=0.125,
        window=None,
        slopes=None,
        bias=None,
        query_positions=None,
        key_positions=None,
        key_mask=None,
        documents=None,
        softcap=None,
        dropout=0.0,
        return_lse=True,
    )


def _rich_call(device: torch.device) -> Call:
    """With grouped heads, a window and ALiBi, in float32."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 4, 37, 16), (1, 2, 37, 16), (1, 2, 37, 16))
    q, k, v = (torch.randn(s, generator=generator).to(device) for s in shapes)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], device=device)
    return _plain_call(device)._replace(
        q=q.requires_grad_(),
        k=k.requires_grad_(),
        v=v.requires_grad_(),
        scores=PseudoScores(0.5, horizon=64),
        scale=0.25,
        window=23,
        slopes=slopes,
    )
