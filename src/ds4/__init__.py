"""ds4: an inference engine and server for the DeepSeek V4 model family.

    import ds4

    engine = ds4.load()
    session = engine.session()
    session.sync(engine.tokenizer.encode_chat(ds4.chat.render([{"role": "user", "content": "Hello"}])))
    for piece in session.generate(ds4.Sampling(seed=1), max_tokens=100):
        print(piece)

Names are imported when they are first used, so that reading a file's header does not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ds4.errors import ContextOverflowError, Ds4Error, FileFormatError, RequestError

if TYPE_CHECKING:
    from ds4 import chat
    from ds4.engine import Engine, EngineConfig, Sampling, Session
    from ds4.engine.loading import from_tensors, from_transformers, load
    from ds4.gguf.shape import FLASH, PRO, TINY, Shape
    from ds4.tokenizer import Detokenizer, Tokenizer

__version__ = "0.1.0"

_HOMES = {
    "Detokenizer": "ds4.tokenizer",
    "Engine": "ds4.engine",
    "EngineConfig": "ds4.engine",
    "FLASH": "ds4.gguf.shape",
    "PRO": "ds4.gguf.shape",
    "Sampling": "ds4.engine",
    "Session": "ds4.engine",
    "Shape": "ds4.gguf.shape",
    "TINY": "ds4.gguf.shape",
    "Tokenizer": "ds4.tokenizer",
    "from_tensors": "ds4.engine.loading",
    "from_transformers": "ds4.engine.loading",
    "load": "ds4.engine.loading",
}

__all__ = [
    "FLASH",
    "PRO",
    "TINY",
    "ContextOverflowError",
    "Detokenizer",
    "Ds4Error",
    "Engine",
    "EngineConfig",
    "FileFormatError",
    "RequestError",
    "Sampling",
    "Session",
    "Shape",
    "Tokenizer",
    "__version__",
    "chat",
    "from_tensors",
    "from_transformers",
    "load",
]


def __getattr__(name: str) -> Any:
    if name == "chat":
        return importlib.import_module("ds4.chat")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'ds4' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
