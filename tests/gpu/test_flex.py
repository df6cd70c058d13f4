"""Flex attention compiled on the GPU, with every gradient of the contract."""

import pytest
import torch

from tests.checks import Truth
from tests.contract import CASES
from tests.gpu.device import needs_gpu, serves_on_gpu

pytestmark = needs_gpu

NAMES = (
    "no sink",
    "sink (B, H, Tq)",
    "scores",
    "scores Tq < Tk",
    "key_positions",
    "window 4",
    "alibi_slopes",
    "bias (B, H, Tq, Tk)",
    "key_mask left",
    "document_ids come back",
    "softcap, alibi, bias",
    "non-causal",
)


@pytest.fixture(autouse=True)
def _compiles_afresh() -> None:
    torch.compiler.reset()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_serves_with_gradients(name: str, dtype: torch.dtype) -> None:
    example = CASES[name](torch.Generator().manual_seed(len(name)), dtype, dim=16)
    serves_on_gpu("flex", Truth(example, tuple(example.tensors())))


def test_narrow_heads_are_refused() -> None:
    example = CASES["scores"](torch.Generator().manual_seed(0), torch.float32)
    serves_on_gpu("flex", Truth(example, ()), "at least 16 wide")
