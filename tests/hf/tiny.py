"""Tiny random models of every architecture that is tried."""

from collections.abc import Callable
from typing import Any

import torch
import transformers as T
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

VOCABULARY = 97
HEADS = 4
WINDOW = 7
LAYERS = 2

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 96,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GATED = {**_COMMON, "intermediate_size": 48}
_GROUPED = {**_GATED, "num_key_value_heads": 2}
_ALTERNATING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {"num_local_experts": 3, "num_experts_per_tok": 2}

SUPPORTED: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: T.LlamaConfig(**_GROUPED),
    "qwen2": lambda: T.Qwen2Config(**_GROUPED, use_sliding_window=True, **_ALTERNATING),
    "qwen3": lambda: T.Qwen3Config(**_GROUPED, head_dim=10),
    "mistral": lambda: T.MistralConfig(**_GROUPED, sliding_window=WINDOW),
    "mixtral": lambda: T.MixtralConfig(**_GROUPED, **_EXPERTS),
    "phi": lambda: T.PhiConfig(**_GATED),
    "phi3": lambda: T.Phi3Config(**_GROUPED, sliding_window=WINDOW),
    "gpt_neox": lambda: T.GPTNeoXConfig(**_GATED),
    "gpt2": lambda: T.GPT2Config(**{**_COMMON, "num_attention_heads": 6, "hidden_size": 36}),
    "olmo2": lambda: T.Olmo2Config(**_GROUPED),
    "starcoder2": lambda: T.Starcoder2Config(**_GROUPED, sliding_window=WINDOW),
    "stablelm": lambda: T.StableLmConfig(**_GROUPED),
    "granite": lambda: T.GraniteConfig(**_GROUPED, attention_multiplier=0.3),
    "smollm3": lambda: T.SmolLM3Config(**_GROUPED, no_rope_layers=[1, 0]),
    "cohere2": lambda: T.Cohere2Config(**_GROUPED, **_ALTERNATING),
    "gemma2": lambda: T.Gemma2Config(**_GROUPED, head_dim=8, attn_logit_softcapping=2.0, **_ALTERNATING),
    "gemma3_text": lambda: T.Gemma3TextConfig(**_GROUPED, head_dim=8, **_ALTERNATING),
    "gpt_oss": lambda: T.GptOssConfig(**_GROUPED, head_dim=8, **_EXPERTS, **_ALTERNATING),
    "opt": lambda: T.OPTConfig(**_COMMON, ffn_dim=48, word_embed_proj_dim=32),
    "gpt_bigcode": lambda: T.GPTBigCodeConfig(**_COMMON),
}

REFUSED: dict[str, Callable[[], PreTrainedConfig]] = {
    "bloom": lambda: T.BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=LAYERS, n_head=HEADS),
    "falcon": lambda: T.FalconConfig(**_COMMON),
    "gpt_neo": lambda: T.GPTNeoConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_layers=LAYERS,
        num_heads=HEADS,
        attention_types=[[["global", "local"], 1]],
        intermediate_size=48,
    ),
    "gptj": lambda: T.GPTJConfig(
        vocab_size=VOCABULARY, n_embd=32, n_layer=LAYERS, n_head=HEADS, rotary_dim=4
    ),
    "mpt": lambda: T.MptConfig(
        vocab_size=VOCABULARY, d_model=32, n_layers=LAYERS, n_heads=HEADS, max_seq_len=64
    ),
}

# Learned positions: left-padded tokens get the wrong ones unless the caller passes position_ids.
LEARNED_POSITIONS = ("gpt2", "gpt_bigcode")
# The stock model does not tell its mask about packed sequences.
NO_PACKING = ("gpt_oss", "opt")

_NO_DROPOUT = (
    "attention_dropout",
    "attn_pdrop",
    "resid_pdrop",
    "embd_pdrop",
    "dropout",
    "hidden_dropout",
    "activation_dropout",
)


def config(name: str) -> PreTrainedConfig:
    """The tiny config of an architecture, without dropout."""
    made = (SUPPORTED | REFUSED)[name]()
    for key in _NO_DROPOUT:
        if hasattr(made, key):
            setattr(made, key, 0.0)
    return made


def model(name: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **options: Any) -> PreTrainedModel:
    """A random model in which attention matters: the usual initial weights are so small that it does not."""
    torch.manual_seed(seed)
    if dtype == torch.float64:
        options["experts_implementation"] = "eager"  # the other one has no float64
    made = T.AutoModelForCausalLM.from_config(config(name), **options).to(dtype).eval()
    with torch.no_grad():
        for name_of, parameter in made.named_parameters():
            if parameter.ndim >= 2 or name_of.endswith("sinks"):
                parameter.normal_(0.0, 0.15)
    return made


def tokens(batch: int, length: int, seed: int = 1) -> Tensor:
    """Random tokens, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (batch, length), generator=generator)
