"""Batched steps over sessions, and the history of each conversation."""

from ds4.engine.engine import Engine, EngineConfig
from ds4.engine.sample_rows import SampleRow
from ds4.engine.sampling import Sampler, Sampling
from ds4.engine.session import Prefill, Session, Snapshot
from ds4.model.cache import FREE_TRUNCATION

__all__ = [
    "FREE_TRUNCATION",
    "Engine",
    "EngineConfig",
    "Prefill",
    "SampleRow",
    "Sampler",
    "Sampling",
    "Session",
    "Snapshot",
]
