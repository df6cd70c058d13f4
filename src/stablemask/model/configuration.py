"""What a model of ours can be: sizes, position encodings and remedies, as data, and the checks on them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from os import PathLike
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from stablemask.model.export import AUTO_MAP, write_shim
from stablemask.pseudo import PseudoScores


@dataclass(frozen=True)
class Kind:
    """What a position encoding or a remedy brings along.

    Attributes:
        settings: Fields of the configuration that mean something with this kind only.
        table: It holds one entry per position, so ``max_position_embeddings`` is a hard limit.
        movable: Cached keys may be given new positions, as the StreamingLLM cache does.
        continuous_batching: It works with the paged cache of ``generate_batch``.
    """

    settings: tuple[str, ...] = ()
    table: bool = False
    movable: bool = True
    continuous_batching: bool = True


POSITIONS: Mapping[str, Kind] = {
    "rope": Kind(settings=("rope_theta",)),
    "alibi": Kind(continuous_batching=False),
    "t5": Kind(settings=("t5_buckets", "t5_max_distance"), continuous_batching=False),
    "learned": Kind(table=True, movable=False),
    "sinusoidal": Kind(movable=False),
    "none": Kind(),
}
REMEDIES: Mapping[str, Kind] = {
    "none": Kind(),
    "stablemask": Kind(settings=("gamma", "horizon", "headwise", "base")),
    "softmax_plus_one": Kind(),
    "learned_sink": Kind(),
    "artificial_token": Kind(settings=("artificial_tokens", "artificial_zero"), continuous_batching=False),
    "urpe": Kind(table=True, continuous_batching=False),
}

_ALWAYS_POSITIVE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "initializer_range",
    "rope_theta",
    "artificial_tokens",
)


@strict
class StableMaskConfig(PreTrainedConfig):
    """Configuration of a decoder: a Llama-like block with a choice of position encoding and sink remedy.

    Every combination of ``position`` and ``remedy`` is a model. A setting that belongs to another kind than
    the one chosen is refused unless it has its default value.

    Args:
        vocab_size: Number of tokens.
        hidden_size: Width of the embeddings.
        intermediate_size: Width of the feed-forward layers.
        num_hidden_layers: Number of layers.
        num_attention_heads: Query heads.
        num_key_value_heads: Key and value heads; as many as query heads by default.
        head_dim: Width of a head, hidden_size / num_attention_heads by default. The attention width is
            num_attention_heads · head_dim, whatever the embedding width is.
        gated: Feed-forward layers act(gate) · up, or act(up) alone.
        hidden_act: The activation, by its transformers name.
        max_position_embeddings: How many positions a learned table and URPE have; else only advice to tools.
        sliding_window: Each query sees its last so many keys; None sees all.
        tie_word_embeddings: The output layer shares the weights of the embedding.
        attention_dropout: Probability of dropping an attention weight in training.
        position: rope, alibi, t5, learned, sinusoidal or none.
        rope_theta: Base of the rotary frequencies.
        t5_buckets: Buckets of the T5 bias.
        t5_max_distance: Distance from which on all keys share the last bucket.
        remedy: none, stablemask, softmax_plus_one, learned_sink, artificial_token or urpe.
        gamma: Decay of the pseudo scores; a list gives one value per head.
        horizon: N, the training length, or "infinite". The stablemask remedy requires it, without default.
        headwise: Spread ``gamma`` over the heads like ALiBi's slopes.
        base: Pseudo score of a hypothetical column 1; "-inf" switches StableMask off.
        artificial_tokens: Number of tokens prepended to each document.
        artificial_zero: They are fixed zero vectors instead of learned ones.
        rms_norm_eps: Added to the mean square in the normalisation layers.
        initializer_range: Standard deviation of the initial weights.
        use_cache: Keep keys and values for generation.

    Examples:
        >>> config = StableMaskConfig(position="rope", remedy="stablemask", horizon=512)
        >>> config.scores
        PseudoScores(gamma=0.5, horizon=512, headwise=True, base=0.0)
    """

    model_type = "stablemask"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012 - transformers reads a plain class attribute
    has_no_defaults_at_init: ClassVar[bool] = True  # stablemask requires a horizon

    vocab_size: int = 50257
    hidden_size: int = 512
    intermediate_size: int = 1536
    num_hidden_layers: int = 6
    num_attention_heads: int = 8
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    gated: bool = True
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    sliding_window: int | None = None
    tie_word_embeddings: bool = False
    attention_dropout: float | int = 0.0
    position: str = "rope"
    rope_theta: float | int = 10000.0
    t5_buckets: int = 32
    t5_max_distance: int = 128
    remedy: str = "stablemask"
    gamma: float | int | list[float | int] = 0.5
    horizon: int | str | None = None
    headwise: bool = True
    base: float | int | str = 0.0
    artificial_tokens: int = 1
    artificial_zero: bool = False
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            self._require("num_attention_heads", self.num_attention_heads > 0, "numbers > 0")
            divides = self.hidden_size % self.num_attention_heads == 0
            self._require(
                "hidden_size", divides, "multiples of num_attention_heads, unless head_dim is given"
            )
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.base == -math.inf:
            self.base = "-inf"  # JSON has no infinity
        for name in kwargs:
            near = get_close_matches(name, [f.name for f in fields(self)], n=1, cutoff=0.75)
            if near:
                raise TypeError(f"{name}: the configuration has no such setting; did you mean {near[0]}?")
        self.auto_map = dict(AUTO_MAP)
        super().__post_init__(**{**kwargs, "auto_map": self.auto_map})  # type: ignore[no-untyped-call]
        self.validate_settings()  # here, so that it raises a plain ValueError; again whenever it is saved

    def validate_settings(self) -> None:
        """Check every setting and their combination."""
        for name in _ALWAYS_POSITIVE:
            self._require(name, getattr(self, name) > 0, "numbers > 0")
        self._require("position", self.position in POSITIONS, ", ".join(POSITIONS))
        self._require("remedy", self.remedy in REMEDIES, ", ".join(REMEDIES))
        self._require("hidden_act", self.hidden_act in ACT2FN, ", ".join(ACT2FN))
        assert self.num_key_value_heads is not None
        divides = self.num_attention_heads % self.num_key_value_heads == 0
        self._require(
            "num_key_value_heads", divides, f"divisors of num_attention_heads = {self.num_attention_heads}"
        )
        window = self.sliding_window
        self._require("sliding_window", window is None or window >= 1, "integers ≥ 1, or None")
        self._require("attention_dropout", 0 <= self.attention_dropout < 1, "probabilities from 0 to below 1")
        if self.position == "rope":
            self._require("head_dim", self.width_of_head % 2 == 0, "even widths with rope")
        if self.position == "sinusoidal":
            self._require("hidden_size", self.hidden_size % 2 == 0, "even widths with sinusoidal positions")
        self._require("t5_buckets", self.t5_buckets >= 2 and self.t5_buckets % 2 == 0, "even numbers ≥ 2")
        self._require(
            "t5_max_distance", self.t5_max_distance > self.t5_buckets // 2, "numbers > t5_buckets / 2"
        )
        self._check_unused("position", POSITIONS, self.position)
        self._check_unused("remedy", REMEDIES, self.remedy)
        if self.remedy == "stablemask":
            self._require("horizon", self.horizon is not None, 'the training length, or "infinite"')
            assert self.scores is not None
            self.scores.gammas(self.num_attention_heads)

    @property
    def width_of_head(self) -> int:
        """``head_dim``, which is never None once the configuration exists."""
        assert self.head_dim is not None
        return self.head_dim

    @property
    def scores(self) -> PseudoScores | None:
        """The pseudo scores, None with every remedy but stablemask."""
        if self.remedy != "stablemask":
            return None
        infinite = self.horizon == "infinite"
        self._require("horizon", infinite or isinstance(self.horizon, int), 'integers ≥ 1, or "infinite"')
        known = not isinstance(self.base, str) or self.base == "-inf"
        self._require("base", known, 'any finite number, or "-inf"')
        horizon = None if infinite else self.horizon
        assert not isinstance(horizon, str)
        return PseudoScores(self.gamma, horizon=horizon, headwise=self.headwise, base=float(self.base))

    @property
    def num_artificial(self) -> int:
        """Artificial tokens in front of each document."""
        return self.artificial_tokens if self.remedy == "artificial_token" else 0

    @property
    def table_length(self) -> int | None:
        """Positions beyond which a table ends; None where no table is involved."""
        table = POSITIONS[self.position].table or REMEDIES[self.remedy].table
        return self.max_position_embeddings + self.num_artificial if table else None

    @property
    def base_model_tp_plan(self) -> dict[str, str]:  # type: ignore[override]
        """How tensor parallelism splits the base model: heads and feed-forward columns over the ranks."""
        attention = {f"layers.*.self_attn.{name}_proj": "colwise" for name in ("q", "k", "v")}
        plan = attention | {"layers.*.self_attn.o_proj": "rowwise", "layers.*.mlp.up_proj": "colwise"}
        plan["layers.*.mlp.down_proj"] = "rowwise"
        if self.gated:
            plan["layers.*.mlp.gate_proj"] = "colwise"
        if self.remedy in ("learned_sink", "urpe"):
            parameter = "sinks" if self.remedy == "learned_sink" else "toeplitz"
            plan[f"layers.*.self_attn.{parameter}"] = "colwise"
            plan["layers.*.self_attn"] = "local_params"
        if self.position == "t5":
            plan["positions.buckets"] = "replicated_with_grad_allreduce"
        return plan

    def save_pretrained(
        self, save_directory: str | PathLike[str], push_to_hub: bool = False, **kwargs: Any
    ) -> None:
        """Write ``config.json`` and the shim that it names in ``auto_map``."""
        write_shim(save_directory)
        super().save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Does nothing: saved folders carry a shim for the installed package, never a copy of this file."""

    def _check_unused(self, choice: str, kinds: Mapping[str, Kind], chosen: str) -> None:
        defaults = {f.name: f.default for f in fields(self)}
        for kind, spec in kinds.items():
            for name in spec.settings:
                if kind != chosen and getattr(self, name) != defaults[name]:
                    allowed = (
                        f"the default {defaults[name]!r} with {choice} {chosen!r}; it belongs to {kind!r}"
                    )
                    self._reject(name, allowed)

    def _require(self, name: str, fulfilled: bool, allowed: str) -> None:
        if not fulfilled:
            self._reject(name, allowed)

    def _reject(self, name: str, allowed: str) -> None:
        raise ValueError(f"{name}: got {getattr(self, name)!r}; allowed: {allowed}")
