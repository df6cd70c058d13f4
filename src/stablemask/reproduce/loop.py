"""The training loop of the study: that of ``stablemask.training``, bare.

The same recipe gives the same weights as ``stablemask train`` does (a test compares them). What is left out
is what runs of minutes do not need: checkpoints, processes, trackers. What is gained is time: an update of
these small models takes a few milliseconds.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.utils import logging

from stablemask.data import Blocks
from stablemask.model import StableMaskForCausalLM
from stablemask.training.recipe import ModelConfig, Recipe
from stablemask.training.sequences import Sequences, collate

OnUpdate = Callable[[int], object]

_PLAIN = ("size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "position")


def make_model(recipe: Recipe, vocabulary: int) -> StableMaskForCausalLM:
    """The model of a recipe with its initial weights.

    Arms of one seed begin with the same ones: a remedy with weights of its own does not shift the others.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.train.seed)
        model = StableMaskForCausalLM(recipe.config(vocabulary, use_cache=False))
        torch.manual_seed(recipe.train.seed)
        plain = ModelConfig(**{name: getattr(recipe.model, name) for name in _PLAIN})
        twin = StableMaskForCausalLM(replace(recipe, model=plain).config(vocabulary))
        model.load_state_dict(twin.state_dict(), strict=False)
    return model


def train(
    model: StableMaskForCausalLM, recipe: Recipe, blocks: Blocks, *, on_update: OnUpdate | None = None
) -> list[float]:
    """Train a model where it is.

    Args:
        model: From ``make_model``, on its device.
        recipe: How.
        blocks: The training text.
        on_update: Called after each update with the number of updates done.

    Returns:
        The mean loss over each tenth of the updates.
    """
    given = recipe.train
    updates = given.updates(len(blocks))
    optimizer = make_optimizer(model, recipe)
    order = Sequences(blocks, updates * given.sequences, given.seed)
    losses = torch.zeros(updates, device=model.device)
    model.train()
    for done, batch in enumerate(_batches(order, given.sequences)):
        for group in optimizer.param_groups:
            group["lr"] = given.learning_rate_at(done, updates)
        with products(recipe, model.device):
            loss = model(**{k: v.to(model.device, non_blocking=True) for k, v in batch.items()}).loss
        optimizer.zero_grad()
        loss.backward()
        if given.clipping:
            nn.utils.clip_grad_norm_(model.parameters(), given.clipping)
        optimizer.step()
        losses[done] = loss.detach()
        if on_update is not None:
            on_update(done + 1)
    nn.Module.eval(model)
    return [float(part.mean()) for part in losses.chunk(min(10, updates))]


def save_model(model: StableMaskForCausalLM, folder: Path) -> None:
    """Write a trained model, without a bar of its own into that of the run."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model.save_pretrained(folder)
    finally:
        if shown:
            logging.enable_progress_bar()


def make_optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.AdamW:
    """AdamW; weight decay for matrices, not for normalisation weights, sinks and the like."""
    given = recipe.train
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": given.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups,
        lr=given.learning_rate,
        betas=(given.beta1, given.beta2),
        eps=given.epsilon,
        fused=True,
    )


def products(recipe: Recipe, device: torch.device) -> AbstractContextManager[Any]:
    """In which precision the model multiplies."""
    if recipe.train.precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)


def _batches(order: Sequences, size: int) -> Iterator[dict[str, torch.Tensor]]:
    for first in range(0, len(order), size):
        yield collate([order[i] for i in range(first, first + size)])
