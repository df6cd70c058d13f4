"""Stock GPU kernels without a GPU: the kernel that adds the sink, interpreted; refusals; traced shapes."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from stablemask import PseudoScores, available_backends, stable_attention
from tests.backends.triton_process import needs_interpreter

SCORES = PseudoScores(0.5, horizon=100)


@needs_interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("batch", "heads", "length", "width"), [(1, 1, 1, 8), (2, 3, 70, 24), (1, 4, 128, 64)]
)
@pytest.mark.parametrize(
    "kind", ["scores", "scores without a horizon", "per row", "per head", "off in places"]
)
def test_the_kernel_adds_the_sink(
    kind: str, batch: int, heads: int, length: int, width: int, dtype: torch.dtype
) -> None:
    from stablemask.backends._rescale import rescale

    generator = torch.Generator().manual_seed(0)
    out = torch.randn(batch, heads, length, width, generator=generator).to(dtype)
    lse = 3 * torch.randn(batch, heads, length, generator=generator)
    gammas, horizon, base, first = None, None, 0.0, 7
    sink: Tensor | None = None
    if kind.startswith("scores"):
        horizon = None if "without" in kind else 60
        base, gammas = 0.25, [0.9 / (h + 1) for h in range(heads)]
        scores = PseudoScores(gammas, horizon=horizon, base=base)
        sigma = scores.row_logits(torch.arange(first, first + length), heads, torch.float32)
    else:
        sink = 5 * torch.randn(1, heads, 1 if kind == "per head" else length, generator=generator)
        if kind == "off in places":
            sink[:, :, ::2] = -math.inf
        sigma = sink
    new_out = out.new_empty(batch, length, heads, width).transpose(1, 2)
    new_lse = rescale(out, lse, new_out, sink, gammas, horizon, base, first)
    sigma = sigma.double()
    torch.testing.assert_close(new_lse.double(), torch.logaddexp(lse.double(), sigma), rtol=1e-5, atol=1e-5)
    expected = (out.double() * torch.sigmoid(lse.double() - sigma).unsqueeze(-1)).to(dtype)
    torch.testing.assert_close(new_out, expected, rtol=2e-3 if dtype == torch.float16 else 2e-5, atol=1e-7)


@needs_interpreter
def test_nan_stays_in_its_row() -> None:
    from stablemask.backends._rescale import rescale

    out, lse = torch.ones(1, 2, 5, 8), torch.zeros(1, 2, 5)
    out[0, 1, 3], lse[0, 1, 3] = math.nan, math.nan
    new = torch.empty_like(out)
    new_lse = rescale(out, lse, new, torch.zeros(1, 1, 1), None, None, 0.0, 0)
    assert torch.equal(new.isnan(), out.isnan())
    assert torch.equal(new_lse.isnan(), lse.isnan())


def qkv(device: str = "cuda", dtype: torch.dtype = torch.bfloat16, queries: int = 64, width: int = 64) -> Any:
    shapes = ((2, 4, queries, width), (2, 2, 64, width), (2, 2, 64, width))
    return [torch.empty(s, device=device, dtype=dtype) for s in shapes]


def test_cpu_tensors_are_refused() -> None:
    assert "got cpu" in str(available_backends(*qkv("cpu"), SCORES)["cuda_flash"])


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "float32": ({"dtype": torch.float32}, {}, "got torch.float32"),
    "wide": ({"width": 136}, {}, "a multiple of 8 up to 128"),
    "odd": ({"width": 20}, {}, "a multiple of 8 up to 128"),
    "fewer queries": ({"queries": 32}, {}, "Tq = Tk or Tq = 1"),
    "no query": ({"queries": 0}, {}, "at least one query"),
    "window": ({}, {"window": 5}, "no window"),
    "softcap": ({}, {"softcap": 5.0}, "no softcap"),
    "dropout": ({}, {"dropout": 0.5}, "dropout"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_with_the_reason(name: str) -> None:
    shape, options, reason = REFUSED[name]
    with FakeTensorMode():
        assert reason in str(available_backends(*qkv(**shape), SCORES, **options)["cuda_flash"])


def test_refuses_tensors_that_restrict_the_view() -> None:
    with FakeTensorMode(), torch.no_grad():
        q, k, v = qkv()
        options = {
            "alibi_slopes": torch.ones(4, device="cuda"),
            "bias": torch.ones(1, 64, 64, device="cuda"),
            "key_mask": torch.ones(2, 64, device="cuda", dtype=torch.bool),
        }
        for name, value in options.items():
            assert name in str(available_backends(q, k, v, 0.0, **{name: value})["cuda_flash"])


@pytest.mark.parametrize("queries", [1, 64])
def test_a_plain_call_gets_it_and_traces(queries: int) -> None:
    with FakeTensorMode():
        q, k, v = (t.requires_grad_() for t in qkv(queries=queries))
        assert next(iter(available_backends(q, k, v, SCORES).items())) == ("cuda_flash", None)
        with torch.no_grad():  # without a GPU autograd ends the process on tensors that claim to be on one
            out, lse = stable_attention(q, k, v, SCORES, return_lse=True)
            gradients = torch.ops.stablemask.cuda_flash_backward(out, q, k, v, out, lse, queries > 1, 0.125)
        assert (out.shape, out.dtype, lse.shape, lse.dtype) == (q.shape, q.dtype, q.shape[:3], torch.float32)
        assert [g.shape for g in gradients] == [q.shape, k.shape, v.shape]


def test_a_window_as_long_as_the_keys_is_none() -> None:
    with FakeTensorMode():
        assert available_backends(*qkv(), SCORES, window=64)["cuda_flash"] is None


def test_float16_is_served_without_gradients_only() -> None:
    with FakeTensorMode():
        q, k, v = qkv(dtype=torch.float16)
        assert available_backends(q, k, v, SCORES)["cuda_flash"] is None
        assert "too small for float16" in str(
            available_backends(q.requires_grad_(), k, v, SCORES)["cuda_flash"]
        )
