"""One model looked at: metrics over pieces of text, maps of the first of them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from stablemask import PseudoScores
from stablemask.analysis.capture import BLOCK, Capture, capture
from stablemask.analysis.metrics import Metrics, average, measure
from stablemask.analysis.pieces import Piece, head
from stablemask.analysis.views import AttentionMap, ModelView
from stablemask.hf.schema import from_table
from stablemask.model import StableMaskConfig

SHOWN = 256
"""Tokens of the first piece whose maps are shown."""

_RESTS = {
    "stablemask": "pseudo mass",
    "softmax_plus_one": "the one of softmax-plus-one",
    "learned_sink": "a learned sink",
    "artificial_token": "artificial tokens",
}


@dataclass(frozen=True)
class Inspection:
    """What one model does with a text.

    Attributes:
        name: Of the model.
        metrics: Means over all pieces.
        view: Maps of the first tokens of the first piece.
        pieces: How many there were.
        length: Tokens of each.
    """

    name: str
    metrics: Metrics
    view: ModelView
    pieces: int
    length: int


def inspect_model(
    model: PreTrainedModel,
    name: str,
    pieces: Sequence[Piece],
    *,
    shown: int = SHOWN,
    block: int = BLOCK,
    on_piece: Callable[[], object] = lambda: None,
) -> Inspection:
    """Run pieces of one length through a model and measure its attention, in memory O(T·block).

    Args:
        model: One that ``capture`` can look into.
        name: Shown for it.
        pieces: From ``cut_pieces``.
        shown: Tokens of the first piece whose maps can be looked at.
        block: Rows of weights that exist at a time.
        on_piece: Called after every piece, for progress.

    Examples:
        >>> found = inspect_model(model, "ours", cut_pieces([text], tokenizer, length=512))
        >>> write_report("report.html", [found.view])
    """
    if not pieces:
        raise ValueError("pieces: got none; allowed is at least one")
    measured = []
    for piece in pieces:
        measured.append(measure(look(model, piece), piece.classes, block=block).cpu())
        on_piece()
    view = view_of(model, name, head(pieces[0], shown))
    return Inspection(name, average(measured), view, len(pieces), pieces[0].length)


def look(model: PreTrainedModel, piece: Piece) -> Capture:
    """The attention of all layers while the model reads a piece; of logits, only the last are computed."""
    with capture(model) as layers, torch.no_grad():
        model(input_ids=piece.ids.to(model.device), use_cache=False, logits_to_keep=1)
    return layers


def view_of(model: PreTrainedModel, name: str, piece: Piece) -> ModelView:
    """What figures and the report page show of a model."""
    layers = look(model, piece)

    def make(layer: int, head: int) -> AttentionMap:
        return layers.attention_map(layer, head)

    rests = [layer.pseudo_mass() + layer.artificial_mass() for layer in layers]
    return ModelView(
        name,
        piece.tokens,
        make,
        torch.stack(rests).float().cpu(),
        rest=_rest(model),
        scores=scores_of(model),
        details=_details(model),
    )


def scores_of(model: PreTrainedModel) -> PseudoScores | None:
    """The pseudo scores of a model, None if it has none."""
    if isinstance(model.config, StableMaskConfig):
        return model.config.scores
    table = getattr(model.config, "stablemask", None)
    return None if table is None else from_table(table)


def _rest(model: PreTrainedModel) -> str:
    """What gets the share of a row that no token gets."""
    if isinstance(model.config, StableMaskConfig):
        return _RESTS.get(model.config.remedy, "nothing")
    return "a learned sink" if scores_of(model) is None else _RESTS["stablemask"]


def _details(model: PreTrainedModel) -> dict[str, str]:
    config, scores = model.config, scores_of(model)
    ours = isinstance(config, StableMaskConfig)
    found = {"positions": config.position, "remedy": config.remedy} if ours else {"model": config.model_type}
    if scores is not None:
        horizon = "infinite" if scores.horizon is None else f"{scores.horizon:,}"
        found |= {"γ": _gamma(scores), "horizon": horizon}
        if scores.base == -math.inf:
            found["base"] = "−∞, which is plain attention"
    return found


def _gamma(scores: PseudoScores) -> str:
    if isinstance(scores.gamma, Sequence):
        return "a list"
    return f"{scores.gamma:g}, {'head-wise' if scores.headwise else 'the same in all heads'}"
