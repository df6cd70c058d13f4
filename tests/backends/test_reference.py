"""The reference back end: every case of the contract with every gradient, and second derivatives."""

import pytest
import torch

from stablemask import PseudoScores, stable_attention
from tests.contract import PARAMETERS, serve_or_refuse, truth_of


@pytest.mark.parametrize(("name", "dtype"), PARAMETERS)
def test_serves_everything(name: str, dtype: torch.dtype) -> None:
    serve_or_refuse("reference", truth_of(name, dtype, None, True), None)


def test_has_second_derivatives() -> None:
    q, k, v = torch.randn(3, 1, 2, 5, 3, dtype=torch.float64).requires_grad_().unbind(0)
    leaves = tuple(t.detach().requires_grad_() for t in (q, k, v))
    scores = PseudoScores(0.5, horizon=7)
    assert torch.autograd.gradgradcheck(
        lambda q, k, v: stable_attention(q, k, v, scores, backend="reference"), leaves
    )
