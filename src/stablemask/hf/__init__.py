"""StableMask in existing architectures of Hugging Face transformers.

Importing it registers ``attn_implementation="stablemask"`` and lets the Auto classes open folders saved
with it.
"""

from stablemask.hf import config as _config
from stablemask.hf import interface as _interface
from stablemask.hf.callbacks import AnnealBase
from stablemask.hf.config import SavedConfig
from stablemask.hf.switch import disable, enable, load

__all__ = ["AnnealBase", "SavedConfig", "disable", "enable", "load"]

_interface.register()
_config.register()
