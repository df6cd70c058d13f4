"""Stock GPU kernels fed (out', lse'): every call they serve, on cuDNN and on FlashAttention."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from stablemask import PseudoScores, available_backends, sink_attention, stable_attention
from stablemask.backends import cuda_flash
from stablemask.testing import Example, make_gradients, make_qkv
from tests.checks import Truth
from tests.gpu.device import needs_gpu, serves_on_gpu

pytestmark = needs_gpu

SCORES = PseudoScores(0.5, horizon=512)
KERNELS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def check(
    kernel: str, sink: Any, *, wrt: bool = True, dtype: torch.dtype = torch.bfloat16, **shape: Any
) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = {"batch": 2, "heads": 4, "kv_heads": 2, "num_queries": 200, "num_keys": 200, "dim": 64}
    causal = shape.pop("causal", True)
    q, k, v = make_qkv(generator, dtype=dtype, **(sizes | shape))
    example = Example(q, k, v, sink, options={} if causal else {"causal": False})
    if not wrt:
        serves_on_gpu("cuda_flash", Truth(example, ()), within=sdpa_kernel(KERNELS[kernel]))
        return
    example = make_gradients(example, generator)
    truth = Truth(example, list(example.tensors()))
    serves_on_gpu("cuda_flash", truth, within=sdpa_kernel(KERNELS[kernel]))


@pytest.mark.parametrize("dim", [8, 24, 64, 128])
@pytest.mark.parametrize("length", [8, 127, 200, 1024])
def test_sizes(kernel: str, length: int, dim: int) -> None:
    check(kernel, SCORES, num_queries=length, num_keys=length, dim=dim)


@pytest.mark.parametrize("dim", [8, 24, 64, 128])
def test_a_single_token(dim: int) -> None:
    """On FlashAttention: PyTorch lets cuDNN have no single key."""
    check("flash", SCORES, num_queries=1, num_keys=1, dim=dim)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_grouped_heads(kernel: str, kv_heads: int) -> None:
    check(kernel, SCORES, kv_heads=kv_heads)


@pytest.mark.parametrize("layout", ["bthd", "qkv", "strided", "expanded"])
def test_layouts(kernel: str, layout: str) -> None:
    check(kernel, SCORES, layout=layout)


@pytest.mark.parametrize(
    "shape", [(), (4,), (1,), (4, 200), (1, 200), (4, 1), (2, 4, 200), (2, 1, 200)], ids=str
)
def test_sinks_of_every_shape(kernel: str, shape: tuple[int, ...]) -> None:
    check(kernel, torch.randn(shape, generator=torch.Generator().manual_seed(5)))


@pytest.mark.parametrize("size", [-30.0, 8.0, 20.0, -math.inf])
def test_strong_sinks(kernel: str, size: float) -> None:
    check(kernel, torch.full((4,), size))


@pytest.mark.parametrize("num_queries", [1, 77, 300])
def test_without_a_causal_mask(kernel: str, num_queries: int) -> None:
    check(kernel, torch.tensor([0.0, 1.0, -2.0, 3.0]), num_queries=num_queries, causal=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_one_query_against_a_cache(kernel: str, dtype: torch.dtype) -> None:
    check(kernel, SCORES, wrt=False, dtype=dtype, num_queries=1, num_keys=777)
    check(kernel, SCORES, wrt=False, dtype=dtype)


def inputs(requires_grad: bool = True) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    return [
        torch.randn(2, 4, 256, 64, device="cuda", dtype=torch.bfloat16, generator=generator).requires_grad_(
            requires_grad
        )
        for _ in range(3)
    ]


def test_it_is_what_a_plain_call_gets() -> None:
    assert next(iter(available_backends(*inputs(), SCORES).items())) == ("cuda_flash", None)


def test_minus_infinity_is_stock_attention_bit_for_bit() -> None:
    q, k, v = inputs(requires_grad=False)
    stock = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert torch.equal(sink_attention(q, k, v, -math.inf, backend="cuda_flash"), stock)


def test_nan_in_gives_nan_out() -> None:
    q, k, v = inputs(requires_grad=False)
    k[0, 0, 5, 3] = math.nan
    out = stable_attention(q, k, v, SCORES, backend="cuda_flash")
    assert out[0, 0, 5:].isnan().all()
    assert out[1].isfinite().all()


def test_opcheck() -> None:
    q, k, v = inputs()
    sink = torch.zeros(1, 4, 1, device="cuda", requires_grad=True)
    torch.library.opcheck(torch.ops.stablemask.cuda_flash, (q, k, v, sink, None, None, 0.0, True, 0.125))
    gammas = [0.5, 0.25, 0.1, 0.0]
    torch.library.opcheck(torch.ops.stablemask.cuda_flash, (q, k, v, None, gammas, 300, 0.0, True, 0.125))


def test_compiles_without_a_graph_break() -> None:
    compiled = torch.compile(lambda *qkv: stable_attention(*qkv, SCORES), fullgraph=True)
    results = []
    for call in (compiled, lambda *qkv: stable_attention(*qkv, SCORES)):
        leaves = inputs()
        out = call(*leaves)
        results.append([out, *torch.autograd.grad(out.float().square().sum(), leaves)])
    for compiled_result, eager in zip(*results, strict=True):
        torch.testing.assert_close(compiled_result, eager, rtol=2e-2, atol=1e-3)


def test_after_stock_attention_of_the_same_shape(kernel: str) -> None:
    """A plan that stock attention made and PyTorch kept is right for ours, whatever lies where."""
    for layout in ("contiguous", "bthd"):
        leaves = [
            torch.randn(2, 4, 256, 64, device="cuda", dtype=torch.bfloat16)
            if layout == "contiguous"
            else torch.randn(2, 256, 4, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
            for _ in range(3)
        ]
        for leaf in leaves:
            leaf.requires_grad_()
        exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
        expected = stable_attention(*exact, SCORES, backend="reference")
        for grad in (torch.ones_like(expected), torch.randn(2, 256, 4, 64, device="cuda").transpose(1, 2)):
            with sdpa_kernel(KERNELS[kernel]):
                stock = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True)
                torch.autograd.grad(stock, leaves, torch.ones_like(stock))
                out = stable_attention(*leaves, SCORES, backend="cuda_flash")
                got = torch.autograd.grad(out, leaves, grad.to(out.dtype))
            wanted = torch.autograd.grad(expected, exact, grad.double(), retain_graph=True)
            for g, w in zip(got, wanted, strict=True):
                assert (g.double() - w).norm() <= 2e-2 * w.norm(), (layout, kernel)


def test_memory_is_linear(kernel: str) -> None:
    """Forward and backward at T = 32,768: no more than 5 % above stock attention."""
    with sdpa_kernel(KERNELS[kernel]):
        ours, stock = (_peak(ours) for ours in (True, False))
    assert ours <= 1.05 * stock


def _peak(ours: bool) -> int:
    leaves = [
        torch.randn(1, 4, 32_768, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)
    ]
    torch.cuda.reset_peak_memory_stats()
    if ours:
        out = stable_attention(*leaves, SCORES, backend="cuda_flash")
    else:
        out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True)
    out.backward(torch.ones_like(out))
    return torch.cuda.max_memory_allocated()


def test_the_kernel_is_the_one_that_stock_attention_takes(kernel: str) -> None:
    q, k, v = inputs(requires_grad=False)
    with sdpa_kernel(KERNELS[kernel]):
        choice = cuda_flash._stock_choice(q, k, v, True, 0.125)
    assert (choice == cuda_flash._CUDNN) == (kernel == "cudnn")
