"""Packed documents: from cumulative lengths, as other libraries take them, to document ids and back."""

from typing import Annotated

import torch
from torch import Tensor


def documents_from_cu_seqlens(cu_seqlens: Annotated[Tensor, "N+1"]) -> Annotated[Tensor, "1 Tk"]:
    """Document ids of one packed row from cumulative lengths ``[0, n_1, n_1 + n_2, …]``.

    Examples:
        >>> documents_from_cu_seqlens(torch.tensor([0, 2, 5]))
        tensor([[0, 0, 1, 1, 1]])
    """
    if (
        cu_seqlens.ndim != 1
        or cu_seqlens.numel() < 1
        or cu_seqlens.is_floating_point()
        or int(cu_seqlens[0]) != 0
    ):
        raise ValueError(
            f"cu_seqlens: got {cu_seqlens}; allowed: integers of shape (N + 1,) that begin with 0"
        )
    lengths = cu_seqlens.diff()
    if bool((lengths < 0).any()):
        raise ValueError(f"cu_seqlens: got {cu_seqlens}; allowed: integers that never fall")
    return torch.arange(lengths.numel(), device=cu_seqlens.device).repeat_interleave(lengths).unsqueeze(0)


def cu_seqlens_from_documents(document_ids: Annotated[Tensor, "1 Tk"]) -> Annotated[Tensor, "N+1"]:
    """Cumulative lengths of the documents of one packed row.

    Examples:
        >>> cu_seqlens_from_documents(torch.tensor([[0, 0, 1, 1, 1]]))
        tensor([0, 2, 5])
    """
    if document_ids.ndim != 2 or document_ids.shape[0] != 1:
        raise ValueError(
            f"document_ids: got shape {tuple(document_ids.shape)}; allowed: one packed row, (1, Tk)"
        )
    lengths = torch.unique_consecutive(document_ids[0], return_counts=True)[1]
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
