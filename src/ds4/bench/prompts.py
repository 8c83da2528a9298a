"""The tokens that are measured with: random ones, or those of a text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ds4.errors import Ds4Error
from ds4.files import read_text

if TYPE_CHECKING:
    from ds4.engine import Engine


def random_ids(engine: Engine, count: int, seed: int) -> list[int]:
    """Token ids without meaning, the same ones for a seed, none of them special where there is a tokenizer."""
    special = set(engine.tokenizer.special.values()) if engine.has_tokenizer else set()
    usable = np.array([id for id in range(engine.shape.vocab) if id not in special])
    return [int(id) for id in np.random.default_rng(seed).choice(usable, count)]


def text_ids(engine: Engine, path: Path, count: int) -> list[int]:
    """The first `count` tokens of a file's text, none of which is special."""
    return _first(path, count, engine.tokenizer.encode)


def chat_ids(engine: Engine, path: Path, system: str, count: int) -> list[int]:
    """The first `count` tokens of a conversation with the file's text as its one question, thinking off."""
    from ds4.chat import Message, render

    def encode(text: str) -> list[int]:
        messages = [Message(role="system", content=system)] if system else []
        return engine.tokenizer.encode_chat(render([*messages, Message(role="user", content=text)], thinking=False))

    return _first(path, count, encode)


def _first(path: Path, count: int, encode: Callable[[str], list[int]]) -> list[int]:
    ids = encode(read_text(path))
    if len(ids) < count:
        raise Ds4Error(
            f"{path}: the text has {len(ids)} tokens, but {count} are needed; give a longer one, or lower --ctx-max"
            " and --first-token"
        )
    return list(ids[:count])
