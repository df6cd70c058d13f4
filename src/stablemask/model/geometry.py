"""Where the rows and keys of one forward pass stand. Worked out once, then used by every layer.

Three facts decide it: what the caller says (``attention_mask``, ``position_ids``), how much the cache holds,
and which of its slots it hands to the attention. The result is one of the two forms of the operation: by
indices (the cheap one), or by coordinates, wherever indices do not give distances.
"""

from collections.abc import Callable
from typing import Annotated, Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from stablemask.model.cache import StreamingCache
from stablemask.model.configuration import POSITIONS, REMEDIES, StableMaskConfig
from stablemask.shapes import DocumentIds, KeyMask, KeyPositions, QueryPositions

Positions = Annotated[Tensor, "B|1 T"]
AdditiveMask = Annotated[Tensor, "B|1 1 Tq Tk"]


class Tokens(NamedTuple):
    """The tokens of one call, and which of all tokens up to the last of them are kept.

    Attributes:
        positions: 0-based position of each in its own document.
        kept: True where a token is no padding; None where all are kept.
        documents: Number of the document of each; None where every sequence is one document.
        start: Where positions are start, start + 1, … in every sequence; None where not, or not known.
    """

    positions: Positions
    kept: Annotated[Tensor, "B past+T"] | None
    documents: DocumentIds | None
    start: int | None


class Geometry(NamedTuple):
    """What the attention of every layer needs to know about rows and keys.

    Attributes:
        positions: Position of each row in its own document, artificial tokens counted.
        start: As in ``Tokens``.
        contiguous: The keys are those of positions 0, 1, … to the last row's, all kept, in one document.
        window: Each row sees its last so many keys.
        key_mask: Keys that are no padding (index form).
        documents: Document of each key (index form).
        coordinates: Coordinates of rows and keys, −1 for padding; None in the index form.
        mask: A whole mask from the caller, added to the scores; nothing else then decides what is visible.
        num_keys: Keys that each row may see at most, cached and artificial ones included.
        moved: Coordinates are those inside the cache, whose keys are not rotated yet.
        new_artificial: Rows of this call that are artificial tokens, which the cache keeps apart.
    """

    positions: Positions
    num_keys: int
    start: int | None = None
    contiguous: bool = False
    window: int | None = None
    key_mask: KeyMask | None = None
    documents: DocumentIds | None = None
    coordinates: tuple[QueryPositions, KeyPositions] | None = None
    mask: AdditiveMask | None = None
    moved: bool = False
    new_artificial: int = 0

    def options(self, batch: int) -> dict[str, Any]:
        """The arguments of ``sink_attention`` that say which key is visible to which row."""
        if self.mask is not None:
            return {"causal": False}
        if self.coordinates is not None:
            rows, keys = (c.expand(batch, -1) for c in self.coordinates)
            return {"positions": rows, "key_positions": keys, "window": self.window}
        return {"key_mask": self.key_mask, "document_ids": self.documents, "window": self.window}

    def distances(self) -> Annotated[Tensor, "B|1 Tq Tk"]:
        """Coordinate of each row minus that of each key."""
        if self.coordinates is not None:
            rows, keys = self.coordinates
        else:
            keys = torch.arange(self.num_keys, device=self.positions.device).unsqueeze(0)
            rows = keys[:, self.num_keys - self.positions.shape[1] :]
        return rows.unsqueeze(-1) - keys.unsqueeze(-2)

    def visible(self, distances: Annotated[Tensor, "B|1 Tq Tk"]) -> Annotated[Tensor, "B|1 Tq Tk"]:
        """The rule of ``options``, written out, for an attention that is not the operation."""
        if self.mask is not None:
            return self.mask.squeeze(1) > -torch.inf
        seen = distances >= 0
        if self.window is not None:
            seen = seen & (distances < self.window)
        if self.coordinates is not None:
            return seen & (self.coordinates[1] >= 0).unsqueeze(-2)
        if self.key_mask is not None:
            seen = seen & self.key_mask.unsqueeze(-2)
        if self.documents is not None:
            seen = seen & (self.documents.unsqueeze(-1) == self.documents.unsqueeze(-2))
        return seen


def read_tokens(
    embeddings: Annotated[Tensor, "B T width"],
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    cache: Cache | None,
    past: int | Tensor,
) -> Tokens:
    """Positions, padding and documents from what the caller gave, every value of it checked for its shape."""
    batch, length = embeddings.shape[:2]
    kept = None if attention_mask is None else _read_mask(attention_mask, batch, length, cache, past)
    counted = past + torch.arange(length, device=embeddings.device).unsqueeze(0)
    if position_ids is not None:
        if position_ids.shape not in ((1, length), (batch, length)):
            _reject(
                "position_ids", f"shape {tuple(position_ids.shape)}", f"(B, T) = {(batch, length)}, or (1, T)"
            )
        positions = position_ids.long()
    elif kept is not None:
        positions = (kept.long().cumsum(-1) - 1).clamp(min=0).index_select(1, counted[0])
    else:
        positions = counted
    plain = kept is None and (position_ids is None or _eager_and((positions == counted).all))
    start = past if plain and isinstance(past, int) else None
    documents = None
    if position_ids is not None and start is None and length > 1:
        documents = _documents(positions.expand(batch, -1), kept, cache)
    return Tokens(positions, kept, documents, start)


def find_geometry(
    config: StableMaskConfig,
    tokens: Tokens,
    cache: Cache | None,
    past: int | Tensor,
    artificial: int,
    fresh: bool,
) -> Geometry:
    """The geometry of a call: of all its tokens, for an attention without a cache or with any cache.

    Args:
        config: The configuration.
        tokens: The tokens, artificial ones included where the call carries them (no cache, or ``fresh``).
        cache: The cache before the call.
        past: Tokens in it, artificial ones not counted.
        artificial: Artificial tokens that the cache keeps, in front of everything else.
        fresh: The call carries the artificial tokens that the cache is to keep.
    """
    carried = artificial if fresh else 0
    length = tokens.positions.shape[1] - carried  # of them go through the cache itself
    if isinstance(cache, StreamingCache):
        return _streaming(config, tokens, cache, artificial, carried)
    capacity, dropped = (length, 0) if cache is None else cache.get_mask_sizes(length, 0)
    if dropped and tokens.kept is not None and not torch.compiler.is_compiling():
        _refuse_lost_keys(tokens.kept[:, artificial:], dropped)
    spare = torch.compiler.is_compiling() and cache is not None and cache.is_compileable
    holes = tokens.kept is not None and tokens.documents is None and _has_holes(tokens.kept)
    filled = past + length - dropped
    geometry = Geometry(
        tokens.positions,
        artificial + capacity,
        tokens.start,
        window=config.sliding_window,
        new_artificial=carried,
    )
    if spare or (holes and _distances_matter(config)) or (artificial and dropped):
        first = past + artificial - carried
        return geometry._replace(coordinates=_coordinates(tokens, first, artificial, dropped, capacity))
    assert isinstance(filled, int)
    return geometry._replace(
        num_keys=artificial + filled,
        contiguous=tokens.start is not None and dropped == 0,
        key_mask=None if tokens.kept is None else tokens.kept[:, dropped:],
        documents=tokens.documents,
    )


def _read_mask(
    mask: Tensor, batch: int, length: int, cache: Cache | None, past: int | Tensor
) -> Tensor | None:
    if mask.ndim != 2 or mask.shape[0] != batch:
        _reject("attention_mask", f"shape {tuple(mask.shape)}", "(B, past + T), or a whole mask of rank 4")
    kept = mask.to(torch.bool)
    if not isinstance(past, int):  # the compiled step of a static cache
        return kept
    static = cache is not None and cache.is_compileable
    if kept.shape[1] != past + length and not (static and kept.shape[1] > past + length):
        _reject(
            "attention_mask",
            f"{kept.shape[1]} columns",
            f"{past + length}: one per cached token and one per new one",
        )
    kept = kept[:, : past + length]
    return None if _eager_and(kept.all) else kept


def _documents(positions: Tensor, kept: Tensor | None, cache: Cache | None) -> DocumentIds | None:
    """Positions that do not go up by one begin a new document. A cache holds one document per sequence."""
    breaks = positions.diff(dim=1) != 1
    if cache is None:
        if _eager_and((~breaks).all):
            return None
        return torch.nn.functional.pad(breaks.long().cumsum(-1), (1, 0))
    if kept is None and _eager_and(breaks.any):
        _reject(
            "position_ids",
            "several documents in a row together with a cache",
            "one document, or use_cache=False",
        )
    return None


def _eager_and(condition: Callable[[], Tensor]) -> bool:
    """What a value says, outside of compiled code; there nobody can look, and False is the careful answer."""
    return not torch.compiler.is_compiling() and bool(condition())


def _distances_matter(config: StableMaskConfig) -> bool:
    return config.position in ("alibi", "t5") or config.remedy == "urpe" or config.sliding_window is not None


def _has_holes(kept: Tensor) -> bool:
    """Whether padding lies between tokens, so that indices are no distances; while compiling, perhaps."""
    if torch.compiler.is_compiling():
        return True
    runs = (kept[:, 1:] & ~kept[:, :-1]).sum(-1) + kept[:, 0]
    return bool((runs > 1).any())


def _refuse_lost_keys(kept: Tensor, dropped: int) -> None:
    """A sliding cache counts slots: padding behind a token pushes out keys that the window still reaches."""
    behind = ~kept & (kept.long().cumsum(-1) > 0)
    if bool(behind[:, dropped:].any()):
        allowed = "padding on the left, or a cache that drops no keys: DynamicCache() without a config"
        _reject("attention_mask", "padding between tokens inside the sliding window", allowed)


def _coordinates(
    tokens: Tokens, first: int | Tensor, artificial: int, dropped: int, capacity: int
) -> tuple[QueryPositions, KeyPositions]:
    """Count the kept tokens; −1 for the others. Empty slots of a static cache lie behind every row."""
    device, total = tokens.positions.device, artificial + dropped + capacity
    counted = torch.arange(total, device=device).unsqueeze(0)
    if tokens.kept is not None:
        kept = torch.nn.functional.pad(tokens.kept, (0, max(total - tokens.kept.shape[1], 0)))
        counted = (kept.long().cumsum(-1) - 1).masked_fill(~kept, -1)
    rows = counted.index_select(1, first + torch.arange(tokens.positions.shape[1], device=device))
    return rows, torch.cat([counted[:, :artificial], counted[:, artificial + dropped : total]], 1)


def _streaming(
    config: StableMaskConfig, tokens: Tokens, cache: StreamingCache, artificial: int, carried: int
) -> Geometry:
    """The cache says where the keys stand that it will return; the last columns of the mask tell padding."""
    if cache.moves_keys and tokens.kept is not None:
        _reject("attention_mask", "padding", f"none with a {type(cache).__name__}")
    if cache.moves_keys and not (POSITIONS[config.position].movable and REMEDIES[config.remedy].movable):
        allowed = f"caches that leave positions alone, with {config.position!r} positions"
        _reject("past_key_values", type(cache).__name__, allowed)
    rows = tokens.positions
    if tokens.kept is not None:
        rows = rows.masked_fill(~tokens.kept[:, -rows.shape[1] :], -1)
    head = torch.arange(artificial, device=rows.device).unsqueeze(0)
    placed, keys = cache.place(rows[:, carried:], offset=artificial)
    rows = torch.cat([head[:, :carried].expand(placed.shape[0], -1), placed], 1)
    keys = torch.cat([head.expand(keys.shape[0], -1), keys], 1)
    window = cache.window if config.sliding_window is None else min(cache.window, config.sliding_window)
    return Geometry(
        positions=rows.clamp(min=0),
        num_keys=keys.shape[1],
        window=None if cache.moves_keys else window,
        coordinates=(rows, keys),
        moved=cache.moves_keys,
        new_artificial=carried,
    )


def _reject(name: str, got: str, allowed: str) -> NoReturn:
    raise ValueError(f"{name}: got {got}; allowed: {allowed}")
