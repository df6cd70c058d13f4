"""Laws between calls, in float64: what is computed at once, in pieces, packed or padded is the same."""

from typing import Any

import pytest
import torch
from torch import Tensor

from stablemask import PseudoScores, sink_attention, stable_attention
from stablemask.testing import LAYOUTS, Layout, make_qkv
from tests.contract import H

BACKENDS = pytest.mark.parametrize("backend", ["reference", "cpu_flash", "portable"])
SCORES = PseudoScores(0.5, horizon=23)
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.7, 0.35], dtype=torch.float64)
OPTIONS = pytest.mark.parametrize(
    "options",
    [{}, {"window": 4}, {"alibi_slopes": SLOPES}, {"alibi_slopes": SLOPES, "window": 4}],
    ids=["plain", "window", "alibi", "alibi window"],
)
LENGTH = 29  # beyond the horizon


def inputs(length: int = LENGTH, layout: Layout = "contiguous") -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return make_qkv(
        generator, num_queries=length, num_keys=length, dtype=torch.float64, layout=layout, value_dim=5
    )


def assert_same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-13)


def attend(*args: Any, backend: str, **options: Any) -> Tensor:
    """out, joined to lse' where the back end has it, so that a law speaks of both."""
    if backend == "portable":
        return stable_attention(*args, **options, backend=backend)
    out, lse = stable_attention(*args, **options, backend=backend, return_lse=True)
    return torch.cat([out, lse.unsqueeze(-1)], -1)


def with_gradients(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, **call: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out and the gradients of q, k and v."""
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out = stable_attention(*leaves, SCORES, **call)
    return (out.detach(), *torch.autograd.grad(out, leaves, grad))


@BACKENDS
@OPTIONS
def test_decoding_with_a_cache_is_prefill(backend: str, options: dict[str, Any]) -> None:
    q, k, v = inputs()
    full = attend(q, k, v, SCORES, **options, backend=backend)
    for t in range(LENGTH):
        row = q[:, :, t : t + 1], k[:, :, : t + 1], v[:, :, : t + 1]
        assert_same(attend(*row, SCORES, **options, backend=backend), full[:, :, t : t + 1])


@BACKENDS
@OPTIONS
@pytest.mark.parametrize("chunk", [1, 7, 16])
def test_chunked_prefill_is_full_prefill(backend: str, options: dict[str, Any], chunk: int) -> None:
    q, k, v = inputs()
    full = attend(q, k, v, SCORES, **options, backend=backend)
    pieces = []
    for i in range(0, LENGTH, chunk):
        rows, keys = slice(i, i + chunk), slice(i + chunk)
        pieces.append(attend(q[:, :, rows], k[:, :, keys], v[:, :, keys], SCORES, **options, backend=backend))
    assert_same(torch.cat(pieces, 2), full)


def ring(k: Tensor, v: Tensor, t: int, slots: int) -> tuple[Tensor, Tensor, Tensor]:
    """The last ``slots`` keys up to position t as a ring buffer holds them; NaN where nothing was written."""
    batch = k.shape[0]
    positions = torch.full((batch, slots), -1)
    buffers = [torch.full((batch, x.shape[1], slots, x.shape[3]), torch.nan, dtype=x.dtype) for x in (k, v)]
    for j in range(max(0, t - slots + 1), t + 1):
        positions[:, j % slots] = j
        for buffer, x in zip(buffers, (k, v), strict=True):
            buffer[:, :, j % slots] = x[:, :, j]
    return *buffers, positions


@BACKENDS
@pytest.mark.parametrize("alibi", [False, True])
def test_a_ring_buffer_in_any_order_is_a_window(backend: str, alibi: bool) -> None:
    window, slots = 4, 7
    q, k, v = inputs()
    options: dict[str, Any] = {"window": window} | ({"alibi_slopes": SLOPES} if alibi else {})
    full = attend(q, k, v, SCORES, **options, backend=backend)
    generator = torch.Generator().manual_seed(1)
    for t in range(LENGTH):
        keys, values, positions = ring(k, v, t, slots)
        order = torch.randperm(slots, generator=generator)
        row = attend(
            q[:, :, t : t + 1],
            keys[:, :, order],
            values[:, :, order],
            SCORES,
            positions=torch.full((2, 1), t),
            key_positions=positions[:, order],
            **options,
            backend=backend,
        )
        assert_same(row, full[:, :, t : t + 1])


@BACKENDS
def test_a_ring_buffer_of_the_window_needs_no_window(backend: str) -> None:
    q, k, v = inputs()
    full = attend(q, k, v, SCORES, window=4, backend=backend)
    for t in range(LENGTH):
        keys, values, positions = ring(k, v, t, 4)
        call = {"positions": torch.full((2, 1), t), "key_positions": positions, "backend": backend}
        assert_same(attend(q[:, :, t : t + 1], keys, values, SCORES, **call), full[:, :, t : t + 1])


@BACKENDS
def test_a_shuffled_cache_gives_shuffled_gradients(backend: str) -> None:
    q, k, v = inputs()
    grad = torch.randn(q.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(3))
    rows = torch.arange(LENGTH).expand(2, -1)
    out, dq, dk, dv = with_gradients(q, k, v, grad, backend=backend)
    cache = {"positions": rows, "key_positions": order.expand(2, -1)}
    shuffled = with_gradients(q, k[:, :, order], v[:, :, order], grad, **cache, backend=backend)
    for actual, expected in zip(shuffled, (out, dq, dk[:, :, order], dv[:, :, order]), strict=True):
        assert_same(actual, expected)


DOCUMENTS = (5, 1, 13, 10)


@BACKENDS
@OPTIONS
def test_packed_documents_are_separate_ones(backend: str, options: dict[str, Any]) -> None:
    q, k, v = inputs()
    grad = torch.randn(q.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    ids = torch.repeat_interleave(torch.tensor([3, 8, 3, 0]), torch.tensor(DOCUMENTS)).expand(2, -1)
    packed = with_gradients(q, k, v, grad, document_ids=ids, **options, backend=backend)
    separate = [
        with_gradients(*parts, **options, backend=backend)
        for parts in zip(*(t.split(DOCUMENTS, 2) for t in (q, k, v, grad)), strict=True)
    ]
    for actual, pieces in zip(packed, zip(*separate, strict=True), strict=True):
        assert_same(actual, torch.cat(pieces, 2))


@BACKENDS
def test_packing_goes_with_padding_inside_and_a_cache_before(backend: str) -> None:
    """12 and 17 keys, the first left-padded by 3, the second right-padded by 4; the last 20 rows alone."""
    q, k, v = inputs()
    ids = torch.repeat_interleave(torch.tensor([0, 1]), torch.tensor([12, 17])).expand(2, -1)
    keep = torch.ones(2, LENGTH, dtype=torch.bool)
    keep[:, :3] = keep[:, 25:] = False
    rows = attend(q[:, :, 9:], k, v, SCORES, document_ids=ids, key_mask=keep, backend=backend)
    pieces = ([t[:, :, a:b] for t in (q, k, v)] for a, b in ((3, 12), (12, 25)))
    first, second = (attend(*piece, SCORES, backend=backend) for piece in pieces)
    assert_same(rows[:, :, :3], first[:, :, 6:])
    assert_same(rows[:, :, 3:16], second)
    assert not rows[:, :, 16:, :5].any()


@BACKENDS
@OPTIONS
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_sequences_are_unpadded_ones(backend: str, options: dict[str, Any], side: str) -> None:
    """Padding of 0 and 6 keys, full of NaN: results there are 0, elsewhere those without padding."""
    q, k, v = inputs()
    grad = torch.randn(q.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    real = slice(6, None) if side == "left" else slice(None, LENGTH - 6)
    keep = torch.ones(2, LENGTH, dtype=torch.bool)
    keep[1] = False
    keep[1, real] = True
    hole = ~keep[:, None, :, None]
    dirty = [t.masked_fill(hole, torch.nan) for t in (k, v)]
    padded = with_gradients(q, *dirty, grad, key_mask=keep, **options, backend=backend)
    whole = with_gradients(q[:1], k[:1], v[:1], grad[:1], **options, backend=backend)
    short = with_gradients(*(t[1:, :, real] for t in (q, k, v, grad)), **options, backend=backend)
    for actual, first, second in zip(padded, whole, short, strict=True):
        assert_same(actual[:1], first)
        assert_same(actual[1:, :, real], second)
        assert not actual.masked_select(hole.expand_as(actual)).any()


@BACKENDS
def test_a_batch_is_its_sequences(backend: str) -> None:
    q, k, v = inputs()
    keep = torch.arange(LENGTH) >= torch.tensor([[0], [7]])
    together = attend(q, k, v, SCORES, key_mask=keep, backend=backend)
    for b in range(2):
        one = (slice(b, b + 1),)
        alone = attend(q[one], k[one], v[one], SCORES, key_mask=keep[one], backend=backend)
        assert_same(together[one], alone)


@BACKENDS
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("length", [1, LENGTH])
def test_strides_change_nothing(backend: str, layout: Layout, length: int) -> None:
    q, k, v = inputs(length, layout)
    grad = torch.randn(2, length, H, 5, dtype=torch.float64).transpose(1, 2)
    strided = with_gradients(q, k, v, grad, backend=backend)
    contiguous = with_gradients(*(t.contiguous() for t in (q, k, v, grad)), backend=backend)
    for actual, expected in zip(strided, contiguous, strict=True):
        assert_same(actual, expected)


@BACKENDS
def test_expanded_gradients_are_taken(backend: str) -> None:
    """``out.sum()`` sends back a gradient without strides."""
    q, k, v = inputs()
    ones = torch.ones_like(q)
    expanded = with_gradients(q, k, v, torch.ones((), dtype=torch.float64).expand_as(q), backend=backend)
    for actual, expected in zip(expanded, with_gradients(q, k, v, ones, backend=backend), strict=True):
        assert_same(actual, expected)


@BACKENDS
def test_heads_of_a_tensor_parallel_rank_are_those_of_the_whole(backend: str) -> None:
    """H counts the global heads: a rank takes its own γ from the list of all."""
    q, k, v = inputs()
    whole = attend(q, k, v, SCORES, backend=backend)
    gammas = SCORES.gammas(H).tolist()
    for rank in range(3):
        shard = PseudoScores(gammas[2 * rank : 2 * rank + 2], horizon=23)
        heads, group = slice(2 * rank, 2 * rank + 2), slice(rank, rank + 1)
        assert_same(attend(q[:, heads], k[:, group], v[:, group], shard, backend=backend), whole[:, heads])


@BACKENDS
def test_a_shorter_batch_keeps_the_horizon(backend: str) -> None:
    q, k, v = inputs()
    full = attend(q, k, v, SCORES, backend=backend)
    assert_same(attend(q[:, :, :11], k[:, :, :11], v[:, :, :11], SCORES, backend=backend), full[:, :, :11])


@BACKENDS
def test_a_sink_is_a_key_of_that_score_with_value_zero(backend: str) -> None:
    """k fixed zero vectors in front, visible to all, are a sink of log k: softmax-plus-one for k = 1."""
    q, k, v = inputs()
    for count in (1, 3):
        zeros = k.new_zeros(2, 3, count, 5)
        longer = sink_attention(q, torch.cat([zeros, k], 2), torch.cat([zeros, v], 2), backend=backend)
        sink = torch.tensor(float(count), dtype=torch.float64).log()
        assert_same(sink_attention(q, k, v, sink, backend=backend), longer)


DIFFERENTIABLE = {
    "reference": ("sink", "bias", "alibi_slopes"),
    "cpu_flash": ("sink",),
    "portable": ("sink", "bias", "alibi_slopes"),
}


@pytest.mark.parametrize("backend", DIFFERENTIABLE)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": 2},
        {"key_mask": torch.tensor([[False, True, True, True, True], [True, True, True, False, True]])},
        {"document_ids": torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 1, 1]])},
        {
            "positions": torch.tensor([[2, 3, 4], [-1, 1, 5]]),
            "key_positions": torch.tensor([[4, 3, -1, 2, 1], [0, 1, 2, 5, -1]]),
        },
    ],
    ids=["plain", "window", "key_mask", "document_ids", "key_positions"],
)
def test_gradcheck_of_every_differentiable_argument(backend: str, options: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(4)
    q, k, v = make_qkv(generator, heads=2, kv_heads=1, num_queries=3, num_keys=5, dim=3, dtype=torch.float64)
    extra = {
        "sink": torch.randn(2, 3, generator=generator, dtype=torch.float64),
        "bias": torch.randn(1, 2, 3, 5, generator=generator, dtype=torch.float64),
        "alibi_slopes": torch.rand(2, generator=generator, dtype=torch.float64),
    }
    names = DIFFERENTIABLE[backend]
    has_lse = backend != "portable"

    def call(q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor) -> Any:
        given = dict(zip(names, tensors, strict=True))
        return sink_attention(q, k, v, **given, **options, return_lse=has_lse, backend=backend)

    leaves = [t.detach().requires_grad_() for t in (q, k, v, *(extra[name] for name in names))]
    assert torch.autograd.gradcheck(call, leaves)
