"""Causal attention without attention sinks and with absolute position, as fast as plain attention."""

from stablemask._cu_seqlens import cu_seqlens_from_documents, documents_from_cu_seqlens
from stablemask.attention import available_backends, sink_attention, stable_attention
from stablemask.backends import BackendUnavailable
from stablemask.pseudo import PseudoScores, pseudo_logits

__all__ = [
    "BackendUnavailable",
    "PseudoScores",
    "available_backends",
    "cu_seqlens_from_documents",
    "documents_from_cu_seqlens",
    "pseudo_logits",
    "sink_attention",
    "stable_attention",
]

__version__ = "0.1.0.dev0"
