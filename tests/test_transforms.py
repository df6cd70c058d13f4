"""The operation under torch.compile, torch.export, autocast, checkpointing, vmap and second derivatives."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from stablemask import BackendUnavailable, PseudoScores, sink_attention, stable_attention
from stablemask.backends import NAMES
from stablemask.testing import Example, attend, evaluate, make_gradients, make_qkv

SCORES = PseudoScores(0.5, horizon=64)
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.7, 0.35])
LENGTHS = (29, 67, 131)  # below, at and above the horizon, and on both sides of the sizes of kept tables

Options = Callable[[int], dict[str, Any]]  # of the number of keys
CALLS: dict[str, tuple[str | None, Options]] = {
    "plain": (None, lambda _: {}),
    "window and alibi": (None, lambda _: {"window": 9, "alibi_slopes": SLOPES}),
    "key_mask": (None, lambda n: {"key_mask": torch.arange(n) >= torch.tensor([[0], [7]])}),
    "document_ids": (None, lambda n: {"document_ids": (torch.arange(n) // 11).expand(2, -1)}),
    "cache": (
        None,
        lambda n: {
            "positions": torch.arange(n).expand(2, -1),
            "key_positions": torch.arange(n).flip(0).expand(2, -1),
        },
    ),
    "softcap": (None, lambda _: {"softcap": 2.0}),
    "portable": ("portable", lambda _: {}),
    "portable with a bias": (
        "portable",
        lambda n: {"bias": (torch.arange(n * n) % 7).float().reshape(1, n, n)},
    ),
}


def example(length: int, options: dict[str, Any], backend: str | None) -> Example:
    generator = torch.Generator().manual_seed(length)
    q, k, v = make_qkv(generator, num_queries=length, num_keys=length, dim=8)
    return make_gradients(
        Example(q, k, v, SCORES, options=options, return_lse=backend != "portable"), generator
    )


COMPILED = [(name, True) for name in ("plain", "window and alibi", "document_ids", "cache", "portable")]
COMPILED += [(name, False) for name in ("plain", "key_mask", "softcap", "portable with a bias")]


@pytest.mark.parametrize(
    ("name", "dynamic"), [pytest.param(n, d, id=f"{n}, {'dynamic' if d else 'static'}") for n, d in COMPILED]
)
def test_compiles_into_one_graph(name: str, dynamic: bool) -> None:
    """Forward and backward without a graph break; with dynamic shapes one graph serves every length."""
    backend, options = CALLS[name]
    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for length in LENGTHS[::2] if dynamic else LENGTHS[:1]:
            assert_as_eager(compiled, example(length, options(length), backend), backend)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_inductor_compiles_a_training_step() -> None:
    torch._dynamo.reset()
    assert_as_eager(torch.compile(attend, fullgraph=True), example(67, {"window": 40}, None), None)


def assert_as_eager(compiled: Any, call: Example, backend: str | None) -> None:
    """out, lse' and every gradient are those of the call that is not compiled."""
    wrt = [name for name in call.tensors() if name != "alibi_slopes"]
    ours, eager = (evaluate(lambda e, f=f: f(e, backend), call, wrt) for f in (compiled, attend))
    assert list(ours) == list(eager)
    for name, t in ours.items():
        torch.testing.assert_close(t, eager[name], msg=lambda text, name=name: f"{name}: {text}")


class Attend(torch.nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return stable_attention(q, k, v, SCORES, **self.options)


@pytest.mark.parametrize(
    "options",
    [{}, {"window": 9}, {"alibi_slopes": SLOPES}, {"return_lse": True}, {"softcap": 2.0}],
    ids=["plain", "window", "alibi", "lse", "softcap"],
)
@pytest.mark.parametrize("one_query", [False, True], ids=["prefill", "decode"])
def test_export_serves_every_length(options: dict[str, Any], one_query: bool) -> None:
    def inputs(length: int) -> tuple[Tensor, ...]:
        queries = 1 if one_query else length
        return make_qkv(torch.Generator().manual_seed(0), num_queries=queries, num_keys=length, dim=8)

    size = torch.export.Dim("T", min=2, max=4096)
    shapes = {"q": None if one_query else {2: size}, "k": {2: size}, "v": {2: size}}
    model = Attend(**options)
    exported = torch.export.export(model, inputs(40), dynamic_shapes=shapes).module()
    for length in LENGTHS:
        torch.testing.assert_close(exported(*inputs(length)), model(*inputs(length)))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_checkpointing_changes_no_gradient(name: str, reentrant: bool) -> None:
    backend, options = CALLS[name]
    call = example(29, options(29), backend)

    def through(e: Example) -> tuple[Tensor, None]:
        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(e.replace({"q": q, "k": k, "v": v}), backend)[0]

        return checkpoint(run, e.q, e.k, e.v, use_reentrant=reentrant), None  # type: ignore[return-value]

    leaves = [t.clone().requires_grad_() for t in (call.q, call.k, call.v)]
    out, _ = through(call.replace(dict(zip(("q", "k", "v"), leaves, strict=True))))
    out.backward(call.grad_out)
    expected = [t.clone().requires_grad_() for t in (call.q, call.k, call.v)]
    plain, _ = attend(call.replace(dict(zip(("q", "k", "v"), expected, strict=True))), backend)
    plain.backward(call.grad_out)
    for ours, theirs in zip(leaves, expected, strict=True):
        assert torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type] # both were reached


@pytest.mark.parametrize("backend", ["reference", "cpu_flash", "portable"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_casts_q_k_v_and_leaves_sigma_and_lse_in_float32(backend: str, dtype: torch.dtype) -> None:
    call = example(29, {}, backend)
    q, k, v = (t.clone().requires_grad_() for t in (call.q, call.k, call.v))
    sink = torch.randn(6, 29, generator=torch.Generator().manual_seed(1)).requires_grad_()
    with torch.autocast("cpu", dtype):
        out, lse = attend(Example(q, k, v, sink, return_lse=call.return_lse), backend)
        mixed = sink_attention(q.to(dtype), k, v, sink, backend=backend)
    halves = [t.detach().to(dtype) for t in (q, k, v)]
    by_hand, lse_by_hand = attend(Example(*halves, sink, return_lse=call.return_lse), backend)
    assert out.dtype == dtype
    assert torch.equal(out, by_hand)
    assert torch.equal(mixed, by_hand)
    if lse is not None and lse_by_hand is not None:
        assert lse.dtype == torch.float32
        assert torch.equal(lse, lse_by_hand)
    out.float().sum().backward()
    assert [t.grad.dtype for t in (q, k, v, sink)] == [torch.float32] * 4  # type: ignore[union-attr] # reached


def test_autocast_leaves_float64_alone() -> None:
    q, k, v = make_qkv(torch.Generator().manual_seed(0), num_queries=13, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        out, lse = stable_attention(q, k, v, SCORES, return_lse=True)
        with pytest.raises(ValueError, match="autocast leaves float64 alone"):
            stable_attention(q, k.float(), v, SCORES)
    assert out.dtype == lse.dtype == torch.float64


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("backend", [None, "reference", "portable"])
def test_vmap_works(backend: str | None) -> None:
    q, k, v = make_qkv(torch.Generator().manual_seed(0), num_queries=13, num_keys=13)
    many = [torch.stack([t, t.flip(2), t + 1]) for t in (q, k, v)]

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return stable_attention(q, k, v, SCORES, window=5, backend=backend)

    one_by_one = torch.stack([run(*one) for one in zip(*many, strict=True)])
    torch.testing.assert_close(torch.func.vmap(run)(*many), one_by_one)
    sinks = torch.randn(3, 6, generator=torch.Generator().manual_seed(1))
    with_sinks = torch.func.vmap(lambda s: sink_attention(q, k, v, s, backend=backend))(sinks)
    torch.testing.assert_close(with_sinks, torch.stack([sink_attention(q, k, v, s) for s in sinks]))


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("backend", [None, "reference", "portable"])
def test_func_grad_works(backend: str | None) -> None:
    q, k, v = make_qkv(torch.Generator().manual_seed(0), num_queries=13)

    def loss(q: Tensor) -> Tensor:
        return stable_attention(q, k, v, SCORES, backend=backend).sin().sum()

    leaf = q.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(leaf), leaf)
    torch.testing.assert_close(torch.func.grad(loss)(q), expected)


@pytest.mark.parametrize("backend", [name for name in NAMES if name not in ("reference", "portable")])
def test_transforms_are_refused_where_they_cannot_be_seen_through(backend: str) -> None:
    q, k, v = make_qkv(torch.Generator().manual_seed(0), num_queries=13)

    def run(q: Tensor) -> Tensor:
        return stable_attention(q, k, v, SCORES, backend=backend)

    on_a_gpu = "runs on NVIDIA GPUs"  # said first: on CPU tensors it is the nearer reason
    with pytest.raises(BackendUnavailable, match=f"torch.func transforms|{on_a_gpu}"):
        torch.func.vmap(run)(q.unsqueeze(0))


def test_second_derivatives_are_those_of_the_reference_or_refused() -> None:
    q, k, v = make_qkv(
        torch.Generator().manual_seed(0), num_queries=3, num_keys=3, dim=2, batch=1, dtype=torch.float64
    )
    leaves = [t.requires_grad_() for t in (q, k, v)]

    def penalty(backend: str | None) -> Tensor:
        out = stable_attention(*leaves, SCORES, backend=backend)
        (dq,) = torch.autograd.grad(out.square().sum(), leaves[0], create_graph=True)
        return dq.square().sum()

    assert all(math.isfinite(float(t.norm())) for t in torch.autograd.grad(penalty("reference"), leaves))
    assert torch.autograd.gradgradcheck(
        lambda *given: stable_attention(*given, SCORES, backend="reference"), leaves
    )
    with pytest.raises(RuntimeError, match=r"double backward: .*use backend='reference'"):
        torch.autograd.grad(penalty(None), leaves)
    with pytest.raises(RuntimeError, match=r"derivative for aten::\w+_backward is not implemented"):
        torch.autograd.grad(penalty("portable"), leaves)
