"""The two functions transformers calls: one where a model makes its mask, one in every attention layer.

The mask function sees the 2-D attention mask and the lengths of the cache, once per forward. What it
returns travels to every layer in place of a mask: a ``Rows``, which describes visibility by a window, kept
keys and documents, so that no T × T mask exists. Only a static cache past its first tokens needs the mask
itself: there the number of filled slots is a tensor.

The position of a row is its entry in the model's ``position_ids``. Where the caller gives none, models put
the index of the row there; the rows are then counted instead: kept tokens of the same document, from 0. In
``generate`` both are the same number.
"""

import math
from collections.abc import Callable
from typing import Annotated, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.masking_utils import causal_mask_function, sdpa_mask

from stablemask.attention import sink_attention
from stablemask.hf.schema import split_base
from stablemask.pseudo import PseudoScores
from stablemask.shapes import DocumentIds, KeyMask, Keys, Queries, RowLogits, Values

NAME = "stablemask"

Positions = Annotated[Tensor, "B|1 Tq"]
Visible = Annotated[Tensor, "B 1 Tq Tk"]
MaskFunction = Callable[..., Any]
AttentionLayer = Any  # a module with a config

_UNKNOWN_MASK = (
    "stablemask: this model or call asks for a mask that is not causal, windowed, padded or packed; "
    "the position of a row is not defined there"
)
_UNSEPARATED = (
    "position_ids: they restart inside a sequence, but the mask does not keep the documents apart. "
    "Pass packed sequences with use_cache=False and without attention_mask; gpt_oss and opt cannot take them"
)


class Rows:
    """The rows and keys of one forward, in place of a mask.

    Of the keys, the first ``num_keys`` count, and the last of them belongs to the last query. transformers
    hands this on like a 4-D mask that the caller prepared: hence ``ndim`` and ``contiguous``. σ is kept
    here, because the object lives as long as one forward. It is no tuple, because FSDP casts floating-point
    tensors in tuples.

    Args:
        counted: Row of every query, counted from the mask and the documents.
        indices: Index of every query among all tokens: the position ids that models make when given none.
        num_keys: How many keys are filled.
        window: How many keys a query sees, itself included.
        key_mask: Which of the keys are kept; None for all.
        document_ids: Document of every key; None for one document.
        visible: The mask itself, over all keys, in place of the four before.
    """

    ndim = 4

    def __init__(
        self,
        counted: Positions,
        indices: Positions,
        *,
        num_keys: int | None = None,
        window: int | None = None,
        key_mask: KeyMask | None = None,
        document_ids: DocumentIds | None = None,
        visible: Visible | None = None,
    ) -> None:
        self.counted = counted
        self.indices = indices
        self.num_keys = num_keys
        self.window = window
        self.key_mask = key_mask
        self.document_ids = document_ids
        self.visible = visible
        self._kept: tuple[object, Positions | None, torch.dtype, int, RowLogits | None] | None = None

    def contiguous(self) -> "Rows":
        """Itself."""
        return self

    def to(self, *args: Any, **kwargs: Any) -> "Rows":
        """The same with every tensor moved, for models spread over several devices."""
        moved = Rows(self.counted, self.indices)
        for name, value in vars(self).items():
            setattr(moved, name, value.to(*args, **kwargs) if isinstance(value, Tensor) else value)
        moved._kept = None
        return moved

    def positions(self, position_ids: Positions | None) -> Positions:
        """The position of every row: ``position_ids`` unless they are nothing but the indices."""
        if position_ids is None:
            return self.counted
        if position_ids.ndim != 2:
            got = tuple(position_ids.shape)
            raise ValueError(
                f"position_ids: got shape {got}; stablemask needs one position per token, (B, T)"
            )
        if self._unseparated(position_ids):
            raise ValueError(_UNSEPARATED)
        given = position_ids.clamp(min=0)
        if self.counted is self.indices:
            return given
        default = (position_ids == self.indices).all(-1, keepdim=True)
        return torch.where(default, self.counted, given)

    def _unseparated(self, position_ids: Positions) -> bool:
        """Whether positions restart under one causal triangle, where a stock model lets documents mix."""
        if self.visible is not None or self.key_mask is not None or self.document_ids is not None:
            return False
        return _readable(position_ids) and bool((position_ids.diff() <= 0).any())

    def pseudo(
        self, module: AttentionLayer, query: Queries, position_ids: Positions | None
    ) -> Annotated[Tensor, "B|1 H Tq"] | None:
        """σ for the heads of this process, worked out by the first layer that asks; None where it is −∞."""
        config, dtype, num_heads = module.config, query.dtype, query.shape[1]
        if self._kept is not None:
            known, ids, *kind, logits = self._kept
            if known is config and ids is position_ids and kind == [dtype, num_heads]:
                return logits
        scores, raised = split_base(getattr(config, "stablemask", None))
        if scores.base == -math.inf:
            logits = None
        else:
            logits = self._all_heads(position_ids, scores, config.num_attention_heads, dtype)
            logits = logits[:, _local_heads(module, num_heads)]
            logits = logits if raised is None else logits + raised
        if not torch.compiler.is_compiling():
            self._kept = (config, position_ids, dtype, num_heads, logits)
        return logits

    def _all_heads(
        self, position_ids: Positions | None, scores: PseudoScores, num_heads: int, dtype: torch.dtype
    ) -> Annotated[Tensor, "B|1 H Tq"]:
        positions = self.positions(position_ids)
        if positions.numel() == 1 and positions.device.type == "cpu" and _readable(positions):
            row = int(positions)
            table = scores.consecutive_logits(row, row + 1, num_heads, dtype=dtype, device=positions.device)
            return table.unsqueeze(0)
        return scores.row_logits(positions, num_heads, dtype)


def register() -> None:
    """Make ``attn_implementation="stablemask"`` known to transformers."""
    AttentionInterface.register(NAME, stablemask_attention)
    AttentionMaskInterface.register(NAME, stablemask_mask)


def stablemask_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction = causal_mask_function,
    attention_mask: Annotated[Tensor, "B T"] | Rows | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    config: PreTrainedConfig | None = None,
    **kwargs: object,
) -> Rows:
    """The rows and keys of this forward. The arguments are those of every mask function of transformers."""
    if isinstance(attention_mask, Rows):
        return attention_mask
    chunked = getattr(config, "attention_chunk_size", None) is not None
    if use_vmap or chunked or "allow_is_bidirectional_skip" in kwargs:
        raise ValueError(_UNKNOWN_MASK)
    indices = (torch.arange(q_length, device=device) + q_offset).unsqueeze(0)
    num_keys = q_offset + q_length - kv_offset
    if attention_mask is not None:
        if isinstance(num_keys, int) and attention_mask.shape[1] != q_offset + q_length:
            got = attention_mask.shape[1]
            raise ValueError(
                f"attention_mask: got {got} columns; allowed: {q_offset + q_length}, cached tokens included"
            )
        if _readable(attention_mask) and bool(attention_mask.all()):
            attention_mask = None
    counted = indices if attention_mask is None else _count_kept(attention_mask, indices)
    if isinstance(num_keys, Tensor) or (num_keys < kv_length and q_length == 1):
        visible = sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,  # type: ignore[arg-type] # a tensor in static caches
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            allow_is_causal_skip=False,
            device=device,
        )
        return Rows(counted, indices, visible=visible)
    if attention_mask is not None:
        kept = attention_mask[:, kv_offset:]
        return Rows(counted, indices, num_keys=num_keys, window=local_size, key_mask=kept)
    if allow_is_causal_skip or mask_function is causal_mask_function or num_keys != q_length or q_length == 1:
        return Rows(counted, indices, num_keys=num_keys, window=local_size)
    documents = _documents(mask_function, batch_size, local_size, indices)
    counted = _count_in_documents(documents)
    return Rows(counted, indices, num_keys=num_keys, window=local_size, document_ids=documents)


def stablemask_attention(
    module: AttentionLayer,
    query: Queries,
    key: Keys,
    value: Values,
    attention_mask: Rows | Visible | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    position_ids: Positions | None = None,
    softcap: float | None = None,
    s_aux: Annotated[Tensor, "H"] | None = None,
    **_: object,
) -> tuple[Annotated[Tensor, "B Tq H Dv"], None]:
    """Attention of one layer, with the pseudo scores of its config.

    Args:
        module: The attention layer.
        query: Queries.
        key: Keys, those of a cache included.
        value: Values.
        attention_mask: What ``stablemask_mask`` returned, or a 4-D mask prepared by the caller.
        dropout: Probability of dropping an attention weight.
        scaling: Multiplies q·k.
        position_ids: Positions of the queries.
        softcap: Limit of the real scores.
        s_aux: Learned sinks of the model; they stand beside ours.
    """
    rows = _given_mask(attention_mask, position_ids) if isinstance(attention_mask, Tensor) else attention_mask
    if not isinstance(rows, Rows):
        raise TypeError(
            f"attention_mask: {type(module).__name__} got {type(rows).__name__}; this model makes its "
            "mask without the AttentionMaskInterface of transformers"
        )
    sink = _sink(rows.pseudo(module, query, position_ids), s_aux)
    if rows.visible is not None:
        hidden = query.new_zeros(()).masked_fill(~rows.visible, -math.inf)
        out = sink_attention(
            query,
            key,
            value,
            sink,
            causal=False,
            bias=hidden,
            scale=scaling,
            softcap=softcap,
            dropout=dropout,
        )
    else:
        if rows.num_keys != key.shape[2]:
            key, value = key[:, :, : rows.num_keys], value[:, :, : rows.num_keys]
        out = sink_attention(
            query,
            key,
            value,
            sink,
            window=rows.window,
            key_mask=rows.key_mask,
            document_ids=rows.document_ids,
            scale=scaling,
            softcap=softcap,
            dropout=dropout,
        )
    return out.transpose(1, 2).contiguous(), None


def _sink(
    pseudo: Annotated[Tensor, "B|1 H Tq"] | None, s_aux: Annotated[Tensor, "H"] | None
) -> Annotated[Tensor, "H | B|1 H Tq"] | None:
    """σ together with the model's own sinks; None where there is neither."""
    if pseudo is None or s_aux is None:
        return s_aux if pseudo is None else pseudo
    return torch.logaddexp(pseudo, s_aux.to(pseudo.dtype)[:, None])


def _local_heads(module: AttentionLayer, num_heads: int) -> slice:
    """Which of the model's heads this process has: all of them but under tensor parallelism."""
    total = module.config.num_attention_heads
    if num_heads == total:
        return slice(None)
    for parameter in module.parameters():
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            mesh = mesh["tp"] if mesh.ndim > 1 else mesh
            if mesh.size() * num_heads == total:
                return slice(mesh.get_local_rank() * num_heads, (mesh.get_local_rank() + 1) * num_heads)
    raise ValueError(f"query: {type(module).__name__} has {num_heads} heads, its config says {total}")


def _given_mask(mask: Visible, position_ids: Positions | None) -> Rows:
    """Rows for a 4-D mask that the caller prepared: only position ids can tell the positions then."""
    if position_ids is None:
        raise ValueError("attention_mask: got a 4-D mask, but this model gives its attention no position_ids")
    visible = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    return Rows(position_ids, position_ids, visible=visible)


def _readable(t: Tensor) -> bool:
    """Whether the values of a tensor may decide what is computed."""
    return not (t.is_meta or torch.compiler.is_compiling())


def _count_kept(attention_mask: KeyMask, indices: Positions) -> Positions:
    """Row of every query among the kept tokens before it; 0 on padding before the first."""
    counted = (attention_mask.cumsum(-1) - 1).clamp(min=0)
    return counted[:, indices[0].clamp(max=counted.shape[1] - 1)]


def _documents(
    mask_function: MaskFunction, batch_size: int, window: int | None, indices: Positions
) -> DocumentIds:
    """Document of every token of packed sequences, found by asking the mask who sees whom.

    transformers hands documents on only as a function of (batch, head, query, key). Three questions per
    token tell them from any other mask: does it see the one before it, the one after it, the first of all?
    """
    if window == 1:
        raise ValueError("sliding_window: got 1 with packed sequences; allowed are windows ≥ 2")
    sequences = torch.arange(batch_size, device=indices.device)[:, None]
    heads = torch.zeros_like(indices)
    later, earlier = indices[:, 1:], indices[:, :-1]
    together = mask_function(sequences, heads[:, 1:], later, earlier).expand(batch_size, -1)
    documents = torch.nn.functional.pad((~together).cumsum(-1), (1, 0))
    if _readable(documents):
        from_first = mask_function(sequences, heads, indices, torch.zeros_like(indices)).expand(
            batch_size, -1
        )
        expected = (documents == 0) if window is None else (documents == 0) & (indices < window)
        looks_ahead = mask_function(sequences, heads[:, 1:], earlier, later)
        if bool(looks_ahead.any()) or not torch.equal(from_first, expected):
            raise ValueError(_UNKNOWN_MASK)
    return documents


def _count_in_documents(documents: DocumentIds) -> Positions:
    index = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    starts = torch.nn.functional.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
    return index - torch.where(starts, index, 0).cummax(-1).values
