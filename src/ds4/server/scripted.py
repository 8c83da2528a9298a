"""The scripted model: it replaces forward passes and sampling, and nothing else.

Sessions, checkpoints, batches, rendering, tokenising and streaming are the real ones, so a client can be tested
against any answer, however rare, in milliseconds. See docs/testing.md for the file format.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds4.engine import FREE_TRUNCATION, Engine, EngineConfig, Sampling, Session
from ds4.engine.engine import Wanted
from ds4.engine.logprobs import Logprobs
from ds4.engine.sample_rows import DeviceSampler
from ds4.engine.sampling import Choice
from ds4.errors import Ds4Error
from ds4.gguf.shape import TINY, Shape
from ds4.server.backend import Backend
from ds4.server.decode import TokenRules
from ds4.tokenizer import Tokenizer

_REACH = FREE_TRUNCATION + 1
"""Tokens a state reaches back: one more than may be cut off, so that the last one kept can be evaluated again."""

_BASE64 = "base64:"

_PIECE_IDS = 1 << 16
"""Ids above the vocabulary that pieces can have; at most half of them are used, so that few meet."""


@dataclass(frozen=True)
class Line:
    """One line of a script: how one generation goes.

    Attributes:
        pieces: the bytes of each sampled token; text equal to a special token becomes that token.
        then: `eos` or `repeat` (the last piece) after the pieces.
        prefill_ms_per_token, step_ms: how long evaluating takes.
        obey: leave out pieces that may not be sampled at their place.
        fail_at, hang_at: the step (from 1) at which the engine raises, or does not return.
        fail_prefill_at: the token of the prompt's evaluated part (from 1) at which the engine raises.
    """

    pieces: tuple[bytes, ...] = ()
    then: str = "eos"
    prefill_ms_per_token: float = 0
    step_ms: float = 0
    obey: bool = False
    fail_at: int | None = None
    fail_prefill_at: int | None = None
    hang_at: int | None = None


def read_script(text: str, where: str = "script") -> list[Line]:
    """The lines of a script (JSON Lines; empty lines do not count). Raises Ds4Error that names the line."""
    lines = [
        _read_line(line, f"{where}, line {number}")
        for number, line in enumerate(text.splitlines(), start=1)
        if line.strip()
    ]
    if not lines:
        raise Ds4Error(f'{where} has no lines: it needs at least one, such as {{"pieces": ["Hello"]}}')
    return lines


def _read_line(text: str, where: str) -> Line:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise Ds4Error(f"{where} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise Ds4Error(f"{where} must be a JSON object")
    for key, item in value.items():
        if key not in _CHECKS:
            raise Ds4Error(f"{where}: {key!r} is not known: use one of {', '.join(f.name for f in fields(Line))}")
        if not _CHECKS[key](item):
            raise Ds4Error(f"{where}: {key} cannot be {item!r}")
    pieces = tuple(_piece(piece, where) for piece in value.pop("pieces", ()))
    if value.get("then") == "repeat" and not pieces:
        raise Ds4Error(f"{where}: nothing to repeat, as there are no pieces")
    return Line(pieces, **value)


def _piece(text: str, where: str) -> bytes:
    if not text.startswith(_BASE64):
        return text.encode("utf-8", "replace")
    try:
        return base64.b64decode(text[len(_BASE64) :], validate=True)
    except ValueError:
        raise Ds4Error(f"{where}: the piece {text!r} is not base64") from None


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


def _place(value: object) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 1)


_CHECKS: dict[str, Callable[[Any], bool]] = {
    "pieces": lambda v: isinstance(v, list) and all(isinstance(piece, str) and piece for piece in v),
    "then": lambda v: v in ("eos", "repeat"),
    "prefill_ms_per_token": _number,
    "step_ms": _number,
    "obey": lambda v: isinstance(v, bool),
    "fail_at": _place,
    "fail_prefill_at": _place,
    "hang_at": _place,
}


class ScriptedTokenizer(Tokenizer):
    """A real tokenizer that also knows the pieces of a script, under ids above its vocabulary.

    Such an id is made from the piece's bytes, so it means the same under another script: states are kept with their
    tokens, and may be continued by another process.

    Attributes:
        ids: number of ids, those for pieces included; they run from 0, though not all of these are in use.
    """

    def __init__(self, base: Tokenizer, pieces: Sequence[bytes]) -> None:
        self.__dict__.update(base.__dict__)
        special = frozenset(base.special.values())
        self._pieces = {base.token_bytes(id): id for id in range(base.vocab_size) if id not in special}
        self._pieces |= {text.encode(): id for text, id in base.special.items()}
        self._extra: dict[int, bytes] = {}
        self.ids = base.vocab_size + _PIECE_IDS
        self.add(pieces)

    def add(self, pieces: Iterable[bytes]) -> None:
        """Give ids to more pieces. Raises Ds4Error if there are too many."""
        for piece in pieces:
            if piece not in self._pieces:
                self._pieces[piece] = self._new_id(piece)

    def _new_id(self, piece: bytes) -> int:
        if len(self._extra) >= _PIECE_IDS // 2:
            raise Ds4Error(f"the script has more than {_PIECE_IDS // 2} different pieces that are no tokens")
        salt = 0
        while True:
            digest = hashlib.blake2b(piece, digest_size=8, salt=salt.to_bytes(8, "little")).digest()
            id = self.vocab_size + int.from_bytes(digest, "little") % _PIECE_IDS
            if self._extra.setdefault(id, piece) == piece:
                return id
            salt += 1

    def piece(self, piece: bytes) -> int:
        """The id of a piece of the script."""
        return self._pieces[piece]

    def token_bytes(self, id: int) -> bytes:
        """See `Tokenizer.token_bytes`; knows the ids of pieces too."""
        piece = self._extra.get(id)
        return super().token_bytes(id) if piece is None else piece

    def extra(self, tokens: Sequence[int]) -> dict[int, bytes]:
        """The bytes of those tokens that are no tokens of the vocabulary."""
        return {id: self.token_bytes(id) for id in set(tokens) if id >= self.vocab_size}

    def learn(self, extra: Mapping[int, bytes]) -> None:
        """Take over what `extra` said in another process. Raises ValueError if an id is taken by other bytes."""
        for id, piece in extra.items():
            if self._extra.setdefault(id, piece) != piece:
                raise ValueError(f"token id {id} stands for {self._extra[id]!r} here, but for {piece!r} in the state")


@dataclass
class Play:
    """A line being played: how far it is."""

    line: Line
    tokens: list[int]
    prefilled: int = 0
    steps: int = 0
    decoding: bool = False
    at: int = 0
    skipped: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class ScriptedCheckpoint:
    """A place in a scripted state; it holds what a real checkpoint of that size would."""

    length: int
    padding: bytes
    logits: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return len(self.padding)


@dataclass(frozen=True)
class ScriptedExport:
    """A scripted state as data; `extra` has the bytes of its tokens that are in no vocabulary."""

    start: int
    checkpoint: ScriptedCheckpoint
    tokens: tuple[int, ...]
    padding: bytes
    extra: Mapping[int, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class HeldTokens:
    """What `ScriptedState.hold` keeps: tokens, the bytes each of them is said to have, and those in no vocabulary."""

    tokens: tuple[int, ...]
    kv_bytes: int
    extra: Mapping[int, bytes]

    def release(self) -> None:
        """Nothing."""


class ScriptedState:
    """A state that remembers its tokens. It can go back exactly as far as a real one can."""

    def __init__(self, kv_bytes: int, tokenizer: ScriptedTokenizer | None = None) -> None:
        self.kv_bytes, self._tokenizer = kv_bytes, tokenizer
        self.tokens: list[int] = []
        self.length = 0
        self.floor = 0
        self.play: Play | None = None

    def extend(self, ids: Sequence[int]) -> None:
        """Take the next tokens."""
        self.tokens += ids
        self.length = len(self.tokens)

    def _cut(self, length: int) -> None:
        del self.tokens[length:]
        self.length = length

    @property
    def nbytes(self) -> int:
        """Bytes a state of this size is said to have."""
        return self.length * self.kv_bytes

    def can_truncate(self, length: int) -> bool:
        """See `ds4.engine.engine.State`."""
        return self.floor <= length <= self.length and self.length - length <= _REACH

    def truncate(self, length: int) -> None:
        """See `ds4.engine.engine.State`."""
        if not self.can_truncate(length):
            raise ValueError(f"cannot cut {self.length} tokens to {length} without a checkpoint")
        self.floor = max(self.floor, self.length - _REACH)
        self._cut(length)

    def fork(self) -> ScriptedState:
        """See `ds4.engine.engine.State`."""
        other = ScriptedState(self.kv_bytes, self._tokenizer)
        other.extend(self.tokens)
        other.floor = self.floor
        return other

    def checkpoint(self, logits: Tensor | None = None, length: int | None = None) -> ScriptedCheckpoint:
        """See `ds4.engine.engine.State`."""
        n = self.length if length is None else length
        if not self.can_truncate(n):
            raise ValueError(f"a state of {self.length} tokens has none of {n} tokens any more")
        return ScriptedCheckpoint(n, bytes(min(n, 128) * self.kv_bytes), logits)

    def restore(self, checkpoint: ScriptedCheckpoint) -> None:
        """See `ds4.engine.engine.State`."""
        if checkpoint.length > self.length:
            raise ValueError(f"a checkpoint at {checkpoint.length} tokens is behind the end of {self.length}")
        self._cut(checkpoint.length)
        self.floor = checkpoint.length

    def reset(self) -> None:
        """See `ds4.engine.engine.State`."""
        self._cut(0)
        self.floor = 0

    def release(self) -> None:
        """See `ds4.engine.engine.State`."""
        self.reset()

    def spoil(self) -> None:
        """See `ds4.engine.engine.State`."""
        self.floor = self.length + 1

    def hold(self, length: int) -> HeldTokens:
        """See `ds4.engine.engine.State`."""
        tokens = tuple(self.tokens[:length])
        return HeldTokens(tokens, self.kv_bytes, self._tokenizer.extra(tokens) if self._tokenizer else {})

    def export(self, start: int = 0) -> ScriptedExport:
        """The tokens from `start` on, padded to their size."""
        tokens = tuple(self.tokens[start:])
        extra = self._tokenizer.extra(tokens) if self._tokenizer else {}
        return ScriptedExport(start, self.checkpoint(), tokens, bytes(len(tokens) * self.kv_bytes), extra)

    def import_state(self, exported: ScriptedExport) -> None:
        """Continue with an exported state; this one must hold the tokens before its start."""
        if self.length < exported.start:
            raise ValueError(f"the tokens start at {exported.start}, but only {self.length} are here")
        if self._tokenizer:
            self._tokenizer.learn(exported.extra)
        self._cut(exported.start)
        self.extend(exported.tokens)
        self.floor = self.length


class ScriptedRunner:
    """A `Runner` whose steps cost the time that the script says, and fail where it says.

    Args:
        wait: waits for some seconds; returns True if the runner was closed meanwhile. For tests that have no time.

    Attributes:
        hanging: set when a step hangs.
        sampler: None, as the lines choose.
    """

    sampler: DeviceSampler | None = None
    shared_chunk = 128

    def __init__(
        self, shape: Shape, tokenizer: ScriptedTokenizer, kv_bytes: int, wait: Callable[[float], bool] | None = None
    ) -> None:
        self.shape = shape
        self.hanging = threading.Event()
        self._tokenizer, self._kv_bytes = tokenizer, kv_bytes
        self._closed = threading.Event()
        self._wait = wait or self._closed.wait

    def new_state(self) -> ScriptedState:
        """The state of an empty sequence."""
        return ScriptedState(self._kv_bytes, self._tokenizer)

    def renew(self) -> ScriptedRunner:
        """See `ds4.engine.engine.Runner`; all that a step writes to is in its states."""
        return self

    def warm_up(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Nothing to do before the first step."""

    def close(self) -> None:
        """End all waiting, also that of a step that hangs."""
        self._closed.set()

    def evaluate(
        self, batch: Sequence[tuple[Any, list[int]]], wanted: Sequence[Wanted], taps: Any, edits: Any
    ) -> list[Tensor | None]:
        """See `ds4.engine.engine.Runner`; there is one logit, which says nothing."""
        seconds = 0.0
        for state, ids in batch:
            if state.play is not None:
                seconds = max(seconds, self._run(state.play, len(ids)))
        if seconds:
            self._wait(seconds)
        for state, ids in batch:
            state.extend(ids)
        return [
            None if want == "none" else torch.zeros((len(ids), 1) if want == "all" else (1,))
            for (_, ids), want in zip(batch, wanted, strict=True)
        ]

    def _run(self, play: Play, tokens: int) -> float:
        """Count a step of one line; returns its seconds, or raises or hangs as the line says."""
        line = play.line
        if not play.decoding:
            before, play.prefilled = play.prefilled, play.prefilled + tokens
            if line.fail_prefill_at is not None and before < line.fail_prefill_at <= play.prefilled:
                raise RuntimeError(f"the script fails at token {line.fail_prefill_at} of the prompt")
            return line.prefill_ms_per_token * tokens / 1000
        play.steps += 1
        if play.steps == line.fail_at:
            raise RuntimeError(f"the script fails at step {play.steps}")
        if play.steps == line.hang_at:
            self.hanging.set()
            self._closed.wait()
            raise RuntimeError(f"the script hung at step {play.steps} until the end")
        return line.step_ms / 1000


class ScriptedChooser:
    """Takes the next token from a line instead of sampling."""

    def __init__(self, play: Play, eos: int, again: Callable[[Session], ScriptedChooser]) -> None:
        self._play = play
        self._eos = eos
        self._again = again

    def choose(self, session: Session, rules: TokenRules) -> Choice:
        """The next token, which is certain. One that may not come there is passed over only if the line obeys."""
        token, top = self._next(rules), rules.top
        return Choice(token, None if top is None else Logprobs(token, 0.0, ((token, 0.0),) if top else ()))

    def skipped(self, choice: Choice, rules: TokenRules) -> list[int]:
        """The tokens passed over for the last choice."""
        return self._play.skipped

    def count(self, tokens: Sequence[int]) -> None:
        """Nothing."""

    def _next(self, rules: TokenRules) -> int:
        play, constraint = self._play, rules.constraint
        play.decoding, play.skipped = True, []
        while play.at < len(play.tokens):
            token = play.tokens[play.at]
            play.at += 1
            refused = token in rules.forbidden or (constraint is not None and not constraint.allows(token))
            if not (play.line.obey and refused):
                return token
            play.skipped.append(token)
        return self._eos if play.line.then == "eos" else play.tokens[-1]

    def again(self, session: Session) -> ScriptedChooser:
        """A second attempt takes the next line."""
        return self._again(session)

    def other(self, session: Session, number: int) -> ScriptedChooser:
        """So does a further answer."""
        return self._again(session)


class Script:
    """The lines in order; each generation takes the next one, and the last one repeats."""

    def __init__(self, lines: Sequence[Line], tokenizer: ScriptedTokenizer) -> None:
        self._lines = list(lines)
        self._tokenizer = tokenizer
        self.taken = 0

    def chooser(self, session: Session, sampling: Sampling) -> ScriptedChooser:
        """What chooses the tokens of the generation that is being admitted on `session`."""
        return self._next(session)

    def _next(self, session: Session) -> ScriptedChooser:
        line = self._lines[min(self.taken, len(self._lines) - 1)]
        self.taken += 1
        play = Play(line, [self._tokenizer.piece(piece) for piece in line.pieces])
        session.state.play = play  # type: ignore[attr-defined]
        return ScriptedChooser(play, self._tokenizer.eos, self._next)


def scripted_backend(
    lines: Sequence[Line],
    tokenizer: Tokenizer,
    config: EngineConfig,
    kv_bytes: int = 64,
    name: str = "scripted",
    wait: Callable[[float], bool] | None = None,
) -> Backend:
    """What answers from a script."""
    extended = ScriptedTokenizer(tokenizer, [piece for line in lines for piece in line.pieces])
    runner = ScriptedRunner(replace(TINY, name="custom", vocab=extended.ids), extended, kv_bytes, wait)
    from ds4.server.scripted_codec import ScriptedCodec

    codec = ScriptedCodec(runner.shape, kv_bytes)
    return Backend(Engine(runner, extended, config), name, Script(lines, extended).chooser, runner.close, codec)


def load_script(path: Path) -> list[Line]:
    """The lines of a script file. Raises Ds4Error."""
    try:
        return read_script(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise Ds4Error(f"the script {path} cannot be read: {error}") from None
