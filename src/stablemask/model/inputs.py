"""From the arguments of a call to what its layers need: where rows and keys stand, what scores get added."""

from typing import Annotated, Any, cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from stablemask.model.configuration import StableMaskConfig
from stablemask.model.geometry import Geometry, find_geometry, read_tokens
from stablemask.model.positions import Positions, Rotation
from stablemask.model.remedies import ArtificialTokens, Places
from stablemask.pseudo import PseudoScores
from stablemask.shapes import HeadSlopes, ScoreBias

Hidden = Annotated[Tensor, "B T width"]
PseudoRows = Annotated[Tensor, "B|1 H Tq"]


class Terms:
    """What the position encoding and the remedy contribute to the scores of every layer.

    It is no tuple and no dataclass, because FSDP would cast the float32 tensors in one to bfloat16.

    Args:
        rotation: Of queries and keys.
        key_rotation: Given where the cache keeps keys unrotated: it then applies to what the cache returns.
        slopes: ALiBi's.
        bias: Added to the scores.
        sink: σ, or what gives it.
    """

    def __init__(
        self,
        rotation: Rotation | None,
        key_rotation: Rotation | None,
        slopes: HeadSlopes | None,
        bias: ScoreBias | None,
        sink: PseudoScores | PseudoRows | float | None,
    ) -> None:
        self.rotation = rotation
        self.key_rotation = key_rotation
        self.slopes = slopes
        self.bias = bias
        self.sink = sink

    def to(self, *args: Any, **kwargs: Any) -> "Terms":
        """The same with every tensor moved, for models spread over several devices."""
        moved = Terms(**vars(self))
        for name, value in vars(self).items():
            if isinstance(value, Rotation):
                setattr(moved, name, Rotation(*(t.to(*args, **kwargs) for t in value)))
            elif isinstance(value, Tensor):
                setattr(moved, name, value.to(*args, **kwargs))
        return moved


def place(
    config: StableMaskConfig,
    artificial: ArtificialTokens | None,
    hidden: Hidden,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    cache: Cache | None,
) -> tuple[Hidden, Geometry, Places]:
    """Embeddings, artificial ones among them; where all of them stand; where the real tokens went."""
    past = _past(cache)
    if attention_mask is not None and attention_mask.ndim == 4:
        geometry = _masked_geometry(config, hidden, attention_mask, position_ids, past)
        _check_length(config, geometry)
        return hidden, geometry, 0
    tokens = read_tokens(hidden, attention_mask, position_ids, cache, past)
    places: Places = 0
    fresh = False
    if artificial is not None:
        fresh = cache is None or _lacks_artificial(cache, past)
        if fresh:
            hidden, tokens, places = artificial.prepend(hidden, tokens)
        else:
            tokens = artificial.behind(tokens)
    cached = config.num_artificial if cache is not None else 0
    geometry = find_geometry(config, tokens, cache, past, cached, fresh)
    _check_length(config, geometry)
    return hidden, geometry, places


def find_terms(config: StableMaskConfig, positions: Positions, hidden: Hidden, geometry: Geometry) -> Terms:
    """The terms of a call."""
    key_rotation = None
    if geometry.moved and geometry.coordinates is not None:
        key_rotation = positions.rotation(geometry.coordinates[1].clamp(min=0), hidden.dtype)
    bias = positions.bias(geometry)
    if geometry.mask is not None:
        bias = geometry.mask if bias is None else bias + geometry.mask
    scores = config.scores
    sink: PseudoScores | Tensor | float | None = None
    if scores is not None and geometry.contiguous:
        sink = scores  # the operation derives σ of consecutive rows itself
    elif scores is not None:
        sink = pseudo_rows(scores, geometry, config.num_attention_heads, hidden)
    elif config.remedy == "softmax_plus_one":
        sink = 0.0
    rotation = positions.rotation(geometry.positions, hidden.dtype)
    return Terms(rotation, key_rotation, positions.slopes(hidden), bias, sink)


def pseudo_rows(scores: PseudoScores, geometry: Geometry, heads: int, like: Tensor) -> PseudoRows:
    """σ of every row, from the table where rows are consecutive."""
    if geometry.start is None:
        return scores.row_logits(geometry.positions, heads, like.dtype)
    stop = geometry.start + geometry.positions.shape[1]
    rows = scores.consecutive_logits(geometry.start, stop, heads, dtype=like.dtype, device=like.device)
    return rows.unsqueeze(0)


def _past(cache: Cache | None) -> int | Tensor:
    """Tokens in the cache. Static caches count with a tensor, which compiled code must leave one."""
    past: int | Tensor = 0 if cache is None else cast("int | Tensor", cache.get_seq_length())
    return past if isinstance(past, int) or torch.compiler.is_compiling() else int(past)


def _masked_geometry(
    config: StableMaskConfig, hidden: Hidden, mask: Tensor, position_ids: Tensor | None, past: int | Tensor
) -> Geometry:
    """The caller, or continuous batching, has decided what is visible."""
    if config.num_artificial:
        raise ValueError(
            "attention_mask: got rank 4; allowed: rank 2 with artificial tokens, which it cannot cover"
        )
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=hidden.dtype).masked_fill(~mask, -torch.inf)
    positions = read_tokens(hidden, None, position_ids, None, past).positions
    return Geometry(positions, mask.shape[-1], mask=mask)


def _lacks_artificial(cache: Cache, past: int | Tensor) -> bool:
    """Whether the cache is empty. A compiled step cannot look into it, so it must find the tokens there."""
    if isinstance(past, int) and past == 0:
        return True
    if not getattr(cache, "artificial", None):
        got = "tokens without artificial tokens before them"
        raise ValueError(
            f"past_key_values: got {got}; allowed: a cache that this model filled from the start"
        )
    return False


def _check_length(config: StableMaskConfig, geometry: Geometry) -> None:
    """A table has an end; nothing is wrapped or cut silently. Compiled code checks its own indices."""
    limit = config.table_length
    if limit is None or torch.compiler.is_compiling():
        return
    if geometry.start is not None:
        last = geometry.start + geometry.positions.shape[1] - 1
    else:
        last = int(geometry.positions.max())
    if last >= limit:
        own = config.num_artificial
        raise ValueError(
            f"position_ids: got {last - own}; allowed: below {limit - own} = max_position_embeddings, "
            f"where the table of {config.position!r} positions or of remedy {config.remedy!r} ends"
        )
