"""The loop: transformers' Trainer, with our order of sequences, schedule, validation and checkpoints."""

import json
import math
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import SequentialSampler
from transformers import (
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from stablemask.data import Blocks
from stablemask.data.blocks import NOT_PREDICTED
from stablemask.model import StableMaskForCausalLM
from stablemask.training import checkpoints
from stablemask.training.recipe import TrainConfig
from stablemask.training.sequences import Sequences, collate

METRICS = "metrics.jsonl"


class Schedule(TrainerCallback):
    """When to log, validate and save: as the recipe says, and all three at the end.

    What is saved is logged and validated before, in this order, so that a resumed run continues its curve.
    """

    def __init__(self, config: TrainConfig) -> None:
        self.config = config

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Set what the Trainer does after an update."""
        step, end = state.global_step, state.global_step >= state.max_steps
        control.should_evaluate = end or step % self.config.eval_every == 0
        control.should_save = end or step % self.config.save_every == 0
        asked = control.should_evaluate or control.should_save
        control.should_log = asked or step % self.config.log_every == 0


class Metrics(TrainerCallback):
    """Appends every entry of the Trainer's log to ``metrics.jsonl``; a resumed run begins by restoring it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / METRICS

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Write what the checkpoint knows: lines of updates that are repeated now are gone."""
        if state.is_world_process_zero:
            with checkpoints.writing(self.path, self.path.parent):
                checkpoints.write_atomically(self.path, "".join(map(_line, state.log_history)))

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Append the newest entry."""
        if state.is_world_process_zero:
            line = _line(state.log_history[-1])
            with (
                checkpoints.writing(self.path, self.path.parent),
                self.path.open("a", encoding="utf-8") as file,
            ):
                file.write(line)
                file.flush()
                os.fsync(file.fileno())


def _line(entry: Mapping[str, Any]) -> str:
    return json.dumps({"step": entry["step"], **dict(sorted(entry.items()))}) + "\n"


class PretrainingTrainer(Trainer):
    """A Trainer for one pass over the ``Sequences`` of a run.

    Args:
        model: The model.
        arguments: Of the Trainer.
        config: The table ``train`` of the recipe.
        sequences: All sequences of the run.
        valid: Blocks of validation.
        tokenizer: Saved beside the model.
        callbacks: More of them.
    """

    def __init__(
        self,
        model: StableMaskForCausalLM,
        arguments: TrainingArguments,
        config: TrainConfig,
        sequences: Sequences,
        valid: Blocks,
        tokenizer: PreTrainedTokenizerFast,
        callbacks: list[TrainerCallback],
    ) -> None:
        self.decoder = model
        self.config = config
        self.sequences = sequences
        self.valid = valid
        self.clock = self.mark = 0.0
        super().__init__(
            model,
            arguments,
            data_collator=collate,
            train_dataset=sequences,
            processing_class=tokenizer,
            callbacks=callbacks,
        )

    def full_weights(self) -> dict[str, Any] | None:
        """The weights, if they have to be collected from several processes before they are saved."""
        return None

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> LambdaLR:
        """The learning rate of the recipe."""
        peak = self.config.learning_rate
        chosen = self.optimizer if optimizer is None else optimizer
        assert chosen is not None
        scheduler = LambdaLR(
            chosen,
            lambda update: self.config.learning_rate_at(update, num_training_steps) / peak,
        )
        self.lr_scheduler, self._created_lr_scheduler = scheduler, True
        return scheduler

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As in the Trainer, with a clock."""
        self.clock = self.mark = time.monotonic()
        return super().train(*args, **kwargs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add tokens and time to an entry; raise at a number that is none, before it is saved."""
        if "train_runtime" in logs:  # the Trainer's last word, which the summary says better
            return
        for name in ("loss", "grad_norm", "valid_loss"):
            if not math.isfinite(logs.get(name, 0.0)):
                raise FloatingPointError(self._lost(name, logs[name]))
        step, history, now = self.state.global_step, self.state.log_history, time.monotonic()
        per_update = self.config.sequences * self.config.length
        if "loss" in logs:
            updates = step - (history[-1]["step"] if history else 0)
            logs["tokens_per_second"] = updates * per_update / max(now - self.mark, 1e-9)
        logs["tokens"] = step * per_update
        logs["seconds"] = (history[-1]["seconds"] if history else 0.0) + now - self.clock
        self.clock = self.mark = now
        super().log(logs, start_time)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "valid"
    ) -> dict[str, float]:
        """Mean loss a token on the validation blocks, and its exponential."""
        began = time.monotonic()
        size, count = self.args.per_device_eval_batch_size, len(self.valid)
        if self.config.eval_tokens is not None:
            count = min(count, max(1, self.config.eval_tokens // self.config.length))
        sums = torch.zeros(2, dtype=torch.float64, device=self.args.device)
        self.decoder.eval()  # type: ignore[no-untyped-call]
        for first in range(0, count, size * self.args.world_size):
            begin = first + size * self.args.process_index
            batch = collate(
                [self.valid[i] for i in range(begin, min(begin + size, count))] or [self.valid[0]]
            )
            if begin >= count:  # sharded models need every process in every forward pass
                batch["labels"].fill_(NOT_PREDICTED)
            with torch.no_grad(), self.compute_loss_context_manager():
                batch = self._prepare_inputs(batch)
                out = self.decoder(**batch, skip_logits=True, num_items_in_batch=1, use_cache=False)
            sums += torch.stack([out.loss.double(), (batch["labels"] != NOT_PREDICTED).sum().double()])
        total, number = self.accelerator.reduce(sums).tolist()
        loss = total / number
        metrics = {"valid_loss": loss, "perplexity": math.exp(min(loss, 700.0))}
        self.log(metrics | {"valid_seconds": time.monotonic() - began})
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _evaluate(self, trial: Any, ignore_keys_for_eval: Any, skip_scheduler: bool = False) -> Any:
        return self.evaluate()

    def _get_train_sampler(self, train_dataset: Any = None) -> SequentialSampler:
        return SequentialSampler(self.sequences)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write a checkpoint, seal it, and only then remove older ones."""
        folder = Path(str(self.args.output_dir)) / f"{checkpoints.PREFIX}{self.state.global_step}"
        main = self.is_world_process_zero()
        self._check_weights()
        try:
            with checkpoints.writing(folder, folder.parent):
                if main and folder.exists():
                    checkpoints.remove(folder)
                self.accelerator.wait_for_everyone()
                super()._save_checkpoint(model, trial)
                self.accelerator.wait_for_everyone()  # each process writes its own random state
                if main:
                    checkpoints.seal(folder)
                    checkpoints.rotate(folder, self.config.keep)
        except OSError:
            if main and not (folder / checkpoints.MANIFEST).exists():  # a part of it is of no use to anybody
                shutil.rmtree(folder, ignore_errors=True)
            raise
        self.mark = time.monotonic()

    def _check_weights(self) -> None:
        for name, parameter in self.decoder.named_parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            if not bool(local.isfinite().all()):
                raise FloatingPointError(self._lost(name, math.nan))

    def _lost(self, name: str, value: float) -> str:
        kept = checkpoints.kept(Path(str(self.args.output_dir)))
        return (
            f"{name}: got {value} at update {self.state.global_step}; allowed: a recipe that stays finite, "
            "for example by a lower learning_rate, more warmup_steps or precision fp32, in a new folder. "
            f"{kept}"
        )
