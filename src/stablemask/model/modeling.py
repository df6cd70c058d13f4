"""The decoder: a Llama-like model whose position encoding and sink remedy are settings.

Read from the bottom: ``StableMaskForCausalLM`` → ``StableMaskModel`` → ``DecoderLayer`` → ``Attention``.
Where rows and keys stand (``Geometry``) and what encoding and remedy add to the scores (``Terms``) is worked
out once per call, in ``inputs``.
"""

from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import DynamicCache, GenerationMixin, PreTrainedModel, initialization
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from stablemask.attention import sink_attention, stable_attention
from stablemask.model.cache import StreamingCache
from stablemask.model.configuration import POSITIONS, REMEDIES, StableMaskConfig
from stablemask.model.geometry import Geometry
from stablemask.model.inputs import Terms, find_terms, place, pseudo_rows
from stablemask.model.loss import OutputLayer, causal_loss
from stablemask.model.positions import Positions
from stablemask.model.remedies import ArtificialTokens, drop_artificial, toeplitz_attention
from stablemask.model.sizes import describe
from stablemask.pseudo import PseudoScores
from stablemask.shapes import Keys, Output, Queries, Values

Hidden = Annotated[Tensor, "B T width"]
TokenIds = Annotated[Tensor, "B T"]
Logits = Annotated[Tensor, "B T vocabulary"]


class Attention(nn.Module):
    """Projections, rotation, cache, the operation. ``paged`` holds the arguments of continuous batching."""

    def __init__(self, config: StableMaskConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.width_of_head
        self.num_heads = config.num_attention_heads
        self.num_artificial = config.num_artificial  # read here once: a configuration answers slowly
        self.remedy = config.remedy
        assert config.num_key_value_heads is not None
        width, kv_width = self.num_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)
        if config.remedy == "learned_sink":
            self.sinks = nn.Parameter(torch.empty(self.num_heads))
        if config.remedy == "urpe":
            self.toeplitz = nn.Parameter(torch.empty(self.num_heads, config.max_position_embeddings))

    def forward(
        self,
        hidden: Hidden,
        geometry: Geometry,
        terms: Terms,
        cache: Cache | None,
        paged: dict[str, Any] | None,
    ) -> Hidden:
        """One attention over the keys of this call and of the cache."""
        shape = (*hidden.shape[:-1], -1, self.head_dim)
        q, k, v = (p(hidden).view(shape).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        if terms.rotation is not None:
            q = terms.rotation(q)
            k = k if terms.key_rotation is not None else terms.rotation(k)
        if paged is not None:
            k, v = paged["cache"].update(k, v, self.layer_idx, kwargs=dict(paged))
        elif cache is not None:
            k, v = self._store(k, v, geometry, cache)
        if terms.key_rotation is not None:
            k = terms.key_rotation(k)
        out = self._attend(q, k, v, geometry, terms)
        projected: Tensor = self.o_proj(out.transpose(1, 2).reshape(*hidden.shape[:-1], -1))
        return projected

    def _store(self, k: Keys, v: Values, geometry: Geometry, cache: Cache) -> tuple[Keys, Values]:
        """Put new keys into the cache, artificial ones beside it; return all, artificial ones first."""
        new = geometry.new_artificial
        artificial = cache.__dict__.setdefault("artificial", {}) if self.num_artificial else {}
        if new:
            artificial[self.layer_idx] = (k[:1, :, :new], v[:1, :, :new])  # the same in every sequence
        k, v = cache.update(k[:, :, new:], v[:, :, new:], self.layer_idx)
        stop = geometry.num_keys - self.num_artificial
        if k.shape[2] != stop:  # empty slots of a static cache
            k, v = k[:, :, :stop], v[:, :, :stop]
        if artificial:
            heads = (t.expand(k.shape[0], -1, -1, -1) for t in artificial[self.layer_idx])
            k, v = (torch.cat([a, t], 2) for a, t in zip(heads, (k, v), strict=True))
        return k, v

    def _attend(self, q: Queries, k: Keys, v: Values, geometry: Geometry, terms: Terms) -> Output:
        heads = self._heads_here(q.shape[1])
        slopes, bias, sink = terms.slopes, terms.bias, terms.sink
        if heads is not None:
            slopes = None if slopes is None else slopes[heads]
            bias = bias if bias is None or bias.shape[1] == 1 else bias[:, heads]
            sink = pseudo_rows(sink, geometry, self.num_heads, q) if isinstance(sink, PseudoScores) else sink
            sink = sink[:, heads] if isinstance(sink, Tensor) else sink
        dropout = float(self.config.attention_dropout) if self.training else 0.0
        if self.remedy == "urpe":
            return toeplitz_attention(q, k, v, self.toeplitz, geometry, slopes, bias, dropout)
        options = {"alibi_slopes": slopes, "bias": bias, "dropout": dropout, **geometry.options(q.shape[0])}
        out: Output
        if isinstance(sink, PseudoScores):
            out = stable_attention(q, k, v, sink, **options)
        else:
            out = sink_attention(q, k, v, self.sinks if self.remedy == "learned_sink" else sink, **options)
        return out

    def _heads_here(self, present: int) -> slice | None:
        """Which heads of the model this process has, under tensor parallelism; None: all."""
        if present == self.num_heads:
            return None
        weight = self.q_proj.weight
        assert isinstance(weight, DTensor)
        rank = weight.device_mesh.get_local_rank("tp")
        return slice(rank * present, (rank + 1) * present)


class FeedForward(nn.Module):
    """act(gate) · up, or act(up) alone, then down."""

    def __init__(self, config: StableMaskConfig) -> None:
        super().__init__()
        self.gate_proj = (
            nn.Linear(config.hidden_size, config.intermediate_size, bias=False) if config.gated else None
        )
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.activation = ACT2FN[config.hidden_act]

    def forward(self, hidden: Hidden) -> Hidden:
        """Each row on its own."""
        up = self.up_proj(hidden)
        inner = (
            self.activation(up) if self.gate_proj is None else self.activation(self.gate_proj(hidden)) * up
        )
        out: Tensor = self.down_proj(inner)
        return out


class DecoderLayer(GradientCheckpointingLayer):
    """Normalise, attend, add; normalise, feed forward, add."""

    def __init__(self, config: StableMaskConfig, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, layer_idx)
        self.mlp = FeedForward(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self,
        hidden: Hidden,
        geometry: Geometry,
        terms: Terms,
        past_key_values: Cache | None = None,
        paged: dict[str, Any] | None = None,
    ) -> Hidden:
        """One layer; ``past_key_values`` is named as gradient checkpointing expects it."""
        hidden = hidden + self.self_attn(
            self.input_layernorm(hidden), geometry, terms, past_key_values, paged
        )
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class StableMaskPreTrainedModel(PreTrainedModel):
    """What transformers wants to know about our models."""

    config: StableMaskConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DecoderLayer"]  # noqa: RUF012 - transformers reads plain class attributes
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012 - as above
    _supports_sdpa = True  # the only name generate_batch accepts; the attention is ours whatever the name
    _can_compile_fullgraph = True

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)  # type: ignore[no-untyped-call]
        if isinstance(module, Attention) and self.config.remedy == "learned_sink":
            initialization.zeros_(module.sinks)
        if isinstance(module, Attention) and self.config.remedy == "urpe":
            initialization.ones_(module.toeplitz)
        if isinstance(module, ArtificialTokens) and not self.config.artificial_zero:
            initialization.normal_(module.weight, mean=0.0, std=self.config.initializer_range)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Does nothing: saved folders carry a shim for the installed package, never a copy of this file."""

    def describe(self) -> None:
        """Print the number of parameters, part by part."""
        describe(self)


class StableMaskModel(StableMaskPreTrainedModel):
    """Embeddings, layers and the last normalisation."""

    def __init__(self, config: StableMaskConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.positions = Positions(config)
        self.artificial = ArtificialTokens(config) if config.num_artificial else None
        self.layers = nn.ModuleList([DecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()  # type: ignore[no-untyped-call]

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: TokenIds | None = None,
        attention_mask: Annotated[Tensor, "B past+T | B 1 Tq Tk"] | None = None,
        position_ids: Annotated[Tensor, "B|1 T"] | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Hidden | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Hidden states of every token.

        Args:
            input_ids: Tokens; or give ``inputs_embeds``.
            attention_mask: True (or 1) for tokens, False for padding, cached tokens included. A mask of rank
                4, boolean or added to the scores, replaces every rule of visibility.
            position_ids: Position of each token in its document; by default tokens that are no padding are
                counted. Without a cache, a position that does not follow the one before begins a document.
            past_key_values: Any cache of transformers, or one of ``stablemask.model.cache``.
            inputs_embeds: Embeddings in place of tokens.
            use_cache: Return a cache.
            output_hidden_states: Also return the input of every layer and the output of the last.
            kwargs: Only ``cache`` and its companions, from continuous batching, mean something here.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("input_ids, inputs_embeds: got both or neither; allowed: exactly one of them")
        if kwargs.get("output_attentions"):
            raise ValueError("output_attentions: got True; allowed: False, as the weights are never formed")
        hidden: Tensor = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        use_cache = self.config.use_cache if use_cache is None else use_cache
        if self.gradient_checkpointing and self.training:
            use_cache = False
        paged = kwargs if kwargs.get("cache") is not None else None
        if use_cache and past_key_values is None and paged is None:
            past_key_values = DynamicCache(config=self.config)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        keep_states = bool(output_hidden_states)
        if isinstance(past_key_values, StreamingCache):
            pieces = past_key_values.pieces(hidden.shape[1])
            if len(pieces) > 1:
                return self._in_pieces(hidden, pieces, attention_mask, past_key_values, keep_states)

        hidden, geometry, places = place(
            self.config, self.artificial, hidden, attention_mask, position_ids, past_key_values
        )
        hidden = self.positions.embed(hidden, geometry.positions)
        terms = find_terms(self.config, self.positions, hidden, geometry)
        states = []
        for layer in self.layers:
            if keep_states:
                states.append(drop_artificial(hidden, places))
            hidden = layer(hidden, geometry, terms, past_key_values=past_key_values, paged=paged)
        hidden = drop_artificial(self.norm(hidden), places)
        return BaseModelOutputWithPast(
            last_hidden_state=hidden,
            past_key_values=past_key_values,
            hidden_states=(*states, hidden) if keep_states else None,
        )

    def _in_pieces(
        self,
        hidden: Hidden,
        pieces: list[int],
        attention_mask: Tensor | None,
        cache: Cache,
        keep_states: bool,
    ) -> BaseModelOutputWithPast:
        """One call after the other, for a cache that cannot take all tokens at once."""
        if attention_mask is not None and not bool(attention_mask.all()):
            raise ValueError(f"attention_mask: got padding; allowed: none with a {type(cache).__name__}")
        outputs = [
            self(inputs_embeds=p, past_key_values=cache, output_hidden_states=keep_states, return_dict=True)
            for p in hidden.split(pieces, 1)
        ]
        states = zip(*(o.hidden_states for o in outputs), strict=True) if keep_states else None
        return BaseModelOutputWithPast(
            last_hidden_state=torch.cat([o.last_hidden_state for o in outputs], 1),
            past_key_values=cache,
            hidden_states=None if states is None else tuple(torch.cat(s, 1) for s in states),
        )


class StableMaskForCausalLM(StableMaskPreTrainedModel, GenerationMixin):
    """The decoder with its output layer."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012 - read by transformers
    _tp_plan = {"lm_head": "colwise_gather_output"}  # noqa: RUF012 - as above

    def __init__(self, config: StableMaskConfig) -> None:
        super().__init__(config)
        self.model = StableMaskModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = OutputLayer(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()  # type: ignore[no-untyped-call]

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: TokenIds | None = None,
        attention_mask: Annotated[Tensor, "B past+T | B 1 Tq Tk"] | None = None,
        position_ids: Annotated[Tensor, "B|1 T"] | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Hidden | None = None,
        labels: TokenIds | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        skip_logits: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits, or the loss where ``labels`` are given; everything else as in ``StableMaskModel.forward``.

        Args:
            input_ids: As in ``StableMaskModel.forward``.
            attention_mask: As in ``StableMaskModel.forward``.
            position_ids: As in ``StableMaskModel.forward``.
            past_key_values: As in ``StableMaskModel.forward``.
            inputs_embeds: As in ``StableMaskModel.forward``.
            labels: The tokens themselves; the loss shifts them by one and skips −100.
            use_cache: As in ``StableMaskModel.forward``.
            logits_to_keep: Only the logits of so many last tokens, or of these; 0 keeps all.
            skip_logits: Return the loss alone, computed without the logits ever standing whole. By default
                in training mode where ``labels`` are given.
            kwargs: As in ``StableMaskModel.forward``, and what the loss function takes.
        """
        out = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            return_dict=True,
            **kwargs,
        )
        hidden: Hidden = out.last_hidden_state
        loss, logits = None, None
        if labels is not None and (self.training if skip_logits is None else skip_logits):
            loss = self._loss_alone(hidden, labels, **kwargs)
        if loss is None:
            keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self.lm_head(hidden[:, keep])
        if labels is not None and loss is None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs
            )
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=out.past_key_values, hidden_states=out.hidden_states
        )

    def _loss_alone(self, hidden: Hidden, labels: TokenIds, **kwargs: Any) -> Tensor | None:
        """The loss in chunks; None where only logits will do: adapters, split vocabularies, other losses."""
        layer = self.lm_head
        split = isinstance(layer.weight, DTensor) and "tp" in (layer.weight.device_mesh.mesh_dim_names or ())
        if split or not isinstance(layer, OutputLayer) or self.loss_function is not ForCausalLMLoss:
            return None
        return causal_loss(layer, hidden, labels, **kwargs)

    @staticmethod
    def create_masks_for_generate(
        attention_mask: Tensor | None, past_key_values: Cache, inputs_embeds: Hidden, **_: Any
    ) -> Tensor | None:
        """For caches of fixed size: the mask, padded to it so that compiled steps keep their shapes."""
        if attention_mask is None:
            return None
        slots, dropped = past_key_values.get_mask_sizes(inputs_embeds.shape[1], 0)
        return nn.functional.pad(attention_mask, (0, max(slots + dropped - attention_mask.shape[1], 0)))

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """As in transformers, for the encodings and remedies that can work with its paged cache."""
        for name, kinds in (("position", POSITIONS), ("remedy", REMEDIES)):
            chosen = getattr(self.config, name)
            if not kinds[chosen].continuous_batching:
                able = ", ".join(k for k, spec in kinds.items() if spec.continuous_batching)
                raise ValueError(f"{name}: got {chosen!r}; allowed with continuous batching: {able}")
        return super().init_continuous_batching(*args, **kwargs)
