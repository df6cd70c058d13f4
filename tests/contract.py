"""The contract as a table: a call for every form of every argument, in sizes that all differ."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from stablemask import PseudoScores
from stablemask.testing import Example, attend, make_gradients, make_qkv
from tests.checks import Truth, claims

B, H, G, TQ, TK, D = 2, 6, 3, 11, 13, 5
SCORES = PseudoScores(0.5, horizon=17)

Build = Callable[..., Example]  # of a generator, a dtype and sizes in place of those of the case
CASES: dict[str, Build] = {}


def case(name: str, make_sink: Any = None, make_options: Any = None, **sizes: Any) -> None:
    """Add a call; sinks and options may be functions of the generator."""

    def build(generator: torch.Generator, dtype: torch.dtype, **others: int) -> Example:
        q, k, v = make_qkv(generator, dtype=dtype, **(sizes | others))
        sink = make_sink(generator) if callable(make_sink) else make_sink
        options = {n: o(generator) if callable(o) else o for n, o in (make_options or {}).items()}
        return make_gradients(Example(q, k, v, sink, options=options), generator)

    assert name not in CASES
    CASES[name] = build


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[torch.Generator], Tensor]:
    return lambda generator: torch.randn(shape, generator=generator).to(dtype)


def keeps(*rows: str) -> Tensor:
    """A key mask, one character per key: x is kept."""
    return torch.tensor([[c == "x" for c in row] for row in rows])


def ids(*rows: str) -> Tensor:
    return torch.tensor([[int(c) for c in row] for row in rows])


SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.7, 0.35])
SQUARE = {"num_queries": TK}
LEFT, RIGHT = keeps("...xxxxxxxxxx", "......xxxxxxx"), keeps("xxxxxxxxxx...", "xxxxx........")
HOLES, ONE_EMPTY = keeps("x.xx.xxxxx.x.", ".x.xx.xx...xx"), keeps("." * TK, "x" * TK)
PACKED = ids("0000011122222", "7777777777733")
COMES_BACK = ids("0001110000222", "5500555550055")
SLOTS = torch.tensor(
    [[4, 9, 1, 0, 12, 3, 2, 8, 7, 5, 6, 11, 10], [20, -1, 18, 17, -1, 15, 16, 19, -1, 14, 13, 12, -1]]
)
ROWS = torch.tensor([[2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], [-1, -1, 12, 13, 14, 15, 16, 17, 18, 19, 20]])

case("no sink", **SQUARE)
case("sink number", 0.7, **SQUARE)
case("sink minus infinity", -math.inf)
case("sink rank 0", normal(), **SQUARE)
case("sink (H,)", normal(H), **SQUARE)
case("sink (1,)", normal(1))
case("sink (H, Tq)", normal(H, TQ))
case("sink (1, Tq)", normal(1, TQ))
case("sink (H, 1)", normal(H, 1))
case("sink (B, H, Tq)", normal(B, H, TQ))
case("sink (B, 1, Tq)", normal(B, 1, TQ))
case("sink (1, H, 1)", normal(1, H, 1))
case("sink (H,) where H = Tq", normal(H), num_queries=H)
case("sink (H, Tq) where H = Tq", normal(H, H), num_queries=H)
case("sink partly minus infinity", torch.tensor([0.0, -math.inf, 1.0, -math.inf, 2.0, -1.0]))
case("sink in bfloat16", normal(H, dtype=torch.bfloat16))
case("sink strong", torch.full((H,), 8.0), **SQUARE)
case("scores", SCORES, **SQUARE)
case("scores Tq < Tk", SCORES)
case("scores at the horizon", PseudoScores(0.5, horizon=TK), **SQUARE)
case("scores beyond the horizon", PseudoScores(0.5, horizon=7), **SQUARE)
case("scores without a horizon", PseudoScores(0.5, horizon=None), **SQUARE)
case("scores of a list", PseudoScores([0.0, 1e-6, 0.1, 0.5, 3.0, 100.0], horizon=17), **SQUARE)
case("scores of one gamma", PseudoScores(0.1, horizon=17, headwise=False), **SQUARE)
case("scores with a base", PseudoScores(0.5, horizon=17, base=3.0), **SQUARE)
case("scores off", PseudoScores(0.5, horizon=17, base=-math.inf), **SQUARE)
case("positions", SCORES, {"positions": lambda g: torch.randint(0, 40, (B, TQ), generator=g)})
case("positions int32", SCORES, {"positions": torch.arange(TQ, dtype=torch.int32).expand(B, TQ)})
case("key_positions", SCORES, {"positions": ROWS, "key_positions": SLOTS})
case("key_positions uint8", SCORES, {"positions": (ROWS + 1).byte(), "key_positions": (SLOTS + 1).byte()})
case("key_positions, sink", normal(H), {"positions": ROWS, "key_positions": SLOTS})
case("key_positions, window", SCORES, {"positions": ROWS, "key_positions": SLOTS, "window": 3})
case("key_positions, alibi", SCORES, {"positions": ROWS, "key_positions": SLOTS, "alibi_slopes": SLOPES})
case("key_positions, mask", SCORES, {"positions": ROWS, "key_positions": SLOTS, "key_mask": HOLES})
case("key_positions, non-causal", 0.5, {"positions": ROWS, "key_positions": SLOTS, "causal": False})
case("key_positions, Tq > Tk", SCORES, {"positions": ROWS, "key_positions": SLOTS[:, :7]}, num_keys=7)
case("window 1", SCORES, {"window": 1}, **SQUARE)
case("window 4", SCORES, {"window": 4}, **SQUARE)
case("window 4, Tq < Tk", SCORES, {"window": 4})
case("window 99", SCORES, {"window": 99}, **SQUARE)
case("alibi_slopes", SCORES, {"alibi_slopes": SLOPES}, **SQUARE)
case("alibi_slopes, Tq < Tk", SCORES, {"alibi_slopes": SLOPES})
case("alibi_slopes, window", SCORES, {"alibi_slopes": SLOPES, "window": 4}, **SQUARE)
case("alibi_slopes, non-causal", 0.5, {"alibi_slopes": SLOPES, "causal": False})
case("bias (H, Tq, Tk)", SCORES, {"bias": normal(H, TQ, TK)})
case("bias (1, Tq, Tk)", SCORES, {"bias": normal(1, TQ, TK)})
case("bias (B, H, Tq, Tk)", SCORES, {"bias": normal(B, H, TQ, TK)})
case("bias (B, 1, Tq, Tk)", SCORES, {"bias": normal(B, 1, TQ, TK)})
case("bias (1, 1, Tq, Tk), alibi", SCORES, {"bias": normal(1, 1, TQ, TK), "alibi_slopes": SLOPES})
case("bias in bfloat16", SCORES, {"bias": normal(H, TQ, TK, dtype=torch.bfloat16)})
case("bias hides keys", SCORES, {"bias": torch.full((1, TQ, TK), -math.inf).triu(2)})
case("key_mask left", SCORES, {"key_mask": LEFT}, **SQUARE)
case("key_mask right", SCORES, {"key_mask": RIGHT}, **SQUARE)
case("key_mask holes", SCORES, {"key_mask": HOLES}, **SQUARE)
case("key_mask keeps nothing", SCORES, {"key_mask": ONE_EMPTY}, **SQUARE)
case("key_mask, Tq < Tk", SCORES, {"key_mask": LEFT})
case("key_mask, window", SCORES, {"key_mask": LEFT, "window": 4}, **SQUARE)
case("key_mask, alibi", SCORES, {"key_mask": RIGHT, "alibi_slopes": SLOPES}, **SQUARE)
case("key_mask, non-causal", 0.5, {"key_mask": HOLES, "causal": False}, **SQUARE)
case("key_mask, sink", normal(B, H, TQ), {"key_mask": LEFT})
case("document_ids", SCORES, {"document_ids": PACKED}, **SQUARE)
case("document_ids come back", SCORES, {"document_ids": COMES_BACK}, **SQUARE)
case("document_ids, Tq < Tk", SCORES, {"document_ids": PACKED})
case("document_ids, window", SCORES, {"document_ids": PACKED, "window": 3}, **SQUARE)
case("document_ids, alibi", SCORES, {"document_ids": PACKED, "alibi_slopes": SLOPES}, **SQUARE)
case("document_ids, mask", SCORES, {"document_ids": PACKED, "key_mask": HOLES}, **SQUARE)
case("document_ids, non-causal", 0.5, {"document_ids": PACKED, "causal": False})
case("document_ids, bias", SCORES, {"document_ids": PACKED, "bias": normal(H, TQ, TK)})
case("scale", SCORES, {"scale": 0.9}, **SQUARE)
case("scale zero", SCORES, {"scale": 0.0}, **SQUARE)
case("scale negative", SCORES, {"scale": -0.4}, **SQUARE)
case("softcap", SCORES, {"softcap": 2.0}, **SQUARE)
case("softcap, alibi, bias", SCORES, {"softcap": 2.0, "alibi_slopes": SLOPES, "bias": normal(H, TQ, TK)})
case("non-causal", 0.5, {"causal": False})
case("non-causal, Tq > Tk", normal(H, 19), {"causal": False}, num_queries=19)
case("values narrower", SCORES, value_dim=3)
case("values wider", SCORES, value_dim=7, **SQUARE)
case("one token", SCORES, num_queries=1, num_keys=1)
case("one query", SCORES, num_queries=1)
case("one query, window, alibi", SCORES, {"window": 4, "alibi_slopes": SLOPES}, num_queries=1)
case("one query, mask", SCORES, {"key_mask": LEFT}, num_queries=1)
case("one query, documents", SCORES, {"document_ids": PACKED}, num_queries=1)
case("one key head", SCORES, kv_heads=1, **SQUARE)
case("as many key heads", SCORES, kv_heads=H, **SQUARE)
case("one head of one sequence", SCORES, batch=1, heads=1, kv_heads=1)
case("width 1", SCORES, dim=1, **SQUARE)
case("width 128", SCORES, dim=128, **SQUARE)
for layout in ("bthd", "qkv", "strided", "expanded"):
    case(f"layout {layout}", SCORES, layout=layout, **SQUARE)
    case(f"layout {layout}, Tq < Tk", SCORES, layout=layout)
    case(f"layout {layout}, alibi", SCORES, {"alibi_slopes": SLOPES}, layout=layout, **SQUARE)
case("no sequence", SCORES, batch=0)
case("no head", 0.5, heads=0, kv_heads=0)
case("no query", SCORES, num_queries=0)
case("no key, no query", SCORES, num_queries=0, num_keys=0)
case("no key, non-causal", 0.5, {"causal": False}, num_keys=0)
case("no key, non-causal, no sink", -math.inf, {"causal": False}, num_keys=0)
case("values of width 0", SCORES, value_dim=0, **SQUARE)

IN_EVERY_DTYPE = (
    "sink (H, Tq)",
    "scores",
    "scores Tq < Tk",
    "key_positions",
    "alibi_slopes, window",
    "bias (H, Tq, Tk)",
    "key_mask left",
    "document_ids, mask",
    "one token",
)
PARAMETERS = [pytest.param(name, torch.float32, id=name) for name in CASES] + [
    pytest.param(name, dtype, id=f"{name}, {dtype}".replace("torch.", ""))
    for name in IN_EVERY_DTYPE
    for dtype in (torch.bfloat16, torch.float16, torch.float64)
]


@cache
def truth_of(name: str, dtype: torch.dtype, wrt: tuple[str, ...] | None, return_lse: bool) -> Truth:
    """The oracle's answer to a case; ``wrt`` None asks for every gradient, () for none."""
    example = CASES[name](torch.Generator().manual_seed(len(name)), dtype)
    if not return_lse:
        example = replace(example, return_lse=False, grad_lse=None)
    if wrt == ():
        example = replace(example, grad_out=None, grad_lse=None)
    return Truth(example, tuple(example.tensors()) if wrt is None else wrt)


def serve_or_refuse(backend: str, truth: Truth, refusal: str | None) -> None:
    """The back end is right within the budget; or, where a refusal is expected, it gives that reason."""
    reason = claims(truth.example, truth.wrt or ())[backend]
    if refusal is None:
        assert reason is None, f"{backend} refuses: {reason}"
        truth.check_backend(backend)
        return
    assert reason is not None, f"{backend} now serves what it refused ({refusal}): test it"
    assert refusal in reason
    tensors = truth.example.tensors()
    leaves = {name: tensors[name].detach().requires_grad_() for name in truth.wrt or ()}
    with pytest.raises(ValueError, match=backend) as caught:
        attend(truth.example.replace(leaves), backend)
    assert reason in str(caught.value)
