"""Eager code calls the kernels without the dispatch of their operators; whoever watches sees those."""

import pytest
import torch
from torch import Tensor
from torch.autograd.profiler import profile

from stablemask import PseudoScores, stable_attention
from stablemask.testing import make_qkv
from tests.backends.triton_process import needs_interpreter

SCORES = PseudoScores(0.5, horizon=64)
BACKENDS = ["cpu_flash", pytest.param("triton", marks=needs_interpreter)]


class Marked(Tensor):
    """A subclass that does nothing but be one."""


def attend(given: list[Tensor], backend: str) -> Tensor:
    q, k, v = given
    return stable_attention(q, k, v, SCORES, backend=backend)


def operators(backend: str, given: list[Tensor]) -> set[str]:
    """Names of our operators that a training call goes through."""
    with profile() as record:
        torch.autograd.grad(attend(given, backend).sum(), given)
    return {event.name for event in record.function_events if event.name.startswith("stablemask::")}


def leaves(kind: type[Tensor] = Tensor) -> list[Tensor]:
    tensors = make_qkv(torch.Generator().manual_seed(0), num_queries=13, num_keys=13)
    return [t.as_subclass(kind).requires_grad_() for t in tensors]


@pytest.mark.parametrize("backend", BACKENDS)
def test_eager_training_calls_no_operator(backend: str) -> None:
    assert operators(backend, leaves()) == set()


@pytest.mark.parametrize("backend", ["cpu_flash"])
def test_a_subclass_of_tensors_sees_the_operators(backend: str) -> None:
    assert operators(backend, leaves(Marked)) == {f"stablemask::{backend}", f"stablemask::{backend}_backward"}


@pytest.mark.parametrize("backend", BACKENDS)
def test_results_are_those_of_the_operators(backend: str) -> None:
    given = leaves()
    direct = attend(given, backend)
    seen = attend([t.as_subclass(Marked) for t in given], backend)
    assert torch.equal(direct, seen.as_subclass(Tensor))
    for mine, theirs in zip(
        torch.autograd.grad(direct.square().sum(), given, retain_graph=True),
        torch.autograd.grad(seen.square().sum(), given),
        strict=True,
    ):
        assert torch.equal(mine, theirs.as_subclass(Tensor))
