"""A second attention for transformers: the paper's A⊙C + P, softmax, ⊙C, dense and in float64.

It imports nothing of the library. It sees unpadded sequences, so that row i is simply row i. Pseudo columns
are real columns here, one for each.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

NAME = "dense_oracle"

# γ = 0.5 over the heads: ALiBi's slopes, written out.
SLOPES = {
    4: [0.25, 0.0625, 0.015625, 0.00390625],
    6: [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125],
}


class Paper(NamedTuple):
    """The parameters, under the names of the paper."""

    horizon: int
    base: float = 0.0


_paper = Paper(horizon=1)


def pseudo_columns(length: int, gamma: float, paper: Paper) -> Tensor:
    """Scores of the pseudo columns of every row, (length, columns): −∞ where a row does not have the column.

    Row i, counted from 1, has the columns i + 1 … N of the horizon; column j has the score base − (j − 1)γ.
    A row beyond the horizon has the one column that follows it.
    """
    rows = torch.arange(1, length + 1, dtype=torch.float64)[:, None]
    columns = torch.arange(1, max(length + 1, paper.horizon) + 1, dtype=torch.float64)[None]
    scores = paper.base - (columns - 1) * gamma
    inside = (columns > rows) & (columns <= paper.horizon)
    beyond = (rows > paper.horizon) & (columns == rows + 1)
    return torch.where(inside | beyond, scores, -torch.inf)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    heads, length = query.shape[1], query.shape[2]
    groups = heads // key.shape[1]
    q, k, v = (
        query.double(),
        key.double().repeat_interleave(groups, 1),
        value.double().repeat_interleave(groups, 1),
    )
    scores = q @ k.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~attention_mask, -torch.inf)
    pseudo = torch.stack([pseudo_columns(length, gamma, _paper) for gamma in SLOPES[heads]])
    columns = [scores, pseudo.expand(query.shape[0], -1, -1, -1)]
    if s_aux is not None:
        columns.append(s_aux.double()[None, :, None, None].expand(query.shape[0], -1, length, 1))
    weights = torch.cat(columns, -1).softmax(-1)[..., : key.shape[2]]
    return (weights @ v).to(query.dtype).transpose(1, 2).contiguous(), None


def _mask(**arguments: Any) -> Tensor:
    return sdpa_mask(**{**arguments, "allow_is_causal_skip": False})


def logits(model: nn.Module, ids: Tensor, paper: Paper) -> Tensor:
    """Logits of a stock model whose attention is this one."""
    global _paper  # noqa: PLW0603 - an attention of transformers has no other way to get parameters
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    _paper = paper
    with torch.no_grad():
        out: Tensor = model(input_ids=ids, use_cache=False).logits
    model.config._attn_implementation = before
    return out
