"""The flex back end on CPU: the forward of the contract. Its gradients need CUDA: see tests/gpu."""

import pytest
import torch

from tests.contract import PARAMETERS, serve_or_refuse, truth_of

EMPTY = (
    "no sequence",
    "no head",
    "no query",
    "no key, no query",
    "no key, non-causal",
    "no key, non-causal, no sink",
    "values of width 0",
)
REFUSES = dict.fromkeys(EMPTY, "at least one query and one key")


@pytest.mark.parametrize(("name", "dtype"), PARAMETERS)
def test_serves_the_forward(name: str, dtype: torch.dtype) -> None:
    serve_or_refuse("flex", truth_of(name, dtype, (), True), REFUSES.get(name))


def test_refuses_gradients() -> None:
    serve_or_refuse("flex", truth_of("scores", torch.float32, None, True), "no backward on CPU")
