"""Looking into a model: what its attention does, and what the paper's theory says about it."""

from stablemask.analysis.capture import Capture, LayerAttention, capture
from stablemask.analysis.classes import CLASSES, classify
from stablemask.analysis.metrics import Metrics, average, measure

__all__ = ["CLASSES", "Capture", "LayerAttention", "Metrics", "average", "capture", "classify", "measure"]
