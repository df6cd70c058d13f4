"""Model views made by a formula: what tests of figures and of the report page look at."""

import math

import torch

from stablemask import PseudoScores
from stablemask.analysis.views import ModelView

WORDS = [" the", " fox", ",", " jumps", " over", " 17", " dogs", "."]


def make_view(
    name: str = "StableMask",
    *,
    length: int = 11,
    layers: int = 3,
    heads: int = 2,
    sink: bool = True,
    seed: int = 0,
) -> ModelView:
    """Random scores; the rest of every row goes to the pseudo scores, or nowhere without ``sink``."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.ones(length, length).triu(1).bool()
    scores = torch.randn(layers, heads, length, length, generator=generator).masked_fill(hidden, -math.inf)
    lse = scores.logsumexp(-1)
    sigma = PseudoScores(0.5, horizon=length, base=0.0 if sink else -math.inf)
    lse = torch.logaddexp(lse, sigma.row_logits(torch.arange(length), heads))
    maps = (scores - lse[..., None]).exp()
    tokens = [WORDS[i % len(WORDS)] for i in range(length)]
    return ModelView(name, tokens, maps, (1 - maps.sum(-1)).clamp(min=0), details={"γ": "0.5"})
