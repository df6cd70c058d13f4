"""What test_distributed.py runs in two gloo processes on this machine, and in one to compare with.

Each part returns tensors that do not depend on the process: whole ones, put together from what is spread.
"""

import os
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from tests.hf import doors, tiny
from tests.model import tiny as own

PROCESSES = 2
STEPS = 4
PLAIN_SGD = {
    "optim": "sgd",
    "learning_rate": 0.05,
    "max_steps": STEPS,
}  # Adam makes much of small differences

Part = Callable[[Path], dict[str, Tensor]]


def start(folder: Path) -> list[dict[str, dict[str, Tensor]]]:
    """What the parts give in each of the processes; the folder has the models that they open."""
    torch.multiprocessing.spawn(_run, (folder,), PROCESSES)
    return [torch.load(folder / f"{rank}.pt") for rank in range(PROCESSES)]


def _run(rank: int, folder: Path) -> None:
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(PROCESSES)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}  # asked for, though the store is a file
    dist.init_process_group("gloo", f"file://{folder}/store", timedelta(minutes=4), PROCESSES, rank)
    torch.save({name: part(folder) for name, part in PARTS.items()}, folder / f"{rank}.pt")
    dist.destroy_process_group()


def whole(t: Tensor) -> Tensor:
    """A tensor put together from its pieces in every process."""
    return (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()


# Data parallel


def trained_by_trainer(folder: Path) -> dict[str, Tensor]:
    """Losses and final weights of both doors, four sequences an update however many processes there are."""
    processes = dist.get_world_size() if dist.is_initialized() else 1
    found = {}
    for door in doors.DOORS:
        trainer = doors.trainer(
            doors.model(door),
            folder / door,
            per_device_train_batch_size=4 // processes,
            **PLAIN_SGD,
        )
        trainer.train()
        assert isinstance(trainer.model_wrapped, DistributedDataParallel) == (processes > 1)
        found[f"{door}: losses"] = doors.losses(trainer)
        found |= {f"{door}: {name}": whole(t) for name, t in trainer.model.state_dict().items()}
    return found


# Sharded


def sharded(model: nn.Module, **options: Any) -> nn.Module:
    """Every parameter spread over the processes, if there are several."""
    if not dist.is_initialized():
        return model
    for layer in model.model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor), name
        assert parameter.to_local().numel() < parameter.numel(), name
    return model


def mine(rows: Tensor) -> Tensor:
    """The part of a batch that this process has."""
    return rows.chunk(dist.get_world_size())[dist.get_rank()] if dist.is_initialized() else rows


def mean(loss: Tensor) -> Tensor:
    """Over the processes, each of which had as many tokens."""
    loss = loss.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(loss)
        loss /= dist.get_world_size()
    return loss


def decoder(position: str, remedy: str) -> PreTrainedModel:
    return own.model(position, remedy).float()


DECODERS = {f"{position}-{remedy}": partial(decoder, position, remedy) for position, remedy in own.EACH}
SHARDED: dict[str, Callable[[], PreTrainedModel]] = {
    "enabled llama": partial(doors.enabled, "llama"),
    **DECODERS,
}


def trained_sharded(_: Path) -> dict[str, Tensor]:
    """Losses and final weights after updates with FSDP2, with and without gradient checkpointing."""
    found = {}
    for name, make in SHARDED.items():
        for checkpointing in (False, True):
            model = sharded(make().train())
            if checkpointing:
                model.activation_checkpointing_enable()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            losses = []
            for _update in range(STEPS):
                ids = mine(doors.tokens(4))
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
                losses.append(mean(loss))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            key = f"{name}, checkpointing {checkpointing}"
            found[f"{key}: losses"] = torch.stack(losses)
            found |= {f"{key}: {part}": whole(t) for part, t in model.state_dict().items()}
    return found


def sharded_in_bfloat16(_: Path) -> dict[str, Tensor]:
    """Logits of packed documents where FSDP casts what every layer gets; σ has to stay in float32."""
    ids = doors.tokens(1)
    positions = torch.cat([torch.arange(7), torch.arange(doors.LENGTH - 7)])[None]
    found = {}
    for name in ("enabled llama", "alibi-stablemask", "rope-stablemask"):
        model = SHARDED[name]()
        if dist.is_initialized():
            model = sharded(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        else:
            for parameter in model.parameters():  # not the frequencies of rope, which FSDP leaves alone
                parameter.data = parameter.data.bfloat16()
        with torch.no_grad():
            found[name] = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    return found


# Tensor parallel

ENABLED = [name for name in tiny.SUPPORTED if getattr(tiny.config(name), "base_model_tp_plan", None)]
PARTLY_FLOAT32 = (
    "mixtral",
    "gemma2",
    "gemma3_text",
)  # their routers and norms compute in it, whatever they get
SPLIT: dict[str, Callable[[], PreTrainedModel]] = {
    **{name: partial(doors.enabled, name) for name in ENABLED},
    "listed decays": partial(doors.enabled, "llama", gamma=[0.5, 0.02, 0.1, 0.3]),
    **DECODERS,
}


def split_up(folder: Path) -> dict[str, Tensor]:
    """Logits, greedy tokens and gradients of saved models whose heads are spread over the processes.

    In float64: a sum in two parts rounds differently, and in float32 small gradients show it in five digits.
    """
    found = {}
    for name, make in SPLIT.items():
        if dist.is_initialized():
            model = AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float64, tp_plan="auto")
            assert any(isinstance(p, DTensor) for p in model.parameters()), name
        else:
            model = make().double()
        model.set_experts_implementation("eager")  # the other one has no float64
        ids = doors.tokens(2)
        out = model.eval()(input_ids=ids, labels=ids, use_cache=False)
        found[f"{name}: logits"] = whole(out.logits)
        out.loss.backward()
        found |= {f"{name}: {part}": whole(p.grad) for part, p in model.named_parameters()}
        found[f"{name}: tokens"] = model.generate(ids, max_new_tokens=6, do_sample=False)
    return found


PARTS: dict[str, Part] = {
    part.__name__: part for part in (trained_by_trainer, trained_sharded, sharded_in_bfloat16, split_up)
}
