"""The weights of Appendix C in a real decoder: exact where arithmetic allows it, and wrong right behind."""

from decimal import Decimal, localcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from stablemask.analysis.theory import (
    CARRIER,
    ENCODINGS,
    POSITION,
    XI,
    construct,
    fit_thresholds,
    last_distinct,
    last_right,
    limits,
    read,
    set_thresholds,
    xi,
)
from stablemask.model import StableMaskConfig, StableMaskForCausalLM

N = 1024
SMALL = (0.0, 1 / 256, 1 / 128)
DTYPES = (torch.float32, torch.float64)
TRUTH = torch.arange(1, N + 1)


def tokens(length: int = N, *, seed: int = 5) -> Tensor:
    return torch.randint(N + 1, (length,), generator=torch.Generator().manual_seed(seed))


def precise(gamma: float) -> list[Decimal]:
    """ξ_1 … ξ_N by its definition, to fifty digits."""
    with localcontext() as context:
        context.prec = 50
        pseudo, values = Decimal(0), []
        for i in range(N, 0, -1):
            if i < N:
                pseudo += (-i * Decimal(gamma)).exp()
            values.append(i / (i + pseudo))
        return values[::-1]


@pytest.mark.parametrize("gamma", [0.0, 1 / 128, 1 / 16, 1 / 2])
def test_xi_is_its_definition(gamma: float) -> None:
    exact = precise(gamma)
    found = [Decimal(x) for x in xi(gamma, N).tolist()]
    relative = max(abs(a - b) / b for a, b in zip(found, exact, strict=True))
    assert relative < 4 * Decimal(torch.finfo(torch.float64).eps)


@pytest.mark.parametrize(
    ("gamma", "float32", "float64"), [(1 / 2, 28, 67), (1 / 16, 187, 492), (1 / 64, 662, N), (1 / 128, N, N)]
)
def test_where_rounded_values_stop_growing(gamma: float, float32: int, float64: int) -> None:
    rounded = torch.tensor([float(x) for x in precise(gamma)], dtype=torch.float64)
    assert last_distinct(rounded) == last_distinct(xi(gamma, N)) == float64
    assert last_distinct(rounded.float()) == last_distinct(xi(gamma, N).float()) == float32


@pytest.mark.parametrize("position", ENCODINGS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gamma", SMALL)
def test_every_position_is_exact(gamma: float, dtype: torch.dtype, position: str) -> None:
    model = construct(gamma, N, position=position, dtype=dtype)
    got = read(model, tokens())
    assert torch.equal(got.position, TRUTH.to(dtype))
    assert torch.equal(got.answer, TRUTH)
    slope = 1 / 16 if position == "alibi" else 0.0
    assert (got.xi.double() - xi(gamma, N, slope)).abs().max() < 8 * torch.finfo(dtype).eps


@pytest.mark.parametrize(
    ("gamma", "dtype"),
    [(1 / 64, torch.float32), *((gamma, dtype) for gamma in (1 / 16, 1 / 2) for dtype in DTYPES)],
)
def test_larger_gammas_reach_as_far_as_xi_differs(gamma: float, dtype: torch.dtype) -> None:
    reach = limits(gamma, N, dtype)
    assert reach.fitted == reach.decoder < N
    assert 0.85 * reach.rounded < reach.decoder <= reach.rounded, (
        "the attention rounds, and stops a bit earlier"
    )
    assert 0.85 * reach.rounded < reach.by_formula <= reach.decoder + 1
    assert reach.beyond is not None
    assert reach.beyond != reach.fitted + 1


def test_beyond_the_last_difference_nothing_can_tell() -> None:
    model = construct(1 / 2, N)
    fit_thresholds(model)
    got = read(model, tokens())
    reach = last_right(got.position)
    assert (1 - got.xi[40:]).abs().max() <= torch.finfo(torch.float32).eps, (
        "1, but for the rounding of the sum"
    )
    assert len(got.position[40:].unique()) <= 3
    assert reach < 40 < N
    assert int((got.answer == TRUTH).sum()) <= 40


def test_small_gammas_keep_a_margin() -> None:
    """So the kernel that computes ξ, and the piece of the sequence it comes in, do not matter."""
    model = construct(1 / 128, N)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        parts = [
            model(piece.unsqueeze(0), past_key_values=cache).logits[0].argmax(-1)
            for piece in tokens().split([1, 1, 500, 1, 521])
        ]
    assert torch.equal(torch.cat(parts), TRUTH)


def test_the_weights_are_the_printed_ones() -> None:
    model = construct(1 / 128, 8, constant=1.0)
    attention, head = model.model.layers[0].self_attn, slice(0, model.config.width_of_head)
    assert not attention.q_proj.weight[head].any()
    assert not attention.k_proj.weight[head].any()
    for weight, one in ((attention.v_proj.weight[head], (0, 0)), (attention.o_proj.weight[:, head], (1, 0))):
        assert weight[one] == 1
        assert weight.count_nonzero() == 1
    embedded = model.model.embed_tokens.weight
    assert (embedded[:, CARRIER] == 1).all()
    assert not embedded[:, [XI, POSITION]].any()
    assert embedded[:, 3:].count_nonzero() == embedded[:, 3:].numel(), "the rest is free"
    assert attention.q_proj.weight[head.stop :].count_nonzero() > 0


def test_it_is_a_model_like_any_other(tmp_path: Path) -> None:
    model = construct(1 / 64, 100, position="rope")
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(loaded, StableMaskForCausalLM)
    batch = torch.randint(101, (3, 60), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(loaded(batch).logits.argmax(-1), torch.arange(1, 61).expand(3, -1))


def test_it_is_stablemask_that_counts() -> None:
    """The same weights without pseudo scores: every ξ is 1, every answer the same."""
    model = construct(1 / 128, N)
    settings = {**model.config.to_dict(), "base": "-inf"}
    plain = StableMaskForCausalLM(StableMaskConfig(**settings)).eval()
    plain.load_state_dict(model.state_dict())
    got = read(plain, tokens())
    assert (1 - got.xi).abs().max() <= torch.finfo(torch.float32).eps
    assert len(got.answer.unique()) <= 3


def test_normalisation_needs_a_large_constant_or_equal_norms() -> None:
    free = torch.randn(N + 1, 13, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    equal = torch.nn.functional.normalize(free, dim=1)
    right = {}
    for name, constant, embeddings in (("any", 1.0, free), ("equal", 1.0, equal), ("large", 2.0**40, free)):
        model = construct(1 / 128, N, constant=constant, embeddings=embeddings, dtype=torch.float64)
        right[name] = int((read(model, tokens()).answer == TRUTH).sum())
    assert right["equal"] == right["large"] == N
    assert right["any"] < N // 10


def test_past_the_horizon_rows_are_taken_for_earlier_ones() -> None:
    model = construct(1 / 128, 512, dtype=torch.float64)
    got = read(model, torch.randint(513, (700,), generator=torch.Generator().manual_seed(0)))
    assert torch.equal(got.position[:512], torch.arange(1, 513).double())
    assert (got.position[512:] <= 512).all()
    assert got.xi[510] < got.xi[512] < got.xi[511] == 1
    assert (got.xi[512:].diff() > 0).all(), "in float64 they still differ"


def test_thresholds_of_something_else_do_not_count() -> None:
    model = construct(1 / 128, N)
    set_thresholds(model, xi(1 / 64, N))
    assert last_right(read(model, tokens()).position) < 10


def test_what_cannot_be_built() -> None:
    with pytest.raises(ValueError, match="position: got 'learned'; allowed: none, rope, t5, alibi"):
        construct(0.5, 8, position="learned")
    with pytest.raises(ValueError, match=r"dtype: got torch.bfloat16; allowed: torch.float32, torch.float64"):
        construct(0.5, 8, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"embeddings: got shape \(8, 13\); allowed: \(9, 13\)"):
        construct(0.5, 8, embeddings=torch.zeros(8, 13))
