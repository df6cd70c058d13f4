"""Attention maps in few bytes: what the report page carries of a model.

Of every map the lower triangle is kept, row by row, then the pseudo mass of all rows; every share is an
integer from 0 to 65,535, so it is exact to a thousandth of a per cent. All high bytes come before all low
bytes, which makes them compress, and the whole is deflated, as browsers can undo.
"""

import base64
import math
import zlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from stablemask.analysis.metrics import entropy_of
from stablemask.analysis.views import AttentionMap, ModelView

PerHead = list[list[float]]

_LARGEST = 65_535
_LEVEL = 6


class Packed(NamedTuple):
    """A model for the page.

    Attributes:
        content: Base64 of the deflated shares.
        first: Mean share of the first token, by layer and head.
        pseudo: Mean pseudo mass, likewise.
        entropy: Mean entropy of where the rest goes, in nats, likewise.
    """

    content: str
    first: PerHead
    pseudo: PerHead
    entropy: PerHead


def pack(model: ModelView, length: int) -> Packed:
    """The first ``length`` rows of every head, or all where the text is shorter."""
    length = min(length, len(model.tokens))
    triangle = torch.ones(length, length).tril().bool()
    shares: list[Tensor] = []
    first, entropy = (torch.zeros(model.num_layers, model.num_heads) for _ in range(2))
    for layer, head, weights in _maps(model, length):
        shares.append(_integers(weights[triangle]))
        first[layer, head] = weights[:, 0].mean()
        entropy[layer, head] = entropy_of(weights).mean()
    pseudo = model.pseudo_mass[:, :, :length].detach().to("cpu", torch.float32)
    shares.append(_integers(pseudo.flatten()))
    numbers = torch.cat(shares)
    planes = torch.stack([numbers >> 8, numbers & 255]).to(torch.uint8)
    content = base64.b64encode(zlib.compress(planes.numpy().tobytes(), _LEVEL)).decode()
    return Packed(content, first.tolist(), pseudo.mean(-1).tolist(), entropy.tolist())


def fitting_length(models: list[ModelView], budget: int) -> int:
    """The largest number of rows, the same for all models, that surely fits into ``budget`` characters.

    It is below 1 where not even one row does.
    """
    longest = max(len(model.tokens) for model in models)
    heads = sum(model.num_layers * model.num_heads for model in models)
    numbers = max(0, budget) / 4 * 3 / 2 * 0.99  # base64, two bytes each; deflate adds less than a hundredth
    return min(longest, math.isqrt(int(2 * numbers / heads)) - 2)


def _maps(model: ModelView, length: int) -> Iterator[tuple[int, int, AttentionMap]]:
    for layer in range(model.num_layers):
        for head in range(model.num_heads):
            yield layer, head, model.attention(layer, head)[:length, :length]


def _integers(shares: Tensor) -> Tensor:
    return (shares.clamp(0, 1) * _LARGEST).round().to(torch.int32)
