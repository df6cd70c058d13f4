"""The CPU flash back end: the contract but for what it says it lacks, its tiles, operators and trial run."""

import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from stablemask import (
    BackendUnavailable,
    PseudoScores,
    _probe,
    available_backends,
    sink_attention,
    stable_attention,
)
from stablemask.backends import _cpu_tiles
from stablemask.testing import LAYOUTS, Example, Layout, make_gradients, make_qkv
from tests.checks import Truth
from tests.contract import PARAMETERS, SCORES, serve_or_refuse, truth_of

REFUSES = {
    "softcap": "cannot cap scores",
    "softcap, alibi, bias": "cannot cap scores",
    "values narrower": "values as wide as queries, got 3 and 5",
    "values wider": "values as wide as queries, got 7 and 5",
    "values of width 0": "values as wide as queries, got 0 and 5",
    "scale zero": "its causal mask by the scale",
    "scale negative": "its causal mask by the scale",
}
WITHOUT_BIASES = ("q", "k", "v", "sink")


@pytest.mark.parametrize(("name", "dtype"), PARAMETERS)
def test_serves_all_but_gradients_of_biases(name: str, dtype: torch.dtype) -> None:
    truth = truth_of(name, dtype, None, True)
    wrt = tuple(n for n in truth.example.tensors() if n in WITHOUT_BIASES)
    serve_or_refuse("cpu_flash", truth_of(name, dtype, wrt, True), REFUSES.get(name))


@pytest.mark.parametrize(("name", "dtype"), PARAMETERS)
def test_serves_without_gradients(name: str, dtype: torch.dtype) -> None:
    serve_or_refuse("cpu_flash", truth_of(name, dtype, (), True), REFUSES.get(name))


@pytest.mark.parametrize("bias", ["bias", "alibi_slopes"])
def test_refuses_gradients_of_biases(bias: str) -> None:
    name = {"bias": "bias (H, Tq, Tk)", "alibi_slopes": "alibi_slopes"}[bias]
    serve_or_refuse("cpu_flash", truth_of(name, torch.float32, None, True), f"no gradient for {bias}")


LENGTH = 300  # more than two bands of rows, and no multiple of one


def long_call(**options: Any) -> Example:
    generator = torch.Generator().manual_seed(0)
    q, k, v = make_qkv(generator, heads=2, kv_heads=1, num_queries=LENGTH, num_keys=LENGTH, dim=16)
    return make_gradients(Example(q, k, v, PseudoScores(0.5, horizon=1000), options=options), generator)


DOCUMENTS = torch.repeat_interleave(torch.arange(4), torch.tensor([131, 1, 150, 18])).expand(2, -1)
PADDED = torch.arange(LENGTH) >= torch.tensor([[0], [170]])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": 40},
        {"window": 200},
        {"alibi_slopes": torch.tensor([0.3, 0.01])},
        {"alibi_slopes": torch.tensor([0.3, 0.01]), "window": 130},
        {"document_ids": DOCUMENTS},
        {"document_ids": DOCUMENTS, "window": 40, "alibi_slopes": torch.tensor([0.3, 0.01])},
        {"key_mask": PADDED},
        {"key_mask": PADDED.flip(1), "window": 40},
        {"key_mask": torch.arange(LENGTH).expand(2, -1) % 7 != 3},
        {"bias": torch.randn(1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(1))},
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("num_queries", [1, 150, LENGTH])
def test_calls_of_several_bands(options: dict[str, Any], num_queries: int) -> None:
    options = {n: o[:, -num_queries:] if n == "bias" else o for n, o in options.items()}
    whole = long_call(**options)
    assert whole.grad_out is not None
    assert whole.grad_lse is not None
    example = replace(
        whole,
        q=whole.q[:, :, -num_queries:],
        grad_out=whole.grad_out[:, :, -num_queries:],
        grad_lse=whole.grad_lse[:, :, -num_queries:],
    )
    Truth(example, ("q", "k", "v")).check_backend("cpu_flash")


SAMPLES = {
    "whole": {},
    "window": {"window": 3},
    "alibi_slopes": {"alibi_slopes": torch.tensor([0.5, 0.25])},
    "key_mask": {"key_mask": torch.tensor([[True] * 9, [False] * 4 + [True] * 5])},
    "document_ids": {"document_ids": torch.tensor([[0] * 4 + [1] * 5, [0] * 9])},
    "bias": {"bias": torch.randn(2, 9, 9)},
}


OPCHECKS = [
    *((name, "contiguous", 9) for name in SAMPLES),
    *((name, "bthd", 5) for name in SAMPLES),
    *(("whole", layout, 9) for layout in LAYOUTS[1:]),
]


@pytest.mark.parametrize(("name", "layout", "num_queries"), OPCHECKS)
def test_opcheck(name: str, layout: Layout, num_queries: int) -> None:
    """Schema, fake tensors, autograd registration and tracing with dynamic shapes, of both operators."""
    generator = torch.Generator().manual_seed(0)
    sizes = {"heads": 2, "kv_heads": 1, "num_queries": num_queries, "num_keys": 9, "dim": 8}
    q, k, v = make_qkv(generator, layout=layout, **sizes)
    forward, backward = operator_arguments(q, k, v, **SAMPLES[name])
    torch.library.opcheck(torch.ops.stablemask.cpu_flash.default, forward)
    torch.library.opcheck(torch.ops.stablemask.cpu_flash_backward.default, backward)


def operator_arguments(
    q: Tensor, k: Tensor, v: Tensor, **options: Any
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """What the two operators are given in a call."""
    options = {n: o[:, -q.shape[2] :] if n == "bias" else o for n, o in options.items()}
    recorded: dict[str, tuple[Any, ...]] = {}

    class Record(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function.namespace == "stablemask":
                recorded[function._schema.name] = args
            return function(*args, **(kwargs or {}))

    sink = torch.randn(q.shape[1], q.shape[2])
    leaves = [t.detach().requires_grad_() for t in (q, k, v, sink)]
    with Record():
        sink_attention(*leaves, **options, backend="cpu_flash").sum().backward()
    forward = recorded["stablemask::cpu_flash"]
    backward = recorded[
        "stablemask::cpu_flash_backward"
    ]  # without requires_grad: it refuses a second derivative
    return (*leaves, *forward[4:]), tuple(t.detach() if isinstance(t, Tensor) else t for t in backward)


def test_double_backward_is_refused() -> None:
    q = torch.randn(1, 2, 5, 3, requires_grad=True)
    out = stable_attention(q, q, q, SCORES, backend="cpu_flash")
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match=r"double backward.*use backend='reference'"):
        dq.sum().backward()


@pytest.fixture
def unprobed() -> Iterator[None]:
    """As in a fresh process; the verdict of this one is put back."""
    before = dict(_probe._failures)
    _probe._failures.clear()
    yield
    _probe._failures.clear()
    _probe._failures.update(before)


def spoil(kernel: str, factor: float) -> Any:
    """The kernel of another PyTorch: the first result of one of its operators is off by a factor."""
    true = getattr(_cpu_tiles, kernel)

    def spoiled(*args: Any, **kwargs: Any) -> Any:
        first, *others = true(*args, **kwargs)
        return (first * factor, *others)

    return patch.object(_cpu_tiles, kernel, spoiled)


@pytest.mark.parametrize(("kernel", "what"), [("flash", "out"), ("flash_backward", "dq")])
def test_a_changed_kernel_is_dropped_with_a_warning(unprobed: None, kernel: str, what: str) -> None:
    q, k, v = make_qkv(torch.Generator().manual_seed(0))
    expected = stable_attention(q, k, v, SCORES, backend="reference")
    with spoil(kernel, 1.001):
        with pytest.warns(
            RuntimeWarning, match=f"back end 'cpu_flash' is not used: .* {what} was off by 1.0e-03"
        ):
            reasons = available_backends(q, k, v, SCORES)
        assert f"{what} was off" in str(reasons["cpu_flash"])
        with warnings.catch_warnings():  # it is said once
            warnings.simplefilter("error")
            torch.testing.assert_close(stable_attention(q, k, v, SCORES), expected)
        with pytest.raises(BackendUnavailable, match=f"'cpu_flash'.*{what} was off"):
            stable_attention(q, k, v, SCORES, backend="cpu_flash")


def test_a_kernel_with_another_signature_is_dropped_with_a_warning(unprobed: None) -> None:
    def changed(query: Tensor) -> Tensor:
        return query

    q, k, v = make_qkv(torch.Generator().manual_seed(0))
    with (
        patch.object(_cpu_tiles, "flash", changed),
        pytest.warns(RuntimeWarning, match="raised TypeError"),
    ):
        reasons = available_backends(q, k, v, SCORES)
    assert reasons["cpu_flash"] is not None
    assert reasons["portable"] is None


@pytest.mark.usefixtures("unprobed")
def test_the_trial_run_happens_once_and_leaves_random_numbers_alone() -> None:
    q, k, v = make_qkv(torch.Generator().manual_seed(0))
    state = torch.get_rng_state()
    with patch.object(_probe, "_try", wraps=_probe._try) as trial:
        for _ in range(3):
            stable_attention(q, k, v, SCORES)
    assert [call.args[0] for call in trial.call_args_list].count("cpu_flash") == 1
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad], ids=["inference_mode", "no_grad"])
def test_the_trial_run_works_in_every_mode(unprobed: None, mode: Any) -> None:
    q, k, v = make_qkv(torch.Generator().manual_seed(0))
    with mode(), torch.autocast("cpu", torch.bfloat16):
        assert available_backends(q, k, v, SCORES)["cpu_flash"] is None


def test_other_devices_are_refused() -> None:
    q = torch.empty(1, 2, 5, 3, device="meta")
    with pytest.raises(BackendUnavailable, match="runs on CPU tensors, got meta"):
        stable_attention(q, q, q, SCORES, backend="cpu_flash")
    assert stable_attention(q, q, q, SCORES).shape == q.shape


@pytest.mark.parametrize("hidden", ["key_mask", "bias"])
def test_a_nan_sink_reaches_rows_without_keys(hidden: str) -> None:
    q, k, v = (torch.randn(2, 2, 6, 8) for _ in range(3))
    keep = torch.ones(2, 6, dtype=torch.bool)
    keep[0] = False
    bias = torch.zeros(2, 1, 6, 6).masked_fill(~keep[:, None, None, :], -torch.inf)
    out, lse = sink_attention(
        q,
        k,
        v,
        torch.full((2, 6), torch.nan),
        key_mask=keep if hidden == "key_mask" else None,
        bias=bias if hidden == "bias" else None,
        return_lse=True,
        backend="cpu_flash",
    )
    assert out.isnan().all()
    assert lse.isnan().all()
