"""Our decoder as a Hugging Face model. Importing this registers it with the Auto classes."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from stablemask.model.cache import StreamingLLMCache, WindowCache
from stablemask.model.configuration import StableMaskConfig
from stablemask.model.modeling import StableMaskForCausalLM, StableMaskModel
from stablemask.model.sizes import SIZES, named_config

__all__ = [
    "SIZES",
    "StableMaskConfig",
    "StableMaskForCausalLM",
    "StableMaskModel",
    "StreamingLLMCache",
    "WindowCache",
    "named_config",
]

AutoConfig.register(StableMaskConfig.model_type, StableMaskConfig)
AutoModel.register(StableMaskConfig, StableMaskModel)
AutoModelForCausalLM.register(StableMaskConfig, StableMaskForCausalLM)
