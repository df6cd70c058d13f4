"""The Triton back end as PyTorch operators: what it refuses, tracing, compilation, and σ in closed form."""

import importlib.util
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from stablemask import PseudoScores, available_backends, pseudo_logits, sink_attention, stable_attention
from stablemask.backends import triton as back_end
from stablemask.backends._call import Call
from stablemask.backends.triton import _operators
from stablemask.backends.triton._bounds import bounds
from stablemask.testing import make_qkv
from tests import oracle
from tests.backends.triton_process import needs_interpreter

pytestmark = needs_interpreter

SCORES = PseudoScores(0.5, horizon=64)


def qkv(length: int = 17, **sizes: Any) -> list[Tensor]:
    defaults = {"batch": 1, "heads": 4, "kv_heads": 2, "num_queries": length, "num_keys": length, "dim": 16}
    return [t.requires_grad_() for t in make_qkv(torch.Generator().manual_seed(0), **defaults | sizes)]


def call(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Call:
    defaults = dict.fromkeys(Call._fields) | {
        "causal": True,
        "scale": 0.25,
        "dropout": 0.0,
        "return_lse": True,
    }
    return Call(**defaults | {"q": q, "k": k, "v": v} | options)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"softcap": 5.0}, "softcap"),
        ({"dropout": 0.1}, "dropout"),
        ({"bias": torch.zeros(1, 17, 17)}, "bias"),
        ({"positions": torch.arange(17)[None], "key_positions": torch.arange(17)[None]}, "key_positions"),
        ({"alibi_slopes": torch.zeros(4, requires_grad=True)}, "alibi_slopes"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else value,
)
def test_what_the_kernels_cannot_do_is_refused_by_name(options: dict[str, Any], reason: str) -> None:
    refusal = available_backends(*qkv(), 0.0, **options)["triton"]
    assert refusal is not None
    assert reason in refusal


def test_slopes_that_require_a_gradient_are_served_where_none_is_taken() -> None:
    with torch.no_grad():
        assert (
            available_backends(*qkv(), 0.0, alibi_slopes=torch.zeros(4, requires_grad=True))["triton"] is None
        )


@pytest.mark.parametrize(("sizes", "reason"), [({"dim": 257}, "257"), ({"value_dim": 300}, "300")])
def test_heads_that_are_too_wide_are_refused(sizes: dict[str, int], reason: str) -> None:
    refusal = available_backends(*qkv(3, **sizes), 0.0)["triton"]
    assert refusal is not None
    assert reason in refusal


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_dtypes_that_cannot_be_interpreted_are_refused(dtype: torch.dtype) -> None:
    refusal = available_backends(*qkv(dtype=dtype), 0.0)["triton"]
    assert refusal is not None
    assert str(dtype).removeprefix("torch.") in refusal


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert back_end.why_not(call(*qkv())) == "the package triton is not installed"


def test_cpu_tensors_need_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    monkeypatch.setattr(knobs.runtime, "interpret", False)
    refusal = back_end.why_not(call(*qkv()))
    assert refusal is not None
    assert "TRITON_INTERPRET=1" in refusal


@pytest.mark.parametrize(("capability", "served"), [((7, 5), False), ((8, 0), True), ((12, 1), True)])
def test_old_gpus_are_refused(
    capability: tuple[int, int], served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton import knobs

    monkeypatch.setattr(knobs.runtime, "interpret", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    with FakeTensorMode():
        refusal = back_end.why_not(call(*(torch.empty(1, 1, 1, 16, device="cuda") for _ in range(3))))
    assert (refusal is None) == served
    assert served or "7.5" in str(refusal)


OPERANDS: dict[str, dict[str, Any]] = {
    "gammas": {"gammas": [0.5, 0.1, 0.0, 2.0], "horizon": 20},
    "sink": {"sink": torch.zeros(1, 4, 1, requires_grad=True), "slopes": torch.ones(4), "window": 5},
    "bounds": {
        "rows": torch.tensor([0, 17], dtype=torch.int32)[None, :, None].expand(1, 2, 17).contiguous(),
        "keys": torch.tensor([0, 17], dtype=torch.int32)[None, :, None].expand(1, 2, 17).contiguous(),
        "holes": True,
    },
}


@pytest.mark.parametrize("name", OPERANDS)
def test_opcheck(name: str) -> None:
    names = ("sink", "slopes", "rows", "keys", "gammas", "horizon")
    given = dict.fromkeys(names) | {
        "base": 0.0,
        "causal": True,
        "scale": 0.25,
        "window": None,
        "holes": False,
    }
    given |= OPERANDS[name]
    forward, backward = torch.ops.stablemask.triton_forward, torch.ops.stablemask.triton_backward
    tensors = qkv()
    torch.library.opcheck(forward.default, (*tensors, *given.values()))
    with torch.no_grad():
        out, lse = forward(*tensors, *given.values())
    rest = [given[n] for n in ("slopes", "rows", "keys", "causal", "scale", "window", "holes")]
    for grad_lse in (None, lse):
        operands = (out, grad_lse, *(t.detach() for t in tensors), out, lse, *rest)
        torch.library.opcheck(backward.default, operands)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("variant", ["scores", "sink and structure"])
def test_the_compiled_operation_is_the_same(variant: str, dynamic: bool) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
        if variant == "scores":
            return stable_attention(q, k, v, SCORES, window=9, return_lse=True, backend="triton")
        length = q.shape[2]
        ids = (torch.arange(length) // 6).unsqueeze(0)
        mask = (torch.arange(length) > 2).unsqueeze(0)
        return sink_attention(
            q, k, v, sink, document_ids=ids, key_mask=mask, return_lse=True, backend="triton"
        )

    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for length in (17, 21):
        leaves = [*qkv(length), torch.zeros(4, requires_grad=True)]
        results = []
        for function in (attend, compiled):
            out, lse = function(*leaves)
            loss = out.sin().sum() + lse.masked_fill(lse.isinf(), 0.0).sum()
            results.append(
                (out, lse, *torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True))
            )
        for expected, got in zip(*results, strict=True):
            assert torch.equal(expected, got)


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:.*torch.jit.script_method.*:DeprecationWarning"
)  # PyTorch's own, while it loads
def test_inductor_compiles_a_training_step() -> None:
    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return stable_attention(q * 2, k, v, SCORES, backend="triton").square().sum()

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True)
    leaves = qkv()
    expected, got = (torch.autograd.grad(f(*leaves), leaves) for f in (loss, compiled))
    for a, b in zip(expected, got, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("structured", [False, True], ids=["plain", "structured"])
def test_a_cuda_call_is_traced_without_a_gpu(dtype: torch.dtype, structured: bool) -> None:
    """Forward and backward apart: PyTorch's CPU build has no autograd for CUDA, not even for fakes."""
    with FakeTensorMode(), torch.no_grad():
        q, k, v = (torch.empty(2, 33, h, 40, device="cuda", dtype=dtype).transpose(1, 2) for h in (4, 2, 2))
        options: dict[str, Any] = {"scores": SCORES, "window": 9}
        if structured:
            options = {
                "sink": torch.empty(1, 4, 1, device="cuda"),
                "documents": torch.empty(2, 33, device="cuda", dtype=torch.int64),
                "key_mask": torch.empty(2, 33, device="cuda", dtype=torch.bool),
                "slopes": torch.empty(4, device="cuda"),
            }
        traced = call(q, k, v, **options)
        assert back_end.why_not(traced) is None
        out, lse = back_end.run(traced)
        rows, keys = bounds(traced)
        context = SimpleNamespace(
            saved_tensors=(q, k, v, traced.sink, out, lse, traced.slopes, rows, keys),
            geometry=(True, 0.25, traced.window, structured),
            needs_input_grad=(True, True, True, structured),
        )
        gradients = _operators._differentiate(context, torch.empty_like(out), torch.empty_like(lse))
    assert (out.device.type, out.dtype, out.shape) == ("cuda", dtype, q.shape)
    assert (lse.device.type, lse.dtype, lse.shape) == ("cuda", torch.float32, q.shape[:3])
    for gradient, leaf in zip(gradients, (q, k, v, traced.sink), strict=False):
        assert (gradient is None) == (leaf is None)
        if leaf is not None:
            assert (gradient.shape, gradient.stride(), gradient.dtype) == (
                leaf.shape,
                leaf.stride(),
                leaf.dtype,
            )


def test_double_backward_names_the_reference() -> None:
    leaves = qkv(5)
    out = stable_attention(*leaves, SCORES, backend="triton")
    (grad,) = torch.autograd.grad(out.square().sum(), leaves[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="backend='reference'"):
        torch.autograd.grad(grad.sum(), leaves[:1])


def sigma_of(gamma: float, positions: Tensor, horizon: int | None, base: float) -> Tensor:
    """σ as the kernel computes it."""
    from tests.backends.triton_sigma import sigma_kernel

    sigma = torch.empty(positions.shape, dtype=torch.float32)
    sigma_kernel[(1,)](positions.to(torch.int32), sigma, gamma, base, horizon, N=positions.numel())
    return sigma


@pytest.mark.parametrize("gamma", [0.0, 1e-6, 1e-3, 0.3, 0.999, 1.0, 1.001, 7.0, 100.0])
@pytest.mark.parametrize("horizon", [1, 7, 1000, 1 << 20, None])
def test_the_closed_form_in_the_kernel(gamma: float, horizon: int | None) -> None:
    if horizon is None and gamma == 0.0:
        pytest.skip("an infinite horizon needs gamma > 0")
    positions = torch.tensor(
        [0, 1, 2, 5, 6, 7, 8, 100, 998, 999, 1000, 5000, (1 << 20) - 2, (1 << 20) - 1, 1 << 20, 1 << 22]
    )
    expected = pseudo_logits(torch.tensor([gamma], dtype=torch.float64), positions, horizon, 0.01)[0]
    got = sigma_of(gamma, positions, horizon, 0.01)
    infinite = expected.isinf()
    assert torch.equal(got.isinf(), infinite)
    error = (got - expected).abs() / expected.abs().clamp(min=1.0)
    assert error[~infinite].max() <= 2e-6


@pytest.mark.parametrize("gamma", [0.0, 0.05, 2.0])
def test_the_closed_form_is_the_sum_of_the_papers_columns(gamma: float) -> None:
    positions = torch.arange(16)
    columns = oracle.pseudo_columns(torch.tensor([gamma]), positions[None], 11, 0.5)[0, 0]
    expected = columns.logsumexp(-1)
    got = sigma_of(gamma, positions, 11, 0.5)
    assert math.isinf(expected[10])
    torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=1e-6)
