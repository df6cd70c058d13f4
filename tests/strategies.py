"""One Hypothesis strategy for calls of the operation: every argument of the contract, drawn together."""

import math
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from stablemask import PseudoScores
from stablemask.testing import LAYOUTS, Example, make_gradients, make_qkv

LENGTHS = (1, 2, 3, 5, 7, 11, 13, 17, 29, 37)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Drawn(NamedTuple):
    """A call, the tensors whose gradients are asked for, and the height of the CPU kernel's bands."""

    example: Example
    wrt: tuple[str, ...]
    band_rows: int


class Sizes(NamedTuple):
    batch: int
    heads: int
    kv_heads: int
    num_queries: int
    num_keys: int
    dim: int
    value_dim: int
    causal: bool
    cached: bool


def seldom(draw: st.DrawFn) -> bool:
    return draw(st.integers(0, 3)) == 3


@st.composite
def sizes(draw: st.DrawFn) -> Sizes:
    kv_heads = draw(st.integers(1, 3))
    heads = kv_heads * draw(st.integers(1, 3))
    causal, cached = not seldom(draw), seldom(draw)
    num_keys = draw(st.sampled_from(LENGTHS))
    most = 41 if cached or not causal else num_keys
    same = draw(st.booleans())
    num_queries = num_keys if same else draw(st.sampled_from([t for t in (*LENGTHS, 41) if t <= most]))
    dim = draw(st.sampled_from((1, 3, 5, 8, 16, 17)))
    value_dim = draw(st.sampled_from((2, 7, 19))) if seldom(draw) else dim
    batch = draw(st.integers(1, 3))
    return Sizes(batch, heads, kv_heads, num_queries, num_keys, dim, value_dim, causal, cached)


@st.composite
def calls(draw: st.DrawFn, dtype: torch.dtype | None = None) -> Drawn:
    """A call with its gradients."""
    s = draw(sizes())
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    dtype = draw(st.sampled_from(DTYPES)) if dtype is None else dtype
    q, k, v = make_qkv(
        generator,
        batch=s.batch,
        heads=s.heads,
        kv_heads=s.kv_heads,
        num_queries=s.num_queries,
        num_keys=s.num_keys,
        dim=s.dim,
        value_dim=s.value_dim,
        dtype=dtype,
        layout=draw(st.sampled_from(LAYOUTS)),
        size=draw(st.sampled_from((1.0, 1.0, 3.0))),
    )
    options = draw(visibility(s, generator)) | draw(score_options(s, generator, dtype))
    sink = draw(sinks(s, generator, dtype))
    if isinstance(sink, PseudoScores) and not s.cached and seldom(draw):
        options["positions"] = torch.randint(0, 60, (s.batch, s.num_queries), generator=generator)
    if isinstance(sink, PseudoScores) and not s.causal:
        sink = draw(st.sampled_from((None, 0.0)))
        options = {name: value for name, value in options.items() if name != "positions" or s.cached}
    if draw(st.booleans()):
        k, v = poison(k, v, options)
    example = Example(q, k, v, sink, options=options, return_lse=draw(st.booleans()))
    wrt: tuple[str, ...] = ()
    if not seldom(draw):
        example = make_gradients(example, generator)
        least = tuple(name for name in example.tensors() if name not in ("bias", "alibi_slopes"))
        wrt = draw(st.sampled_from((tuple(example.tensors()), least)))
    return Drawn(example, wrt, draw(st.sampled_from((3, 128))))


@st.composite
def visibility(draw: st.DrawFn, s: Sizes, generator: torch.Generator) -> dict[str, Any]:
    """Everything that decides which keys a query sees."""
    options: dict[str, Any] = {} if s.causal else {"causal": False}
    if s.causal and seldom(draw):
        options["window"] = draw(st.sampled_from((1, 2, 3, 7, 50)))
    if seldom(draw):
        options["key_mask"] = draw(key_masks(s, generator))
    if s.cached:
        slots = torch.stack([torch.randperm(s.num_keys + 4, generator=generator) for _ in range(s.batch)])
        empty = torch.rand(s.batch, s.num_keys, generator=generator) < draw(st.sampled_from((0.0, 0.3, 1.0)))
        options["key_positions"] = slots[:, : s.num_keys].masked_fill(empty, -1)
        options["positions"] = torch.randint(
            -1, s.num_keys + 5, (s.batch, s.num_queries), generator=generator
        )
    elif s.num_queries <= s.num_keys and seldom(draw):
        changes = torch.rand(s.batch, s.num_keys, generator=generator) < draw(st.sampled_from((0.1, 0.4)))
        options["document_ids"] = changes.cumsum(-1) % 3  # ids come back: a document is a run, not an id
    return options


@st.composite
def key_masks(draw: st.DrawFn, s: Sizes, generator: torch.Generator) -> Tensor:
    kind = draw(st.sampled_from(("left", "right", "holes", "none kept")))
    if kind == "holes":
        return torch.rand(s.batch, s.num_keys, generator=generator) > 0.3
    if kind == "none kept":
        return torch.rand(s.batch, 1, generator=generator).expand(-1, s.num_keys) > 0.5
    padding = torch.randint(0, s.num_keys + 1, (s.batch, 1), generator=generator)
    keys = torch.arange(s.num_keys)
    return keys >= padding if kind == "left" else keys < padding


@st.composite
def score_options(
    draw: st.DrawFn, s: Sizes, generator: torch.Generator, dtype: torch.dtype
) -> dict[str, Any]:
    """Everything that changes the scores of visible keys."""
    options: dict[str, Any] = {}
    own = draw(st.sampled_from((dtype, torch.float32)))
    if seldom(draw):
        options["alibi_slopes"] = torch.rand(s.heads, generator=generator).to(own)
    if seldom(draw):
        shape = (
            *draw(st.sampled_from(((), (1,), (s.batch,)))),
            draw(st.sampled_from((1, s.heads))),
            s.num_queries,
            s.num_keys,
        )
        options["bias"] = torch.randn(shape, generator=generator).to(own)
    if seldom(draw):
        options["scale"] = draw(st.sampled_from((0.3, 1.0, 0.0, -0.5)))
    if seldom(draw):
        options["softcap"] = draw(st.sampled_from((3.0, 20.0)))
    return options


@st.composite
def sinks(
    draw: st.DrawFn, s: Sizes, generator: torch.Generator, dtype: torch.dtype
) -> PseudoScores | Tensor | float | None:
    """None, a number, a tensor of any rank with any size of 1, or pseudo scores."""
    strong = (
        4.0 if dtype == torch.float16 else 20.0
    )  # out' of a stronger sink is below the normal float16 numbers
    kind = draw(st.sampled_from(("none", "number", "tensor", "scores", "scores", "scores")))
    if kind == "none":
        return None
    if kind == "number":
        return draw(st.sampled_from((0.0, -3.0, strong, -math.inf)))
    if kind == "scores":
        gamma: float | list[float] = draw(st.sampled_from((0.0, 1e-6, 0.01, 0.5, 5.0, 100.0)))
        horizons = (1, 2, 5, 23, 64) if gamma == 0 else (1, 2, 5, 23, 64, None)
        if seldom(draw):
            gamma = [0.01 + 0.3 * h for h in range(s.heads)]
        headwise = draw(st.booleans()) and gamma not in (5.0, 100.0)
        base = draw(st.sampled_from((0.0, -2.0, strong / 2, -math.inf)))
        return PseudoScores(gamma, horizon=draw(st.sampled_from(horizons)), headwise=headwise, base=base)
    full = (
        (s.batch, s.heads, s.num_queries)[3 - draw(st.integers(0, 3)) :]
        if draw(st.booleans())
        else (s.heads,)
    )
    if full == (s.num_queries,):
        full = (s.heads,)
    shape = tuple(draw(st.sampled_from((1, size))) for size in full)
    values = torch.randn(shape, generator=generator) * draw(st.sampled_from((1.0, strong / 4)))
    return values.to(draw(st.sampled_from((dtype, torch.float32))))


def poison(k: Tensor, v: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """NaN in keys and values that are not kept."""
    dropped = torch.zeros(k.shape[0], k.shape[2], dtype=torch.bool)
    if "key_mask" in options:
        dropped |= ~options["key_mask"]
    if "key_positions" in options:
        dropped |= options["key_positions"] < 0
    if not bool(dropped.any()):
        return k, v
    return tuple(t.masked_fill(dropped[:, None, :, None], math.nan) for t in (k, v))
