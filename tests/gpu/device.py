"""An example of the contract on the GPU, laid out in memory as on the CPU, against the oracle on the CPU."""

import dataclasses
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor

from stablemask.testing import Example, attend, compare, evaluate, plain_errors
from tests.checks import Truth, claims

needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU: torch.cuda is not available"
)


def on_gpu(example: Example) -> Example:
    """The same numbers with the same strides."""
    options = {n: _moved(o) if isinstance(o, Tensor) else o for n, o in example.options.items()}
    moved = {
        name: _moved(value)
        for name in ("q", "k", "v", "sink", "grad_out", "grad_lse")
        if isinstance(value := getattr(example, name), Tensor)
    }
    return dataclasses.replace(example, **moved, options=options)


def serves_on_gpu(
    backend: str,
    truth: Truth,
    refusal: str | None = None,
    within: AbstractContextManager[object] | None = None,
) -> None:
    """The back end is right within the budget of the GPU's own attention; or it gives the reason expected.

    It runs in ``within``; what it is compared with does not.
    """
    example = on_gpu(truth.example)
    wrt = tuple(example.tensors()) if truth.wrt is None else tuple(truth.wrt)
    reason = claims(example, wrt)[backend]
    if refusal is not None:
        assert reason is not None, f"{backend} now serves what it refused ({refusal}): test it"
        assert refusal in reason
        return
    assert reason is None, f"{backend} refuses: {reason}"
    with within or nullcontext():
        actual = evaluate(lambda e: attend(e, backend), example, wrt)
    plain = plain_errors(example, causal=example.options.get("causal", True))
    found = compare(
        {name: t.cpu() for name, t in actual.items()},
        truth.expected,
        plain,
        dtype=example.q.dtype,
        norms=truth.norms,
    )
    assert all(d.ok for d in found), "\n".join(map(str, found))


def _moved(t: Tensor) -> Tensor:
    whole = torch.empty(0, dtype=t.dtype).set_(t.untyped_storage())
    return whole.cuda().as_strided(t.size(), t.stride(), t.storage_offset())
