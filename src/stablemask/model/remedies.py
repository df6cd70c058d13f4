"""The remedies against attention sinks that are more than a choice of σ: artificial tokens and URPE.

All others are one logit per row, see ``stablemask.attention``: −∞ (none), the pseudo scores (stablemask), 0
(softmax_plus_one) or a parameter per head (learned_sink).
"""

from typing import Annotated

import torch
from torch import Tensor, nn

from stablemask.model.configuration import StableMaskConfig
from stablemask.model.geometry import Geometry, Tokens
from stablemask.shapes import HeadSlopes, Keys, Output, Queries, ScoreBias, Values

Hidden = Annotated[Tensor, "B T width"]
Places = Annotated[Tensor, "B T"] | int


class ArtificialTokens(nn.Module):
    """k tokens in front of every document: learned, or fixed zero vectors. Real positions move up by k."""

    def __init__(self, config: StableMaskConfig) -> None:
        super().__init__()
        self.count = config.artificial_tokens
        if not config.artificial_zero:
            self.weight = nn.Parameter(torch.empty(self.count, config.hidden_size))

    def prepend(self, hidden: Hidden, tokens: Tokens) -> tuple[Hidden, Tokens, Places]:
        """Embeddings and tokens with the artificial ones among them, and where the real ones went."""
        batch, _, width = hidden.shape
        own = self.weight.to(hidden.dtype) if hasattr(self, "weight") else hidden.new_zeros(self.count, width)
        vectors = own.expand(batch, -1, -1)
        if tokens.documents is not None:
            return self._per_document(hidden, vectors, tokens)
        head = torch.arange(self.count, device=hidden.device).expand(tokens.positions.shape[0], -1)
        positions = torch.cat([head, tokens.positions + self.count], 1)
        extended = Tokens(positions, self.extend(tokens.kept), None, tokens.start)
        return torch.cat([vectors, hidden], 1), extended, self.count

    def behind(self, tokens: Tokens) -> Tokens:
        """The tokens of a call whose artificial ones the cache already has."""
        start = None if tokens.start is None else tokens.start + self.count
        return Tokens(tokens.positions + self.count, self.extend(tokens.kept), None, start)

    def extend(self, kept: Tensor | None) -> Tensor | None:
        """A mask of tokens with the artificial ones in front."""
        return None if kept is None else torch.nn.functional.pad(kept, (self.count, 0), value=True)

    def _per_document(self, hidden: Hidden, vectors: Hidden, tokens: Tokens) -> tuple[Hidden, Tokens, Places]:
        """Insert them before each document of packed rows; rows with fewer documents end in padding."""
        assert tokens.documents is not None
        batch, length, width = hidden.shape
        places = torch.arange(length, device=hidden.device) + self.count * (tokens.documents + 1)
        total = length + self.count * (int(tokens.documents.max()) + 1)
        real = torch.zeros(batch, total, dtype=torch.bool, device=hidden.device).scatter(1, places, True)
        inserted = (~real).long().cumsum(-1)  # artificial places up to and including this one, from 1
        source = torch.where(real, self.count + real.long().cumsum(-1) - 1, (inserted - 1) % self.count)
        merged = torch.cat([vectors, hidden], 1).gather(1, source.unsqueeze(-1).expand(-1, -1, width))
        artificial = (inserted - 1) % self.count
        positions = artificial.scatter(1, places, tokens.positions.expand(batch, -1) + self.count)
        kept = inserted <= self.count * (tokens.documents[:, -1:] + 1)
        if tokens.kept is not None:
            kept = kept.scatter(1, places, tokens.kept)
        return merged, Tokens(positions, kept, (inserted - 1) // self.count, None), places


def drop_artificial(hidden: Hidden, places: Places) -> Hidden:
    """The real tokens' rows, from what ``ArtificialTokens.prepend`` returned."""
    if isinstance(places, int):
        return hidden[:, places:]
    return hidden.gather(1, places.unsqueeze(-1).expand(-1, -1, hidden.shape[-1]))


def toeplitz_attention(
    q: Queries,
    k: Keys,
    v: Values,
    factors: Annotated[Tensor, "H length"],
    geometry: Geometry,
    slopes: HeadSlopes | None,
    bias: ScoreBias | None,
    dropout: float,
) -> Output:
    """URPE: softmax, then a learned factor per distance (Luo et al., 2022).

    A factor may be negative and multiplies weights already normalised: no sink or bias can stand for it.
    """
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    distances = geometry.distances()  # (B|1, Tq, Tk)
    scores = (q @ k.transpose(-1, -2)).to(torch.promote_types(q.dtype, torch.float32)) * q.shape[-1] ** -0.5
    if slopes is not None:
        scores = scores - slopes[:, None, None] * distances.unsqueeze(1)
    if bias is not None:
        scores = scores + bias
    seen = geometry.visible(distances).unsqueeze(1)
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    weights = weights.masked_fill(~seen, 0.0)  # no NaN where a row sees no key at all
    weights = torch.nn.functional.dropout(weights, dropout)
    factor = factors[:, distances.masked_fill(~seen.squeeze(1), 0)].movedim(0, 1)  # (B|1, H, Tq, Tk)
    return (weights * factor).to(v.dtype) @ v
