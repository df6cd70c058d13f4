"""The comparison must reject what is plausible and wrong, after it accepted the same call without a fault."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from stablemask import PseudoScores, pseudo_logits, sink_attention, stable_attention
from stablemask.testing import Deviation, Example, Operation, attend, make_gradients, make_qkv
from tests.checks import Truth

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
ALIBI = torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.03, 0.015])


def example(
    sink: PseudoScores | Tensor | None = None, *, dtype: torch.dtype = torch.float32, **options: object
) -> Example:
    generator = torch.Generator().manual_seed(0)
    scores = PseudoScores(0.5, horizon=31) if sink is None else sink
    q, k, v = make_qkv(generator, num_queries=29, num_keys=29, dim=8, dtype=dtype)
    return make_gradients(Example(q, k, v, scores, options=options), generator)


def wrong(truth: Truth, operation: Operation) -> dict[str, Deviation]:
    """What the comparison rejects, after it accepted the operation without a fault."""
    truth.check_backend("reference")
    return {d.name: d for d in truth.deviations(operation) if not d.ok}


def row_logits(e: Example, positions: Tensor, horizon: int = 31) -> Tensor:
    return PseudoScores(0.5, horizon=horizon).row_logits(positions, e.q.shape[1], e.q.dtype)


def with_sink(e: Example, sink: Tensor | float | None) -> tuple[Tensor, Tensor]:
    return sink_attention(e.q, e.k, e.v, sink, **e.options, return_lse=True, backend="reference")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_plain_causal_softmax_is_rejected(dtype: torch.dtype) -> None:
    rejected = wrong(Truth(example(dtype=dtype)), lambda e: with_sink(e, None))
    assert {"out", "lse", "dq", "dk", "dv"} <= set(rejected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shift", [-1, 1])
def test_a_pseudo_score_shifted_by_one_column_is_rejected(dtype: torch.dtype, shift: int) -> None:
    """The shift changes the pseudo scores of the last heads by a hundredth only."""
    positions = torch.arange(29) + shift
    rejected = wrong(Truth(example(dtype=dtype)), lambda e: with_sink(e, row_logits(e, positions)))
    assert "lse" in rejected
    assert "out" in rejected


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_dropped_lse_gradient_is_rejected(dtype: torch.dtype) -> None:
    """Autograd through out · sigmoid(lse − σ) with an lse that has no gradient: the forward is exact."""

    def detached(e: Example) -> tuple[Tensor, Tensor]:
        sink = row_logits(e, torch.arange(29))
        out, lse = sink_attention(e.q, e.k, e.v, None, return_lse=True, backend="reference")
        share = torch.sigmoid(lse.detach() - sink)
        return (out * share.unsqueeze(-1)).to(e.q.dtype), torch.logaddexp(lse, sink)

    truth = Truth(dataclasses.replace(example(dtype=dtype), grad_lse=None))
    assert {"dq", "dk"} <= set(wrong(truth, detached)) <= {"dq", "dk"}


def test_a_dropped_gradient_of_the_returned_lse_is_rejected() -> None:
    def detached(e: Example) -> tuple[Tensor, Tensor]:
        out, lse = attend(e, "reference")
        assert lse is not None
        return out, lse.detach()

    assert set(wrong(Truth(example()), detached)) == {"dq", "dk"}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_horizon_taken_from_the_batch_is_rejected(dtype: torch.dtype) -> None:
    rejected = wrong(
        Truth(example(dtype=dtype)), lambda e: with_sink(e, row_logits(e, torch.arange(29), horizon=29))
    )
    assert {"out", "lse"} <= set(rejected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_key_only_alibi_is_rejected(dtype: torch.dtype) -> None:
    """m·j instead of m·(j − i): the same softmax, another ratio to σ."""

    def key_only(e: Example) -> tuple[Tensor, Tensor]:
        bias = ALIBI[:, None, None] * torch.arange(29.0).expand(1, 29, 29)
        sink = row_logits(e, torch.arange(29))
        return sink_attention(e.q, e.k, e.v, sink, bias=bias, return_lse=True, backend="reference")

    truth = Truth(example(dtype=dtype, alibi_slopes=ALIBI), ("q", "k", "v"))
    assert {"out", "lse", "dq", "dk", "dv"} <= set(wrong(truth, key_only))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reversed_heads_are_rejected(dtype: torch.dtype) -> None:
    sink_of = row_logits
    rejected = wrong(
        Truth(example(dtype=dtype)), lambda e: with_sink(e, sink_of(e, torch.arange(29)).flip(0))
    )
    assert {"out", "lse"} <= set(rejected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_all_zeros_under_a_strong_sink_are_rejected(dtype: torch.dtype) -> None:
    """Outputs near 1e-9 are small, not zero."""

    def zeros(e: Example) -> tuple[Tensor, Tensor]:
        out, lse = attend(e, "reference")
        assert lse is not None
        return out * 0.0, lse

    truth = Truth(dataclasses.replace(example(torch.full((6,), 23.0), dtype=dtype), grad_lse=None))
    assert 1e-10 < float(truth.expected["out"].abs().mean()) < 1e-8
    assert set(wrong(truth, zeros)) == {"out", "dq", "dk", "dv", "dsink"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("coarse", [torch.bfloat16, torch.float16], ids=str)
def test_a_16_bit_lse_is_rejected(dtype: torch.dtype, coarse: torch.dtype) -> None:
    def rounded(e: Example) -> tuple[Tensor, Tensor]:
        out, lse = attend(e, "reference")
        assert lse is not None
        return out, lse + (lse.to(coarse) - lse).detach()

    def stored(e: Example) -> tuple[Tensor, Tensor]:
        out, lse = attend(e, "reference")
        assert lse is not None
        return out, lse.to(coarse)

    truth = Truth(example(dtype=dtype))
    assert set(wrong(truth, rounded)) == {"lse"}
    assert str(coarse) in wrong(truth, stored)["lse"].complaint


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [6, 8])
def test_a_window_off_by_one_is_rejected(dtype: torch.dtype, window: int) -> None:
    def off(e: Example) -> tuple[Tensor, Tensor]:
        return stable_attention(e.q, e.k, e.v, e.sink, window=window, return_lse=True, backend="reference")

    rejected = wrong(Truth(example(dtype=dtype, window=7)), off)
    assert set(rejected) == {"out", "lse", "dq", "dk", "dv"}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_documents_that_leak_are_rejected(dtype: torch.dtype) -> None:
    """Positions restart as they should; attention does not stop at the border."""
    documents = (torch.arange(29) // 11).expand(2, -1)

    def leaking(e: Example) -> tuple[Tensor, Tensor]:
        positions = (torch.arange(29) % 11).expand(2, -1)
        return stable_attention(
            e.q, e.k, e.v, e.sink, positions=positions, return_lse=True, backend="reference"
        )

    def running_on(e: Example) -> tuple[Tensor, Tensor]:
        sink = row_logits(e, torch.arange(29))
        return sink_attention(
            e.q, e.k, e.v, sink, document_ids=documents, return_lse=True, backend="reference"
        )

    truth = Truth(example(dtype=dtype, document_ids=documents))
    assert set(wrong(truth, leaking)) == {"out", "lse", "dq", "dk", "dv"}
    assert {"out", "lse"} <= set(wrong(truth, running_on)), "positions must restart in every document"


def test_a_sink_gradient_without_the_mass_is_rejected() -> None:
    class Unweighted(torch.autograd.Function):
        """The identity on σ, whose gradient forgets exp(σ − lse')."""

        @staticmethod
        def forward(ctx: torch.autograd.function.FunctionCtx, sink: Tensor, mass: Tensor) -> Tensor:
            ctx.save_for_backward(mass)
            return sink.clone()

        @staticmethod
        def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
            return grad / ctx.saved_tensors[0], None

    def forgetful(e: Example) -> tuple[Tensor, Tensor]:
        _, lse = with_sink(e, e.sink)
        return with_sink(e, Unweighted.apply(e.sink, torch.exp(e.sink - lse).detach()))

    sink = torch.randn(2, 6, 29, generator=torch.Generator().manual_seed(1))
    assert set(wrong(Truth(example(sink)), forgetful)) == {"dsink"}


def test_a_gradient_summed_over_the_wrong_heads_is_rejected() -> None:
    """Key heads of a group are the h // (H / G), not the h % G."""

    def interleaved(e: Example) -> tuple[Tensor, Tensor]:
        k, v = (t.repeat(1, 2, 1, 1) for t in (e.k, e.v))
        return attend(dataclasses.replace(e, k=k, v=v), "reference")  # type: ignore[return-value]

    assert {"out", "dk", "dv"} <= set(wrong(Truth(example()), interleaved))


def test_missing_values_infinities_and_gradients_are_reported_together() -> None:
    truth = Truth(example())

    def broken(e: Example) -> tuple[Tensor, Tensor]:
        out, lse = attend(e, "reference")
        assert lse is not None
        holes = torch.zeros_like(lse)
        holes[0, 0, 3] = math.nan
        return out + holes.unsqueeze(-1), torch.where(lse == lse.max(), math.inf, lse)

    rejected = wrong(truth, broken)
    assert "NaN differs at 8 places, first at (0, 0, 3, 0)" in rejected["out"].complaint
    assert "+inf differs at 1 places" in rejected["lse"].complaint


def test_the_pseudo_logits_of_another_gamma_are_rejected() -> None:
    """Slopes of 2⁻⁸ per head are told from those of ALiBi's rule for a head count that is no power of two."""
    naive = torch.tensor([0.5 ** (8 * (h + 1) / 6) for h in range(6)])
    rejected = wrong(
        Truth(example()), lambda e: with_sink(e, pseudo_logits(naive.to(e.q), torch.arange(29), 31))
    )
    assert {"out", "lse"} <= set(rejected)
