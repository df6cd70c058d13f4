"""Padding and packed documents as ranges instead of a mask."""

from typing import Annotated

import torch
from torch import Tensor

from stablemask.backends._call import Call

RowBounds = Annotated[Tensor, "B 2 Tq"]
KeyBounds = Annotated[Tensor, "B 2 Tk"]


def bounds(call: Call) -> tuple[RowBounds, KeyBounds] | tuple[None, None]:
    """First and stop of the keys that each row may see, and of the rows that may see each key.

    None where all may see all. Padding rows and dropped keys have the empty range (length, 0); a dropped key
    inside the range of a row is known by its own.
    """
    given = call.key_mask if call.key_mask is not None else call.documents
    num_queries, num_keys = call.q.shape[2], call.k.shape[2]
    if given is None or num_keys == 0:
        return None, None
    offset = num_keys - num_queries
    index = torch.arange(num_keys, dtype=torch.int32, device=given.device).expand(given.shape)
    first, stop = torch.zeros_like(index), torch.full_like(index, num_keys)  # per key, in keys
    if call.documents is not None:
        documents = call.documents.contiguous()
        first = torch.searchsorted(documents, documents, out_int32=True)
        stop = torch.searchsorted(documents, documents, right=True, out_int32=True)
    mask = call.key_mask
    if mask is not None:
        first = torch.maximum(first, torch.where(mask, index, num_keys).amin(-1, keepdim=True))
        stop = torch.minimum(stop, torch.where(mask, index + 1, 0).amax(-1, keepdim=True))
    first_row = (first - offset).clamp(min=0) if offset >= 0 else torch.zeros_like(first)
    rows = _stack(first, stop, mask, num_keys)
    keys = _stack(first_row, stop - offset, mask, num_queries)
    if offset < 0:  # queries that precede every key see all that are kept
        everything = torch.tensor([[0], [num_keys]], dtype=torch.int32, device=given.device)
        rows = torch.cat([everything.expand(rows.shape[0], 2, -offset), rows], -1)
    return rows.narrow(-1, max(offset, 0), num_queries).contiguous(), keys


def _stack(first: Tensor, stop: Tensor, mask: Tensor | None, length: int) -> Tensor:
    if mask is not None:
        first, stop = torch.where(mask, first, length), torch.where(mask, stop, 0)
    return torch.stack([first, stop], 1).to(torch.int32)
