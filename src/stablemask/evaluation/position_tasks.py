"""Tasks that need absolute positions (Appendix B.2 of the paper), learned by small decoders.

All inputs are zeros, but for one [ABE] in the second task; the answers are these, for positions 1 … T:

* ``mapping``: 0 0 0 0 … → 1 2 3 4 …, asked everywhere;
* ``identification``: 0 0 [ABE] 0 … → 3, asked at [ABE], which comes at every position;
* ``odd_even``: 0 0 0 0 … → 1 2 1 2 …, asked everywhere.

Where all inputs are identical, a relative encoding alone gives identical outputs: its attention averages
equal values, whatever the weights. Then one answer has to serve every position, and ``ceiling`` is the best
it can do. The second task has no such ceiling: [ABE] competes with the zeros before it, and its share counts
them. The positions asked are those of training, so these are tests of what a model can represent and learn.
Past the training length the labels of the first two tasks never occurred; only ``odd_even`` can go on there.
"""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from typing import Annotated, Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache

from stablemask.model import StableMaskConfig, StableMaskForCausalLM

Task = Literal["mapping", "identification", "odd_even"]
TASKS: tuple[Task, ...] = get_args(Task)
RELATIVE = ("alibi", "t5", "rope")
REMEDIES = ("stablemask", "softmax_plus_one", "learned_sink", "artificial_token", "urpe")
_NOT_ASKED = -100
_POSITIONS_BEYOND = 32


class Encoding(NamedTuple):
    """A row of the table: a position encoding and a remedy of our decoder."""

    position: str
    remedy: str = "none"


ENCODINGS: tuple[Encoding, ...] = (
    *(Encoding(position) for position in ("learned", "sinusoidal", *RELATIVE, "none")),
    *(Encoding(position, remedy) for position in RELATIVE for remedy in REMEDIES),
)


@dataclass(frozen=True)
class Setting:
    """The model of a position task, and its training.

    Args:
        layers: Layers of the decoder.
        width: Of its embeddings; the feed-forward layers are twice as wide.
        heads: Heads of its attention.
        steps: Steps of AdamW, with a warm-up of a tenth and a linear decay.
        batch_size: Sequences in a step of identification. The other tasks have only one sequence.
        learning_rate: The highest.
    """

    layers: int = 2
    width: int = 128
    heads: int = 8
    steps: int = 600
    batch_size: int = 16
    learning_rate: float = 2e-3


def position_task(
    task: Task,
    encoding: Encoding,
    *,
    length: int,
    seed: int = 0,
    setting: Setting = Setting(),
    device: str = "cpu",
    on_step: Callable[[int], object] | None = None,
) -> Iterator[tuple[str, float]]:
    """Train a small decoder on a task and ask every position of it.

    Args:
        task: mapping, identification or odd_even.
        encoding: Of the decoder.
        length: T, also the horizon.
        seed: Of the weights and of the order of the sequences.
        setting: The model and its training.
        device: Where it is trained.
        on_step: Called with 1 after each step.

    Yields:
        ``accuracy``, of the positions 1 … T; ``accuracy_beyond``, of the positions T + 1 … 2T in sequences of
        that length, unless the encoding ends at T; ``loss``, of the last step.
    """
    if task not in TASKS:
        raise ValueError(f"task: got {task!r}; allowed: {', '.join(TASKS)}")
    if length < 2:
        raise ValueError(f"length: got {length}; allowed: from 2 on")
    model, loss = train(task, encoding, length, seed, setting, device, on_step)
    torch.nn.Module.eval(model.double())  # so that equal outputs are equal, not apart by what float32 rounds
    yield "accuracy", accuracy(model, task, torch.arange(length), length)
    if model.config.table_length is None:
        beyond = torch.arange(length, 2 * length)
        if task == "identification":
            beyond = beyond[:: math.ceil(length / _POSITIONS_BEYOND)]
        yield "accuracy_beyond", accuracy(model, task, beyond, length)
    yield "loss", loss


def ceiling(task: Task, encoding: Encoding, length: int) -> float | None:
    """The best accuracy that identical outputs can have; None where outputs need not be identical."""
    if encoding.position not in (*RELATIVE, "none") or encoding.remedy != "none" or task == "identification":
        return None
    return 1 / length if task == "mapping" else math.ceil(length / 2) / length


def printed() -> dict[str, Any]:
    """The paper's table: where it stands, and its accuracies by encoding and task."""
    text = files("stablemask.evaluation").joinpath("position_table.json").read_text(encoding="utf-8")
    table: dict[str, Any] = json.loads(text)
    return table


def train(
    task: Task,
    encoding: Encoding,
    length: int,
    seed: int,
    setting: Setting,
    device: str,
    on_step: Callable[[int], object] | None = None,
) -> tuple[StableMaskForCausalLM, float]:
    """A decoder after its training, and its last loss."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = StableMaskForCausalLM(configuration(encoding, length, setting))
    torch.nn.Module.to(model, device)
    model.train()
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=setting.learning_rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )
    warm = max(setting.steps // 10, 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm, (setting.steps - step) / (setting.steps - warm + 1))
    )
    loss = torch.tensor(math.nan)
    for _ in range(setting.steps):
        positions = torch.randperm(length, generator=generator)[: setting.batch_size]
        loss = _loss(model, task, positions, length)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if on_step is not None:
            on_step(1)
    return model, loss.item()


def configuration(encoding: Encoding, length: int, setting: Setting) -> StableMaskConfig:
    """Tokens are 0, the labels 1 … 2T and, last, [ABE]; a table of positions ends at T."""
    own: dict[str, Any] = {"horizon": length} if encoding.remedy == "stablemask" else {}
    return StableMaskConfig(
        vocab_size=2 * length + 2,
        hidden_size=setting.width,
        intermediate_size=2 * setting.width,
        num_hidden_layers=setting.layers,
        num_attention_heads=setting.heads,
        max_position_embeddings=length,
        position=encoding.position,
        remedy=encoding.remedy,
        **own,
    )


def sequences(
    task: Task, positions: Annotated[Tensor, "n"], total: int, length: int
) -> tuple[Annotated[Tensor, "B total"], Annotated[Tensor, "B total"]]:
    """Inputs of ``total`` tokens and their labels at ``positions`` (from 0), −100 where nothing is asked."""
    if task == "identification":
        rows = torch.arange(len(positions))
        ids = torch.zeros(len(positions), total, dtype=torch.long)
        ids[rows, positions] = 2 * length + 1
        labels = torch.full_like(ids, _NOT_ASKED)
        labels[rows, positions] = positions + 1
        return ids, labels
    ids = torch.zeros(1, total, dtype=torch.long)
    every = torch.arange(total).unsqueeze(0)
    return ids, every + 1 if task == "mapping" else every % 2 + 1


@torch.inference_mode()
def accuracy(
    model: StableMaskForCausalLM, task: Task, positions: Annotated[Tensor, "n"], length: int
) -> float:
    """Share of right answers at these positions (from 0), in sequences that end with the last of them."""
    right = 0
    for part in positions.split(32) if task == "identification" else (positions,):
        ids, labels = sequences(task, part, int(part.max()) + 1, length)
        labels[:, : int(positions.min())] = _NOT_ASKED
        logits, wanted = _answers(model, ids.to(model.device), labels.to(model.device))
        right += int((logits.argmax(-1) == wanted).sum())
    return right / len(positions)


def _loss(
    model: StableMaskForCausalLM, task: Task, positions: Annotated[Tensor, "n"], length: int
) -> Annotated[Tensor, ""]:
    """Of the positions drawn for identification, else of all."""
    if task == "identification":
        return _identification_loss(model, positions.to(model.device), length)
    ids, labels = sequences(task, positions, length, length)
    return F.cross_entropy(*_answers(model, ids.to(model.device), labels.to(model.device)))


def _identification_loss(
    model: StableMaskForCausalLM, positions: Annotated[Tensor, "n"], length: int
) -> Annotated[Tensor, ""]:
    """The zeros are read once, into a cache; every [ABE] then stands behind as many of them as it should.

    Nothing behind [ABE] reaches its answer, and what is before it is the same in all sequences.
    """
    cache = DynamicCache(config=model.config)
    zeros = torch.zeros(1, max(int(positions.max()), 1), dtype=torch.long, device=model.device)
    model.model(zeros, past_key_values=cache, use_cache=True)
    cache.batch_repeat_interleave(len(positions))
    seen = torch.arange(zeros.shape[1], device=model.device) < positions.unsqueeze(1)
    mask = F.pad(seen, (0, 1), value=True)
    asked = torch.full((len(positions), 1), 2 * length + 1, device=model.device)
    hidden = model.model(asked, attention_mask=mask, past_key_values=cache, use_cache=True).last_hidden_state
    return F.cross_entropy(model.lm_head(hidden[:, 0]), positions + 1)


def _answers(model: StableMaskForCausalLM, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and labels of the positions asked."""
    asked = labels != _NOT_ASKED
    hidden = model.model(ids, use_cache=False).last_hidden_state
    return model.lm_head(hidden[asked]), labels[asked]
