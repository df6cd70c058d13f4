"""From text to blocks of tokens of one length: sources, tokenizers, packing, and a cache on disk."""

from stablemask.data.blocks import Blocks
from stablemask.data.config import DataConfig
from stablemask.data.prepare import Splits, prepare

__all__ = ["Blocks", "DataConfig", "Splits", "prepare"]
