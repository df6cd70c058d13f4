"""Caches of constant size for generating without end: a plain window, and the StreamingLLM baseline.

Both keep keys in a ring buffer: a new key takes the place of the oldest. ``WindowCache`` keeps the last W
keys as they are, with their absolute positions. ``StreamingLLMCache`` (Xiao et al., 2024) also pins the first
keys, stores keys unrotated and counts positions inside the cache. Pass either as ``past_key_values`` to the
model or to ``generate``.
"""

from functools import partial
from typing import Annotated, Any, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from stablemask.shapes import KeyPositions, Keys, QueryPositions, Values

SlotPositions = Annotated[Tensor, "B|1 slots"]


class RingLayer(CacheLayerMixin):
    """Keys and values of one layer: ``pinned`` slots, each written once, then a ring of ``window`` slots."""

    is_sliding = True
    supports_early_init = False
    keys: Tensor
    values: Tensor

    def __init__(self, window: int, pinned: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.window = window
        self.pinned = pinned
        self.cumulative_length = 0

    def lazy_initialization(self, key_states: Keys, value_states: Values) -> None:
        """Reserve all slots."""
        slots = self.pinned + self.window
        self.keys = key_states.new_zeros(*key_states.shape[:2], slots, key_states.shape[3])
        self.values = value_states.new_zeros(*value_states.shape[:2], slots, value_states.shape[3])
        self.is_initialized = True

    def slots(self, length: int) -> tuple[Annotated[Tensor, "n"], Annotated[Tensor, "n"]]:
        """Which of the next ``length`` tokens stay after the last of them came, and the slot of each."""
        first, stop = self.cumulative_length, self.cumulative_length + length
        tokens = torch.arange(first, stop)
        tokens = tokens[(tokens < self.pinned) | (tokens >= stop - self.window)]
        ring = self.pinned + (tokens - self.pinned) % self.window
        return tokens - first, torch.where(tokens < self.pinned, tokens, ring)

    def update(self, key_states: Keys, value_states: Values, *_: Any, **__: Any) -> tuple[Keys, Values]:
        """Store new keys; return the slots, followed by the new keys where there are several of them."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        length = key_states.shape[2]
        keys, values = self.keys, self.values
        if length > 1:
            keys, values = torch.cat([keys, key_states], 2), torch.cat([values, value_states], 2)
        which, slots = self.slots(length)
        for held, new in ((self.keys, key_states), (self.values, value_states)):
            held.index_copy_(2, slots.to(new.device), new.index_select(2, which.to(new.device)))
        self.cumulative_length += length
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many keys the next ``update`` returns."""
        return self.get_max_length() + (query_length if query_length > 1 else 0), 0

    def get_seq_length(self) -> int:
        """Tokens seen, not tokens held."""
        return self.cumulative_length

    def get_max_length(self) -> int:
        """Tokens held at most."""
        return self.pinned + self.window

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence."""
        self.keys, self.values = (t.repeat_interleave(repeats, 0) for t in (self.keys, self.values))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the sequences ``indices``."""
        self.keys, self.values = self.keys[indices], self.values[indices]


class StreamingCache(Cache):
    """What the two caches share. The model asks ``place`` for positions before its layers call ``update``."""

    moves_keys = False

    def __init__(self, window: int, pinned: int) -> None:
        _check_at_least("window", window, 1)
        _check_at_least("pinned", pinned, 0)
        super().__init__(layer_class_to_replicate=partial(RingLayer, window, pinned))  # type: ignore[arg-type]
        self.window = window
        self.pinned = pinned
        self.held: SlotPositions | None = None

    def place(self, rows: QueryPositions, offset: int) -> tuple[QueryPositions, KeyPositions]:
        """Coordinates of the new rows and of the keys ``update`` will return for them; −1 is an empty slot.

        Args:
            rows: Positions of the new rows, −1 for padding.
            offset: Artificial tokens in front of everything, which the positions already count.
        """
        raise NotImplementedError

    def pieces(self, length: int) -> list[int]:
        """How the next ``length`` tokens have to be cut so that each piece can be placed."""
        return [length]

    def reset(self) -> None:
        """Forget everything."""
        super().reset()  # type: ignore[no-untyped-call]
        self.held = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Follow the beams."""
        super().reorder_cache(beam_idx)  # type: ignore[arg-type]
        self._select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence."""
        super().batch_repeat_interleave(repeats)
        if self.held is not None and self.held.shape[0] > 1:
            self.held = self.held.repeat_interleave(repeats, 0)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the sequences ``indices``."""
        super().batch_select_indices(indices)
        self._select(indices)

    def crop(self, tokens_to_remove: int) -> NoReturn:  # noqa: ARG002 - the signature of transformers
        """A ring has overwritten what cropping would bring back."""
        allowed = "caches that can be cropped, with assisted and prompt-lookup decoding"
        raise ValueError(f"past_key_values: got a {type(self).__name__}; allowed: {allowed}")

    @property
    def is_croppable(self) -> bool:
        """False: see ``crop``."""
        return False

    def _select(self, indices: Tensor) -> None:
        if self.held is not None and self.held.shape[0] > 1:
            self.held = self.held[indices.to(self.held.device)]

    def _next_slots(self, length: int) -> tuple[Annotated[Tensor, "n"], Annotated[Tensor, "n"]]:
        layer = self.layers[0] if self.layers else RingLayer(self.window, self.pinned)
        assert isinstance(layer, RingLayer)
        return layer.slots(length)


class WindowCache(StreamingCache):
    """The last ``window`` keys, nothing pinned, nothing rotated again: all that a model without sinks needs.

    Examples:
        >>> cache = WindowCache(256)
        >>> cache.get_seq_length()
        0
    """

    def __init__(self, window: int) -> None:
        super().__init__(window, pinned=0)

    def place(self, rows: QueryPositions, offset: int) -> tuple[QueryPositions, KeyPositions]:  # noqa: ARG002
        """Rows and keys stand at their absolute positions."""
        before = rows.new_full((1, self.window), -1) if self.held is None else self.held
        batch = max(before.shape[0], rows.shape[0])
        before, new = before.expand(batch, -1), rows.expand(batch, -1)
        which, slots = (t.to(rows.device) for t in self._next_slots(rows.shape[1]))
        self.held = before.index_copy(1, slots, new[:, which])
        return rows, self.held if rows.shape[1] == 1 else torch.cat([before, new], 1)


class StreamingLLMCache(StreamingCache):
    """The StreamingLLM baseline: the first ``pinned`` keys, the last ``window``, positions inside the cache.

    A token is the last of the window it sees, so rows and keys stand at 0 … pinned + window − 1 however long
    the text is. Artificial tokens are kept in front of the pinned ones. Padding has no place here.

    Examples:
        >>> StreamingLLMCache(pinned=4, window=252).pinned
        4
    """

    moves_keys = True

    def __init__(self, pinned: int, window: int) -> None:
        super().__init__(window, pinned)

    def place(self, rows: QueryPositions, offset: int) -> tuple[QueryPositions, KeyPositions]:
        """The oldest key in the ring stands behind the pinned ones, the newest token last."""
        slots, seen, length = self.pinned + self.window, self.get_seq_length(), rows.shape[1]
        places = torch.arange(slots, device=rows.device)
        if seen + length > slots:
            newest = (seen - self.pinned) % self.window
            age = (places - self.pinned - newest - 1) % self.window
            keys = torch.where(places < self.pinned, places, self.pinned + age)
            last = places[-1:]
        else:
            last = torch.arange(seen, seen + length, device=rows.device)
            known = seen + (1 if length == 1 else 0)
            keys = places.masked_fill(places >= known, -1 - offset)
            keys = keys if length == 1 else torch.cat([keys, last])
        return (last + offset).unsqueeze(0), (keys + offset).unsqueeze(0)

    def pieces(self, length: int) -> list[int]:
        """As many as still fit, then one by one: each of the others moves the keys before it."""
        free = max(self.pinned + self.window - self.get_seq_length(), 0)
        fit = min(free, length)
        return [fit] * (fit > 0) + [1] * (length - fit)


def _check_at_least(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}: got {value!r}; allowed: integers ≥ {least}")
