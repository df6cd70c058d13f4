"""σ against a 40-digit reference, its gradients, its table of cached rows and its refusals."""

import gc
import math
import weakref
from collections.abc import Iterator

import mpmath
import pytest
import torch
from torch import Tensor

from stablemask import PseudoScores, pseudo, pseudo_logits, stable_attention
from tests import oracle
from tests.checks import paper_gammas

GAMMAS = (0.0, 1e-12, 1e-6, 1e-3, 0.04, 0.0499, 0.0501, 0.3, 0.5, 1.0, 5.0, 30.0, 100.0)
HORIZONS = (1, 2, 3, 64, 1000, 2**20)


def exact(gamma: float, position: int, horizon: int | None, base: float = 0.0) -> float:
    """log Σ exp(base − jγ) with 40 digits: term by term where they are few, else as a geometric series."""
    i = position + 1
    with mpmath.workdps(40):
        g = mpmath.mpf(gamma)
        if horizon is None:
            return float(base + mpmath.log(mpmath.exp(-i * g) / (1 - mpmath.exp(-g))))
        if i == horizon:
            return -math.inf
        if i > horizon:
            return float(base - i * g)
        if horizon - i <= 60:
            return float(base + mpmath.log(mpmath.fsum(mpmath.exp(-j * g) for j in range(i, horizon))))
        if g == 0:
            return float(base + mpmath.log(horizon - i))
        return float(
            base + mpmath.log((mpmath.exp(-i * g) - mpmath.exp(-horizon * g)) / (1 - mpmath.exp(-g)))
        )


def rows_around(horizon: int) -> list[int]:
    """0-based rows: the first ones, those around the end of the horizon, and far beyond it."""
    beyond = (horizon, horizon + 1, 2 * horizon + 7, 2**24)
    return sorted({0, 1, 2, horizon // 3, horizon // 2, *(max(horizon - d, 0) for d in range(1, 5)), *beyond})


def assert_accurate(got: Tensor, expected: list[float]) -> None:
    for value, truth in zip(got.tolist(), expected, strict=True):
        if math.isinf(truth):
            assert value == truth
        else:
            assert abs(value - truth) <= 2e-6 * max(1.0, abs(truth)), (value, truth)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("horizon", HORIZONS)
@pytest.mark.parametrize("gamma", GAMMAS)
def test_sigma_is_accurate(gamma: float, horizon: int, dtype: torch.dtype) -> None:
    rows = rows_around(horizon)
    for base in (0.0, -3.5, 11.0):
        scores = PseudoScores(gamma, horizon=horizon, headwise=False, base=base)
        got = scores.row_logits(torch.tensor(rows), 1, dtype)[0]
        assert got.dtype == dtype
        assert_accurate(got, [exact(gamma, row, horizon, base) for row in rows])


@pytest.mark.parametrize("gamma", GAMMAS[1:])
def test_sigma_without_a_horizon_is_accurate(gamma: float) -> None:
    rows = [0, 1, 10, 1000, 2**24]
    got = PseudoScores(gamma, horizon=None, headwise=False).row_logits(torch.tensor(rows), 1)[0]
    assert_accurate(got, [exact(gamma, row, None) for row in rows])


@pytest.mark.parametrize("gamma", [0.0, 1e-3, 0.5, 5.0])
def test_float64_sigma_is_accurate_to_float64(gamma: float) -> None:
    rows = rows_around(1000)
    got = PseudoScores(gamma, horizon=1000, headwise=False).row_logits(torch.tensor(rows), 1, torch.float64)[
        0
    ]
    truth = torch.tensor([exact(gamma, row, 1000) for row in rows], dtype=torch.float64)
    torch.testing.assert_close(got, truth, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("gamma", [1e-9, 1e-3, 0.3, 5.0])
def test_the_reference_agrees_with_itself(gamma: float) -> None:
    """Its geometric series, for more than 60 columns, continues its sum of single terms."""
    few, many = exact(gamma, 939, 1000), exact(gamma, 938, 1000)  # 60 and 61 columns
    assert many == pytest.approx(few + math.log1p(math.exp(-939 * gamma - few)), rel=1e-12)


def test_values_around_the_horizon() -> None:
    """Rows N − 1, N and N + 1, counted from 1: −(N − 1)γ, −∞, −(N + 1)γ."""
    N, gamma = 10, 0.5
    got = PseudoScores(gamma, horizon=N, headwise=False).row_logits(torch.tensor([N - 2, N - 1, N]), 1)
    assert got.tolist() == [[-(N - 1) * gamma, -math.inf, -(N + 1) * gamma]]


def test_positions_of_every_integer_dtype_agree() -> None:
    rows = torch.arange(100, 128)
    expected = PseudoScores(0.5, horizon=300).row_logits(rows, 4)
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32):
        assert torch.equal(PseudoScores(0.5, horizon=300).row_logits(rows.to(dtype), 4), expected), dtype


def test_positions_may_have_a_batch_dimension() -> None:
    rows = torch.tensor([[3, 1, 4], [1, 5, 9]])
    scores = PseudoScores(0.5, horizon=7)
    assert torch.equal(scores.row_logits(rows, 4), torch.stack([scores.row_logits(row, 4) for row in rows]))


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 6, 7, 8, 12, 16, 20, 31, 48])
def test_headwise_gammas_follow_alibi(heads: int) -> None:
    scores = PseudoScores(0.5, horizon=8)
    assert torch.equal(scores.gammas(heads), paper_gammas(scores, heads))
    assert scores.gammas(heads).dtype == torch.float64


def test_alibi_values_written_out() -> None:
    """The slopes that the ALiBi paper prints for 8 heads, and those its code gives for 12."""
    eight = [2.0**-n for n in range(1, 9)]
    between = [2.0 ** -(n + 0.5) for n in range(4)]
    assert PseudoScores(0.5, horizon=8).gammas(8).tolist() == eight
    assert PseudoScores(0.5, horizon=8).gammas(12).tolist() == pytest.approx(eight + between, rel=1e-15)


def test_constant_and_listed_gammas() -> None:
    assert PseudoScores(0.3, horizon=8, headwise=False).gammas(3).tolist() == [0.3] * 3
    assert PseudoScores([0.1, 0, 2], horizon=8).gammas(3).tolist() == [0.1, 0.0, 2.0]


def test_dense_is_the_printed_matrix() -> None:
    """p_j = base − (j − 1)γ above the diagonal, the same down every column; the first one is base − γ."""
    C, P = PseudoScores([0.5, 0.25], horizon=4, base=1.0).dense(4, 2)
    assert C.tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    assert P[0].tolist() == [[0, 0.5, 0, -0.5], [0, 0, 0, -0.5], [0, 0, 0, -0.5], [0, 0, 0, 0]]
    assert P[1].tolist() == [[0, 0.75, 0.5, 0.25], [0, 0, 0.5, 0.25], [0, 0, 0, 0.25], [0, 0, 0, 0]]


@pytest.mark.parametrize("base", [0.0, 1.5, -math.inf])
def test_dense_and_row_logits_are_one_definition(base: float) -> None:
    scores = PseudoScores(0.5, horizon=13, base=base)
    C, P = scores.dense(13, 3)
    summed = P.masked_fill(C.bool(), -math.inf).logsumexp(-1)
    torch.testing.assert_close(
        scores.row_logits(torch.arange(13), 3, torch.float64), summed, rtol=1e-14, atol=1e-14
    )


@pytest.mark.parametrize("horizon", [None, 5, 40])
def test_row_logits_are_the_pseudo_columns_of_the_oracle(horizon: int | None) -> None:
    gammas = torch.tensor([0.5, 0.01, 3.0], dtype=torch.float64)
    rows = torch.arange(60).expand(2, -1)
    columns = oracle.pseudo_columns(gammas, rows, horizon, 0.7).logsumexp(-1)
    torch.testing.assert_close(pseudo_logits(gammas, rows, horizon, 0.7), columns, rtol=1e-13, atol=1e-13)


def test_base_minus_infinity_switches_off() -> None:
    for scores in (
        PseudoScores(0.5, horizon=8, base=-math.inf),
        PseudoScores(0.0, horizon=None, base=-math.inf),
    ):
        assert torch.equal(scores.row_logits(torch.arange(20), 4), torch.full((4, 20), -math.inf))


def test_ablation_values() -> None:
    """The paper's constant pseudo values 0 and 1e-2: log of the number of columns, plus the value."""
    counts = torch.arange(7, 0, -1, dtype=torch.float64).log().float()
    for value in (0.0, 1e-2):
        got = PseudoScores(0.0, horizon=8, base=value).row_logits(torch.arange(7), 2)
        torch.testing.assert_close(got, (counts + value).expand(2, 7), rtol=1e-6, atol=1e-6)


def slope(gamma: float, position: int, horizon: int | None) -> float:
    """dσ/dγ with 40 digits: minus the mean of j under the weights exp(−jγ)."""
    i = position + 1
    if horizon is not None and i >= horizon:
        return 0.0 if i == horizon else -float(i)
    with mpmath.workdps(40):
        g = mpmath.mpf(gamma)
        if horizon is None:
            return float(-i - 1 / mpmath.expm1(g))
        c = horizon - i
        if g == 0:
            return float(-i - mpmath.mpf(c - 1) / 2)
        return float(-i - 1 / mpmath.expm1(g) + c / mpmath.expm1(c * g))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("horizon", [1, 2, 64, 10**6, None])
@pytest.mark.parametrize("gamma", [0.0, 1e-9, 1e-3, 0.0499, 0.0501, 0.5, 100.0])
def test_gradients_are_finite_and_right(gamma: float, horizon: int | None, dtype: torch.dtype) -> None:
    gamma = 1e-6 if gamma == 0 and horizon is None else gamma  # 0 is refused there: the pseudo mass diverges
    rows = torch.tensor(rows_around(64 if horizon is None else horizon))
    for row in rows.tolist():
        g = torch.tensor([gamma], dtype=dtype, requires_grad=True)
        base = torch.tensor(0.5, dtype=dtype, requires_grad=True)
        logit = pseudo_logits(g, torch.tensor([row]), horizon, base)
        dg, dbase = torch.autograd.grad(logit.sum(), (g, base))
        empty = horizon is not None and row + 1 == horizon
        assert dbase.item() == (0.0 if empty else 1.0)
        expected = slope(float(g.detach()), row, horizon)
        assert dg.item() == pytest.approx(
            expected, rel=1e-5 if dtype == torch.float32 else 1e-7, abs=1e-12
        ), row


def test_gradient_where_c_gamma_is_huge() -> None:
    g = torch.tensor([100.0, 0.0], requires_grad=True)
    logits = pseudo_logits(g, torch.tensor([0]), 10**6 + 1)
    logits.sum().backward()
    assert g.grad is not None
    assert g.grad.tolist() == pytest.approx([-1.0, -1.0 - (10**6 - 1) / 2], rel=1e-6)


def test_gradcheck_in_gamma_and_base() -> None:
    g = torch.tensor([0.0, 0.003, 0.2, 2.0], dtype=torch.float64).add(1e-3).requires_grad_()
    base = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    rows = torch.tensor([[0, 3, 9], [4, 11, 30]])  # row 10, counted from 1, is the empty one
    assert torch.autograd.gradcheck(lambda g, b: pseudo_logits(g, rows.clamp(max=8), 10, b), (g, base))
    assert torch.autograd.gradcheck(lambda g, b: pseudo_logits(g, rows, None, b), (g, base))


def test_a_scalar_base_tensor_of_minus_infinity_has_no_nan_gradient() -> None:
    g = torch.tensor([0.5], requires_grad=True)
    base = torch.tensor(-math.inf)
    weights = pseudo_logits(g, torch.arange(5), 8, base).exp()
    weights.sum().backward()
    assert weights.tolist() == [[0.0] * 5]
    assert g.grad is not None
    assert g.grad.tolist() == [0.0]


def test_low_precision_gammas_give_float32_logits() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        g = torch.tensor([0.5, 0.25], dtype=dtype)
        assert pseudo_logits(g, torch.arange(5), 8).dtype == torch.float32
        assert torch.equal(pseudo_logits(g, torch.arange(5), 8), pseudo_logits(g.float(), torch.arange(5), 8))


REFUSED = [
    ({"gamma": -0.1}, ValueError, "gamma: got -0.1"),
    ({"gamma": math.nan}, ValueError, "gamma: got nan"),
    ({"gamma": math.inf}, ValueError, "gamma: got inf"),
    ({"gamma": "0.5"}, TypeError, "gamma: got '0.5'"),
    ({"gamma": True}, TypeError, "gamma: got True"),
    ({"gamma": []}, ValueError, "gamma: got an empty sequence"),
    ({"gamma": [0.5, -1.0]}, ValueError, "gamma: got -1.0"),
    ({"gamma": [0.5, None]}, TypeError, "gamma: got None"),
    ({"horizon": 0}, ValueError, "horizon: got 0"),
    ({"horizon": -3}, ValueError, "horizon: got -3"),
    ({"horizon": 8.0}, TypeError, "horizon: got 8.0"),
    ({"horizon": True}, TypeError, "horizon: got True"),
    ({"horizon": "8"}, TypeError, "horizon: got '8'"),
    ({"base": math.nan}, ValueError, "base: got nan"),
    ({"base": math.inf}, ValueError, "base: got inf"),
    ({"base": "0"}, TypeError, "base: got '0'"),
    ({"base": None}, TypeError, "base: got None"),
    ({"headwise": 1}, TypeError, "headwise: got 1"),
    ({"gamma": 0.0, "horizon": None}, ValueError, "gamma: got 0 with an infinite horizon"),
    ({"gamma": [0.5, 0.0], "horizon": None}, ValueError, "gamma: got 0 with an infinite horizon"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_bad_scores_are_refused(arguments: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        PseudoScores(**{"horizon": 8, **arguments})  # type: ignore[arg-type]
    assert str(caught.value).startswith(message)
    assert "allowed" in str(caught.value) or "give" in str(caught.value)


def test_the_horizon_has_no_default_and_the_scores_are_frozen() -> None:
    with pytest.raises(TypeError, match="horizon"):
        PseudoScores(0.5)  # type: ignore[call-arg]
    with pytest.raises(AttributeError):
        PseudoScores(0.5, horizon=8).gamma = 1.0  # type: ignore[misc]


def test_scores_are_values() -> None:
    assert PseudoScores([0.5, 0.25], horizon=8) == PseudoScores((0.5, 0.25), horizon=8)
    assert (
        len({PseudoScores(0.5, horizon=8), PseudoScores(0.5, horizon=8), PseudoScores(0.5, horizon=9)}) == 2
    )


def row_logits(positions: Tensor) -> Tensor:
    return PseudoScores(0.5, horizon=8).row_logits(positions, 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: PseudoScores(0.5, horizon=8).gammas(0), "num_heads: got 0"),
        (lambda: PseudoScores([0.5, 0.1], horizon=8).gammas(3), "gamma: got 2 values for 3 heads"),
        (lambda: PseudoScores(1e200, horizon=8).gammas(8), "gamma: 1e\\+200"),
        (lambda: PseudoScores(0.5, horizon=8).dense(0, 2), "length: got 0"),
        (lambda: row_logits(torch.arange(4.0)), "positions: got torch.float32"),
        (lambda: row_logits(torch.ones(4, dtype=torch.bool)), "positions: got torch.bool"),
        (lambda: row_logits(torch.ones(1, 1, 4).long()), r"positions: got torch.int64 of shape \(1, 1, 4\)"),
        (lambda: pseudo_logits(torch.ones(2, 2), torch.arange(3), 8), r"gammas: got .* shape \(2, 2\)"),
        (lambda: pseudo_logits(torch.ones(2).long(), torch.arange(3), 8), "gammas: got torch.int64"),
        (lambda: pseudo_logits([0.5], torch.arange(3), 8), r"gammas: got \[0.5\]"),  # type: ignore[arg-type]
        (lambda: pseudo_logits(torch.ones(2), [0, 1], 8), r"positions: got \[0, 1\]"),  # type: ignore[arg-type]
        (lambda: pseudo_logits(torch.ones(2), torch.arange(3), 0), "horizon: got 0"),
        (lambda: pseudo_logits(torch.ones(2), torch.arange(3), 8, math.inf), "base: got inf"),
        (lambda: pseudo_logits(torch.ones(2), torch.arange(3), 8, torch.zeros(2)), r"base: got .*\(2,\)"),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()  # type: ignore[operator]


@pytest.fixture
def tables() -> Iterator[dict[object, Tensor]]:
    """The cache of consecutive rows, empty before and after."""
    pseudo._tables.clear()
    yield pseudo._tables  # type: ignore[misc]
    pseudo._tables.clear()


CPU = torch.device("cpu")


def consecutive(scores: PseudoScores, start: int, stop: int, heads: int = 4) -> Tensor:
    return scores.consecutive_logits(start, stop, heads, dtype=torch.float32, device=CPU)


def test_the_table_gives_the_rows_that_row_logits_gives(tables: dict[object, Tensor]) -> None:
    scores = PseudoScores(0.5, horizon=100)
    for start, stop in ((0, 7), (60, 65), (0, 64), (199, 200), (5, 5), (0, 1)):
        assert torch.equal(consecutive(scores, start, stop), scores.row_logits(torch.arange(start, stop), 4))
    assert len(tables) == 1


def test_a_second_call_reads_the_same_storage(tables: dict[object, Tensor]) -> None:
    scores = PseudoScores(0.5, horizon=100)
    first, second = consecutive(scores, 0, 50), consecutive(PseudoScores(0.5, horizon=100), 10, 60)
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    assert (
        first.untyped_storage().data_ptr() != consecutive(scores, 0, 50, heads=5).untyped_storage().data_ptr()
    )


def test_decoding_token_by_token_makes_few_tables(tables: dict[object, Tensor]) -> None:
    scores = PseudoScores(0.5, horizon=100)
    storages = {consecutive(scores, t, t + 1).untyped_storage().data_ptr() for t in range(1000)}
    assert len(storages) <= 5  # 64, 128, 256, 512, 1024
    assert len(tables) == 1


def test_the_number_of_tables_is_bounded_and_dropped_ones_are_freed(tables: dict[object, Tensor]) -> None:
    first = weakref.ref(consecutive(PseudoScores(0.5, horizon=1), 0, 64)._base)  # type: ignore[arg-type]
    assert first() is not None
    for horizon in range(2, 40):
        consecutive(PseudoScores(0.5, horizon=horizon), 0, 64)
    gc.collect()
    assert len(tables) == pseudo._MAX_TABLES
    assert first() is None


def test_a_table_that_is_used_stays(tables: dict[object, Tensor]) -> None:
    kept = PseudoScores(0.5, horizon=1000)
    storage = consecutive(kept, 0, 64).untyped_storage().data_ptr()
    for horizon in range(1, 40):
        consecutive(PseudoScores(0.5, horizon=horizon), 0, 64)
        assert consecutive(kept, 0, 64).untyped_storage().data_ptr() == storage


def test_very_long_sequences_are_not_kept(tables: dict[object, Tensor]) -> None:
    scores = PseudoScores(0.5, horizon=100)
    start, stop = pseudo._MAX_TABLE_ELEMENTS, pseudo._MAX_TABLE_ELEMENTS + 3
    assert torch.equal(consecutive(scores, start, stop), scores.row_logits(torch.arange(start, stop), 4))
    assert not tables


def attend_and_differentiate() -> None:
    q, k, v = (
        torch.randn(3, 1, 4, 9, 8, generator=torch.Generator().manual_seed(0)).requires_grad_().unbind(0)
    )
    stable_attention(q, k, v, PseudoScores(0.5, horizon=100)).sum().backward()


def test_inference_mode_does_not_poison_the_table(tables: dict[object, Tensor]) -> None:
    with torch.inference_mode():
        consecutive(PseudoScores(0.5, horizon=100), 0, 9)
    assert len(tables) == 1
    assert not any(table.is_inference() for table in tables.values())
    attend_and_differentiate()


def test_fake_tensors_do_not_enter_the_table(tables: dict[object, Tensor]) -> None:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    with FakeTensorMode():
        assert isinstance(consecutive(PseudoScores(0.5, horizon=100), 0, 9), FakeTensor)
    assert not tables
    attend_and_differentiate()


def test_transforms_do_not_enter_the_table(tables: dict[object, Tensor]) -> None:
    scores = PseudoScores(0.5, horizon=100)
    out = torch.func.vmap(lambda x: x + consecutive(scores, 0, 9))(torch.zeros(3, 4, 9))
    assert torch.equal(out, consecutive(scores, 0, 9).expand(3, -1, -1))
    tables.clear()
    torch.func.grad(lambda x: (x * consecutive(scores, 0, 9)).sum())(torch.zeros(4, 9))
    assert not tables


def test_the_table_needs_no_gradient(tables: dict[object, Tensor]) -> None:
    consecutive(PseudoScores(0.5, horizon=100), 0, 9)
    assert not any(table.requires_grad for table in tables.values())
