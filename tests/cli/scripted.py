"""An engine whose model says what a test wants it to say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import ds4
from ds4.engine import Engine, EngineConfig


@dataclass(frozen=True)
class Kept:
    """A checkpoint."""

    tokens: tuple[int, ...]
    logits: Any = None
    nbytes: int = 1

    @property
    def length(self) -> int:
        return len(self.tokens)


@dataclass
class ScriptedState:
    """The state of a sequence is its tokens."""

    tokens: list[int] = field(default_factory=list)
    nbytes: int = 0

    @property
    def length(self) -> int:
        return len(self.tokens)

    def can_truncate(self, length: int) -> bool:
        return length <= self.length <= length + 17

    def truncate(self, length: int) -> None:
        del self.tokens[length:]

    def fork(self) -> ScriptedState:
        return ScriptedState(list(self.tokens))

    def checkpoint(self, logits: Any = None, length: int | None = None) -> Kept:
        return Kept(tuple(self.tokens[:length]), logits)

    def restore(self, checkpoint: Kept) -> None:
        self.tokens = list(checkpoint.tokens)

    def reset(self) -> None:
        self.tokens = []

    def release(self) -> None:
        self.reset()

    def spoil(self) -> None: ...

    def export(self, start: int = 0) -> Any:
        raise NotImplementedError

    def import_state(self, exported: Any) -> None:
        raise NotImplementedError


class ScriptedRunner:
    """Each assistant turn says its reply, then ends: reply n follows the n-th `<｜Assistant｜>` and its think marker.

    Attributes:
        evaluated: number of tokens that were evaluated in all.
    """

    def __init__(self, shape: ds4.Shape, tokenizer: ds4.Tokenizer, replies: Sequence[str | Sequence[int]]) -> None:
        self.shape = shape
        self.sampler = None
        self.evaluated = 0
        self._tokenizer = tokenizer
        self._replies = [tokenizer.encode_chat(r) if isinstance(r, str) else list(r) for r in replies]

    def new_state(self) -> ScriptedState:
        return ScriptedState()

    def warm_up(self, progress: Any = None) -> None: ...

    def evaluate(self, batch: Any, wanted: Any, taps: Any, edits: Any) -> list[torch.Tensor | None]:
        results: list[torch.Tensor | None] = []
        for (state, ids), want in zip(batch, wanted, strict=True):
            rows = []
            for id in ids:
                state.tokens.append(id)
                rows.append(self._logits(state.tokens))
            self.evaluated += len(ids)
            results.append({"none": None, "all": torch.stack(rows)}.get(want, rows[-1]))
        return results

    def _logits(self, tokens: list[int]) -> torch.Tensor:
        turns = [i for i, id in enumerate(tokens) if id == self._tokenizer.assistant]
        reply = self._replies[len(turns) - 1] if turns else []
        said = len(tokens) - turns[-1] - 2 if turns else -1
        next_id = reply[said] if 0 <= said < len(reply) else self._tokenizer.eos
        logits = torch.zeros(self.shape.vocab)
        logits[next_id] = 50.0
        return logits


def scripted_engine(
    shape: ds4.Shape, tokenizer: ds4.Tokenizer, *replies: str | Sequence[int], context: int | None = None
) -> Engine:
    """An engine that gives these replies, one each turn."""
    return Engine(ScriptedRunner(shape, tokenizer, replies), tokenizer, EngineConfig(context=context))
