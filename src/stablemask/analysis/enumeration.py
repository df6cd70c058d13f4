"""Small sources and decoders of which every input can be enumerated, as the paper's appendices need them.

What ``stablemask theory`` prints and what the reproduction of the paper records is made from these.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from stablemask.analysis.disproportionality import Collapsed, Proposition, fit, proposition
from stablemask.analysis.markov import MarkovSource, markov_source, soft_copy_last
from stablemask.model import StableMaskConfig, StableMaskForCausalLM

TOKENS = 9
CASES = 6
"""How many ``enumerate_propositions`` yields: three sources, two decoders."""
EQUAL = 1e-9
"""Entropies that differ by less are the same but for rounding."""


@dataclass(frozen=True, eq=False)
class Enumerated:
    """Proposition 1 for one source and one decoder.

    Attributes:
        name: Of the source.
        decoder: "random", or "collapsed": its first layer forgets its newest token.
        isotropic: Whether the source is causally isotropic.
        found: Both sides of every statement.
    """

    name: str
    decoder: str
    isotropic: bool
    found: Proposition

    def met(self) -> dict[str, bool]:
        """Whether what each statement supposes is given."""
        contextual = self.found.contextual
        return {
            "1": True,
            "2": contextual,
            "3": self.isotropic,
            "4": self.isotropic and contextual,
            "shares": contextual,
        }


def symmetric_chain(length: int) -> MarkovSource:
    """A token that stays the same four times of five."""
    return markov_source(torch.tensor([[0.8, 0.2], [0.2, 0.8]]), length)


def sources(length: int) -> dict[str, MarkovSource]:
    """Two that are causally isotropic, and one that is not."""
    return {
        "softCopyLast": soft_copy_last(3, length),
        "symmetric chain": symmetric_chain(length),
        "lopsided chain": markov_source(torch.tensor([[0.9, 0.1], [0.4, 0.6]]), length),
    }


def small_decoder(source: MarkovSource, remedy: str = "none") -> StableMaskForCausalLM:
    """Two layers of four heads with RoPE and random weights, the same for every remedy."""
    own: dict[str, Any] = {"horizon": source.length} if remedy == "stablemask" else {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = StableMaskConfig(
            vocab_size=source.symbols,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            initializer_range=0.2,
            remedy=remedy,
            **own,
        )
        model = StableMaskForCausalLM(config)
    torch.nn.Module.eval(model)
    return model


def enumerate_propositions(length: int) -> Iterator[Enumerated]:
    """Proposition 1 for every source, through a random decoder and through one with a collapsed layer."""
    for name, source in sources(length).items():
        isotropic = source.anisotropy() < EQUAL
        for kind in ("random", "collapsed"):
            model = small_decoder(source).double()
            if kind == "collapsed":
                model.model.layers[0] = Collapsed(model.model.layers[0])
            yield Enumerated(name, kind, isotropic, proposition(model, source))


def fitted_decoder(
    source: MarkovSource, remedy: str, steps: int, on_step: Callable[[int], object] | None = None
) -> tuple[StableMaskForCausalLM, float]:
    """A small decoder after training on samples of a source, and how far it is from its entropy."""
    model = small_decoder(source, remedy)
    return model, fit(model, source, steps=steps, on_step=on_step)
