"""Training a model into StableMask."""

import dataclasses
import math
from typing import Any

from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from stablemask.hf.config import is_switched
from stablemask.hf.schema import from_table, to_table


class AnnealBase(TrainerCallback):
    """Raise the base of the pseudo scores from −∞ to its value over the first updates of a training run.

    For weights that were trained without StableMask. The base is ``base + log(update / updates)``, so that
    the pseudo mass grows in proportion to the update. Before the first it is −∞: the run starts at exactly
    the loss of the model without StableMask. A resumed run goes on where it stopped.

    Args:
        updates: After how many updates ``base`` is reached.
        base: The base at the end.

    Examples:
        >>> stablemask.hf.enable(model, gamma=0.5, horizon=2048, base=-math.inf)
        >>> trainer = Trainer(model, args, callbacks=[stablemask.hf.AnnealBase(updates=1000)])
    """

    def __init__(self, updates: int, base: float = 0.0) -> None:
        if updates < 1:
            raise ValueError(f"updates: got {updates!r}; allowed are integers ≥ 1")
        if not math.isfinite(base):
            raise ValueError(f"base: got {base!r}; allowed are finite numbers")
        self.updates = updates
        self.base = base

    def base_at(self, update: int) -> float:
        """The base after ``update`` updates."""
        return self.base + math.log(min(update / self.updates, 1.0)) if update else -math.inf

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Set the base the run starts with."""
        self._set(kwargs["model"], state)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Set the base of the next update, before anything is evaluated or saved."""
        self._set(kwargs["model"], state)

    def _set(self, model: PreTrainedModel, state: TrainerState) -> None:
        config = model.config
        if not is_switched(config):
            raise ValueError("model: StableMask is not switched on in it; call stablemask.hf.enable first")
        scores = from_table(config.stablemask)
        config.stablemask = to_table(dataclasses.replace(scores, base=self.base_at(state.global_step)))
