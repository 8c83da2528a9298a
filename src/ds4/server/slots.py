"""The conversations that are kept live: their sessions, and by what a client's later prompts are recognised."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ds4.chat.message import ToolCall
from ds4.engine import Engine, Session
from ds4.engine.session import common_prefix
from ds4.tokenizer import Tokenizer

_BLOCK = 64
"""Tokens between two places in key bytes that are known."""


@dataclass(frozen=True)
class Prefix:
    """The beginning of some key bytes: its length, and its hash.

    Attributes:
        length, digest: size in bytes and `digest` of them.
    """

    length: int
    digest: bytes

    @classmethod
    def of(cls, key: bytes) -> Prefix:
        """All of `key`."""
        return cls(len(key), digest(key))

    def begins(self, key: bytes, start: int = 0) -> bool:
        """Whether `key` has it at `start`."""
        end = start + self.length
        return end <= len(key) and digest(key[start:end]) == self.digest


@dataclass(frozen=True)
class Anchor:
    """The end of an answer, and by what a prompt shows that it goes on there, though it may not show all of it.

    Attributes:
        front: what the prompt of the answer was up to its think marker: key bytes that end with `<｜Assistant｜>`.
        bare: the same without the reasoning of earlier turns.
        ids: the ids of the calls in it, as a hash of them.
        opened: turns that are opened in it.
        held: turns that are opened in the session up to the answer; more, if the model was asked again.
        reasoning: the answer's reasoning, as a hash of it.
        shown: the key bytes from `</think>` to the end of sentence that a client's view of the answer has; None if
            only its calls say what was sampled.
        content: the answer's text, as a hash of it.
        calls: its calls with their ids.
        tokens: tokens of the session at its end.
        extra: tokens sampled (or due) behind them that were not evaluated; they come before what follows.
    """

    front: Prefix
    bare: Prefix
    ids: bytes
    opened: int
    held: int
    reasoning: bytes
    shown: Prefix | None
    content: bytes
    calls: tuple[ToolCall, ...]
    tokens: int
    extra: tuple[int, ...] = ()


def digest(key: bytes) -> bytes:
    """The hash of bytes in an anchor."""
    return hashlib.blake2b(key, digest_size=16).digest()


def digests(key: bytes, lengths: Iterable[int]) -> dict[int, bytes]:
    """The hashes of several prefixes of a key, in one pass."""
    running, at, found = hashlib.blake2b(digest_size=16), 0, {}
    for length in sorted(set(lengths)):
        if length <= len(key):
            running.update(key[at:length])
            at = length
            found[length] = running.digest()
    return found


class TokenKey:
    """The key bytes of tokens that grow and are cut, and which token stands where in them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._data = bytearray()
        self._marks = [0]

    def follow(self, tokens: Sequence[int]) -> None:
        """Be the key of these tokens; what was known of their beginning stays."""
        known, size = self._tokens, common_prefix(self._tokens, tokens)
        if size < len(known):
            size -= size % _BLOCK
            del known[size:], self._marks[size // _BLOCK + 1 :]
            del self._data[self._marks[-1] :]
        while len(known) < len(tokens):
            block = tokens[len(known) : len(known) - len(known) % _BLOCK + _BLOCK]
            known += block
            self._data += self._tokenizer.key_bytes(block)
            if len(known) % _BLOCK == 0:
                self._marks.append(len(self._data))

    @property
    def data(self) -> bytes:
        """All of it."""
        return bytes(self._data)

    def length(self, tokens: int) -> int:
        """How many key bytes the first tokens have."""
        start = tokens - tokens % _BLOCK
        return self._marks[start // _BLOCK] + len(self._tokenizer.key_bytes(self._tokens[start:tokens]))

    def token_at(self, offset: int) -> tuple[int, int]:
        """The index of the token that a key byte belongs to, and the offset of its first one."""
        block = bisect_right(self._marks, offset) - 1
        i, at = block * _BLOCK, self._marks[block]
        while (end := at + len(self._tokenizer.key_bytes(self._tokens[i : i + 1]))) <= offset:
            i, at = i + 1, end
        return i, at

    def copy(self) -> TokenKey:
        """An equal one."""
        other = TokenKey(self._tokenizer)
        other._tokens, other._data, other._marks = self._tokens.copy(), self._data.copy(), self._marks.copy()
        return other


class Slot:
    """One live conversation.

    Attributes:
        session: its tokens and state.
        busy: a request is using it.
        used: when it was last used, on the clock of its table.
        request: the number of the request that used it last.
        read: how many tokens its last prompt has; what stands behind them was sampled.
        spare: it holds one of several answers to a prompt that another slot holds as well, and nothing says that it
            will be continued.
        saved: its states on disk (see `ds4.server.disk.Saved`).
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.busy = False
        self.used = self.request = self.read = 0
        self.spare = False
        self.anchors: list[Anchor] = []
        self.saved: list[Any] = []
        self._key = TokenKey(session.engine.tokenizer)

    @property
    def sampled(self) -> bool:
        """Whether its last token was sampled."""
        return len(self.session.tokens) > self.read

    def key(self) -> TokenKey:
        """The key of the evaluated tokens, as they are now."""
        self._key.follow(self.session.tokens)
        return self._key

    def reachable(self, length: int) -> int:
        """The longest state of at most `length` tokens that the session can have without evaluating anything."""
        session = self.session
        if length == len(session.tokens) or session.state.can_truncate(length):
            return length
        checkpoint = session.checkpoints.best(length)
        return 0 if checkpoint is None else checkpoint.length

    def keep(self, tokens: int) -> None:
        """Forget what is known about the session behind its first `tokens` tokens: they are going to change."""
        self.anchors = [anchor for anchor in self.anchors if anchor.tokens <= tokens]
        self.saved = [saved for saved in self.saved if saved.tokens <= tokens]

    def bind(self, anchor: Anchor) -> None:
        """Let prompts continue at an anchor; it replaces the one that is reached by the same prompts."""
        self.anchors = [other for other in self.anchors if other.front != anchor.front]
        self.anchors.append(anchor)

    def fork(self) -> Slot:
        """A slot with an equal session of its own."""
        other = Slot(self.session.fork())
        other.anchors, other.saved, other._key = list(self.anchors), list(self.saved), self._key.copy()
        other.read = self.read
        return other


class SlotTable:
    """Up to `limit` slots; one leaves for a new conversation, and `leaving` is told before.

    That is a spare one if there is one, otherwise the least recently used one.
    """

    def __init__(self, engine: Engine, limit: int, leaving: Callable[[Slot], None] = lambda slot: None) -> None:
        self.engine, self.limit, self._leaving = engine, limit, leaving
        self.slots: list[Slot] = []
        self._clock = 0

    @property
    def busy(self) -> int:
        """How many are in use. Any thread may ask."""
        return sum(slot.busy for slot in list(self.slots))

    @property
    def free(self) -> int:
        """How many answers more can get a slot now."""
        return self.limit - self.busy

    def fork(self, slot: Slot) -> Slot:
        """A spare slot for another answer to what a busy one holds, now busy as well; there must be room for it."""
        other = slot.fork()
        self._make_room()
        other.busy = other.spare = True
        self.slots.append(other)
        self.touch(other)
        return other

    def take(self, wanted: Slot | None, whole: bool) -> Slot:
        """The slot for a request that continues `wanted` (None: nothing), now busy.

        With `whole` the request goes on behind everything the slot holds, so it takes the slot itself. Otherwise it
        leaves it half way, and gets a fork as long as that costs no other conversation more recent than this one.
        """
        if wanted is not None and not wanted.busy and (whole or self._oldest() is wanted):
            slot = wanted
        else:
            slot = Slot(self.engine.session()) if wanted is None else wanted.fork()
            self._make_room()
            self.slots.append(slot)
        slot.busy, slot.spare = True, False
        self.touch(slot)
        return slot

    def add(self, session: Session) -> Slot:
        """A slot for a session from elsewhere, not busy."""
        self._make_room()
        slot = Slot(session)
        self.slots.append(slot)
        self.touch(slot)
        return slot

    def touch(self, slot: Slot) -> None:
        """Note that a slot is used now."""
        self._clock += 1
        slot.used = self._clock

    def drop(self, slot: Slot) -> None:
        """Give a slot up."""
        self.slots.remove(slot)
        slot.session.close()

    def _make_room(self) -> None:
        oldest = self._oldest()
        if oldest is not None:
            self._leaving(oldest)
            self.drop(oldest)

    def _oldest(self) -> Slot | None:
        """The slot that leaves next if one has to leave now; None while there is room, or if all are busy."""
        idle = [slot for slot in self.slots if not slot.busy]
        if len(self.slots) < self.limit or not idle:
            return None
        return min(idle, key=lambda slot: (not slot.spare, slot.used))
