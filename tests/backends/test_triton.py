"""The Triton kernels in Triton's interpreter, forward and backward, against the paper's matrix in float64.

Run with TRITON_INTERPRET=1, which `make test` sets. Scratch memory is full of NaN, so that a number nobody
wrote is seen.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from stablemask import PseudoScores, sink_attention
from stablemask.testing import Example, make_gradients, make_qkv
from tests.backends.triton_process import needs_interpreter
from tests.checks import Truth

pytestmark = needs_interpreter

DTYPES = (torch.float32, torch.float16)
SCORES = PseudoScores(0.5, horizon=64)
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def poisoned(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def wrapper(*args: Any, **kwargs: Any) -> Tensor:
            fresh = allocate(*args, **kwargs)
            return fresh.fill_(math.nan) if fresh.is_floating_point() else fresh

        return wrapper

    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
    monkeypatch.setattr(Tensor, "new_empty", poisoned(Tensor.new_empty))


def check(
    sink: Any, dtype: torch.dtype, seed: int = 0, *, options: dict[str, Any] | None = None, **shape: Any
) -> None:
    """out, lse' and the gradients of q, k, v and the sink, through both outputs."""
    generator = torch.Generator().manual_seed(seed)
    sizes = {"batch": 1, "heads": 4, "kv_heads": 2, "num_queries": 37, "num_keys": 37, "dim": 16} | shape
    q, k, v = make_qkv(generator, dtype=dtype, **sizes)
    example = make_gradients(Example(q, k, v, sink, options=options or {}), generator)
    wrt = [name for name in example.tensors() if name in ("q", "k", "v", "sink")]
    Truth(example, wrt).check_backend("triton")


def left_padding(num_keys: int) -> Tensor:
    return torch.arange(num_keys) >= torch.tensor([[0], [num_keys // 2], [num_keys]])


def documents(num_keys: int) -> Tensor:
    return torch.arange(num_keys) // torch.tensor([[3], [num_keys // 2], [num_keys]])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_queries", "num_keys", "dim", "value_dim"),
    [
        (1, 1, 16, 16),
        (1, 130, 20, 12),
        (17, 17, 1, 3),
        (37, 77, 16, 16),
        (77, 77, 33, 16),
        (130, 130, 16, 16),
    ],
)
def test_stable_mask_of_any_size(
    num_queries: int, num_keys: int, dim: int, value_dim: int, dtype: torch.dtype
) -> None:
    heads = 2 if num_queries > 50 else 4
    check(
        SCORES, dtype, heads=heads, num_queries=num_queries, num_keys=num_keys, dim=dim, value_dim=value_dim
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"window": 1},
        {"window": 16},
        {"window": 23, "alibi_slopes": SLOPES},
        {"alibi_slopes": SLOPES, "scale": -0.3},
        {"scale": 0.0},
    ],
    ids="-".join,
)
def test_window_alibi_and_scale(options: dict[str, Any], dtype: torch.dtype) -> None:
    check(SCORES, dtype, num_queries=37, num_keys=61, options=options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_queries", "num_keys"), [(17, 1), (40, 17), (17, 40), (32, 32)])
def test_attention_without_a_causal_mask(num_queries: int, num_keys: int, dtype: torch.dtype) -> None:
    sink = torch.tensor([0.0, 1.0, -2.0, 3.0])
    options = {"causal": False, "alibi_slopes": SLOPES}
    check(sink, dtype, num_queries=num_queries, num_keys=num_keys, options=options)


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 6])
def test_grouped_heads(kv_heads: int) -> None:
    check(SCORES, torch.float32, batch=2, heads=6, kv_heads=kv_heads, num_queries=19, num_keys=19)


@pytest.mark.parametrize("layout", ["bthd", "qkv", "strided", "expanded"])
def test_strided_inputs(layout: str) -> None:
    check(SCORES, torch.float32, num_queries=19, num_keys=23, layout=layout)


@pytest.mark.parametrize(
    "shape", [(), (2,), (1,), (2, 19), (1, 19), (2, 1), (3, 2, 19), (3, 1, 19), (1, 2, 1)], ids=str
)
def test_sinks_of_every_shape(shape: tuple[int, ...]) -> None:
    sink = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    check(sink, torch.float32, batch=3, heads=2, num_queries=19, num_keys=19)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sink_with_any_strides(dtype: torch.dtype) -> None:
    sink = torch.randn(37, 4, 2, generator=torch.Generator().manual_seed(5)).permute(2, 1, 0)
    check(sink, dtype, batch=2)


@pytest.mark.parametrize("size", [-30.0, 20.0, 60.0])
def test_strong_sinks(size: float) -> None:
    check(torch.full((4,), size), torch.float32)


def test_sinks_that_are_minus_infinity_in_places() -> None:
    sink = torch.randn(4, 37, generator=torch.Generator().manual_seed(5)).masked_fill(
        torch.arange(37) % 3 == 0, -math.inf
    )
    check(sink, torch.float32)
    check(sink, torch.float32, num_keys=0, options={"causal": False})


def test_strong_sinks_in_half_precision_keep_small_weights() -> None:
    check(torch.full((2,), 8.0), torch.float16, heads=2, num_queries=64, num_keys=64)


@pytest.mark.parametrize(
    "scores",
    [
        PseudoScores([0.0, 1e-6, 0.3, 100.0], horizon=29),
        PseudoScores([0.0, 0.01, 1.0, 7.0], horizon=37, base=0.01),
        PseudoScores([0.0, 1e-3, 0.999, 1.001], horizon=1000, base=-3.0),
        PseudoScores([1e-6, 0.1, 1.0, 100.0], horizon=None),
        PseudoScores(0.5, horizon=37, base=-math.inf),
        PseudoScores(0.25, horizon=1, headwise=False),
    ],
    ids=["below", "at", "above", "infinite", "off", "one"],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gammas_and_horizons(scores: PseudoScores, dtype: torch.dtype) -> None:
    check(scores, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_queries", [1, 29, 41])
@pytest.mark.parametrize("padding", ["left", "right", "holes"])
def test_padding(padding: str, num_queries: int, dtype: torch.dtype) -> None:
    mask = left_padding(41)
    if padding == "right":
        mask = mask.flip(-1)
    if padding == "holes":
        mask = torch.rand(3, 41, generator=torch.Generator().manual_seed(2)) > 0.4
    check(SCORES, dtype, batch=3, heads=2, num_queries=num_queries, num_keys=41, options={"key_mask": mask})


@pytest.mark.parametrize("num_queries", [17, 41, 53])
def test_padding_without_a_causal_mask(num_queries: int) -> None:
    options = {"key_mask": left_padding(41), "causal": False}
    check(
        torch.zeros(2), torch.float32, batch=3, heads=2, num_queries=num_queries, num_keys=41, options=options
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"window": 9, "alibi_slopes": SLOPES[:2]}, {"key_mask": left_padding(61)}, {"causal": False}],
    ids=["plain", "window-alibi", "padded", "not-causal"],
)
@pytest.mark.parametrize("num_queries", [20, 61])
def test_packed_documents(num_queries: int, options: dict[str, Any], dtype: torch.dtype) -> None:
    sink = SCORES if "causal" not in options else torch.zeros(2)
    options = options | {"document_ids": documents(61)}
    check(sink, dtype, batch=3, heads=2, num_queries=num_queries, num_keys=61, options=options)


def test_tiles_nobody_sees_are_not_read() -> None:
    """NaN in a tile that a masked product would spread: none arrives, so the tile was skipped."""
    q, k, v = make_qkv(torch.Generator().manual_seed(0), batch=1, num_queries=128, num_keys=128, dim=16)
    v[:, :, :64] = math.nan
    ids = (torch.arange(128) // 64).unsqueeze(0)
    packed = sink_attention(q, k, v, document_ids=ids, backend="triton")
    windowed = sink_attention(q, k, v, window=16, backend="triton")
    assert packed[:, :, 64:].isfinite().all()
    assert windowed[:, :, 64 + 32 :].isfinite().all()


def test_nan_reaches_exactly_the_rows_that_see_it() -> None:
    clean = make_qkv(
        torch.Generator().manual_seed(0), batch=1, heads=2, kv_heads=1, num_queries=37, num_keys=37, dim=16
    )
    rows = torch.arange(37)
    for index, poisoned_rows in ((0, rows == 5), (1, rows >= 5)):
        qkv = [t.clone() for t in clean]
        qkv[index][0, 0, 5, 3] = math.nan
        out, lse = sink_attention(*qkv, sink=1.0, return_lse=True, backend="triton")
        assert torch.equal(out.isnan().all(-1)[0, 0], poisoned_rows)
        assert torch.equal(out.isnan().any(-1)[0, 0], poisoned_rows)
        assert torch.equal(lse.isnan()[0, 0], poisoned_rows)
    qkv = [t.clone() for t in clean]
    qkv[2][0, 0, 5, 3] = math.nan
    assert sink_attention(*qkv, backend="triton")[0, 0, 5:, 3].isnan().all()


def test_nan_in_a_dropped_key_reaches_no_row() -> None:
    q, k, v = make_qkv(torch.Generator().manual_seed(0), batch=1, num_queries=37, num_keys=37, dim=16)
    mask = torch.rand(1, 37, generator=torch.Generator().manual_seed(2)) > 0.4
    clean = [t.clone().requires_grad_() for t in (q, k, v)]
    poisoned = [q.clone(), *(t.masked_fill(~mask[:, None, :, None], math.nan) for t in (k, v))]
    poisoned = [t.requires_grad_() for t in poisoned]
    results = []
    for qkv in (clean, poisoned):
        out, lse = sink_attention(*qkv, sink=0.0, key_mask=mask, return_lse=True, backend="triton")
        results.append((out, lse, *torch.autograd.grad(out.square().sum() + lse.sum(), qkv)))
    for expected, got in zip(*results, strict=True):
        assert torch.equal(expected, got)


def test_rows_without_visible_keys_give_zero_and_sigma() -> None:
    q, k, v = make_qkv(
        torch.Generator().manual_seed(0), batch=1, heads=4, kv_heads=2, num_queries=7, num_keys=7, dim=16
    )
    sink = torch.tensor([0.1, 20.0, -1e4, -math.inf])
    mask = torch.zeros(1, 7, dtype=torch.bool)
    out, lse = sink_attention(q, k, v, sink, key_mask=mask, return_lse=True, backend="triton")
    assert (out == 0).all()
    assert torch.equal(lse, sink[None, :, None].expand(1, 4, 7))


@pytest.mark.parametrize(
    "sizes",
    [{"batch": 0}, {"num_queries": 0}, {"num_queries": 0, "num_keys": 0}, {"num_keys": 0}],
    ids="-".join,
)
def test_empty_calls(sizes: dict[str, int]) -> None:
    check(torch.zeros(4), torch.float32, options={"causal": False}, **sizes)


def test_minus_infinity_is_plain_attention_bit_for_bit() -> None:
    q, k, v = make_qkv(torch.Generator().manual_seed(0), num_queries=37, num_keys=37, dim=16)
    plain = sink_attention(q, k, v, None, return_lse=True, backend="triton")
    switched_off = sink_attention(q, k, v, -math.inf, return_lse=True, backend="triton")
    assert all(torch.equal(a, b) for a, b in zip(plain, switched_off, strict=True))
