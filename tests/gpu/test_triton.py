"""The Triton kernels on the GPU in sizes that take several tiles: out, lse' and the gradients."""

import math
from typing import Any

import pytest
import torch

from stablemask import PseudoScores, sink_attention
from stablemask.testing import Example, make_gradients, make_qkv
from tests.checks import Truth
from tests.gpu.device import needs_gpu, serves_on_gpu

pytestmark = needs_gpu

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SCORES = PseudoScores(0.5, horizon=512)
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])


def check(sink: Any, dtype: torch.dtype, *, options: dict[str, Any] | None = None, **shape: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = {"batch": 2, "heads": 4, "kv_heads": 2, "num_queries": 333, "num_keys": 333, "dim": 64} | shape
    q, k, v = make_qkv(generator, dtype=dtype, **sizes)
    example = make_gradients(Example(q, k, v, sink, options=options or {}), generator)
    wrt = [name for name in example.tensors() if name in ("q", "k", "v", "sink")]
    serves_on_gpu("triton", Truth(example, wrt))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [16, 40, 64, 128, 200, 256])
def test_widths(dim: int, dtype: torch.dtype) -> None:
    check(SCORES, dtype, dim=dim)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 1), (1, 700), (64, 512), (129, 640), (1024, 1024)])
def test_lengths(num_queries: int, num_keys: int, dtype: torch.dtype) -> None:
    check(SCORES, dtype, batch=1, num_queries=num_queries, num_keys=num_keys)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("structure", ["none", "alibi", "padding", "holes", "documents"])
def test_structure(structure: str, window: int | None, dim: int, dtype: torch.dtype) -> None:
    keys = torch.arange(333)
    holes = torch.rand(2, 333, generator=torch.Generator().manual_seed(1)) > 0.3
    options: dict[str, dict[str, Any]] = {
        "none": {},
        "alibi": {"alibi_slopes": SLOPES},
        "padding": {"key_mask": keys >= torch.tensor([[0], [200]])},
        "holes": {"key_mask": holes},
        "documents": {"document_ids": keys // torch.tensor([[50], [111]])},
    }
    check(SCORES, dtype, dim=dim, options=options[structure] | {"window": window})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [-30.0, 8.0, 20.0])
def test_strong_sinks(size: float, dtype: torch.dtype) -> None:
    check(torch.full((4,), size), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "scores",
    [
        PseudoScores([0.0, 1e-6, 0.3, 100.0], horizon=200),
        PseudoScores([1e-6, 0.1, 1.0, 100.0], horizon=None),
        PseudoScores(0.5, horizon=333, base=-math.inf),
    ],
    ids=["beyond", "infinite", "off"],
)
def test_gammas_and_horizons(scores: PseudoScores, dtype: torch.dtype) -> None:
    check(scores, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_without_a_causal_mask(dtype: torch.dtype) -> None:
    check(torch.tensor([0.0, 1.0, -2.0, 3.0]), dtype, num_queries=200, options={"causal": False})


def test_long_rows_reach_past_32_bit_offsets() -> None:
    """The last head lies beyond 2³¹ numbers; it has to equal the same head computed alone."""
    heads, length = 132, 131_072
    q = torch.randn(1, heads, length, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(1, heads, length, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    assert q.numel() > 1 << 31
    out = sink_attention(q, k, v, 0.5, window=64, backend="triton")
    alone = sink_attention(*(t[:, -1:].clone() for t in (q, k, v)), 0.5, window=64, backend="triton")
    assert torch.equal(out[:, -1:], alone)
