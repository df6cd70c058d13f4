"""Every case of the contract on the GPU, with every gradient that a back end claims."""

import pytest
import torch

from tests.checks import claims
from tests.contract import CASES, IN_EVERY_DTYPE, PARAMETERS, truth_of
from tests.gpu.device import needs_gpu, on_gpu, serves_on_gpu

pytestmark = needs_gpu

IN_16_BITS = [
    pytest.param(name, torch.bfloat16, id=f"{name}, bfloat16") for name in CASES if name not in IN_EVERY_DTYPE
]
TRITON_REFUSES = (
    ("bias", "take no dense bias"),
    ("key_positions", "not by key_positions"),
    ("softcap", "cannot cap scores"),
)


def refusal_of_triton(name: str, dtype: torch.dtype) -> str | None:
    """The reason expected; None where the kernels have to serve."""
    if dtype == torch.float64:
        return "compute in float32"
    truth = truth_of(name, dtype, None, True)
    return next((reason for option, reason in TRITON_REFUSES if option in truth.example.options), None)


def needed(name: str) -> tuple[str, ...]:
    """Gradients of q, k, v and the sink: the kernels have none for slopes."""
    tensors = CASES[name](torch.Generator().manual_seed(0), torch.float32).tensors()
    return tuple(t for t in tensors if t in ("q", "k", "v", "sink"))


@pytest.mark.parametrize(("name", "dtype"), PARAMETERS + IN_16_BITS)
def test_triton(name: str, dtype: torch.dtype) -> None:
    refusal = refusal_of_triton(name, dtype)
    if refusal is not None and "softcap" in name:
        refusal = "cannot cap scores"
    serves_on_gpu("triton", truth_of(name, dtype, needed(name), True), refusal)


@pytest.mark.parametrize(("name", "dtype"), PARAMETERS)
def test_reference(name: str, dtype: torch.dtype) -> None:
    serves_on_gpu("reference", truth_of(name, dtype, None, True))


@pytest.mark.parametrize(("name", "dtype"), PARAMETERS)
def test_portable(name: str, dtype: torch.dtype) -> None:
    refusal = "cannot cap scores" if "softcap" in name else None
    serves_on_gpu("portable", truth_of(name, dtype, None, False), refusal)


STOCK_REFUSES = ("window", "alibi_slopes", "bias", "softcap", "key_mask", "document_ids", "key_positions")


@pytest.mark.parametrize(("name", "dtype"), PARAMETERS + IN_16_BITS)
def test_cuda_flash_refuses_what_the_stock_kernels_cannot_do(name: str, dtype: torch.dtype) -> None:
    truth = truth_of(name, dtype, needed(name), True)
    reason = claims(on_gpu(truth.example), truth.wrt)["cuda_flash"]
    if dtype != torch.bfloat16:
        assert reason is not None
    for option in STOCK_REFUSES:
        if option in truth.example.options:
            assert reason is not None
    if reason is None:
        serves_on_gpu("cuda_flash", truth)
