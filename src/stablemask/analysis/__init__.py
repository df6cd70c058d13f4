"""Looking into a model: what its attention does, and what the paper's theory says about it."""

from stablemask.analysis.capture import Capture, LayerAttention, capture

__all__ = ["Capture", "LayerAttention", "capture"]
