"""A training run as data: what is trained on what, and how; read from TOML."""

import math
import types
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from stablemask.data import DataConfig
from stablemask.model import SIZES, StableMaskConfig
from stablemask.training.toml import merge, read_tables

Schedule = Literal["linear", "cosine"]
Precision = Literal["fp32", "bf16"]
Distribution = Literal["ddp", "fsdp"]
Table = Mapping[str, Any]

_CHOICES = {"schedule": Schedule, "precision": Precision, "distribution": Distribution}

_T = TypeVar("_T")


@dataclass(frozen=True)
class ModelConfig:
    """The decoder, as settings of ``StableMaskConfig``; what is left out has its default there."""

    size: str = "71m"
    """71m, 160m, 400m or 1.4b, the sizes of the paper. The next four override its numbers."""

    hidden_size: int | None = None
    """Width of the embeddings."""

    intermediate_size: int | None = None
    """Width of the feed-forward layers."""

    num_hidden_layers: int | None = None
    """Layers."""

    num_attention_heads: int | None = None
    """Query heads."""

    num_key_value_heads: int | None = None
    """Key and value heads; as many as query heads by default."""

    head_dim: int | None = None
    """Width of a head; hidden_size / num_attention_heads by default."""

    tie_word_embeddings: bool = False
    """The output layer shares the weights of the embedding."""

    sliding_window: int | None = None
    """Each query sees its last so many keys; by default all."""

    position: str = "rope"
    """rope, alibi, t5, learned, sinusoidal or none."""

    remedy: str = "none"
    """none, stablemask, softmax_plus_one, learned_sink, artificial_token or urpe."""

    gamma: float = 0.5
    """StableMask: decay of the pseudo scores."""

    headwise: bool = True
    """StableMask: spread ``gamma`` over the heads like ALiBi's slopes."""

    horizon: int | Literal["infinite"] | None = None
    """StableMask: N; by default the training length."""

    base: float = 0.0
    """StableMask: pseudo score of a hypothetical column 1; −inf switches it off."""

    artificial_tokens: int = 1
    """Remedy artificial_token: how many are put in front of each document."""

    artificial_zero: bool = False
    """Remedy artificial_token: fixed zero vectors instead of learned ones."""

    def __post_init__(self) -> None:
        """Refuse sizes that have no name; the rest is checked by the configuration of the model."""
        if self.size not in SIZES:
            raise ValueError(f"size: got {self.size!r}; allowed: {', '.join(SIZES)}")

    def settings(self, length: int) -> dict[str, Any]:
        """Arguments of ``StableMaskConfig`` for a training length."""
        given = {name: value for name, value in asdict(self).items() if value is not None}
        del given["size"]
        if self.remedy == "stablemask":
            given.setdefault("horizon", length)
        return {**SIZES[self.size], "max_position_embeddings": length, **given}


@dataclass(frozen=True)
class TrainConfig:
    """How the model is trained. One of ``steps``, ``epochs`` and ``tokens``, one of the two batch sizes."""

    steps: int | None = None
    """Updates of the weights."""

    epochs: float | None = None
    """Passes over the training split."""

    tokens: int | None = None
    """Tokens of training text, repeated ones counted again; rounded up to a whole update."""

    length: int = 512
    """Tokens in a sequence."""

    batch_size: int | None = None
    """Sequences in an update, over all processes."""

    batch_tokens: int | None = None
    """Tokens in an update, a multiple of ``length``."""

    accumulation: int = 1
    """An update is computed in so many pieces, for less memory."""

    learning_rate: float = 6e-4
    """At the end of warm-up, where it is highest."""

    beginning_learning_rate: float = 1e-6
    """Of the first update; from there it rises along a line."""

    warmup_steps: int = 0
    """Updates until ``learning_rate`` is reached."""

    schedule: Schedule = "linear"
    """How it falls to 0 at the end of the run, after warm-up."""

    beta1: float = 0.9
    """AdamW: memory of the mean of gradients."""

    beta2: float = 0.98
    """AdamW: memory of the mean of their squares."""

    epsilon: float = 1e-8
    """AdamW: added to the root of that mean."""

    weight_decay: float = 0.01
    """AdamW: for matrices; not for normalisation weights, sinks and the like."""

    clipping: float = 1.0
    """Largest norm of the gradient; 0 does not clip."""

    seed: int = 0
    """Of the initial weights and of the order of sequences."""

    precision: Precision = "fp32"
    """fp32, or bf16: weights in float32, products in bfloat16."""

    gradient_checkpointing: bool = False
    """Compute each layer again in the backward pass instead of keeping what it made."""

    log_every: int = 10
    """Updates between two lines of metrics; also where a checkpoint is written."""

    eval_every: int = 1000
    """Updates between two validations; there is one at the end of the run in any case."""

    eval_tokens: int | None = None
    """Validate on so many tokens at most, always the first ones; by default on the whole split."""

    save_every: int = 1000
    """Updates between two checkpoints."""

    keep: int = 2
    """Checkpoints that are kept, the newest ones; at least 2, so that a damaged one has one before it."""

    report_to: tuple[str, ...] = ()
    """Trackers of transformers' Trainer, such as tensorboard, wandb, trackio."""

    distribution: Distribution = "ddp"
    """With several processes: ddp copies the model to each, fsdp spreads it over them."""

    def __post_init__(self) -> None:
        """Refuse numbers that mean nothing. What excludes each other is checked by ``Recipe.check``."""
        positive = (
            *("steps", "epochs", "tokens", "batch_size", "batch_tokens", "accumulation", "learning_rate"),
            *("epsilon", "log_every", "eval_every", "eval_tokens", "save_every"),
        )
        for name in positive:
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name}: got {value}; allowed: finite, above 0")
        for name, low in {"length": 2, "keep": 2}.items():
            if getattr(self, name) < low:
                raise ValueError(f"{name}: got {getattr(self, name)}; allowed: at least {low}")
        not_negative = ("beginning_learning_rate", "warmup_steps", "weight_decay", "clipping", "seed")
        for name in not_negative:
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}: got {getattr(self, name)}; allowed: finite, 0 or above")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}; allowed: from 0 to below 1")
        for name, choice in _CHOICES.items():
            if getattr(self, name) not in get_args(choice):
                allowed = ", ".join(get_args(choice))
                raise ValueError(f"{name}: got {getattr(self, name)!r}; allowed: {allowed}")

    @property
    def sequences(self) -> int:
        """Sequences in an update."""
        if self.batch_size is not None:
            return self.batch_size
        assert self.batch_tokens is not None
        return self.batch_tokens // self.length

    def updates(self, blocks: int) -> int:
        """Updates of the run, for a training split of so many blocks."""
        if self.steps is not None:
            return self.steps
        if self.tokens is not None:
            return -(-self.tokens // (self.sequences * self.length))
        assert self.epochs is not None
        return max(1, round(self.epochs * blocks / self.sequences))

    def learning_rate_at(self, update: int, updates: int) -> float:
        """The rate of an update, counted from 0, in a run of ``updates``."""
        peak, begin, warmup = self.learning_rate, self.beginning_learning_rate, self.warmup_steps
        if update < warmup:
            return begin + (peak - begin) * update / warmup
        done = min((update - warmup) / max(updates - warmup, 1), 1.0)
        return peak * (1 - done if self.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2)


@dataclass(frozen=True)
class Recipe:
    """A training run.

    Attributes:
        name: By default the name of the file, without its ending.
        model: The decoder.
        data: The text.
        train: The training.
    """

    name: str = "recipe"
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    def config(self, vocab_size: int = 50257, **settings: Any) -> StableMaskConfig:
        """The configuration of its model, for a vocabulary."""
        return StableMaskConfig(
            vocab_size=vocab_size, **{**self.model.settings(self.train.length), **settings}
        )

    def check(self) -> None:
        """Raise if its settings contradict each other."""
        for group in ALTERNATIVES["train"]:
            given = [name for name in group if getattr(self.train, name) is not None]
            if len(given) != 1:
                got = " and ".join(given) or "none"
                raise ValueError(f"train: got {got}; allowed: exactly one of {', '.join(group)}")
        batch_tokens, length = self.train.batch_tokens, self.train.length
        if batch_tokens is not None and batch_tokens % length:
            raise ValueError(f"batch_tokens: got {batch_tokens}; allowed: multiples of the length, {length}")
        if self.train.sequences % self.train.accumulation:
            raise ValueError(
                f"accumulation: got {self.train.accumulation}; allowed: divisors of the batch of "
                f"{self.train.sequences} sequences"
            )
        self.config()

    def table(self) -> dict[str, Any]:
        """All settings as nested tables."""
        return asdict(self)


# Of these at most one has a value. An override that gives one takes it from the others.
ALTERNATIVES: Mapping[str, Sequence[tuple[str, ...]]] = {
    "train": (("steps", "epochs", "tokens"), ("batch_size", "batch_tokens"))
}


def load_recipe(path: str | Path, overrides: Table | None = None) -> Recipe:
    """A recipe from a TOML file, checked.

    A file may name others that it builds on: ``extends = "other.toml"``, or several, the later ones winning;
    its own settings win over all of them.

    Args:
        path: The file.
        overrides: Nested tables, as in the file, that win over it.

    Raises:
        ValueError: An unknown key, with the nearest that exists, or a value that is not allowed.
        OSError: A file cannot be read.

    Examples:
        >>> load_recipe("recipes/tiny.toml", {"train": {"steps": 5}}).train.steps
        5
    """
    path = Path(path)
    tables = merge(read_tables(path, ALTERNATIVES), overrides or {}, ALTERNATIVES)
    tables.setdefault("name", path.stem)
    recipe = parse(Recipe, tables, str(path))
    recipe.check()
    return recipe


def parse(kind: type[_T], table: Table, where: str) -> _T:
    """A dataclass from a table, with the types and names of its fields and nothing else."""
    hints = get_type_hints(kind)
    known = [f.name for f in fields(kind)]  # type: ignore[arg-type]
    given = {}
    for name, value in table.items():
        if name not in known:
            near = get_close_matches(name, known, n=1, cutoff=0.0)
            raise ValueError(f"{where}: unknown key {name!r}; did you mean {near[0]!r}?")
        given[name] = _convert(hints[name], value, f"{where}: {name}")
    try:
        return kind(**given)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _convert(hint: Any, value: Any, where: str) -> Any:
    if is_dataclass(hint) and isinstance(hint, type):
        if not isinstance(value, Mapping):
            raise ValueError(f"{where}: got {value!r}; allowed: a table")
        return parse(hint, value, where)
    if get_origin(hint) in (Union, types.UnionType):
        for choice in get_args(hint):
            try:
                return _convert(choice, value, where)
            except ValueError:
                continue
    elif get_origin(hint) is Literal:
        if value in get_args(hint):
            return value
    elif get_origin(hint) is tuple:
        if isinstance(value, list | tuple):
            return tuple(_convert(get_args(hint)[0], item, where) for item in value)
    elif hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    elif isinstance(value, hint) and isinstance(value, bool) == (hint is bool):
        return value
    raise ValueError(f"{where}: got {value!r}; allowed: {_described(hint)}")


def _described(hint: Any) -> str:
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(_described(choice) for choice in get_args(hint) if choice is not type(None))
    if get_origin(hint) is Literal:
        return ", ".join(map(repr, get_args(hint)))
    if get_origin(hint) is tuple:
        return f"a list of {_described(get_args(hint)[0])}"
    names = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}
    return names.get(hint, "nothing")
