"""Windows of constant size for architectures of transformers: recent keys alone, or with the first ones.

Our decoder has caches of its own. These layers do the same in models that rotate their keys before they
reach the cache: to give a key another place, its rotation is taken back and the one of its new place put on.
"""

from functools import partial
from typing import Annotated, Any, NamedTuple, cast

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from stablemask.shapes import Keys, Values

_SHIFT = 5


class Turns(NamedTuple):
    """Cosine and sine of the model's rotation, at the places 0, 1, … of a cache."""

    cos: Annotated[Tensor, "1 slots R"]
    sin: Annotated[Tensor, "1 slots R"]

    def put_on(self, keys: Keys, first: int = 0) -> Keys:
        """Rotate keys to the places from ``first`` on."""
        return self._turn(keys, first, 1.0)

    def take_back(self, keys: Keys, first: int) -> Keys:
        """What they were before; scaled as the model scales its rotations."""
        return self._turn(keys, first, -1.0)

    def _turn(self, keys: Keys, first: int, sign: float) -> Keys:
        places = slice(first, first + keys.shape[2])
        cos, sin = self.cos[:, places].unsqueeze(1), self.sin[:, places].unsqueeze(1)
        if sign < 0:
            scale = cos.square() + sin.square()
            cos, sin = cos / scale, -sin / scale
        turned, rest = keys[..., : cos.shape[-1]], keys[..., cos.shape[-1] :]
        left, right = turned.chunk(2, -1)
        return torch.cat([turned * cos + torch.cat([-right, left], -1) * sin, rest], -1)


class RecentLayer(CacheLayerMixin):
    """Keys and values of one layer: the first ``pinned`` and the last of all, ``slots`` together."""

    is_sliding = True
    supports_early_init = False
    keys: Tensor
    values: Tensor

    def __init__(self, slots: int, pinned: int, turns: Turns | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.slots = slots
        self.pinned = pinned
        self.turns = turns
        self.seen = 0

    def lazy_initialization(self, key_states: Keys, value_states: Values) -> None:
        """Begin with nothing."""
        self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        self.is_initialized = True

    def update(self, key_states: Keys, value_states: Values, *_: Any, **__: Any) -> tuple[Keys, Values]:
        """Store new keys, as many as fit or a single one; return all that are held."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        new = key_states.shape[2]
        if self.turns is not None:
            key_states = self.turns.take_back(key_states, min(self.seen, self.slots - 1))
        self.keys = self._kept(self.keys, key_states)
        self.values = self._kept(self.values, value_states)
        self.seen += new
        return self.keys if self.turns is None else self.turns.put_on(self.keys), self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many keys the next ``update`` returns, and how many tokens before them are forgotten."""
        held = min(self.seen + query_length, self.slots)
        return held, self.seen + query_length - held

    def get_seq_length(self) -> int:
        """Tokens seen, not tokens held."""
        return self.seen

    def get_max_length(self) -> int:
        """Tokens held at most."""
        return self.slots

    def _kept(self, held: Tensor, new: Tensor) -> Tensor:
        excess = held.shape[2] + new.shape[2] - self.slots
        if excess <= 0:
            return torch.cat([held, new], 2)
        assert new.shape[2] == 1, "more than one token at a time goes only into free slots"
        return torch.cat([held[:, :, : self.pinned], held[:, :, self.pinned + excess :], new], 2)


class RecentCache(Cache):
    """A cache of ``slots`` keys, of which the first ``pinned`` stay.

    Args:
        slots: Keys held at most.
        pinned: The first so many tokens stay.
        turns: The model's rotation, where positions are those inside the cache.
    """

    def __init__(self, slots: int, pinned: int, turns: Turns | None) -> None:
        super().__init__(layer_class_to_replicate=partial(RecentLayer, slots, pinned, turns))  # type: ignore[arg-type]
        self.slots = slots
        self.turns = turns

    def pieces(self, length: int) -> list[int]:
        """How the next ``length`` tokens have to be cut: as many as fit, then one by one."""
        fit = min(max(self.slots - self.get_seq_length(), 0), length)
        return [fit] * (fit > 0) + [1] * (length - fit)

    def positions(self, length: int, device: torch.device) -> Annotated[Tensor, "1 T"]:
        """Positions of the next piece: absolute, or inside the cache where keys are given new places."""
        first = self.get_seq_length()
        if self.turns is not None:
            first = min(first, self.slots - 1)
        return torch.arange(first, first + length, device=device).unsqueeze(0)


def why_not_movable(model: PreTrainedModel) -> str | None:
    """Why keys in the cache of a model cannot be given other places; None where they can.

    Found out by trying: the first layer's keys of a text that begins later, turned back, have to be those of
    the text that begins at 0.
    """
    kinds = set(getattr(model.config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or getattr(model.config, "sliding_window", None) is not None:
        return "some of its layers have a window of their own"
    if not hasattr(model.base_model, "rotary_emb"):
        return "it has no rotary encoding that all its layers share"
    count = 4
    turns = find_turns(model, _SHIFT + count)
    ids = torch.arange(count, device=model.device).unsqueeze(0)
    raw = [turns.take_back(_first_keys(model, ids, first), first) for first in (0, _SHIFT)]
    shifted = _first_keys(model, ids, _SHIFT)
    tolerance = 64 * torch.finfo(shifted.dtype).eps * float(shifted.abs().max())
    if float((raw[0] - raw[1]).abs().max()) > tolerance:
        return "it rotates its keys in another way than Llama"
    return None


@torch.inference_mode()
def find_turns(model: PreTrainedModel, slots: int) -> Turns:
    """The rotation of a model at the places 0 … slots − 1."""
    places = torch.arange(slots, device=model.device).unsqueeze(0)
    like = torch.empty(0, device=model.device, dtype=model.dtype)
    rotary = cast("Any", model.base_model).rotary_emb
    return Turns(*rotary(like, places))


@torch.inference_mode()
def _first_keys(model: PreTrainedModel, ids: Annotated[Tensor, "1 T"], first: int) -> Keys:
    cache = DynamicCache()
    positions = torch.arange(first, first + ids.shape[1], device=ids.device).unsqueeze(0)
    model(input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True)
    keys: Tensor = cast("Any", cache.layers[0]).keys
    return keys
