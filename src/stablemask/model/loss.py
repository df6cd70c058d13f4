"""The loss over the vocabulary; its logits, the largest tensor of a training step, never stand whole.

Rows go through the output layer in chunks. Each chunk yields its share of the loss and, at once, of both
gradients, so that nothing is computed twice and the backward pass only scales what is there.
"""

from typing import Annotated, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

IGNORED = -100
"""The label of a row without a loss."""

_MIN_CHUNK = 256  # fewer rows a product lose more speed than memory they save

Rows = Annotated[Tensor, "rows width"]
Weight = Annotated[Tensor, "vocabulary width"]
Labels = Annotated[Tensor, "rows"]


class OutputLayer(nn.Linear):
    """The output layer: logits of hidden states, or the sum of their losses."""

    def forward(self, hidden: Tensor, labels: Labels | None = None) -> Tensor:
        """Logits of any hidden states; with ``labels`` the summed loss of ``hidden``, flattened to rows."""
        if labels is None:
            return super().forward(hidden)
        return summed_loss(hidden.flatten(0, -2), self.weight, labels)


def causal_loss(
    layer: OutputLayer,
    hidden: Annotated[Tensor, "B T width"],
    labels: Annotated[Tensor, "B T"],
    *,
    num_items_in_batch: Tensor | int | None = None,
    shift_labels: Annotated[Tensor, "B T"] | None = None,
    ignore_index: int = IGNORED,
    **_: Any,
) -> Tensor:
    """The loss of transformers' ``ForCausalLMLoss``, with its arguments, without the logits.

    Args:
        layer: From hidden states to the vocabulary.
        hidden: Last hidden states.
        labels: The tokens; each row has to predict the next of its sequence.
        num_items_in_batch: What the sum is divided by; by default the number of labels that count.
        shift_labels: What each row has to predict, in place of ``labels``.
        ignore_index: The label of a row that does not count.
    """
    targets = F.pad(labels[:, 1:], (0, 1), value=ignore_index) if shift_labels is None else shift_labels
    targets = targets.to(hidden.device).flatten()
    targets = targets.masked_fill(targets == ignore_index, IGNORED)
    count = (targets != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch
    summed: Tensor = layer(hidden, targets)
    return summed / (count.to(summed.device) if isinstance(count, Tensor) else count)


def summed_loss(hidden: Rows, weight: Weight, labels: Labels, *, chunk: int | None = None) -> Tensor:
    """The summed cross-entropy of ``hidden @ weight.T`` against ``labels``, without those logits.

    Args:
        hidden: Last hidden states. Under autocast the products are in its dtype, as in a linear layer.
        weight: Of the output layer.
        labels: The right token of each row; −100 where a row has none.
        chunk: Rows at a time; by default as many as let the logits take the memory of ``hidden``, but at
            least 256.
    """
    device = hidden.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    else:
        dtype = hidden.dtype
    rows = chunk or max(_MIN_CHUNK, hidden.numel() // weight.shape[0])
    wanted = (
        torch.is_grad_enabled() and hidden.requires_grad,
        torch.is_grad_enabled() and weight.requires_grad,
    )
    return cast("Tensor", _SummedLoss.apply(hidden, weight, labels, rows, dtype, wanted))  # type: ignore[no-untyped-call]


class _SummedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Rows,
        weight: Weight,
        labels: Labels,
        rows: int,
        dtype: torch.dtype,
        wanted: tuple[bool, bool],
    ) -> Tensor:
        precise = torch.promote_types(dtype, torch.float32)
        matrix = weight.to(dtype)
        loss = torch.zeros((), dtype=precise, device=hidden.device)
        pieces = []
        grad_weight = torch.zeros_like(weight, dtype=precise) if wanted[1] else None
        for h, target in zip(hidden.to(dtype).split(rows), labels.split(rows), strict=True):
            kept = (target != IGNORED).unsqueeze(-1)
            places = target.clamp(min=0).unsqueeze(-1)
            labelled = h.masked_fill(~kept, 0.0)
            scores = F.log_softmax((labelled @ matrix.T).to(precise), -1)
            loss = loss - scores.gather(-1, places).masked_fill(~kept, 0.0).sum()
            if not any(wanted):
                continue
            # Softmax minus one-hot. Rows without a label are dropped where rows are narrow, not here.
            errors = (
                scores.exp_().scatter_add_(-1, places, scores.new_tensor(-1.0).expand_as(places)).to(dtype)
            )
            if wanted[0]:
                pieces.append((errors @ matrix).masked_fill(~kept, 0.0))
            if grad_weight is not None:
                if dtype == precise:
                    grad_weight.addmm_(errors.T, labelled)
                else:
                    grad_weight += errors.T @ labelled
        grad_hidden = torch.cat(pieces).to(hidden.dtype) if pieces else None
        ctx.save_for_backward(grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype))
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        scaled = (None if g is None else g * grad.to(g.dtype) for g in ctx.saved_tensors)
        return (*scaled, None, None, None, None)
