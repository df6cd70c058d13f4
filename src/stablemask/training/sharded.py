"""The loop with the model spread over all processes, by ``fully_shard`` (FSDP2).

Checkpoints are whole, as without sharding: any number of processes can go on from them.
"""

import contextlib
from pathlib import Path
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from stablemask.training.trainer import PretrainingTrainer

_OPTIMIZER, _SCHEDULER = "optimizer.pt", "scheduler.pt"
_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
_SPREAD = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


class ShardedTrainer(PretrainingTrainer):
    """A Trainer whose parameters, gradients and optimizer states are spread over the processes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not torch.distributed.is_initialized():
            raise ValueError(
                "distribution: got 'fsdp' in a single process; allowed: with several, started by torchrun or "
                "accelerate launch"
            )
        for layer in self.decoder.model.layers:
            fully_shard(layer)
        fully_shard(self.decoder)
        self._check_sharded()
        # accelerate would copy the model to every process (DDP), and knows no FSDP without GPUs. This tells
        # it that the model is as it should be; there is no public way to.
        vars(self.decoder)["_is_accelerate_prepared"] = True

    def full_weights(self) -> dict[str, Any]:
        """The weights, whole, on the main process; the others help."""
        return get_model_state_dict(self.decoder, options=_WHOLE)

    def compute_loss_context_manager(self) -> contextlib.ExitStack:
        """With the products in the recipe's precision, which accelerate would see to."""
        stack = contextlib.ExitStack()
        if self.config.precision == "bf16":
            stack.enter_context(torch.autocast(self.args.device.type, torch.bfloat16))
        return stack

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the whole weights."""
        state = self.full_weights()
        if self.args.should_save:
            self._save(output_dir, state_dict=state)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        state = get_optimizer_state_dict(self.decoder, self._own_optimizer(), options=_WHOLE)
        if self.args.should_save:
            torch.save(state, Path(output_dir) / _OPTIMIZER)
            assert self.lr_scheduler is not None
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / _SCHEDULER)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        path = Path(resume_from_checkpoint) / "model.safetensors"
        state: dict[str, Any] = dict(load_file(path)) if self.args.should_save else {}
        set_model_state_dict(self.decoder, state, options=_SPREAD)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        folder = Path(checkpoint)
        state = torch.load(folder / _OPTIMIZER, weights_only=True) if self.args.should_save else {}
        set_optimizer_state_dict(self.decoder, self._own_optimizer(), state, options=_SPREAD)
        assert self.lr_scheduler is not None
        self.lr_scheduler.load_state_dict(torch.load(folder / _SCHEDULER, weights_only=True))

    def _own_optimizer(self) -> torch.optim.Optimizer:
        optimizer = self.optimizer
        if isinstance(optimizer, AcceleratedOptimizer):
            optimizer = optimizer.optimizer
        assert isinstance(optimizer, torch.optim.Optimizer)
        return optimizer

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm)  # type: ignore[no-untyped-call]
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def _check_sharded(self) -> None:
        whole = [name for name, p in self.decoder.named_parameters() if not isinstance(p, DTensor)]
        if whole:
            raise RuntimeError(
                f"distribution: got 'fsdp', but {len(whole)} parameters such as {whole[0]} are whole"
            )
