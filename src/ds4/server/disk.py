"""Conversations on disk: when a state is stored, how a prompt finds one, and what comes back with it.

Storing does not hold up the worker: it takes a snapshot, which shares the rows, and a thread of its own writes it. What
goes wrong here is logged and costs time, never an answer.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from functools import partial

from ds4.chat.message import ToolCall
from ds4.engine import Engine, Session, Snapshot
from ds4.engine.packing import StateCodec
from ds4.errors import Ds4Error
from ds4.kvstore.container import Reason, StoredCall, ToolTurn
from ds4.kvstore.disk import Files
from ds4.kvstore.payload import token_digest
from ds4.kvstore.reading import Entry
from ds4.kvstore.store import NewState, Store, StoredState
from ds4.server.anchors import anchor_values, read_anchors, read_length, ways
from ds4.server.backend import Backend
from ds4.server.config import ServerConfig
from ds4.server.continuation import Plan, plan
from ds4.server.metrics import Metrics
from ds4.server.outline import outline
from ds4.server.replay import ReplayEntry, ReplayMemory
from ds4.server.request import Job, Prompt
from ds4.server.running import Running
from ds4.server.slots import Slot, SlotTable, digests
from ds4.server.trace import Trace
from ds4.tokenizer import Tokenizer

log = logging.getLogger("ds4.server")

SWITCH_SECONDS = 0.0005
"""How long the thread that writes may keep the interpreter from the worker: Python's 5 ms are felt in a step."""

_MAX_WAITING = 16
"""States that may wait to be written; more are not stored, as they keep memory from being freed."""

_CANDIDATES = 4
"""Entries of each sort that are looked into for one prompt."""

_PART = 128
"""A turn's end is stored if the state has grown by this part of it, and by half as many tokens."""

_KEPT_MINOR = 4
"""Latest states of a conversation between two large steps that are kept for edits of its last turns."""

_MODELS = {"flash": 0, "pro": 1}


@dataclass(eq=False)
class Saved:
    """A state of a conversation that is stored, or will be; `entry` is None until then, or if it was not.

    Attributes:
        major: later states build on it.
        lost: it was not stored.
    """

    tokens: int
    major: bool
    entry: Entry | None = None
    lost: bool = False


@dataclass(frozen=True)
class _Task:
    """A state to be written; `extra`: tokens of its last answer that are not evaluated."""

    snapshot: Snapshot
    key: bytes
    reason: Reason
    saved: Saved
    before: tuple[Saved, ...]
    meta: dict[str, object]
    extra: tuple[int, ...]
    number: int
    protected: Collection[str]
    incoming: bytes


class _StoredSlot(Slot):
    """A stored state as a plan looks at it: it can be had as it is, and not in part."""

    def __init__(self, session: Session, stored: StoredState) -> None:
        super().__init__(session)
        self.session.tokens = stored.tokens
        self.anchors = read_anchors(stored.meta, len(stored.tokens), session.engine.shape.vocab)
        self.read = read_length(stored.meta, len(stored.tokens))

    def reachable(self, length: int) -> int:
        """See `Slot`."""
        return length if length == len(self.session.tokens) else 0


@dataclass
class DiskCache:
    """What the worker does with a store; without one (`store` None) all of it does nothing.

    All methods but `recall` and `close` are called by the worker's thread.
    """

    store: Store | None
    config: ServerConfig
    tokenizer: Tokenizer
    replay: ReplayMemory
    trace: Trace
    metrics: Metrics
    _queue: queue.SimpleQueue[_Task | Callable[[], object] | None] = field(default_factory=queue.SimpleQueue)
    _done: deque[Snapshot] = field(default_factory=deque)
    _thread: threading.Thread | None = None
    _protected: tuple[Collection[str], bytes] = ((), b"")
    _read_maps: set[str] = field(default_factory=set)
    _map_lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        if self.store is not None:
            self.replay.recall = self.recall
            self._thread = threading.Thread(target=self._write_all, name="ds4-disk", daemon=True)
            self._thread.start()

    # -- finding -------------------------------------------------------------------------------------------------------

    def restore(self, job: Job, live: Plan, slots: SlotTable, again: Callable[[], Plan]) -> Plan:
        """The plan of a request, with a stored state among the live ones if that leaves less to evaluate.

        `again` makes the plan anew.
        """
        if self.store is None or live.reused >= len(job.prompt.ids):
            return live
        started = time.monotonic()
        try:
            entry = self._best(job.prompt, live, slots)
            if entry is None:
                return live
            stored, exported = self.store.load(entry)
            session = slots.engine.session()
            session.import_state(session.token_ids(stored.tokens), exported)
        except Exception as error:
            log.warning("request %d: a stored state cannot be used: %s", job.number, error)
            self.metrics.disk("failed")
            return live
        self._protected = ({entry.name}, job.prompt.key)
        try:
            slot = slots.add(session)
        finally:
            self._protected = ((), b"")
        slot.anchors = read_anchors(stored.meta, entry.tokens, slots.engine.shape.vocab)
        slot.read = read_length(stored.meta, entry.tokens)
        slot.saved = [Saved(entry.tokens, True, entry)]
        self.replay.import_entries(_replay_entries(stored.turns))
        self._queue.put(partial(self.store.touch, entry))  # which may have to wait for other processes
        seconds = time.monotonic() - started
        log.info(
            "request %d kv cache hit text tokens=%d text=%d key=%s in %.3f s",
            job.number, entry.tokens, entry.key_bytes, entry.name[:40], seconds,
        )  # fmt: skip
        self.trace.write(job.number, "load", key=entry.name[:40], tokens=entry.tokens, seconds=round(seconds, 6))
        self.metrics.disk("loaded")
        chosen = again()
        return replace(chosen, disk=entry.name) if chosen.slot is slot else chosen

    def _best(self, prompt: Prompt, live: Plan, slots: SlotTable) -> Entry | None:
        """The entry from which least is left to evaluate, if that is worth reading it."""
        store, config = self.store, self.config
        assert store is not None
        store.refresh()
        least = max(config.kv_cache_min_tokens, live.reused + min(config.kv_cache_min_tokens, _PART))
        by_key = [entry for entry in store.lookup(prompt.key) if entry.tokens >= least][:_CANDIDATES]
        for sort, key in (("front", prompt.key), ("bare", b"")):
            if lengths := store.way_lengths(sort):
                key = key or outline(prompt.key, prompt.messages).bare
                hashes = {length: hash.hex() for length, hash in digests(key, lengths).items()}
                found = [entry for entry in store.reach(sort, hashes) if entry.tokens >= least][:_CANDIDATES]
                by_key += [entry for entry in found if entry not in by_key]
        best, left = None, len(live.ids) - live.reused - min(config.kv_cache_min_tokens, _PART)
        for entry in sorted(by_key, key=lambda entry: entry.tokens, reverse=True):
            try:
                rest = self._left(prompt, store.read(entry), slots)
            except Exception as error:
                log.warning("the stored state %s cannot be used: %s", entry.name, error)
                continue
            if rest is not None and rest < left:
                best, left = entry, rest
            if best is not None and left <= _PART:
                break  # the others have fewer tokens
        return best

    def _left(self, prompt: Prompt, stored: StoredState, slots: SlotTable) -> int | None:
        """How many tokens are left to evaluate behind a stored state; None: it cannot be used."""
        tokens = stored.tokens
        if len(tokens) == len(prompt.ids) and not stored.logits:
            return None
        if prompt.ids[: len(tokens)] == tokens:
            return len(prompt.ids) - len(tokens)
        session = slots.engine.session()
        try:
            context = slots.engine.context
            view = _StoredSlot(session, stored)
            found = plan(prompt, [view], self.tokenizer, context, self.config.max_tokens)
        finally:
            session.close()
        return len(found.ids) - found.reused if found.reused == len(tokens) else None

    def recall(self) -> None:
        """Read the tool maps of entries that were not read yet. May be called from any thread."""
        store = self.store
        if store is None:
            return
        with self._map_lock:
            try:
                store.refresh()
            except OSError as error:
                log.warning("stored conversations cannot be looked at: %s", error)
            for entry in sorted(store.entries(), key=lambda entry: entry.used):
                if not entry.tool_map or entry.id in self._read_maps or not store.same_model(entry):
                    continue
                self._read_maps.add(entry.id)
                try:
                    self.replay.import_entries(_replay_entries(store.turns(entry)))
                except (Ds4Error, OSError) as error:
                    log.warning("the tool calls of %s are not known: %s", entry.name, error)

    # -- storing -------------------------------------------------------------------------------------------------------

    def evaluated(self, running: Running, complete: bool) -> None:
        """A chunk of a prompt was evaluated; store it if it has reached a place that is worth it."""
        if self.store is None:
            return
        slot, number = running.slot, running.job.number
        if not complete:
            self._continued(slot, number, running.evaluated)
            return
        tokens, config = slot.session.tokens, self.config
        users = [i for i, token in enumerate(tokens) if token == self.tokenizer.user]
        if running.source == "none" and config.kv_cache_min_tokens <= len(tokens) <= config.kv_cache_cold_max_tokens:
            self._save(slot, Reason.COLD, number, self._cold_length(slot.session, users))
        # Where an edit of the last message leaves the prompt, and where the same prompt goes on.
        if users:
            self._grown(slot, number, users[-1])
        self._grown(slot, number, len(tokens))

    def _cold_length(self, session: Session, users: list[int]) -> int:
        """Where the part of a prompt ends that other conversations may begin with."""
        config = self.config
        if users and users[0] >= config.kv_cache_min_tokens:
            return users[0]
        cut = len(session.tokens) - config.kv_cache_boundary_trim_tokens
        cut -= cut % max(config.kv_cache_boundary_align_tokens, 1)
        # No chunk needs to end there.
        there = session.checkpoints.best(cut)
        return there.length if there and there.length >= config.kv_cache_min_tokens else len(session.tokens)

    def stepped(self, slot: Slot, number: int, count: int) -> None:
        """An answer has grown by so many tokens."""
        if self.store is not None:
            self._continued(slot, number, count)

    def answered(self, running: Running) -> None:
        """An answer ended, and what clients may come back with is bound to its state."""
        if self.store is not None:
            self._grown(running.slot, running.job.number, len(running.slot.session.tokens))

    def leaving(self, slot: Slot) -> None:
        """A conversation leaves memory for another one."""
        if not slot.spare:
            self._save(slot, Reason.EVICT, 0)

    def shutdown(self, slots: list[Slot]) -> None:
        """The server ends."""
        for slot in slots:
            if not slot.spare:
                self._save(slot, Reason.SHUTDOWN, 0)

    def follow(self, engine: Engine) -> None:
        """Sessions are those of another engine from now on."""
        try:
            if self.store is not None and self.store.codec is not None:
                self.store.codec = self.store.codec.of(engine)
        except Ds4Error as error:
            log.warning("stored states are not loaded any more: %s", error)

    def failed(self, running: Running) -> None:
        """A request failed in its prompt. A stored state that it went on from is not tried again."""
        if self.store is None or not running.plan.disk or running.first is not None:
            return
        log.warning("%s is deleted, as the request that continued it failed", running.plan.disk)
        try:
            self.store.remove(running.plan.disk)
        except Exception:
            log.exception("%s is not deleted", running.plan.disk)

    def _continued(self, slot: Slot, number: int, count: int) -> None:
        """Store when a multiple of the interval was reached or passed with the last `count` tokens."""
        interval, align = self.config.kv_cache_continued_interval_tokens, self.config.kv_cache_boundary_align_tokens
        if interval <= 0:
            return
        interval += -interval % max(align, 1)
        length = len(slot.session.tokens)
        if length // interval > (length - count) // interval:
            self._save(slot, Reason.CONTINUED, number)

    def _grown(self, slot: Slot, number: int, length: int) -> None:
        """Store a turn's boundary, unless what was added since the last time is soon evaluated again."""
        last = max((saved.tokens for saved in slot.saved if saved.tokens <= length), default=0)
        if length - last >= max(_PART // 2, length // _PART):
            self._save(slot, Reason.CONTINUED, number, length)

    def _save(self, slot: Slot, reason: Reason, number: int, length: int | None = None) -> None:
        try:
            self._enqueue(slot, reason, number, len(slot.session.tokens) if length is None else length)
        except Exception:
            log.exception("a state is not stored")

    def _enqueue(self, slot: Slot, reason: Reason, number: int, n: int) -> None:
        session, config = slot.session, self.config
        if self.store is None or n < config.kv_cache_min_tokens or session.closed:
            return
        slot.saved = [saved for saved in slot.saved if not self._gone(saved)]
        if any(saved.tokens == n for saved in slot.saved):
            return
        if n < len(session.tokens) and session.checkpoints.at(n) is None:
            return
        if self._queue.qsize() >= _MAX_WAITING and reason != Reason.SHUTDOWN:
            log.warning("a state of %d tokens is not stored: %d wait to be written", n, self._queue.qsize())
            return
        before = tuple(saved for saved in slot.saved if saved.tokens < n)
        base = max((saved.tokens for saved in before if saved.major), default=0)
        major = reason == Reason.COLD or n - base >= config.kv_cache_boundary_align_tokens
        anchors = [anchor for anchor in slot.anchors if anchor.tokens <= n]
        key = slot.key()
        task = _Task(
            session.snapshot(n),
            key.data[: key.length(n)],
            reason,
            Saved(n, major),
            before,
            {"anchors": anchor_values(anchors), "ways": ways(anchors), "read": min(slot.read, n)},
            next((anchor.extra for anchor in anchors if anchor.tokens == n), ()),
            number,
            *self._protected,
        )
        slot.saved.append(task.saved)
        self._queue.put(task)

    def _gone(self, saved: Saved) -> bool:
        """Whether a state is not stored, or not any more."""
        assert self.store is not None
        return saved.lost or (saved.entry is not None and self.store.get(saved.entry.name) is None)

    def _lost(self, task: _Task) -> None:
        task.saved.lost = True
        self.metrics.disk("failed")

    def settle(self) -> None:
        """Give back what snapshots held that are written."""
        while self._done:
            self._done.popleft().release()

    def drain(self, timeout: float | None = None) -> bool:
        """Wait until all is written that was to be stored by now; False if that takes longer. For any thread."""
        if self._thread is None:
            return True
        done = threading.Event()
        self._queue.put(done.set)
        return done.wait(timeout)

    def close(self, timeout: float | None = None) -> bool:
        """Write what waits, and end; False if that takes longer. May be called from any thread."""
        if self._thread is None:
            return True
        self._queue.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    # -- the thread that writes ----------------------------------------------------------------------------------------

    def _write_all(self) -> None:
        while (task := self._queue.get()) is not None:
            if not isinstance(task, _Task):
                try:
                    task()
                except Exception:
                    log.exception("a use of a state is not counted")
                continue
            try:
                self._write(task)
            except Exception:
                log.exception("a state of %d tokens is not stored", task.saved.tokens)
                self._lost(task)
            finally:
                self._done.append(task.snapshot)

    def _write(self, task: _Task) -> None:
        store, snapshot = self.store, task.snapshot
        assert store is not None
        assert store.codec is not None
        codec: StateCodec = store.codec
        parent = None
        for saved in sorted(task.before, key=lambda saved: saved.tokens, reverse=True):
            # A text that was cut off and written on may have had other tokens at that length.
            digest = token_digest(snapshot.tokens[: saved.tokens]).hex()
            known = store.get(saved.entry.name) if saved.major and saved.entry is not None else None
            if known is not None and known.digest == digest:
                parent = known
                break
        text = self.tokenizer.decode([*snapshot.tokens, *task.extra]).decode(errors="replace")
        turns = self.replay.export_entries(text) if self.config.replay else []
        entry = store.put(
            NewState(
                task.key,
                snapshot.tokens,
                lambda start: codec.parts(snapshot, start),
                task.reason,
                parent,
                task.meta,
                [ToolTurn(e.block, tuple(StoredCall(c.id, c.name, c.arguments) for c in e.calls)) for e in turns],
                task.protected,
                task.incoming,
            )
        )
        if entry is None:
            self._lost(task)
            return
        task.saved.entry = entry
        reason = task.reason.name.lower()
        log.info(
            "kv cache stored tokens=%d reason=%s key=%s bytes=%d", entry.tokens, reason, entry.name[:40], entry.size
        )
        self.trace.write(
            task.number, "store", key=entry.name[:40], tokens=entry.tokens, reason=reason, bytes=entry.size
        )
        self.metrics.disk("stored")
        minor = [saved for saved in task.before if not saved.major and saved.entry is not None]
        for saved in sorted(minor, key=lambda saved: saved.tokens)[:-_KEPT_MINOR]:
            if saved.entry is not None and store.drop(saved.entry):
                saved.entry = None


def open_disk(
    backend: Backend,
    config: ServerConfig,
    replay: ReplayMemory,
    trace: Trace,
    metrics: Metrics,
) -> DiskCache:
    """The store that the configuration wants. Raises Ds4Error if it cannot be used."""
    store, engine, codec = None, backend.engine, backend.codec
    if config.kv_disk_dir is not None:
        if codec is None:
            raise Ds4Error("--kv-disk-dir: states of this model are not packed (qat_sim is off) and are not stored")

        def evicted(entry: Entry) -> None:
            trace.write(0, "evict", key=entry.name[:40], tokens=entry.tokens, bytes=entry.size)
            metrics.disk("evicted")

        budget = config.kv_disk_space_mb << 20
        model = _MODELS.get(engine.shape.name, 255)
        store = Store(Files(config.kv_disk_dir), codec, budget, engine.context, model, evicted=evicted)
        log.info("kv cache in %s: %d entries", config.kv_disk_dir, len(store.entries()))
    return DiskCache(store, config, engine.tokenizer, replay, trace, metrics)


def _replay_entries(turns: list[ToolTurn]) -> list[ReplayEntry]:
    return [ReplayEntry(t.block, tuple(ToolCall(c.name, c.arguments, c.id) for c in t.calls)) for t in turns]
