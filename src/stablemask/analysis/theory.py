r"""The weights of Appendix C, put into a real decoder: its first layer recovers absolute positions.

The paper sets the first hidden dimension of every embedding to a constant, W_Q = W_K = 0 in one head and
lets W_V, W_O carry the constant into the second dimension. With horizon N = n that is::

    ξ_i = Z_i / (Z_i + Σ_{j=i}^{n−1} e^{−jγ}),     Z_i = i

strictly increasing in i, so that a feed-forward layer can turn it into i. The paper refers to universal
approximation for that; here it is written out. With activation relu6 and a steep slope, unit k is a step
from 0 to 6 between ξ_{k−1} and ξ_k, and::

    i = Σ_k relu6(K·(ξ_i − m_k)) / 6,     m_1 < ξ_1 ≤ m_2 < ξ_2 ≤ … ≤ m_n < ξ_n

Three things the proof leaves out. Our blocks normalise, so the constant must be large against the rest of an
embedding (or all embeddings must have one norm): the printed 1 becomes ``CONSTANT``. The position goes into a
third dimension, as ξ and the constant already fill two. Under ALiBi scores are not zero although W_Q = W_K =
0: there Z_i = Σ_{d<i} e^{−d·slope}.
"""

from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from stablemask.model import StableMaskConfig, StableMaskForCausalLM
from stablemask.model.modeling import Attention
from stablemask.model.positions import Positions

PerPosition = Annotated[Tensor, "n"]

ENCODINGS = ("none", "rope", "t5", "alibi")
CONSTANT = 2.0**40
"""The first dimension of every embedding: so large that nothing else in a row changes its norm in float64."""
CARRIER, XI, POSITION = range(3)
"""The hidden dimensions of the constant, of ξ and of the position."""
_WIDTH, _HEADS = 16, 2
_DTYPES = (torch.float32, torch.float64)


class Reading(NamedTuple):
    """What the decoder says about the tokens of one sequence.

    Attributes:
        xi: The second hidden dimension.
        position: The third, behind the feed-forward layer.
        answer: The token of the largest logit; token k stands for position k.
    """

    xi: PerPosition
    position: PerPosition
    answer: PerPosition


def xi(gamma: float, length: int, slope: float = 0.0) -> Annotated[Tensor, "length"]:
    """ξ_1 … ξ_n, to the last digit of float64 or the one before.

    Args:
        gamma: Decay of the pseudo scores.
        length: n, also the horizon.
        slope: Of ALiBi; 0 for the encodings that leave the scores of W_Q = W_K = 0 at zero.
    """
    i = torch.arange(1, length + 1, dtype=torch.float64)
    terms = torch.exp(-i * gamma)
    terms[-1] = 0.0
    pseudo = terms.flip(0).cumsum(0).flip(0)
    real = i if slope == 0 else torch.exp(-(i - 1) * slope).cumsum(0)
    small = pseudo / (real + pseudo)  # 1 − ξ, which keeps its digits where ξ is nearly 1
    return torch.where(small < 0.5, 1 - small, real / (real + pseudo))


def last_distinct(values: PerPosition) -> int:
    """The last i up to which values only grow: the length, if they never stop."""
    stops = (values.diff() <= 0).nonzero()
    return int(stops[0]) + 1 if len(stops) else len(values)


def last_right(answers: PerPosition) -> int:
    """The last i up to which every position is right."""
    wrong = (answers != torch.arange(1, len(answers) + 1)).nonzero()
    return int(wrong[0]) if len(wrong) else len(answers)


def construct(
    gamma: float,
    length: int,
    *,
    position: str = "none",
    dtype: torch.dtype = torch.float32,
    constant: float = CONSTANT,
    embeddings: Annotated[Tensor, "length+1 13"] | None = None,
) -> StableMaskForCausalLM:
    """A decoder of one layer whose logits name the position of every token, whatever the tokens are.

    Head 0 and three of 16 hidden dimensions carry it. The other dimensions of the embeddings and the other
    head are random and do what they like, but for leaving those three dimensions alone. Thresholds of the
    feed-forward layer come from the formula of ξ; ``fit_thresholds`` takes what the attention makes of it.

    Args:
        gamma: Of head 0.
        length: n: the horizon, and the largest position. Tokens are 0 … n.
        position: none, rope, t5 or alibi.
        dtype: float32 or float64.
        constant: The first dimension of every embedding, 1 in the paper.
        embeddings: Dimensions 3 … 15 of every embedding; random by default, with norms that differ.

    Examples:
        >>> model = construct(1 / 128, 1024, position="rope")
        >>> model(torch.randint(0, 1025, (1, 1024))).logits.argmax(-1)
        tensor([[   1,    2,    3,  ..., 1022, 1023, 1024]])
    """
    if position not in ENCODINGS:
        raise ValueError(f"position: got {position!r}; allowed: {', '.join(ENCODINGS)}")
    if dtype not in _DTYPES:
        raise ValueError(f"dtype: got {dtype}; allowed: {', '.join(map(str, _DTYPES))}")
    config = StableMaskConfig(
        vocab_size=length + 1,
        hidden_size=_WIDTH,
        intermediate_size=length,
        num_hidden_layers=1,
        num_attention_heads=_HEADS,
        gated=False,
        hidden_act="relu6",
        position=position,
        gamma=[gamma, 0.5],
        horizon=length,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = StableMaskForCausalLM(config)
        if embeddings is None:
            embeddings = torch.randn(length + 1, _WIDTH - 3)
        others = [torch.randn(_WIDTH, _WIDTH) for _ in range(4)]
    torch.nn.Module.to(model, dtype)
    torch.nn.Module.eval(model)
    with torch.no_grad():
        scale = _set_embeddings(model, embeddings, constant)
        for norm in (*_norms(model), model.model.norm):
            norm.weight.fill_(scale)
            norm.weight[CARRIER] = scale / constant
        _set_attention(model.model.layers[0].self_attn, others)
        if position == "t5":
            _positions(model).buckets.weight.zero_()
        set_thresholds(model, xi(gamma, length, _slope(model)))
        k = torch.arange(length + 1, dtype=dtype)
        model.lm_head.weight.zero_()
        model.lm_head.weight[:, CARRIER], model.lm_head.weight[:, POSITION] = -k * k / 2, k
    return model


def read(model: StableMaskForCausalLM, tokens: Annotated[Tensor, "T"]) -> Reading:
    """Run the decoder on one sequence."""
    with torch.no_grad():
        hidden = model.model(tokens.unsqueeze(0), use_cache=False).last_hidden_state
        logits = model.lm_head(hidden)
    return Reading(hidden[0, :, XI], hidden[0, :, POSITION], logits[0].argmax(-1))


def set_thresholds(model: StableMaskForCausalLM, values: Annotated[Tensor, "n"]) -> None:
    """Put the steps of the feed-forward layer between these values of ξ."""
    dtype = model.dtype
    rounded = values.to(dtype)
    middle = (values[:-1] + (values[1:] - values[:-1]) / 2).to(dtype)
    below = torch.nextafter(rounded[1:], torch.zeros((), dtype=dtype))
    steps = torch.maximum(torch.minimum(middle, below), rounded[:-1]).cummax(0).values
    slope = (
        2 / torch.finfo(dtype).eps ** 2
    )  # a power of two; one digit above a threshold is then past the step
    mlp = model.model.layers[0].mlp
    with torch.no_grad():
        for projection in (mlp.up_proj, mlp.down_proj):
            projection.weight.zero_()
        mlp.up_proj.weight[0, CARRIER] = slope  # the first step is taken by every row
        mlp.up_proj.weight[1:, XI] = slope
        mlp.up_proj.weight[1:, CARRIER] = -slope * steps
        mlp.down_proj.weight[POSITION] = 1 / 6


def fit_thresholds(model: StableMaskForCausalLM) -> None:
    """Put the steps between the values of ξ that the attention of this decoder outputs on this machine."""
    set_thresholds(model, read(model, torch.zeros(model.config.vocab_size - 1, dtype=torch.long)).xi)


class Limits(NamedTuple):
    """How far positions reach in one dtype, out of n. All are the last i before something goes wrong.

    Attributes:
        rounded: ξ, correctly rounded, grows up to here.
        decoder: ξ, as the attention of the decoder computes it, grows up to here.
        by_formula: Positions are right up to here, with thresholds from the formula.
        fitted: Positions are right up to here, with thresholds between what the attention outputs.
        beyond: What the fitted decoder answers at the next position; None if there is none.
        error: Largest difference between ξ of the decoder and of the formula, in units of eps / 2.
    """

    rounded: int
    decoder: int
    by_formula: int
    fitted: int
    beyond: float | None
    error: float


def limits(gamma: float, length: int, dtype: torch.dtype, *, position: str = "none") -> Limits:
    """Build the decoder, run it on random tokens and see how far it gets."""
    model = construct(gamma, length, position=position, dtype=dtype)
    tokens = torch.randint(length + 1, (length,), generator=torch.Generator().manual_seed(1))
    plain = read(model, tokens)
    fit_thresholds(model)
    fitted = read(model, tokens)
    formula = xi(gamma, length, _slope(model))
    reach = last_right(fitted.position)
    return Limits(
        rounded=last_distinct(formula.to(dtype)),
        decoder=last_distinct(plain.xi),
        by_formula=last_right(plain.position),
        fitted=reach,
        beyond=None if reach == length else float(fitted.position[reach]),
        error=float((plain.xi.double() - formula).abs().max() / torch.finfo(dtype).eps * 2),
    )


def _set_embeddings(model: StableMaskForCausalLM, free: Tensor, constant: float) -> float:
    """Write the embeddings; return the root mean square of a row, as a norm computes it."""
    weight = model.model.embed_tokens.weight
    if free.shape != (weight.shape[0], _WIDTH - 3):
        allowed = (weight.shape[0], _WIDTH - 3)
        raise ValueError(f"embeddings: got shape {tuple(free.shape)}; allowed: {allowed}")
    weight.zero_()
    weight[:, CARRIER] = constant
    weight[:, 3:] = free.to(weight.dtype)
    return float((weight.double().square().mean() + model.config.rms_norm_eps).sqrt())


def _set_attention(attention: Attention, others: list[Tensor]) -> None:
    """Head 0 is the paper's; head 1 is random and reaches the free dimensions only."""
    width = attention.head_dim
    projections = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
    for projection, random in zip(projections, others, strict=True):
        projection.weight.copy_(random)
    for projection in projections[:3]:
        projection.weight[:width] = 0.0
    attention.o_proj.weight[:, :width] = 0.0
    attention.o_proj.weight[:3] = 0.0
    attention.v_proj.weight[0, CARRIER] = 1.0
    attention.o_proj.weight[XI, 0] = 1.0


def _norms(model: StableMaskForCausalLM) -> tuple[Any, Any]:
    layer = model.model.layers[0]
    return layer.input_layernorm, layer.post_attention_layernorm


def _positions(model: StableMaskForCausalLM) -> Positions:
    positions = model.model.positions
    assert isinstance(positions, Positions)
    return positions


def _slope(model: StableMaskForCausalLM) -> float:
    """ALiBi's slope of head 0; 0 with the other encodings."""
    slopes = _positions(model).slopes(torch.zeros((), dtype=torch.float64))
    return 0.0 if slopes is None else float(slopes[0])
