"""The portable back end: the contract but for lse' and softcap; dropout as stock attention does it."""

import pytest
import torch

from tests.contract import PARAMETERS, serve_or_refuse, truth_of

REFUSES = {"softcap": "cannot cap scores", "softcap, alibi, bias": "cannot cap scores"}


@pytest.mark.parametrize(("name", "dtype"), PARAMETERS)
def test_serves_everything_without_lse(name: str, dtype: torch.dtype) -> None:
    serve_or_refuse("portable", truth_of(name, dtype, None, False), REFUSES.get(name))


def test_refuses_lse() -> None:
    serve_or_refuse(
        "portable", truth_of("scores", torch.float32, None, True), "does not return the log-sum-exp"
    )
