"""A call of inference that repeats the one before gives what it would give alone, and refuses the same."""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from stablemask import PseudoScores, _repeats, sink_attention, stable_attention
from stablemask.attention import observing
from stablemask.backends import cpu_flash

SCORES = PseudoScores(0.5, horizon=64)
BASE: dict[str, Any] = {"batch": 2, "queries": 1, "keys": 9, "heads": 4, "kv_heads": 2, "width": 8}
Call = Callable[[], Any]
QKV = tuple[Tensor, Tensor, Tensor]


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_repeats, "_kept", {})


def tensors(dtype: torch.dtype = torch.float32, seed: int = 0, **changes: int) -> QKV:
    n = {**BASE, **changes}
    generator = torch.Generator().manual_seed(seed)
    shapes = [(n["batch"], n["heads"], n["queries"], n["width"])]
    shapes += 2 * [(n["batch"], n["kv_heads"], n["keys"], n["width"])]
    q, k, v = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return q, k, v


def row_logits(seed: int = 0, batch: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(batch, 4, 1, generator=torch.Generator().manual_seed(seed)).to(dtype)


def nested() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's own of a prototype
        return torch.nested.nested_tensor([torch.randn(4, 1, 8), torch.randn(4, 1, 8)])


def make_calls() -> dict[str, Call]:
    """Calls that differ from the first by one thing each, bad ones among them."""
    q, k, v = tensors()
    long_q, *_ = tensors(queries=9)
    half = tensors(torch.float16)
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[0, 8] = False

    def stable(q: Any = q, k: Any = k, v: Any = v, scores: Any = SCORES, **options: Any) -> Call:
        return lambda: stable_attention(q, k, v, scores, **options)

    def sink(given: Any, **options: Any) -> Call:
        return lambda: sink_attention(q, k, v, given, **options)

    def casting() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return stable_attention(q, k, v, SCORES)

    return {
        "first": stable(),
        "other tensors": stable(*tensors(seed=1)),
        "more keys": stable(q, *tensors(keys=10)[1:]),
        "fewer keys": stable(q, *tensors(keys=3)[1:]),
        "no keys": stable(q, *tensors(keys=0)[1:]),
        "more values": stable(q, k, tensors(keys=10)[2]),
        "more queries": stable(long_q),
        "more queries than keys": stable(long_q, *tensors(keys=8)[1:]),
        "other heads": stable(q, *tensors(kv_heads=4)[1:]),
        "wrong heads": stable(q, *tensors(kv_heads=3)[1:]),
        "wider": stable(q, *tensors(width=16)[1:]),
        "wider values": stable(v=tensors(width=16)[2]),
        "other batch": stable(*tensors(batch=1)),
        "half": stable(*half),
        "half keys": stable(q, *half[1:]),
        "double": stable(*tensors(torch.float64)),
        "equal scores": stable(scores=PseudoScores(0.5, horizon=64)),
        "other scores": stable(scores=PseudoScores(0.25, horizon=64)),
        "off": stable(scores=PseudoScores(0.5, horizon=64, base=float("-inf"))),
        "no scores": stable(scores=None),
        "window": stable(window=2),
        "other window": stable(window=3),
        "wide window": stable(window=64),
        "bad window": stable(window=0),
        "window as a float": stable(window=2.0),
        "window as a tensor": stable(window=torch.tensor(2)),
        "window of another library": stable(window=np.int64(2)),
        "window as a list": stable(window=[2]),
        "scale": stable(scale=0.25),
        "scale as a tensor": stable(scale=torch.tensor(0.25)),
        "scale of another library": stable(scale=np.float32(0.25)),
        "negative scale": stable(scale=-0.25),
        "bad scale": stable(scale=float("nan")),
        "softcap": stable(softcap=2.0),
        "bad dropout": stable(dropout=1.0),
        "dropout as a truth": stable(dropout=False),
        "dropout as a tensor": stable(dropout=torch.zeros(2)),
        "lse as a number": stable(return_lse=0),
        "mask of another library": stable(key_mask=np.ones((2, 9), bool)),
        "slopes of another library": stable(alibi_slopes=np.ones(4, np.float32)),
        "lse": stable(return_lse=True),
        "mask": stable(key_mask=mask),
        "slopes": stable(alibi_slopes=torch.rand(4, generator=torch.Generator().manual_seed(3))),
        "documents": stable(document_ids=mask.long()),
        "positions": stable(positions=torch.tensor([[8], [3]])),
        "plain": sink(None),
        "scores as a sink": sink(SCORES),
        "not causal": sink(row_logits(), causal=False),
        "logits": sink(row_logits()),
        "other logits": sink(row_logits(1)),
        "logits of each sequence": sink(row_logits(batch=2)),
        "wrong logits": sink(row_logits(batch=3)),
        "half logits": sink(row_logits(dtype=torch.float16)),
        "integers": sink(row_logits().long()),
        "logits of heads": sink(row_logits()[0, :, 0]),
        "sparse logits": sink(row_logits().to_sparse()),
        "number": sink(1.0),
        "sparse": stable(q.to_sparse()),
        "nested": stable(nested()),
        "rank 3": stable(q[0], k[0], v[0]),
        "not a tensor": stable("q"),
        "another device": stable(q, k.to("meta"), v),
        "NaN": stable(q.masked_fill(q > 1, float("nan"))),
        "autocast": casting,
        "of leaves": stable(q.clone().requires_grad_()),
        "keys of leaves": stable(q, k.clone().requires_grad_(), v),
        "reference": stable(backend="reference"),
        "unable": stable(backend="cuda_flash"),
        "other strides": stable(q, k.mT.contiguous().mT, v),
    }


def outcome(call: Call) -> Any:
    """What a call returns, or how it refuses."""
    try:
        return call()
    except (TypeError, ValueError) as error:
        return type(error), str(error)


NAMES = tuple(make_calls())


@pytest.mark.parametrize("before", ["first", "logits", "plain", "more queries", "window", "scale", "off"])
@pytest.mark.parametrize("name", NAMES)
def test_what_came_before_changes_nothing(name: str, before: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = make_calls()
    with torch.inference_mode():
        alone = outcome(calls[name])
        monkeypatch.setattr(_repeats, "_kept", {})
        outcome(calls[before])
        after, again = outcome(calls[name]), outcome(calls[name])
    with torch.enable_grad():
        outcome(calls[before])
        differentiable = outcome(calls[name])
    for found in (after, again, differentiable):
        if isinstance(alone, Tensor) or isinstance(alone[0], Tensor):
            torch.testing.assert_close(found, alone, rtol=0, atol=0, equal_nan=True)
        else:
            assert found == alone


@pytest.mark.parametrize("name", ["first", "logits", "plain", "more queries", "window"])
def test_a_repeated_call_is_not_checked_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = make_calls()[name]
    with torch.no_grad():
        expected = call()
        monkeypatch.setattr("stablemask.attention.build_call", None)
        assert torch.equal(call(), expected)


def test_from_token_to_token_no_call_is_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.no_grad():
        q, k, v = tensors()
        stable_attention(q, k, v, SCORES)
        given = [tensors(keys=n, seed=n) for n in (10, 11, 11, 70, 200)]
        expected = [stable_attention(*t, SCORES, backend="reference") for t in given]
        monkeypatch.setattr("stablemask.attention.build_call", None)
        for t, out in zip(given, expected, strict=True):
            torch.testing.assert_close(stable_attention(*t, SCORES), out)


def test_layers_of_two_kinds_may_alternate(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = make_calls()
    with torch.no_grad():
        expected = {name: calls[name]() for name in ("first", "window")}
        monkeypatch.setattr("stablemask.attention.build_call", None)
        for name in 3 * ("first", "window"):
            assert torch.equal(calls[name](), expected[name])


def test_only_a_few_calls_are_kept() -> None:
    q, k, v = tensors()
    with torch.no_grad():
        for window in range(1, 100):
            stable_attention(q, k, v, SCORES, window=window)
    assert len(_repeats._kept) <= 8


def test_gradients_are_as_without() -> None:
    q, k, v = tensors()
    with torch.no_grad():
        stable_attention(q, k, v, SCORES)
    q.requires_grad_()
    out = stable_attention(q, k, v, SCORES)
    (gradient,) = torch.autograd.grad(out.sum(), q)
    (expected,) = torch.autograd.grad(stable_attention(q, k, v, SCORES, backend="reference").sum(), q)
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("queries", [1, 9])
@pytest.mark.parametrize("sink", [SCORES, row_logits(), None], ids=["scores", "logits", "none"])
def test_nothing_is_kept_of_the_tensors(sink: PseudoScores | Tensor | None, queries: int) -> None:
    """Not through a view, either: σ of all rows is a table, which has its own bounds."""
    with torch.no_grad():
        if isinstance(sink, PseudoScores):
            stable_attention(*tensors(queries=queries), sink)
        else:
            sink_attention(*tensors(queries=queries), sink)
    (kept,) = _repeats._kept.values()
    held = [t for t in (*kept, *kept.call) if isinstance(t, Tensor)]
    assert sum(t.untyped_storage().nbytes() for t in held) <= 4 * 4


def test_logits_may_change_in_place() -> None:
    q, k, v = tensors()
    logits = row_logits()
    with torch.no_grad():
        first = sink_attention(q, k, v, logits)
        logits.add_(3.0)
        second = sink_attention(q, k, v, logits)
        assert not torch.equal(first, second)
        torch.testing.assert_close(second, sink_attention(q, k, v, logits, backend="reference"))


def test_an_observer_sees_repeated_calls() -> None:
    seen: list[Tensor] = []
    call = make_calls()["first"]
    with torch.no_grad():
        call()
        with observing(lambda _, lse: seen.append(lse)):
            call()
            call()
    assert len(seen) == 2
    torch.testing.assert_close(seen[1], make_calls()["lse"]()[1])


def test_compiled_calls_keep_nothing() -> None:
    call = make_calls()["first"]
    with torch.no_grad():
        expected = call()
        compiled = torch.compile(lambda: make_calls()["first"](), backend="eager")  # noqa: PLW0108
        torch.testing.assert_close(compiled(), expected)
        _repeats._kept.clear()
        torch.testing.assert_close(compiled(), expected)
    assert not _repeats._kept


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_transforms_neither_use_nor_keep_anything() -> None:
    q, k, v = tensors()
    with torch.no_grad():
        stable_attention(q, k, v, SCORES)
        kept = dict(_repeats._kept)
        mapped = torch.func.vmap(lambda x: stable_attention(x, k, v, SCORES))(torch.stack([q, 2 * q]))
        assert _repeats._kept == kept
        torch.testing.assert_close(mapped[1], stable_attention(2 * q, k, v, SCORES))


def test_threads_do_not_mix_their_calls() -> None:
    """One call is kept for all threads; each reads it once."""
    from concurrent.futures import ThreadPoolExecutor

    def many(n: int) -> bool:
        given = tensors(keys=n, seed=n)
        alone = stable_attention(*given, SCORES, backend="cpu_flash")
        with torch.no_grad():
            return all(torch.equal(stable_attention(*given, SCORES), alone) for _ in range(500))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(many, (3, 9, 33, 100)))


def test_the_back_end_of_inference_on_a_cpu_is_the_flash_kernel() -> None:
    with torch.no_grad():
        make_calls()["first"]()
    assert _repeats._kept[None].infer is cpu_flash.infer
