"""The V4 graph, its weights and its state."""

from ds4.model.cache import Checkpoint, ExportedState, KVCache, SequenceState
from ds4.model.deepseek_v4 import DeepseekV4, Edits, Output, Slice, Taps
from ds4.model.weights import FileSource, ModelWeights, TensorSource

__all__ = [
    "Checkpoint",
    "DeepseekV4",
    "Edits",
    "ExportedState",
    "FileSource",
    "KVCache",
    "ModelWeights",
    "Output",
    "SequenceState",
    "Slice",
    "Taps",
    "TensorSource",
]
