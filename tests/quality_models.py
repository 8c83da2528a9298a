"""A random model with the small tokenizer, for tests that evaluate text."""

from __future__ import annotations

from functools import cache

import ds4
from ds4.engine import EngineConfig
from tests.cli.conftest import random_tensors, small_shape, tokenizer_metadata


@cache
def text_engine(context: int = 96, prefill_chunk: int = 16) -> ds4.Engine:
    """Shared: tests leave its attributes alone."""
    metadata = tokenizer_metadata()
    shape = small_shape(len(metadata["tokenizer.ggml.tokens"]))
    config = EngineConfig(context=context, prefill_chunk=prefill_chunk, checkpoint_interval=0, threads=1)
    return ds4.from_tensors(shape, random_tensors(shape), ds4.Tokenizer.from_metadata(metadata), config=config)
