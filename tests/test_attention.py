"""The operation where its result is known by hand, and the choice among its back ends."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stablemask import (
    BackendUnavailable,
    PseudoScores,
    available_backends,
    backends,
    cu_seqlens_from_documents,
    documents_from_cu_seqlens,
    sink_attention,
    stable_attention,
)
from stablemask.testing import make_qkv

SERVING = ("reference", "cpu_flash", "portable", "flex")
BACKENDS = pytest.mark.parametrize("backend", SERVING)
WITH_GRADIENT = pytest.mark.parametrize("backend", ["reference", "cpu_flash", "portable"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


def random_inputs(length: int = 13, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    return make_qkv(torch.Generator().manual_seed(0), num_queries=length, num_keys=length, dtype=dtype)


@WITH_GRADIENT
@DTYPES
def test_one_key_by_hand(backend: str, dtype: torch.dtype) -> None:
    """q = k = 1, v = 2, σ = 0: out = 2·sigmoid(1), dq = dk = −dσ = 2·sigmoid'(1), dv = sigmoid(1)."""
    q, k, v = (torch.full((1, 1, 1, 1), x, dtype=dtype, requires_grad=True) for x in (1.0, 1.0, 2.0))
    sink = torch.zeros((), dtype=dtype, requires_grad=True)
    out = sink_attention(q, k, v, sink, backend=backend)
    out.sum().backward()
    assert out.item() == pytest.approx(1.4621171572600098, rel=1e-6)
    assert [t.grad.item() for t in (q, k, v, sink)] == pytest.approx(  # type: ignore[union-attr]
        [0.39322386648296370, 0.39322386648296370, 0.73105857863000487, -0.39322386648296370], rel=1e-6
    )


@pytest.mark.parametrize("backend", ["reference", "cpu_flash", "flex"])
def test_one_key_lse_by_hand(backend: str) -> None:
    """lse' = log(e¹ + e⁰)."""
    one = torch.ones(1, 1, 1, 1)
    _, lse = sink_attention(one, one, one, 0.0, return_lse=True, backend=backend)
    assert lse.shape == (1, 1, 1)
    assert lse.item() == pytest.approx(1.3132616875182228, rel=1e-6)


def kept_share(n: int, gamma: float) -> list[float]:
    """α_i = i / (i + Σ_{j=i}^{n−1} e^{−jγ}): attention over identical inputs."""
    return [i / (i + math.fsum(math.exp(-j * gamma) for j in range(i, n))) for i in range(1, n + 1)]


@BACKENDS
@DTYPES
@pytest.mark.parametrize("gamma", [0.0, 1 / 16, 0.5, 100.0])
@pytest.mark.parametrize("n", [1, 2, 13, 200])
def test_identical_inputs_give_the_printed_shares(
    backend: str, dtype: torch.dtype, gamma: float, n: int
) -> None:
    q = k = torch.zeros(1, 2, n, 4, dtype=dtype)
    v = torch.ones(1, 2, n, 4, dtype=dtype)
    out = stable_attention(q, k, v, PseudoScores(gamma, horizon=n, headwise=False), backend=backend)
    shares = torch.tensor(kept_share(n, gamma), dtype=dtype)[:, None].expand(1, 2, n, 4)
    tolerance = 8 * (1 + math.log(n)) * torch.finfo(dtype).eps  # exp of a logit of that size
    torch.testing.assert_close(out, shares, rtol=tolerance, atol=0.0)
    assert out[0, 0, -1].tolist() == pytest.approx([1.0] * 4, rel=tolerance), "row N has no pseudo column"
    if dtype == torch.float64 and gamma == 1 / 16:
        assert (out[0, 0, :, 0].diff() > 0).all()


@pytest.mark.parametrize(
    ("gamma", "dtype", "first_equal"),
    [
        (0.5, torch.float32, 28),
        (0.5, torch.float64, 65),
        (1 / 16, torch.float32, 187),
        (1 / 16, torch.float64, 489),
        (1 / 128, torch.float32, None),
        (1 / 128, torch.float64, None),
    ],
)
def test_positions_that_finite_precision_tells_apart(
    gamma: float, dtype: torch.dtype, first_equal: int | None
) -> None:
    """ξ_i = i / (i + e^σ_i) of the theorem, n = 1024: where the first two consecutive ones become equal."""
    n = 1024
    sigma = PseudoScores(gamma, horizon=n, headwise=False).row_logits(torch.arange(n), 1, torch.float64)[0]
    i = torch.arange(1, n + 1, dtype=torch.float64)
    xi = (i / (i + sigma.exp())).to(dtype)
    equal = (xi.diff() <= 0).nonzero().flatten().tolist()
    assert (equal[0] + 1 if equal else None) == first_equal


@BACKENDS
def test_values_of_one_sum_to_what_the_sink_leaves(backend: str) -> None:
    """out of v = 1 is the row sum α of Ã; with lse' it is exp(lse − lse'), never above 1."""
    q, k, _ = random_inputs(dtype=torch.float64)
    ones = torch.ones_like(k)
    sums = stable_attention(q, k, ones, PseudoScores(0.5, horizon=20), backend=backend)[..., 0]
    options = {"return_lse": True, "backend": "reference"}
    _, lse = sink_attention(q, k, ones, **options)
    _, lse_sink = stable_attention(q, k, ones, PseudoScores(0.5, horizon=20), **options)
    torch.testing.assert_close(sums, torch.exp(lse - lse_sink), rtol=1e-13, atol=0.0)
    assert (sums < 1).all()
    at_horizon = stable_attention(q, k, ones, PseudoScores(0.5, horizon=13), backend=backend)[..., 0]
    torch.testing.assert_close(
        at_horizon[:, :, -1], torch.ones(2, 6, dtype=torch.float64), rtol=1e-14, atol=0.0
    )


OFF = {
    "scores of base −∞": lambda q, k, v, **o: stable_attention(
        q, k, v, PseudoScores(0.5, horizon=9, base=-math.inf), **o
    ),
    "number −∞": lambda q, k, v, **o: sink_attention(q, k, v, -math.inf, **o),
    "tensor −∞": lambda q, k, v, **o: sink_attention(q, k, v, torch.full((6,), -math.inf), **o),
}


@pytest.mark.parametrize("backend", ["reference", "cpu_flash", "flex"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", OFF)
@pytest.mark.parametrize("window", [None, 4])
def test_a_sink_of_minus_infinity_is_no_sink_bit_for_bit(
    backend: str, dtype: torch.dtype, name: str, window: int | None
) -> None:
    q, k, v = random_inputs(dtype=dtype)
    options = {"window": window, "backend": backend, "return_lse": True}
    for off, plain in zip(OFF[name](q, k, v, **options), sink_attention(q, k, v, **options), strict=True):
        assert torch.equal(off, plain)


@pytest.mark.parametrize("name", OFF)
def test_a_sink_of_minus_infinity_is_stock_attention_bit_for_bit(name: str) -> None:
    """On CPU stock attention is the kernel below ``cpu_flash``: forward and gradients."""
    leaves = [t.requires_grad_() for t in random_inputs(37)]
    grad = torch.randn(2, 6, 37, 5, generator=torch.Generator().manual_seed(1))
    stock = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
    off = OFF[name](*leaves, backend="cpu_flash")
    assert torch.equal(off, stock)
    for ours, theirs in zip(
        torch.autograd.grad(off, leaves, grad), torch.autograd.grad(stock, leaves, grad), strict=True
    ):
        assert torch.equal(ours, theirs)


@BACKENDS
def test_a_growing_gamma_tends_to_plain_attention(backend: str) -> None:
    q, k, v = random_inputs(dtype=torch.float64)
    plain = sink_attention(q, k, v, backend=backend)
    last = math.inf
    for gamma in (0.5, 2.0, 8.0, 32.0, 128.0):
        scores = PseudoScores(gamma, horizon=20, headwise=False)
        distance = float((stable_attention(q, k, v, scores, backend=backend) - plain).norm() / plain.norm())
        assert distance < max(last * math.exp(-gamma / 4), 1e-15) if last < math.inf else distance > 0.05
        last = distance
    assert last < 1e-14


@BACKENDS
def test_rows_around_the_horizon(backend: str) -> None:
    """Row N keeps everything; row N + 1 has the one pseudo score −(N + 1)γ."""
    N = 5
    q = k = torch.zeros(1, 1, 7, 1, dtype=torch.float64)
    v = torch.ones(1, 1, 7, 1, dtype=torch.float64)
    scores = PseudoScores(0.25, horizon=N, headwise=False)
    out = stable_attention(q, k, v, scores, backend=backend).flatten().tolist()
    assert out[N - 2] == pytest.approx((N - 1) / (N - 1 + math.exp(-(N - 1) * 0.25)), rel=1e-14)
    assert out[N - 1] == pytest.approx(1.0, rel=1e-14)
    assert out[N] == pytest.approx((N + 1) / (N + 1 + math.exp(-(N + 1) * 0.25)), rel=1e-14)


@pytest.mark.parametrize("backend", ["reference", "cpu_flash", "flex"])
def test_rows_that_see_nothing(backend: str) -> None:
    """out = 0, lse' = σ; without a sink lse' = −∞."""
    q, k, v = random_inputs()
    keep = torch.zeros(2, 13, dtype=torch.bool)
    options = {"key_mask": keep, "return_lse": True, "backend": backend}
    sink = torch.randn(2, 6, 13)
    out, lse = sink_attention(q, k, v, sink, **options)
    assert not out.any()
    assert torch.equal(lse, sink)
    out, lse = sink_attention(q, k, v, **options)
    assert not out.any()
    assert (lse == -math.inf).all()


@pytest.mark.parametrize("backend", ["reference", "cpu_flash", "flex"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_dtypes_of_the_results(backend: str, dtype: torch.dtype) -> None:
    q, k, v = random_inputs(dtype=dtype)
    out, lse = stable_attention(q, k, v, PseudoScores(0.5, horizon=9), return_lse=True, backend=backend)
    assert out.dtype == dtype
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("backend", ["reference", "portable"])
@pytest.mark.parametrize("rate", [0.1, 0.6])
def test_dropout_drops_weights_and_scales_the_others(backend: str, rate: float) -> None:
    """With the unit matrix for v the output is the weight matrix itself; the gradient uses the same draw."""
    torch.manual_seed(0)
    T = 64
    q, k = torch.randn(2, 1, 4, T, T, dtype=torch.float64).unbind(0)
    v = torch.eye(T, dtype=torch.float64).expand(1, 4, T, T).clone().requires_grad_()
    scores = PseudoScores(0.5, horizon=100)
    weights = stable_attention(q, k, v, scores, backend=backend).detach()
    dropped = stable_attention(q, k, v, scores, dropout=rate, backend=backend)
    visible = torch.ones(T, T, dtype=torch.bool).tril().expand(1, 4, T, T)
    kept = dropped.detach() != 0
    torch.testing.assert_close(dropped.detach()[kept], weights[kept] / (1 - rate), rtol=1e-12, atol=0.0)
    assert float(kept[visible].double().mean()) == pytest.approx(1 - rate, abs=0.02)
    grad = torch.randn(1, 4, T, T, dtype=torch.float64)
    (dv,) = torch.autograd.grad(dropped, v, grad)
    torch.testing.assert_close(dv, dropped.detach().mT @ grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", ["cpu_flash", "flex"])
def test_dropout_is_refused_where_the_kernel_has_none(backend: str) -> None:
    with pytest.raises(
        BackendUnavailable, match=f"backend: '{backend}' cannot serve this call: .* no dropout"
    ):
        sink_attention(*random_inputs(), dropout=0.1, backend=backend)


def test_lse_with_dropout_is_that_without() -> None:
    q, k, v = random_inputs()
    _, without = sink_attention(q, k, v, 0.0, return_lse=True)
    _, with_dropout = sink_attention(q, k, v, 0.0, dropout=0.5, return_lse=True)
    torch.testing.assert_close(with_dropout, without)


def chosen(**options: Any) -> str:
    """The back end that ``backend=None`` runs for a call."""
    ran = []

    def record(name: str, run: Any) -> Any:
        return lambda call: (ran.append(name), run(call))[1]

    with pytest.MonkeyPatch.context() as patched:
        for name in SERVING:
            module = backends.module(name)
            patched.setattr(module, "run", record(name, module.run))
        leaves = [t.requires_grad_() for t in random_inputs()]
        sink_attention(*leaves, 0.0, **options)
    (name,) = ran
    return name


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({}, "cpu_flash"),
        ({"window": 3, "alibi_slopes": torch.rand(6), "return_lse": True}, "cpu_flash"),
        ({"dropout": 0.1}, "portable"),
        ({"bias": torch.zeros(1, 13, 13, requires_grad=True)}, "portable"),
        ({"alibi_slopes": torch.rand(6, requires_grad=True), "return_lse": True}, "reference"),
        ({"softcap": 2.0}, "reference"),
    ],
    ids=["plain", "window, alibi, lse", "dropout", "bias gradient", "slopes gradient, lse", "softcap"],
)
def test_the_fastest_back_end_that_honours_everything_is_chosen(options: dict[str, Any], name: str) -> None:
    assert chosen(**options) == name


def test_available_backends_names_all_of_them_in_order_of_preference() -> None:
    reasons = available_backends(*random_inputs(), PseudoScores(0.5, horizon=9))
    assert list(reasons) == list(backends.preference(torch.device("cpu")))
    assert sorted(reasons) == sorted(backends.NAMES)
    assert next(name for name, reason in reasons.items() if reason is None) == "cpu_flash"
    for name, reason in reasons.items():
        assert reason is None or (isinstance(reason, str) and len(reason) > 10), name


@pytest.mark.parametrize("cu_seqlens", [[0], [0, 5], [0, 2, 5], [0, 1, 2, 3], [0, 2, 2, 5]])
def test_cu_seqlens_become_documents_and_come_back(cu_seqlens: list[int]) -> None:
    given = torch.tensor(cu_seqlens)
    documents = documents_from_cu_seqlens(given)
    lengths = given.diff()
    assert documents.shape == (1, cu_seqlens[-1])
    assert documents[0].tolist() == [n for n, length in enumerate(lengths.tolist()) for _ in range(length)]
    assert cu_seqlens_from_documents(documents).tolist() == sorted(set(cu_seqlens))


def test_documents_are_runs_not_ids() -> None:
    assert cu_seqlens_from_documents(torch.tensor([[7, 7, 3, 7]])).tolist() == [0, 2, 3, 4]
