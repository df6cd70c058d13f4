"""Training through the libraries people use: Trainer in its ways, annealing, PEFT."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor
from transformers import (
    DataCollatorWithFlattening,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import stablemask.hf
from tests.hf import doors, tiny

EXACT = 1e-5

every_door = pytest.mark.parametrize("door", doors.DOORS)


def train(
    model: Any, folder: Path, callbacks: Sequence[TrainerCallback] = (), resume: bool = False, **options: Any
) -> Tensor:
    """The loss of every update."""
    trainer = doors.trainer(model, folder, callbacks, **options)
    trainer.train(resume_from_checkpoint=resume)
    return doors.losses(trainer)


def furthest(a: Tensor, b: Tensor) -> float:
    return float((a - b).detach().abs().max() / b.detach().abs().max())


@every_door
def test_the_loss_falls_with_and_without_checkpointing_and_in_bfloat16(door: str, tmp_path: Path) -> None:
    plain = train(doors.model(door), tmp_path)
    assert doors.losses_fall(plain)
    checkpointed = train(doors.model(door), tmp_path, activation_checkpointing=True)
    assert furthest(checkpointed, plain) <= EXACT
    half = train(doors.model(door), tmp_path, bf16=True)
    assert doors.losses_fall(half)
    assert 0 < furthest(half[:1], plain[:1]) < 0.01


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler uses its own deprecated parts
@every_door
def test_a_compiled_run_has_the_same_losses(door: str, tmp_path: Path) -> None:
    compiled = train(doors.model(door), tmp_path, max_steps=4, torch_compile=True)
    assert furthest(compiled, train(doors.model(door), tmp_path, max_steps=4)) <= EXACT


@every_door
def test_packed_sequences_train_as_separate_ones(door: str, tmp_path: Path) -> None:
    """The same updates from one row of packed sequences as from a batch."""
    lengths = {"per_device_train_batch_size": 2, "max_steps": 3}
    batches = train(doors.model(door), tmp_path, **lengths)
    collator = DataCollatorWithFlattening(return_tensors="pt")
    model = doors.model(door)
    trainer = Trainer(
        model,
        TrainingArguments(
            str(tmp_path),
            learning_rate=5e-3,
            lr_scheduler_type="constant",
            logging_steps=1,
            use_cpu=True,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **lengths,
        ),
        train_dataset=[{"input_ids": row.tolist()} for row in doors.tokens(8)],
        data_collator=collator,
    )
    trainer.train()
    assert furthest(doors.losses(trainer), batches) <= EXACT


def annealed(**scores: Any) -> tuple[PreTrainedModel, stablemask.hf.AnnealBase]:
    model = tiny.model("llama")
    stablemask.hf.enable(model, gamma=0.5, horizon=doors.HORIZON, base=-math.inf)
    return model, stablemask.hf.AnnealBase(updates=6, **scores)


def test_annealing_starts_at_exactly_the_stock_loss(tmp_path: Path) -> None:
    stock = train(tiny.model("llama"), tmp_path)
    model, anneal = annealed()
    losses = train(model, tmp_path, [anneal])
    assert losses[0] == stock[0]
    assert furthest(losses[1:2], stock[1:2]) > 1e-4
    assert doors.losses_fall(losses)
    assert model.config.stablemask["base"] == 0.0


def test_a_resumed_run_goes_on_annealing(tmp_path: Path) -> None:
    whole = train(*started(annealed(base=-1.0), tmp_path), max_steps=5)
    train(*started(annealed(base=-1.0), tmp_path), max_steps=3, save_strategy="steps", save_steps=3)
    model, anneal = annealed(base=-1.0)
    resumed = train(model, tmp_path, [anneal], resume=True, max_steps=5)
    assert furthest(resumed, whole) <= EXACT
    assert model.config.stablemask["base"] == -1.0 + math.log(5 / 6)


def started(
    pair: tuple[PreTrainedModel, TrainerCallback], folder: Path
) -> tuple[Any, Path, list[TrainerCallback]]:
    return pair[0], folder, [pair[1]]


def test_annealing_compiles_nothing_at_every_update(tmp_path: Path) -> None:
    """One graph without pseudo scores, one with the first base, one with any."""
    losses = train(*started(annealed(), tmp_path))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = train(*started(annealed(), tmp_path), torch_compile=True, torch_compile_backend="aot_eager")
    assert furthest(compiled, losses) <= EXACT
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 3


def test_annealing_needs_a_model_with_stablemask(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"call stablemask\.hf\.enable first"):
        train(tiny.model("llama"), tmp_path, [stablemask.hf.AnnealBase(updates=3)], max_steps=1)


@every_door
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks by the old name
def test_lora(door: str, tmp_path: Path) -> None:
    model = doors.model(door)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    model.save_pretrained(tmp_path / "base")
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], bias="none")
    )
    assert doors.losses_fall(train(adapted, tmp_path, max_steps=30, learning_rate=0.1), to=0.85)
    kept = {
        name.replace(".base_layer", ""): t for name, t in model.state_dict().items() if "lora" not in name
    }
    assert all(torch.equal(kept[name], t) for name, t in before.items())

    ids = doors.tokens(2)
    expected = adapted.eval()(ids).logits
    adapted.save_pretrained(tmp_path / "adapter")
    base = doors.reopen(tmp_path / "base")
    assert furthest(base(ids).logits, expected) > 0.01
    again = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter")).eval()
    assert furthest(again(ids).logits, expected) <= EXACT
    merged = again.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    assert furthest(doors.reopen(tmp_path / "merged")(ids).logits, expected) <= EXACT
