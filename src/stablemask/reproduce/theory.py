"""What is measured of the paper's theorems and of its equations: the values of the cells ``theory/…``.

* ``rows``: the operation against the paper's equation, row sums of identical inputs, a cache against none;
* ``construction-…``: positions that the weights of Appendix C recover (``analysis.theory``);
* ``entropies-met``, ``entropies-all``: the room that the statements of Proposition A.4 have;
* ``chain-…``, ``copy-…``: disproportional attention of trained decoders (``analysis.disproportionality``).
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any

import torch
from torch import Tensor
from transformers import DynamicCache

from stablemask import PseudoScores, sink_attention, stable_attention
from stablemask.analysis.disproportionality import disproportion
from stablemask.analysis.enumeration import TOKENS, enumerate_propositions, fitted_decoder, symmetric_chain
from stablemask.analysis.markov import MarkovSource, identical_probability, soft_copy_last
from stablemask.analysis.theory import limits
from stablemask.model import StableMaskConfig, StableMaskForCausalLM

CONSTRUCTION_LENGTH = 1024
FIT_STEPS = 200
CONSTRUCTIONS: Mapping[str, float] = {
    "0": 0.0,
    "1:256": 1 / 256,
    "1:128": 1 / 128,
    "1:16": 1 / 16,
    "1:2": 1 / 2,
}
_HEADS, _ROWS, _LENGTH = 8, 64, 129

Values = dict[str, float]


def values(what: str) -> Values:
    """The values of the cell ``theory/what``."""
    kind, _, which = what.partition("-")
    if kind == "construction":
        return _construction(CONSTRUCTIONS[which])
    if kind == "entropies":
        return _entropies(only_met=which == "met")
    return _rows() if kind == "rows" else _degrees(_SOURCES[kind](), which)


_SOURCES: Mapping[str, Callable[[], MarkovSource]] = {
    "chain": lambda: symmetric_chain(TOKENS),
    "copy": lambda: soft_copy_last(2, TOKENS),
}
NAMES: tuple[str, ...] = (
    *("rows", "entropies-met", "entropies-all"),
    *(f"construction-{name}" for name in CONSTRUCTIONS),
    *(f"{source}-{remedy}" for source in _SOURCES for remedy in ("none", "stablemask")),
)
METRICS: tuple[str, ...] = (
    *("increasing", "last row", "cached/stablemask", "cached/none", "cached/wrong horizon"),
    *("error/stablemask", "error/none", "error/shifted"),
    *(f"{dtype}/{name}" for dtype in ("float32", "float64") for name in ("rounded", "decoder", "fitted")),
    *("1", "2", "3", "4", "shares"),
    *("least", "mean", "largest", "excess", "weak", "identical", "anisotropy"),
)


def _construction(gamma: float) -> Values:
    found = {}
    for dtype in (torch.float32, torch.float64):
        reach = limits(gamma, CONSTRUCTION_LENGTH, dtype)
        for name in ("rounded", "decoder", "fitted"):
            found[f"{str(dtype)[6:]}/{name}"] = float(getattr(reach, name))
    return found


def _entropies(*, only_met: bool) -> Values:
    """Of every statement the least room, where its conditions are met or everywhere."""
    found: Values = {}
    for case in enumerate_propositions(TOKENS):
        for statement, room in case.found.slack().items():
            if case.met()[statement] or not only_met:
                found[statement] = min(found.get(statement, room), room)
    return found


def _degrees(source: MarkovSource, remedy: str) -> Values:
    model, _ = fitted_decoder(source, remedy, FIT_STEPS)
    result = disproportion(model, source)
    degree = result.degree()
    return {
        "least": float(degree.min()),
        "mean": float(degree.mean()),
        "largest": float(degree.max()),
        "excess": float((result.over @ result.chance).mean()),
        "weak": float(result.degree(weak=True).min()),
        "identical": identical_probability(source),
        "anisotropy": source.anisotropy(),
    }


def _rows() -> Values:
    scores = PseudoScores(0.5, horizon=_ROWS)
    same = torch.ones(1, _HEADS, _ROWS, 16, dtype=torch.float64)
    sums = stable_attention(same, same, same, scores)[0, :, :, 0]  # (H, T)
    return {
        "increasing": float((sums.diff(dim=-1) > 0).sum()),
        "last row": float((sums[:, -1] - 1).abs().max()),
        **_cached(),
        **_errors(),
    }


def _errors() -> Values:
    """The operation in float32 against the paper's matrix in float64, built as it is printed."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, _HEADS, _LENGTH, 64, generator=generator).unbind(0)
    scores = PseudoScores(0.5, horizon=_LENGTH)
    visible, pseudo = scores.dense(_LENGTH, _HEADS)
    shifted = torch.cat([pseudo[..., 1:], pseudo[..., -1:]], -1).triu(1)
    hidden = torch.zeros_like(pseudo).masked_fill(visible == 0, -torch.inf)
    ours = stable_attention(q, k, v, scores)

    def apart(out: Tensor, added: Annotated[Tensor, "H T T"]) -> float:
        a = q.double() @ k.double().mT * q.shape[-1] ** -0.5
        exact = (torch.softmax(a * visible + added, -1) * visible) @ v.double()
        return float((out.double() - exact).norm() / exact.norm())

    return {
        "error/stablemask": apart(ours, pseudo),
        "error/none": apart(sink_attention(q, k, v, None), hidden),
        "error/shifted": apart(ours, shifted),
    }


@torch.no_grad()
def _cached() -> Values:
    """Logits of the last token: all tokens at once, and one after the other with a cache."""
    tokens = torch.randint(97, (1, _ROWS), generator=torch.Generator().manual_seed(0))
    found = {}
    for remedy in ("stablemask", "none"):
        model = _random_decoder(remedy)
        whole = model(input_ids=tokens, use_cache=False).logits[:, -1]
        found[f"cached/{remedy}"] = _apart(_step_by_step(model, tokens), whole)
    model = _random_decoder("stablemask")
    whole = model(input_ids=tokens, use_cache=False).logits[:, -1]
    wrong = _step_by_step(model, tokens, horizon_of_length=True)
    return {**found, "cached/wrong horizon": _apart(wrong, whole)}


def _random_decoder(remedy: str) -> StableMaskForCausalLM:
    own: dict[str, Any] = {"horizon": _ROWS} if remedy == "stablemask" else {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = StableMaskConfig(
            vocab_size=97,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=_HEADS,
            initializer_range=0.2,
            remedy=remedy,
            **own,
        )
        model = StableMaskForCausalLM(config)
    torch.nn.Module.eval(model.double())
    return model


def _step_by_step(
    model: StableMaskForCausalLM, tokens: Annotated[Tensor, "1 T"], *, horizon_of_length: bool = False
) -> Tensor:
    """Logits of the last token. The wrong way takes the number of tokens read so far for the horizon."""
    cache, logits = DynamicCache(config=model.config), torch.empty(0)
    for read, token in enumerate(tokens.split(1, 1), 1):
        if horizon_of_length:
            model.config.horizon = read
        logits = model(input_ids=token, past_key_values=cache, use_cache=True).logits[:, -1]
    return logits


def _apart(logits: Tensor, expected: Tensor) -> float:
    return float((logits - expected).norm() / expected.norm())
