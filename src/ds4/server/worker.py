"""The worker: the one thread that owns the engine and every session.

Its loop: admit, evaluate one chunk of a prompt, run one step of all answers, send what they wrote, look for clients
that left. A prompt therefore never holds up the answers, nor a cancellation, longer than one chunk, and chunks are
short while answers are running.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from ds4.chat.events import CallBegin, Event
from ds4.chat.message import Message
from ds4.engine import Engine, Session
from ds4.errors import RequestError
from ds4.server.config import ServerConfig
from ds4.server.continuation import Plan, bind_reply, plan
from ds4.server.decode import Chooser, ChooserFactory, Ending, Generation, sampling_chooser
from ds4.server.prompting import PromptBuilder
from ds4.server.replay import ReplayMemory
from ds4.server.request import Admitted, ChatRequest, Done, Events, Failed, Job, Prompt, Reply, Usage
from ds4.server.slots import Slot, SlotTable
from ds4.server.trace import Trace
from ds4.server.turns import TurnMemory

log = logging.getLogger("ds4.server")

SHUTTING_DOWN = "server shutting down"
_DEFECT = "internal error; see the server's log"
_SHARED_CHUNK = 128
"""Most prompt tokens evaluated between two steps while answers are running: they must not starve."""

_TURN_BOUNDARIES = 7
"""Turns of a prompt, counted from its end, that get a way back."""

_MIN_SYSTEM = 32
"""Tokens of a system region that is worth a way back of its own."""


class QueueFullError(RequestError):
    """As many requests wait as may wait."""


class ShuttingDownError(RequestError):
    """The server takes no requests any more: it is shutting down, or its worker has ended."""


@dataclass
class Backend:
    """What answers: an engine, how its tokens are chosen, its name, and how to end what it waits for."""

    engine: Engine
    name: str
    chooser: ChooserFactory = sampling_chooser
    close: Callable[[], None] = lambda: None


@dataclass(eq=False)
class _Running:
    """A request that has a slot; it has a generation once its prompt is evaluated."""

    job: Job
    slot: Slot
    plan: Plan
    chooser: Chooser
    boundaries: list[int]
    reused: int | None = None
    generation: Generation | None = None
    call_ids: list[str] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)
    answering: float = 0.0

    @property
    def usage(self) -> Usage:
        generation = self.generation
        return Usage(
            prompt=len(self.plan.ids),
            reused=self.plan.reused if self.reused is None else self.reused,
            completion=generation.completion if generation else 0,
            reasoning=generation.reasoning if generation else 0,
        )


class Worker:
    """Runs jobs. `submit`, `status`, `stop` and `wait_idle` may be called from any thread."""

    def __init__(self, backend: Backend, config: ServerConfig, trace: Trace | None = None) -> None:
        self.backend, self.config = backend, config
        self.engine = backend.engine
        self.trace = trace or Trace()
        self.replay = ReplayMemory(config.tool_memory_max_ids, config.tool_memory_bytes)
        self.turns = TurnMemory()
        self.prompts = PromptBuilder(
            self.engine.tokenizer, config, self.engine.context, self.replay if config.replay else None
        )
        self._slots = SlotTable(self.engine, config.max_sessions)
        self._prefilling: list[_Running] = []
        self._decoding: list[_Running] = []
        self._changed = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._stopping = False
        self._ended = False
        self._idle = True
        self._count = 0
        self._thread = threading.Thread(target=self._run, name="ds4-worker", daemon=True)

    # -- for other threads --------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, request: ChatRequest, prompt: Prompt, deliver: Callable[[Reply], None]) -> Job:
        """Queue a request; its replies go to `deliver`, the last one is Done or Failed (none after a cancellation).

        Raises:
            QueueFullError, ShuttingDownError: the request is not taken.
        """
        with self._changed:
            if self._stopping:
                raise ShuttingDownError(SHUTTING_DOWN)
            if not self.alive:
                raise ShuttingDownError("the worker has ended; see the server's log, and start the server again")
            if self.config.max_queue and len(self._waiting) >= self.config.max_queue:
                raise QueueFullError(f"{len(self._waiting)} requests are waiting already; try again later")
            self._count += 1
            job = Job(self._count, request, prompt, deliver)
            self._waiting.append(job)
            self._idle = False
            self._changed.notify_all()
        return job

    @property
    def alive(self) -> bool:
        """Whether requests are served, or will be once `start` is called."""
        return not self._ended and (self._thread.ident is None or self._thread.is_alive())

    def status(self) -> dict[str, int]:
        """Numbers of waiting and running requests and of live sessions."""
        return {
            "waiting": len(self._waiting),
            "running": len(self._prefilling) + len(self._decoding),
            "sessions": len(self._slots.slots),
        }

    def jobs(self) -> list[Job]:
        """The jobs that run now."""
        return [running.job for running in [*self._prefilling, *self._decoding]]

    def sessions(self) -> list[Session]:
        """The live sessions; only while the worker is idle may they be looked at."""
        return [slot.session for slot in self._slots.slots]

    def wait_idle(self, timeout: float | None = None) -> bool:
        """Wait until nothing runs or waits; False if that took longer than `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._idle, timeout)

    def stop(self, timeout: float | None = None) -> bool:
        """End running and waiting requests with an error, and the thread; False if it did not end in time."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self.backend.close()
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    # -- the loop -----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                try:
                    self._admit()
                    self._prefill()
                    self._decode()
                except Exception:
                    # A defect of the loop itself must not leave clients waiting for ever.
                    log.exception("the worker failed")
                    self._fail_all(500, _DEFECT)
        finally:
            # However the thread ends, nobody waits for it any more.
            self._ended = True
            message = SHUTTING_DOWN if self._stopping else _DEFECT
            self._fail_all(503, message)
            for job in self._take_waiting():
                self._deliver(job, Failed(503, message))

    def _fail_all(self, status: int, message: str) -> None:
        for running in [*self._prefilling, *self._decoding]:
            try:
                self._fail(running, status, message)
            except Exception:
                log.exception("request %d could not be ended", running.job.number)

    def _wait_for_work(self) -> bool:
        with self._changed:
            while not (self._waiting or self._prefilling or self._decoding or self._stopping):
                self._idle = True
                self._changed.notify_all()
                self._changed.wait()
            return not self._stopping

    def _take_waiting(self) -> list[Job]:
        with self._changed:
            jobs = list(self._waiting)
            self._waiting.clear()
            self._idle = True
            self._changed.notify_all()
        return jobs

    def _admit(self) -> None:
        while True:
            with self._changed:
                for job in [job for job in self._waiting if job.cancelled]:
                    self._waiting.remove(job)
                    self.trace.write(job.number, "cancel", phase="queue")
                if not self._waiting or not self._slots.has_room():
                    return
                job = self._waiting.popleft()
            try:
                self._start(job)
            except Exception as error:
                log.exception("request %d could not be started", job.number)
                self._deliver(job, Failed(500, _text(error)))

    def _start(self, job: Job) -> None:
        chosen = plan(job.prompt, self._slots.slots, self.engine.tokenizer, self.prompts.encode, self.engine.context)
        if chosen.miss:
            log.info("request %d live kv cache miss %s", job.number, chosen.miss)
        slot = self._slots.take(chosen.slot, chosen.whole)
        slot.keep(chosen.kept)
        try:
            chooser = self.backend.chooser(slot.session, job.request.sampling)
        except Exception:
            slot.busy = False
            raise
        running = _Running(job, slot, chosen, chooser, self._boundaries(chosen.ids))
        self._prefilling.append(running)
        log.info(
            "request %d prompt start tokens=%d reused=%d source=%s %s",
            job.number, len(chosen.ids), chosen.reused, chosen.source, chosen.detail,
        )  # fmt: skip
        if self.trace.active:
            self.trace.write(
                job.number,
                "prompt",
                text=str(job.prompt.text),
                tokens=len(job.prompt.ids),
                effective_tokens=len(chosen.ids),
                reused=chosen.reused,
                source=chosen.source,
                detail=chosen.detail,
                miss=chosen.miss,
            )
        self._deliver(job, Admitted(running.usage))

    def _prefill(self) -> None:
        """Evaluate one chunk of the prompt whose turn it is."""
        if not self._prefilling:
            return
        running = self._prefilling[0]
        job, session = running.job, running.slot.session
        if job.cancelled:
            self._cancel(running, "prefill")
            return
        chunks = 0
        chunk = self.engine.config.prefill_chunk
        if self._decoding:
            chunk = min(chunk, _SHARED_CHUNK)

        def one_chunk() -> bool:
            nonlocal chunks
            chunks += 1
            return chunks > 1

        try:
            complete = session.sync(running.plan.ids, chunk=chunk, cancelled=one_chunk, boundaries=running.boundaries)
        except Exception as error:
            log.exception("request %d failed in its prompt", job.number)
            self._fail(running, 500, _text(error))
            return
        if running.reused is None:
            running.reused = session.reused
        log.info("request %d prefill chunk %d/%d", job.number, len(session.tokens), len(running.plan.ids))
        # Prompts take turns.
        self._prefilling.append(self._prefilling.pop(0))
        if complete:
            self._begin_answer(running)

    def _boundaries(self, ids: list[int]) -> list[int]:
        """Where later prompts may leave this one: behind the system region, at the think markers of the last turns."""
        tokenizer = self.engine.tokenizer
        turns = [i + 1 for i, token in enumerate(ids) if token == tokenizer.assistant]
        first = ids.index(tokenizer.user) if tokenizer.user in ids else 0
        return sorted({*([first] if first >= _MIN_SYSTEM else ()), *turns[-_TURN_BOUNDARIES:]})

    def _begin_answer(self, running: _Running) -> None:
        job, session = running.job, running.slot.session
        wanted = self.config.max_tokens if job.request.max_tokens is None else job.request.max_tokens
        running.answering = time.monotonic()
        running.generation = Generation(
            job.number,
            job.request,
            session,
            running.chooser,
            self.engine.tokenizer,
            opened=running.plan.ids[-1],
            limit=min(wanted, self.engine.context - len(session.tokens)),
            profile=self.config.template,
            think_recovery=self.config.think_recovery,
            trace=self.trace,
        )
        log.info("request %d prompt done in %.2f s", job.number, running.answering - running.started)
        self._prefilling.remove(running)
        self._decoding.append(running)

    def _decode(self) -> None:
        """Choose the next token of every answer, send what that completes, and evaluate all of them in one step."""
        stepping = []
        for running in list(self._decoding):
            generation = running.generation
            if running.job.cancelled or generation is None:
                self._cancel(running, "decode")
                continue
            try:
                self._send(running, generation.step())
                if generation.ending is not None:
                    self._finish(running, generation.ending)
                else:
                    stepping.append((running, generation))
            except Exception as error:
                log.exception("request %d failed", running.job.number)
                self._fail(running, 500, _text(error))
        if not stepping:
            return
        try:
            self.engine.step([(running.slot.session, generation.fresh) for running, generation in stepping])
        except Exception as error:
            log.exception("a step of requests %s failed", [running.job.number for running, _ in stepping])
            for running, _ in stepping:
                self._fail(running, 500, _text(error))

    # -- the end of a request -----------------------------------------------------------------------------------------

    def _send(self, running: _Running, events: list[Event]) -> None:
        if not events:
            return
        for event in events:
            if isinstance(event, CallBegin):
                running.call_ids.append(self.replay.new_id(running.job.request.call_prefix, running.call_ids))
        self._deliver(running.job, Events(tuple(events), tuple(running.call_ids)))

    def _finish(self, running: _Running, ending: Ending) -> None:
        job, slot = running.job, running.slot
        calls = tuple(
            replace(call, id=id) for call, id in zip(ending.message.tool_calls, running.call_ids, strict=False)
        )
        message = replace(ending.message, tool_calls=calls)
        if calls and message.raw_dsml and self.config.replay:
            # Before the client has the ids: it may send them back at once.
            try:
                self.replay.put(calls, message.raw_dsml)
            except Exception:
                log.exception("request %d: its calls cannot be repeated", job.number)
        usage = running.usage
        speed = usage.completion / max(time.monotonic() - running.answering, 1e-9)
        log.info(
            "request %d finish=%s prompt=%d reused=%d completion=%d %.1f tokens/s",
            job.number, ending.reason, usage.prompt, usage.reused, usage.completion, speed,
        )  # fmt: skip
        self._trace_end(job.number, ending.reason, message, usage)
        whole = message
        if not (message.complete or calls or ending.stop_string) and running.generation is not None:
            whole = running.generation.whole_text()
        self._deliver(job, Done(ending.reason, message, usage, ending.stop_string, whole))
        # The answer is out; what follows only makes the next one cheaper.
        try:
            if ending.bindable:
                slot.session.checkpoint()
                bind_reply(slot, job.prompt, message, self.engine.tokenizer, self.prompts.encode, self.config.template)
        except Exception:
            log.exception("request %d: its answer cannot be continued by its visible text", job.number)
        finally:
            self._release(running)

    def _trace_end(self, number: int, reason: str, message: Message, usage: Usage) -> None:
        if not self.trace.active:
            return
        self.trace.write(
            number,
            "parse",
            reasoning=message.reasoning,
            content=message.text,
            calls=[{"id": call.id, "name": call.name, "arguments": call.arguments} for call in message.tool_calls],
            problems=list(message.problems),
        )
        self.trace.write(number, "finish", reason=reason, usage=vars(usage))

    def _cancel(self, running: _Running, phase: str) -> None:
        """The client left. What was computed stays: a repeated request goes on from there."""
        log.info("request %d finish=cancelled in %s", running.job.number, phase)
        self.trace.write(running.job.number, "cancel", phase=phase)
        self._release(running)

    def _fail(self, running: _Running, status: int, message: str) -> None:
        log.info("request %d finish=error %s", running.job.number, message)
        self.trace.write(running.job.number, "error", message=message)
        self._release(running)
        try:
            # A step that broke off leaves a state nobody should continue.
            self._slots.drop(running.slot)
        finally:
            self._deliver(running.job, Failed(status, message))

    def _release(self, running: _Running) -> None:
        if running in self._prefilling:
            self._prefilling.remove(running)
        if running in self._decoding:
            self._decoding.remove(running)
        running.slot.busy = False
        self._slots.touch(running.slot)

    def _deliver(self, job: Job, reply: Reply) -> None:
        try:
            job.deliver(reply)
        except RuntimeError:
            # The handler's event loop is gone, and with it the client.
            job.cancel()
        except Exception:
            log.exception("request %d: a reply could not be delivered", job.number)
            job.cancel()


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__
