"""Bad input: an error that names argument, value and what is allowed, never a crash; NaN in, NaN out."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from stablemask import (
    BackendUnavailable,
    PseudoScores,
    available_backends,
    cu_seqlens_from_documents,
    documents_from_cu_seqlens,
    sink_attention,
    stable_attention,
)

B, H, G, TQ, TK, D = 2, 6, 3, 11, 13, 5
SCORES = PseudoScores(0.5, horizon=17)


def good() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"q": (B, H, TQ, D), "k": (B, G, TK, D), "v": (B, G, TK, D)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def ints(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def meta(t: Tensor) -> Tensor:
    return t.to("meta")


# Arguments that replace the good ones, the error, and how its message begins.
BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"q": None}, TypeError, "q: got NoneType"),
    ({"k": [[1.0]]}, TypeError, "k: got list"),
    ({"v": 3.0}, TypeError, "v: got float"),
    ({"q": torch.randn(H, TQ, D)}, ValueError, f"q: got torch.float32 of shape ({H}, {TQ}, {D})"),
    ({"k": torch.randn(1, B, G, TK, D)}, ValueError, "k: got torch.float32 of shape (1, 2, 3, 13, 5)"),
    ({"v": torch.randn(D)}, ValueError, "v: got torch.float32 of shape (5,)"),
    ({"q": torch.zeros(B, H, TQ, D).long()}, ValueError, "q: got torch.int64"),
    ({"q": torch.zeros(B, H, TQ, D, dtype=torch.complex64)}, ValueError, "q: got torch.complex64"),
    ({"q": torch.zeros(B, H, TQ, D, dtype=torch.float8_e4m3fn)}, ValueError, "q: got torch.float8_e4m3fn"),
    ({"k": torch.randn(B, G, TK, D).to_sparse()}, ValueError, "k: got torch.sparse_coo"),
    (
        {"q": torch.nested.nested_tensor([torch.randn(H, TQ)], layout=torch.jagged)},
        ValueError,
        "q: got a nested tensor",
    ),
    ({"k": torch.randn(B, G, TK, D).double()}, ValueError, "k: got torch.float64"),
    ({"v": torch.randn(B, G, TK, D).bfloat16()}, ValueError, "v: got torch.bfloat16"),
    ({"k": torch.randn(3, G, TK, D)}, ValueError, "k: got torch.float32 of shape (3, 3, 13, 5)"),
    ({"k": torch.randn(1, G, TK, D), "v": torch.randn(1, G, TK, D)}, ValueError, "k: got"),
    ({"v": torch.randn(B, H, TK, D)}, ValueError, "v: got torch.float32 of shape (2, 6, 13, 5)"),
    ({"v": torch.randn(B, G, TK + 1, D)}, ValueError, "v: got torch.float32 of shape (2, 3, 14, 5)"),
    ({"k": torch.randn(B, G, TK, D + 1)}, ValueError, "k: got torch.float32 of shape (2, 3, 13, 6)"),
    ({"k": torch.randn(B, 4, TK, D), "v": torch.randn(B, 4, TK, D)}, ValueError, "k: got 4 heads"),
    ({"k": torch.randn(B, 12, TK, D), "v": torch.randn(B, 12, TK, D)}, ValueError, "k: got 12 heads"),
    ({"k": torch.randn(B, 0, TK, D), "v": torch.randn(B, 0, TK, D)}, ValueError, "k: got 0 heads"),
    ({"q": torch.randn(B, H, TQ, 0), "k": torch.randn(B, G, TK, 0)}, ValueError, "k: got"),
    ({"k": meta(torch.randn(B, G, TK, D))}, ValueError, "k: got device meta"),
    ({"v": meta(torch.randn(B, G, TK, D))}, ValueError, "v: got device meta"),
    ({"q": torch.randn(B, H, TK + 1, D)}, ValueError, "q: got 14 queries for 13 keys"),
    (
        {"k": torch.randn(B, G, 0, D), "v": torch.randn(B, G, 0, D)},
        ValueError,
        "q: got 11 queries for 0 keys",
    ),
    ({"sink": "0"}, TypeError, "sink: got str"),
    ({"sink": True}, TypeError, "sink: got bool"),
    ({"sink": [0.0] * H}, TypeError, "sink: got list"),
    ({"sink": SCORES}, TypeError, "sink: got a PseudoScores"),
    ({"sink": ints(H)}, ValueError, "sink: got torch.int64"),
    ({"sink": torch.zeros(H + 1)}, ValueError, "sink: got torch.float32 of shape (7,)"),
    ({"sink": torch.zeros(TQ)}, ValueError, "sink: got torch.float32 of shape (11,)"),
    ({"sink": torch.zeros(TQ, H)}, ValueError, "sink: got torch.float32 of shape (11, 6)"),
    ({"sink": torch.zeros(B, TQ)}, ValueError, "sink: got torch.float32 of shape (2, 11)"),
    ({"sink": torch.zeros(3, H, TQ)}, ValueError, "sink: got torch.float32 of shape (3, 6, 11)"),
    ({"sink": torch.zeros(B, H, TQ, 1)}, ValueError, "sink: got torch.float32 of shape (2, 6, 11, 1)"),
    ({"sink": meta(torch.zeros(H))}, ValueError, "sink: got device meta"),
    ({"causal": 1}, TypeError, "causal: got 1"),
    ({"causal": None}, TypeError, "causal: got None"),
    ({"return_lse": 1}, TypeError, "return_lse: got 1"),
    ({"window": 0}, ValueError, "window: got 0"),
    ({"window": -4}, ValueError, "window: got -4"),
    ({"window": 4.0}, ValueError, "window: got 4.0"),
    ({"window": 1 << 70}, ValueError, f"window: got {1 << 70}"),
    ({"window": True}, ValueError, "window: got True"),
    ({"window": (4, 0)}, ValueError, "window: got (4, 0)"),
    ({"window": 4, "causal": False}, ValueError, "window: got 4"),
    ({"scale": math.nan}, ValueError, "scale: got nan"),
    ({"scale": math.inf}, ValueError, "scale: got inf"),
    ({"scale": "1"}, ValueError, "scale: got '1'"),
    ({"scale": True}, ValueError, "scale: got True"),
    ({"softcap": 0.0}, ValueError, "softcap: got 0.0"),
    ({"softcap": -1.0}, ValueError, "softcap: got -1.0"),
    ({"softcap": math.nan}, ValueError, "softcap: got nan"),
    ({"dropout": 1.0}, ValueError, "dropout: got 1.0"),
    ({"dropout": -0.1}, ValueError, "dropout: got -0.1"),
    ({"dropout": math.nan}, ValueError, "dropout: got nan"),
    ({"dropout": None}, ValueError, "dropout: got None"),
    ({"dropout": True}, ValueError, "dropout: got True"),
    ({"positions": ints(B, TQ)}, ValueError, "positions: got positions without key_positions"),
    ({"key_positions": ints(B, TK)}, ValueError, "positions: got None"),
    (
        {"positions": ints(B, TQ), "key_positions": ints(B, TQ)},
        ValueError,
        "key_positions: got torch.int64 of",
    ),
    (
        {"positions": ints(TQ), "key_positions": ints(B, TK)},
        ValueError,
        "positions: got torch.int64 of shape (11,)",
    ),
    (
        {"positions": ints(1, TQ), "key_positions": ints(B, TK)},
        ValueError,
        "positions: got torch.int64 of shape (1,",
    ),
    (
        {"positions": torch.zeros(B, TQ), "key_positions": ints(B, TK)},
        ValueError,
        "positions: got torch.float32",
    ),
    (
        {"positions": ints(B, TQ), "key_positions": ints(B, TK).bool()},
        ValueError,
        "key_positions: got torch.bool",
    ),
    ({"positions": ints(B, TQ), "key_positions": [[0] * TK] * B}, TypeError, "key_positions: got list"),
    (
        {"positions": ints(B, TQ), "key_positions": meta(ints(B, TK))},
        ValueError,
        "key_positions: got device meta",
    ),
    ({"key_mask": torch.ones(B, TK)}, ValueError, "key_mask: got torch.float32"),
    ({"key_mask": ints(B, TK)}, ValueError, "key_mask: got torch.int64"),
    (
        {"key_mask": torch.ones(B, TQ, dtype=torch.bool)},
        ValueError,
        "key_mask: got torch.bool of shape (2, 11)",
    ),
    (
        {"key_mask": torch.ones(1, TK, dtype=torch.bool)},
        ValueError,
        "key_mask: got torch.bool of shape (1, 13)",
    ),
    ({"key_mask": torch.ones(TK, dtype=torch.bool)}, ValueError, "key_mask: got torch.bool of shape (13,)"),
    ({"key_mask": True}, TypeError, "key_mask: got bool"),
    ({"key_mask": meta(torch.ones(B, TK, dtype=torch.bool))}, ValueError, "key_mask: got device meta"),
    ({"document_ids": ints(TK)}, ValueError, "document_ids: got torch.int64 of shape (13,)"),
    ({"document_ids": torch.zeros(B, TK)}, ValueError, "document_ids: got torch.float32"),
    ({"document_ids": ints(B, TQ)}, ValueError, "document_ids: got torch.int64 of shape (2, 11)"),
    (
        {"document_ids": ints(B, TK), "positions": ints(B, TQ), "key_positions": ints(B, TK)},
        ValueError,
        "document_ids: got document_ids together with key_positions",
    ),
    (
        {"document_ids": ints(B, TK), "q": torch.randn(B, H, TK + 1, D), "causal": False},
        ValueError,
        "document_ids: got 14 queries for 13 keys",
    ),
    ({"alibi_slopes": torch.zeros(G)}, ValueError, "alibi_slopes: got torch.float32 of shape (3,)"),
    ({"alibi_slopes": torch.zeros(H, 1)}, ValueError, "alibi_slopes: got torch.float32 of shape (6, 1)"),
    ({"alibi_slopes": ints(H)}, ValueError, "alibi_slopes: got torch.int64"),
    ({"alibi_slopes": [0.5] * H}, TypeError, "alibi_slopes: got list"),
    ({"alibi_slopes": meta(torch.zeros(H))}, ValueError, "alibi_slopes: got device meta"),
    ({"bias": torch.zeros(TQ, TK)}, ValueError, "bias: got torch.float32 of shape (11, 13)"),
    ({"bias": torch.zeros(H, TK, TQ)}, ValueError, "bias: got torch.float32 of shape (6, 13, 11)"),
    ({"bias": torch.zeros(G, TQ, TK)}, ValueError, "bias: got torch.float32 of shape (3, 11, 13)"),
    ({"bias": torch.zeros(3, H, TQ, TK)}, ValueError, "bias: got torch.float32 of shape (3, 6, 11, 13)"),
    (
        {"bias": torch.zeros(1, B, H, TQ, TK)},
        ValueError,
        "bias: got torch.float32 of shape (1, 2, 6, 11, 13)",
    ),
    ({"bias": torch.zeros(H, TQ, 1)}, ValueError, "bias: got torch.float32 of shape (6, 11, 1)"),
    ({"bias": torch.zeros(H, TQ, TK, dtype=torch.bool)}, ValueError, "bias: got torch.bool"),
    ({"bias": 0.0}, TypeError, "bias: got float"),
    ({"bias": meta(torch.zeros(H, TQ, TK))}, ValueError, "bias: got device meta"),
    ({"backend": "flash"}, ValueError, "backend: got 'flash'"),
    ({"backend": 3}, ValueError, "backend: got 3"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), BAD, ids=[message for *_, message in BAD])
def test_bad_arguments_are_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        sink_attention(**{**good(), **arguments})
    assert str(caught.value).startswith(message)
    rest = str(caught.value)[len(message) :]
    assert "allowed" in rest or "pass it to" in rest, "an error says what is allowed"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [case for case in BAD if "backend" not in case[0]],
    ids=[message for arguments, _, message in BAD if "backend" not in arguments],
)
def test_available_backends_refuses_the_same(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    if isinstance(arguments.get("sink"), PseudoScores):  # stands for a call of stable_attention there
        assert available_backends(**{**good(), **arguments})["reference"] is None
        return
    with pytest.raises(error) as caught:
        available_backends(**{**good(), **arguments})
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("scores", [0.5, None, torch.zeros(H)], ids=["number", "None", "tensor"])
def test_stable_attention_takes_nothing_but_scores(scores: object) -> None:
    with pytest.raises(TypeError, match=r"scores: got .*; allowed is a PseudoScores"):
        stable_attention(*good().values(), scores)  # type: ignore[arg-type]


def test_listed_gammas_must_fit_the_heads() -> None:
    with pytest.raises(ValueError, match="gamma: got 3 values for 6 heads"):
        stable_attention(*good().values(), PseudoScores([0.5] * 3, horizon=8))


def test_options_are_keyword_only() -> None:
    with pytest.raises(TypeError):
        sink_attention(*good().values(), None, True)  # type: ignore[misc]
    with pytest.raises(TypeError, match="unexpected keyword"):
        sink_attention(**good(), is_causal=True)  # type: ignore[call-overload]


def test_backend_unavailable_is_a_value_error_with_the_reason() -> None:
    assert issubclass(BackendUnavailable, ValueError)
    with pytest.raises(BackendUnavailable, match=r"backend: 'cpu_flash' cannot serve this call: .*softcap"):
        sink_attention(**good(), softcap=3.0, backend="cpu_flash")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: documents_from_cu_seqlens(torch.tensor([1, 4])), "cu_seqlens: got"),
        (lambda: documents_from_cu_seqlens(torch.tensor([0, 4, 2])), "cu_seqlens: got"),
        (lambda: documents_from_cu_seqlens(torch.tensor([[0, 4]])), "cu_seqlens: got"),
        (lambda: documents_from_cu_seqlens(torch.tensor([])), "cu_seqlens: got"),
        (lambda: documents_from_cu_seqlens(torch.tensor([0.0, 2.0])), "cu_seqlens: got"),
        (lambda: cu_seqlens_from_documents(torch.zeros(2, 5).long()), r"document_ids: got shape \(2, 5\)"),
        (lambda: cu_seqlens_from_documents(torch.zeros(5).long()), r"document_ids: got shape \(5,\)"),
    ],
)
def test_bad_packing_is_refused(call: Callable[[], Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


SERVING = pytest.mark.parametrize("backend", ["reference", "cpu_flash", "portable", "flex"])
EXTRA = {
    "nothing": {},
    "window": {"window": 2},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.1])},
    "mask": {"key_mask": torch.ones(2, 9, dtype=torch.bool)},
    "documents": {"document_ids": torch.tensor([[0] * 4 + [1] * 5] * 2)},
    "bias": {"bias": torch.zeros(2, 9, 9)},
}


def one_bad_number(name: str, row: int, value: float, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {n: torch.randn(2, 2, 9, 5, generator=generator).to(dtype) for n in ("q", "k", "v")}
    tensors[name][0, 1, row, 3] = value
    return tensors


@SERVING
@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("row", [0, 4, 8])
@pytest.mark.parametrize("extra", EXTRA)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_nan_at_a_visible_place_reaches_every_row_that_sees_it(
    backend: str, name: str, row: int, extra: str, dtype: torch.dtype
) -> None:
    """Also in row 0, whose single key is its own. Other sequences and heads stay clean."""
    out = sink_attention(
        **one_bad_number(name, row, math.nan, dtype), sink=0.0, **EXTRA[extra], backend=backend
    )
    end = {"window": row + 2, "documents": 4 if row < 4 else 9}.get(extra, 9)
    rows = slice(row, row + 1 if name == "q" else min(end, 9))
    assert out[0, 1, rows].isnan().any(-1).all()
    others = torch.ones(2, 2, dtype=torch.bool)
    others[0, 1] = False
    assert out[others].isfinite().all()
    if name == "q":
        assert out[0, 1, :row].isfinite().all()
        assert out[0, 1, row + 1 :].isfinite().all()


@pytest.mark.parametrize("backend", ["reference", "cpu_flash", "flex"])
@pytest.mark.parametrize("name", ["q", "k"])
@pytest.mark.parametrize("length", [1, 9])
def test_nan_scores_make_lse_nan(backend: str, name: str, length: int) -> None:
    tensors = {
        n: t[:, :, :length].clone() for n, t in one_bad_number(name, 0, math.nan, torch.float32).items()
    }
    out, lse = sink_attention(**tensors, return_lse=True, backend=backend)
    assert lse[0, 1, 0].isnan()
    assert out[0, 1, 0].isnan().all()
    assert lse[1].isfinite().all()


@pytest.mark.parametrize("backend", ["reference", "cpu_flash"])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_nan_reaches_gradients_too(backend: str, name: str) -> None:
    leaves = {n: t.requires_grad_() for n, t in one_bad_number(name, 4, math.nan, torch.float32).items()}
    sink_attention(**leaves, sink=0.0, backend=backend).sum().backward()
    assert leaves["q"].grad is not None
    assert leaves["q"].grad[0, 1, 4].isnan().any()


@SERVING
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["k", "v"])
def test_what_lies_in_dropped_keys_reaches_no_row(backend: str, name: str, value: float) -> None:
    tensors = one_bad_number(name, 4, value, torch.float32)
    keep = torch.ones(2, 9, dtype=torch.bool)
    keep[0, 4] = False
    clean = {n: t.clone() for n, t in tensors.items()}
    clean[name][0, 1, 4, 3] = 0.0
    call = {"sink": 0.0, "key_mask": keep, "backend": backend}
    assert torch.equal(sink_attention(**tensors, **call), sink_attention(**clean, **call))


@pytest.mark.parametrize("backend", ["reference", "cpu_flash", "portable"])
def test_nan_in_dropped_keys_reaches_no_gradient(backend: str) -> None:
    tensors = one_bad_number("k", 4, math.nan, torch.float32)
    tensors["v"][0, :, 4] = math.nan
    keep = torch.ones(2, 9, dtype=torch.bool)
    keep[0, 4] = False
    leaves = {n: t.requires_grad_() for n, t in tensors.items()}
    sink_attention(**leaves, sink=0.0, key_mask=keep, backend=backend).sum().backward()
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        assert leaf.grad.isfinite().all(), name
    assert not leaves["k"].grad[0, :, 4].any()  # type: ignore[index]


@pytest.mark.parametrize("backend", ["reference", "cpu_flash", "portable"])
def test_nan_in_the_sink_is_seen(backend: str) -> None:
    tensors = one_bad_number("q", 0, 1.0, torch.float32)
    out = sink_attention(**tensors, sink=torch.tensor([0.0, math.nan]), backend=backend)
    assert out[:, 1].isnan().all()
    assert out[:, 0].isfinite().all()


SIZES = [
    {"B": 0},
    {"H": 0, "G": 0},
    {"TQ": 0},
    {"TQ": 0, "TK": 0},
    {"DV": 0},
    {"TQ": 1, "TK": 1},
    {"TQ": 1},
    {"D": 1, "DV": 1},
]


@SERVING
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_empty_and_tiny_sizes_are_served_or_refused(
    backend: str, sizes: dict[str, int], causal: bool
) -> None:
    n = {"B": 2, "H": 2, "G": 2, "TQ": 3, "TK": 3, "D": 5, "DV": 5} | sizes
    q = torch.randn(n["B"], n["H"], n["TQ"], n["D"], requires_grad=backend != "flex")
    k = torch.randn(n["B"], n["G"], n["TK"], n["D"])
    v = torch.randn(n["B"], n["G"], n["TK"], n["DV"])
    if available_backends(q, k, v, 0.0, causal=causal)[backend] is not None:
        with pytest.raises(BackendUnavailable):
            sink_attention(q, k, v, 0.0, causal=causal, backend=backend)
    else:
        out = sink_attention(q, k, v, 0.0, causal=causal, backend=backend)
        assert out.shape == (n["B"], n["H"], n["TQ"], n["DV"])
        if q.requires_grad:
            out.sum().backward()
            assert q.grad is not None
            assert q.grad.shape == q.shape
    assert sink_attention(q, k, v, 0.0, causal=causal).shape == (n["B"], n["H"], n["TQ"], n["DV"])


@pytest.mark.parametrize("backend", ["reference", "cpu_flash", "portable"])
@pytest.mark.parametrize("make", ["last stride 2", "last stride 0", "transposed", "all strides 0"])
def test_any_strides_are_served(backend: str, make: str) -> None:
    strided = {
        "last stride 2": lambda: torch.randn(2, 2, 9, 10)[..., ::2],
        "last stride 0": lambda: torch.randn(2, 2, 9, 1).expand(-1, -1, -1, 5),
        "transposed": lambda: torch.randn(5, 9, 2, 2).permute(3, 2, 1, 0),
        "all strides 0": lambda: torch.randn(1, 1, 1, 1).expand(2, 2, 9, 5),
    }[make]
    q, k, v = (strided().requires_grad_() for _ in range(3))
    copies = [t.detach().contiguous().requires_grad_() for t in (q, k, v)]
    out = stable_attention(q, k, v, SCORES, backend=backend)
    expected = stable_attention(*copies, SCORES, backend=backend)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    grad = torch.randn(5, 9, 2, 2).permute(3, 2, 1, 0)
    for ours, theirs in zip(
        torch.autograd.grad(out, (q, k, v), grad), torch.autograd.grad(expected, copies, grad), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
