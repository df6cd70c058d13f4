"""Reading a long text piece by piece, with all keys or with a constant number of them.

* ``full``: all keys are kept.
* ``window``: the most recent keys alone.
* ``pinned``: the first tokens stay, and positions are counted inside the cache (StreamingLLM).

Our decoder has caches for the last two; other architectures get those of ``stock_cache``.
"""

from typing import Annotated, Any, Literal, cast, get_args

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from stablemask.evaluation.stock_cache import RecentCache, find_turns, why_not_movable
from stablemask.model import StableMaskConfig, StreamingLLMCache, WindowCache
from stablemask.model.configuration import POSITIONS, REMEDIES

Method = Literal["full", "window", "pinned"]
METHODS: tuple[Method, ...] = get_args(Method)

_POSITION_TABLES = {"wpe", "embed_positions", "position_embeddings", "embed_position"}


class Reader:
    """A model, and what it keeps of the text that it has read.

    Args:
        model: Any causal language model of transformers.
        method: Which keys it keeps.
        keys: How many of them, with ``window`` and ``pinned``: the first tokens included.
        pinned: How many first tokens stay, with ``pinned``.

    Examples:
        >>> read = Reader(model, "window", keys=512)
        >>> logits = torch.cat([read(piece) for piece in ids.split(256, 1)], 1)
    """

    def __init__(self, model: PreTrainedModel, method: Method, *, keys: int, pinned: int = 4) -> None:
        reason = why_not(model, method)
        if reason is not None:
            raise ValueError(f"method: got {method!r}; not with this model: {reason}")
        if keys < 1:
            raise ValueError(f"keys: got {keys}; allowed: from 1 on")
        if method == "pinned" and not 0 < pinned < keys:
            raise ValueError(f"pinned: got {pinned}; allowed: from 1 to {keys - 1}, one less than keys")
        self.model = model
        self.cache = _open_cache(model, method, keys, pinned)

    @torch.inference_mode()
    def __call__(self, ids: Annotated[Tensor, "B T"]) -> Annotated[Tensor, "B T vocabulary"]:
        """Logits of the next tokens of each text."""
        if not isinstance(self.cache, RecentCache):
            return self._forward(ids)
        logits = []
        for piece in ids.split(self.cache.pieces(ids.shape[1]), 1):
            positions = self.cache.positions(piece.shape[1], ids.device)
            logits.append(self._forward(piece, position_ids=positions))
        return torch.cat(logits, 1)

    def held_bytes(self) -> int:
        """Bytes of the keys and values that are kept."""
        layers = cast("list[Any]", self.cache.layers)
        tensors = [t for layer in layers for t in (layer.keys, layer.values)]
        return sum(t.numel() * t.element_size() for t in tensors)

    def _forward(self, ids: Tensor, **positions: Tensor) -> Tensor:
        out = self.model(input_ids=ids, past_key_values=self.cache, use_cache=True, **positions)
        logits: Tensor = out.logits
        return logits


def why_not(model: PreTrainedModel, method: Method, length: int = 0) -> str | None:
    """Why a model cannot read a text of this length in this way; None where it can."""
    if method not in METHODS:
        raise ValueError(f"method: got {method!r}; allowed: {', '.join(METHODS)}")
    config = model.config
    limit = _table_length(model)
    if not isinstance(config, StableMaskConfig):
        if limit is not None and (length > limit or method == "pinned"):
            return f"its table of positions ends at {limit}"
        return why_not_movable(model) if method == "pinned" else None
    if limit is not None and length > limit:
        return f"its table of {config.position!r} positions or of {config.remedy!r} ends at {limit}"
    movable = POSITIONS[config.position].movable and REMEDIES[config.remedy].movable
    if method == "pinned" and not movable:
        return f"keys with {config.position!r} positions cannot be given other places"
    return None


def _open_cache(
    model: PreTrainedModel, method: Method, keys: int, pinned: int
) -> DynamicCache | WindowCache | StreamingLLMCache | RecentCache:
    if method == "full":
        return DynamicCache(config=model.config)
    if isinstance(model.config, StableMaskConfig):
        return WindowCache(keys) if method == "window" else StreamingLLMCache(pinned, keys - pinned)
    if method == "window":
        return RecentCache(keys, 0, None)
    return RecentCache(keys, pinned, find_turns(model, keys))


def _table_length(model: PreTrainedModel) -> int | None:
    """Positions beyond which a model has none, where it looks them up in a table."""
    if isinstance(model.config, StableMaskConfig):
        length = model.config.table_length
        return None if length is None else length - model.config.num_artificial
    tables = [
        part.num_embeddings
        for name, part in model.named_modules()
        if isinstance(part, nn.Embedding) and name.rpartition(".")[2] in _POSITION_TABLES
    ]
    limit = getattr(model.config, "max_position_embeddings", None)
    return min([*tables, *([limit] if tables and isinstance(limit, int) else [])], default=None)
