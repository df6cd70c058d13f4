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

_PROBED = ("cpu_flash", "triton")
_TOLERANCE = 1e-4

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


# torch.compiler.assume_constant_result does this and imports the compiler first, which is too dear for an import
probe_failure._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _try(name: str, device: torch.device) -> str | None:
    try:
        expected, got = (_trial(n, device) for n in ("reference", name))
    except Exception as error:  # noqa: BLE001 - whatever a changed private operator raises means: do not use it
        return f"its trial run raised {type(error).__name__}: {error}"
    for what, e, g in zip(("out", "lse", "dq", "dk", "dv"), expected, got, strict=True):
        relative = float((g - e).norm() / e.norm())
        if not relative <= _TOLERANCE:
            return (
                f"in its trial run {what} was off by {relative:.1e} of its norm (PyTorch {torch.__version__})"
            )
    return None


def _trial(name: str, device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 4, 37, 16), (1, 2, 37, 16), (1, 2, 37, 16), (1, 4, 37, 16))
    q, k, v, grad = (torch.randn(s, generator=generator).to(device) for s in shapes)
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
        slopes=torch.tensor([0.5, 0.25, 0.125, 0.0625], device=device),
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
