"""Flex attention compiled on the GPU, with every gradient of the contract."""

import pytest
import torch

from tests.contract import truth_of
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
    "width 128",
)


@pytest.fixture(autouse=True)
def _compiles_afresh() -> None:
    torch.compiler.reset()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_serves_with_gradients(name: str, dtype: torch.dtype) -> None:
    serves_on_gpu("flex", truth_of(name, dtype, None, True))
