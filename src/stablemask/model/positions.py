"""The position encodings: added to the embeddings, turning queries and keys, or added to the scores."""

import math
from typing import Annotated, NamedTuple

import torch
from torch import Tensor, nn

from stablemask.model.configuration import StableMaskConfig
from stablemask.model.geometry import Geometry
from stablemask.pseudo import PseudoScores
from stablemask.shapes import HeadSlopes, ScoreBias

Hidden = Annotated[Tensor, "B T width"]
Heads = Annotated[Tensor, "B heads T D"]


class Rotation(NamedTuple):
    """Cosine and sine of every angle of a rotary encoding."""

    cos: Annotated[Tensor, "B|1 1 T D"]
    sin: Annotated[Tensor, "B|1 1 T D"]

    def __call__(self, x: Heads) -> Heads:
        """Turn each pair (i, i + D/2) by its angle, in the finer dtype of the two."""
        left, right = x.chunk(2, -1)
        return (x * self.cos + torch.cat([-right, left], -1) * self.sin).to(x.dtype)


class Positions(nn.Module):
    """The one encoding that the configuration names. Holds a parameter for learned and t5 positions only."""

    def __init__(self, config: StableMaskConfig) -> None:
        super().__init__()
        self.config = config
        if config.position == "learned":
            length = config.max_position_embeddings + config.num_artificial
            self.table = nn.Embedding(length, config.hidden_size)
        if config.position == "t5":
            self.buckets = nn.Embedding(config.t5_buckets, config.num_attention_heads)

    def embed(self, hidden: Hidden, positions: Annotated[Tensor, "B|1 T"]) -> Hidden:
        """Add learned positions, or sinusoidal ones to embeddings scaled by √width (Vaswani et al.)."""
        if self.config.position == "learned":
            table: Tensor = self.table(positions)
            return hidden + table
        if self.config.position == "sinusoidal":
            angles = _angles(positions, hidden.shape[-1], 10000.0, hidden.dtype)
            waves = torch.cat([angles.sin(), angles.cos()], -1).to(hidden.dtype)
            return hidden * math.sqrt(hidden.shape[-1]) + waves
        return hidden

    def rotation(self, positions: Annotated[Tensor, "B|1 T"], dtype: torch.dtype) -> Rotation | None:
        """The rotation of queries or keys at these positions; None unless the encoding is rope."""
        if self.config.position != "rope":
            return None
        half = _angles(positions, self.config.width_of_head, float(self.config.rope_theta), dtype)
        angles = torch.cat([half, half], -1).unsqueeze(1)
        return Rotation(angles.cos().to(dtype), angles.sin().to(dtype))

    def slopes(self, like: Tensor) -> HeadSlopes | None:
        """ALiBi's slopes, which are the head-wise γ of γ = 0.5; None unless the encoding is alibi."""
        if self.config.position != "alibi":
            return None
        slopes = PseudoScores(0.5, horizon=None).gammas(self.config.num_attention_heads)
        return slopes.to(like.device, torch.promote_types(like.dtype, torch.float32))

    def bias(self, geometry: Geometry) -> ScoreBias | None:
        """The learned T5 bias of every score, (B|1, H, Tq, Tk); None unless the encoding is t5."""
        if self.config.position != "t5":
            return None
        per_head: Tensor = self.buckets(self._bucket(geometry.distances().clamp(min=0)))
        return per_head.movedim(-1, 1)

    def _bucket(self, distances: Tensor) -> Tensor:
        """One bucket per distance up to half of them, then logarithmic up to ``t5_max_distance``."""
        exact = self.config.t5_buckets // 2
        octaves = torch.log(distances.clamp(min=exact).float() / exact)
        growth = octaves / math.log(self.config.t5_max_distance / exact)
        far = (exact + (growth * exact).long()).clamp(max=self.config.t5_buckets - 1)
        return torch.where(distances < exact, distances, far)


def _angles(
    positions: Annotated[Tensor, "B|1 T"], width: int, theta: float, dtype: torch.dtype
) -> Annotated[Tensor, "B|1 T width/2"]:
    """Position times frequency; in bfloat16 neighbouring positions would be one."""
    precise = torch.promote_types(dtype, torch.float32)
    exponents = torch.arange(0, width, 2, device=positions.device, dtype=precise) / width
    return positions.unsqueeze(-1).to(precise) * theta**-exponents
