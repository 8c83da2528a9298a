"""The worker: the one thread that owns the engine and every session.

Its loop: look for clients that left, admit, evaluate one chunk of a prompt, run one step of all answers, send what they
wrote. A prompt therefore never holds up the answers, nor a cancellation, longer than one chunk, and chunks are short
while answers are running.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from math import inf

from ds4.chat.events import CallBegin, Event
from ds4.engine import Session
from ds4.errors import Ds4Error, RequestError
from ds4.server.backend import Backend
from ds4.server.config import ServerConfig
from ds4.server.constraints import Enforcement, SchemaError
from ds4.server.continuation import Plan, bind_reply, plan
from ds4.server.decode import Ending, Generation
from ds4.server.disk import open_disk
from ds4.server.live import LiveSession, look_at
from ds4.server.metrics import Metrics
from ds4.server.prompting import PromptBuilder
from ds4.server.recovery import MIN_ROOM, correction
from ds4.server.replay import ReplayMemory
from ds4.server.replies import DEFECT, SHUTTING_DOWN, Replies, overdue, stuck_message, text_of
from ds4.server.request import (
    Admitted,
    ChatRequest,
    Done,
    Events,
    Failed,
    Job,
    Post,
    Prompt,
    QueueFullError,
    Reply,
    ShuttingDownError,
    post_here,
)
from ds4.server.running import (
    Found,
    Question,
    Questions,
    Running,
    TimedJob,
    WaitingLine,
    answer_of,
    boundaries,
    choose,
    note_end,
    note_prompt,
    turn_of,
)
from ds4.server.slots import Slot, SlotTable
from ds4.server.trace import Trace
from ds4.server.turns import TurnMemory
from ds4.server.watch import Clock, StepLostError, StepWatch

log = logging.getLogger("ds4.server")


class Worker:
    """Runs jobs. `submit`, `status`, `stop` and `wait_idle` may be called from any thread."""

    def __init__(
        self, backend: Backend, config: ServerConfig, trace: Trace | None = None, clock: Clock | None = None
    ) -> None:
        self.backend, self.config = backend, config
        self.engine = backend.engine
        self.trace = trace or Trace()
        self.replay = ReplayMemory(config.tool_memory_max_ids if config.replay else 0, config.tool_memory_bytes)
        self.turns = TurnMemory()
        self.prompts = PromptBuilder(
            self.engine.tokenizer,
            config,
            self.engine.context,
            self.replay if config.replay else None,
            self.engine.shape.vocab,
        )
        self.metrics = Metrics(backend.name, self.engine.context, config.max_sessions)
        self._clock = clock or Clock()
        self._replies = Replies(self.trace, self.metrics, self._clock)
        self.disk = open_disk(backend, config, self.replay, self.trace, self.metrics)
        self._slots = self._new_slots()
        self._prefilling: list[Running] = []
        self._decoding: list[Running] = []
        self._changed = threading.Condition()
        self._waiting = WaitingLine()
        self._between = 0
        self._questions = Questions()
        self._stopping = False
        self._started = False
        self._ended = False
        self._idle = True
        self._count = 0
        self._stuck_steps = 0
        self._watch = StepWatch(config.step_timeout, self._clock)
        self._thread = self._new_thread()
        self.metrics.follow(self.status)

    # -- for other threads --------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread."""
        self._started = True
        self._thread.start()
        if self._watch.seconds:
            threading.Thread(target=self._replace_stuck_threads, name="ds4-watch", daemon=True).start()

    def submit(
        self,
        request: ChatRequest,
        prompt: Prompt,
        deliver: Callable[[Reply], None],
        post: Post = post_here,
        constraint: Future[Enforcement] | None = None,
    ) -> Job:
        """Queue a request; its replies go to `deliver`, the last one is Done or Failed (none after a cancellation).

        `post` calls that where it has to be called (see `Job`). The request alone waits for its `constraint`.

        Raises:
            QueueFullError, ShuttingDownError: the request is not taken.
        """
        with self._changed:
            self._check_takes()
            self._count += 1
            now = self._clock.now()
            job = TimedJob(self._count, request, prompt, deliver, post, arrived=now, constraint=constraint)
            job.deadline = now + (self.config.request_timeout or inf)
            self._waiting.put(job)
            self._idle = False
            self._changed.notify_all()
        if constraint is not None:
            constraint.add_done_callback(lambda done: self._made(job))
        return job

    def _made(self, job: TimedJob) -> None:
        """What a job waited for is there, or an error, which waits neither for a place nor for a step."""
        with self._changed:
            rejected = job.fault is not None and self._waiting.leave(job)
            self._changed.notify_all()
        if rejected:
            self._replies.reject(job)

    def _check_takes(self) -> None:
        error: RequestError | None = None
        if self._stopping:
            error = ShuttingDownError(SHUTTING_DOWN)
        elif not self.alive:
            error = ShuttingDownError("the worker has ended; see the server's log, and start the server again")
        # Those for which there is room do not wait; they only have not been taken yet.
        elif self.config.max_queue and len(self._waiting) - self._slots.free >= self.config.max_queue:
            error = QueueFullError(f"requests waiting already: {len(self._waiting)} (--max-queue); try again later")
        if error is not None:
            self.metrics.refused()
            raise error

    def count(self, request: ChatRequest, prompt: Prompt) -> Future[int]:
        """The tokens that the request would have before it now: with hidden reasoning more than its prompt."""
        return self._ask(Question(lambda: len(self._plan(request, prompt).ids), len(prompt.ids)))

    def measure(self) -> Future[list[LiveSession]]:
        """What is live now; the metrics that only the worker's thread may look up are brought up to date with it."""
        return self._ask(Question(lambda: look_at(self._slots, [*self._prefilling, *self._decoding], self.metrics), []))

    def _ask(self, question: Question[Found]) -> Future[Found]:
        with self._changed:
            if self._stopping or not self.alive:
                question.give_up()
            else:
                self._questions.put(question)
                self._changed.notify_all()
        return question.answer

    @property
    def alive(self) -> bool:
        """Whether requests are served, or will be once `start` is called."""
        return not self._ended and (self._thread.ident is None or self._thread.is_alive())

    def status(self) -> dict[str, int]:
        """Numbers of waiting and running requests, of live sessions, and of steps that were given up, if there are."""
        with self._changed:
            waiting = len(self._waiting) + self._between
        # Looked at in the order in which a request goes, so that none is missed.
        status = {
            "waiting": waiting,
            "running": self._slots.busy,
            "sessions": len(self._slots.slots),
        }
        return {**status, "stuck_steps": self._stuck_steps} if self._stuck_steps else status

    def jobs(self) -> list[Job]:
        """The jobs that run now."""
        return list(dict.fromkeys(running.job for running in [*self._prefilling, *self._decoding]))

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
        if not self._started:
            return True
        with self._changed:
            # Not `join` first: while it waits, another thread may take this one's place.
            if not self._changed.wait_for(lambda: self._ended, timeout):
                return False
        self._thread.join(timeout)
        return not self._thread.is_alive() and self.disk.close(timeout)

    # -- the loop -----------------------------------------------------------------------------------------------------

    def _new_thread(self) -> threading.Thread:
        return threading.Thread(target=self._run, name="ds4-worker", daemon=True)

    def _run(self) -> None:
        self._watch.enter()
        lost = False
        try:
            while self._wait_for_work():
                try:
                    self._questions.settle()
                    self.disk.settle()
                    self._end_left()
                    self._admit()
                    self._prefill()
                    self._decode()
                except Exception:
                    # A defect of the loop itself must not leave clients waiting for ever.
                    log.exception("the worker failed")
                    self._fail_all(500, DEFECT)
        except StepLostError:
            # Nothing here belongs to this thread any more.
            lost = True
            log.warning("a step that had been given up has returned")
        finally:
            if not lost:
                self._end()

    def _end(self) -> None:
        """However the thread ends, nobody waits for it any more."""
        message = SHUTTING_DOWN if self._stopping else DEFECT
        with self._changed:
            self._ended = True
        self._watch.close()
        if self._stopping:
            self.disk.shutdown(self._slots.slots)
        self._fail_all(503, message)
        for job in self._take_waiting():
            self._replies.refuse(job, 503, message)
        self._questions.give_up()

    def _replace_stuck_threads(self) -> None:
        """What the thread of the watch does."""
        while self._watch.wait_for_stuck():
            self._take_over()

    def _take_over(self) -> None:
        """A step was given up, and the thread that is in it: let another one go on, with sessions of its own."""
        stuck = [*self._prefilling, *self._decoding]
        self._prefilling, self._decoding = [], []
        # Nothing that the lost step holds is used again: its sessions go with the engine that they came from.
        try:
            self.engine = self.engine.renew()
        except Ds4Error as error:  # no room on the device beside what the lost step holds
            log.error("the server cannot go on after a step of the model that did not return: %s", error)
            self._slots = self._new_slots()
            for running in stuck:
                self._replies.refuse(running.job, 503, DEFECT)
            self._end()
            return
        self.disk.follow(self.engine)
        self.metrics.evicted("stuck", len(self._slots.slots))
        self.metrics.stuck_steps.inc()
        self._slots = self._new_slots()
        self._stuck_steps += 1
        message = stuck_message(self.config)
        log.error("requests %s finish=error %s", [running.job.number for running in stuck], message)
        for running in stuck:
            self._replies.refuse(running.job, 500, message)
        self._thread = self._new_thread()
        self._thread.start()

    def _fail_all(self, status: int, message: str) -> None:
        for running in [*self._prefilling, *self._decoding]:
            try:
                self._fail(running, status, message)
            except Exception:
                log.exception("request %d could not be ended", running.job.number)

    def _wait_for_work(self) -> bool:
        with self._changed:
            while not (self._questions or self._prefilling or self._decoding or self._stopping):
                patience = self._waiting.patience(self._clock.now())
                if not patience:
                    break
                self._idle = not self._waiting
                self._changed.notify_all()
                self._clock.wait(self._changed, patience)
            return not self._stopping

    def _take_waiting(self) -> list[TimedJob]:
        with self._changed:
            jobs = self._waiting.take_all()
            self._idle = True
            self._changed.notify_all()
        return jobs

    def _new_slots(self) -> SlotTable:
        return SlotTable(self.engine, self.config.max_sessions, self._leaving)

    def _leaving(self, slot: Slot) -> None:
        self.metrics.evicted("room")
        self.disk.leaving(slot)

    def _plan(self, request: ChatRequest, prompt: Prompt) -> Plan:
        context, limit = self.engine.context, self._room(request, 0)
        return plan(prompt, self._slots.slots, self.engine.tokenizer, context, limit)

    def _admit(self) -> None:
        while (job := self._next()) is not None:
            try:
                self._start(job)
            except Exception as error:
                log.exception("request %d could not be started", job.number)
                self._replies.refuse(job, 500, text_of(error))
            finally:
                self._between = 0

    def _next(self) -> TimedJob | None:
        """Take the request out of the queue that is admitted now; before it those that do not wait any more."""
        now = self._clock.now()
        with self._changed:
            gone = self._waiting.take_gone(now)
            self._between = len(gone)
        # Not while holding the lock: whoever submits a request would wait for the disk.
        for left in gone:
            if left.cancelled:
                self.trace.write(left.number, "cancel", phase="queue")
                self._replies.ended(left, "cancelled")
            else:
                self._replies.refuse(left, 503, overdue(self.config.request_timeout, "queue").message, "overdue")
        with self._changed:
            job = self._waiting.take(self._slots.free - sum(running.due for running in self._prefilling))
            self._between = int(job is not None)
        return job

    def _end_left(self) -> None:
        """End the running requests whose clients left, or that take too long. What was computed stays."""
        now = self._clock.now()
        for running in [*self._prefilling, *self._decoding]:
            reading = running in self._prefilling
            if running.job.cancelled:
                self._cancel(running, "prefill" if reading else "decode")
            elif running.job.deadline <= now:
                # A second attempt has a prompt of its own, and is part of the answer.
                late = overdue(self.config.request_timeout, "prompt" if reading and not running.first else "answer")
                log.info("request %d finish=error %s", running.job.number, late.message)
                self._release(running)
                self._replies.refuse(running.job, late.status, late.message, "overdue", late.retry)

    def _start(self, job: TimedJob) -> None:
        again = partial(self._plan, job.request, job.prompt)
        chosen = self.disk.restore(job, again(), self._slots, again)
        slot = self._slots.take(chosen.slot, chosen.whole or bool(chosen.disk))
        try:
            slot.keep(chosen.kept)
            chooser = self.backend.chooser(slot.session, job.request.sampling)
            ways_back = boundaries(chosen.ids, chosen.reused, self.engine.tokenizer)
            running = Running(job, slot, chosen, chooser, ways_back, chosen.source)
        except Exception:
            slot.busy = False
            raise
        self._prefilling.append(running)
        self._between = 0
        try:
            note_prompt(self.trace, job, chosen)
            self.metrics.admitted(job, chosen, self._clock.now())
        except Exception as error:
            log.exception("request %d could not be started", job.number)
            self._fail(running, 500, text_of(error))
            return
        self._replies.deliver(job, Admitted(running.usage))

    def _prefill(self) -> None:
        """Evaluate one chunk of the prompt whose turn it is."""
        if not self._prefilling:
            return
        running = self._prefilling[0]
        job, session = running.job, running.slot.session
        chunk = self.engine.shared_chunk if self._decoding else self.engine.prefill_chunk
        try:
            complete = self._watch.step(lambda: running.evaluate(chunk))
        except Exception as error:
            log.exception("request %d failed in its prompt", job.number)
            self.disk.failed(running)
            self._fail(running, 500, text_of(error))
            return
        self.metrics.evaluated(running)
        self.disk.evaluated(running, complete)
        log.info("request %d prefill chunk %d/%d", job.number, len(session.tokens), len(running.ids))
        # Prompts take turns; in one go, as other threads look.
        self._prefilling[:] = [*self._prefilling[1:], running]
        if complete:
            self._begin_answer(running)

    def _begin_answer(self, running: Running) -> None:
        """The prompt is evaluated: write the answer, and further ones from the same state."""
        answers, slots = [running], []
        try:
            for _ in range(running.due):
                slots.append(self._slots.fork(running.slot))
                answers.append(answers[-1].fork(slots[-1]))
            for answer in answers:
                limit = self._room(answer.job.request, len(answer.slot.session.tokens))
                answer.open(self.engine.tokenizer, limit, self.config, self.trace)
        except Exception as error:
            log.exception("request %d: its answers could not begin", running.job.number)
            for slot in slots:
                self._slots.drop(slot)
            self._fail(running, 500, text_of(error))
            return
        if running.first is None:
            log.info("request %d prompt done in %.2f s", running.job.number, running.answering - running.started)
        self._decoding += answers
        self._prefilling.remove(running)

    def _room(self, request: ChatRequest, tokens: int) -> int:
        """Most tokens that may be sampled behind so many."""
        wanted = self.config.max_tokens if request.max_tokens is None else request.max_tokens
        return min(wanted, self.engine.context - tokens)

    def _decode(self) -> None:
        """Choose the next token of every answer, send what that completes, and evaluate all of them in one step."""
        stepping, wrote = [], 0
        began = self._clock.now()
        self._watch.step(lambda: choose(self.engine, self._decoding))
        for running in list(self._decoding):
            generation = running.generation
            if running.job.cancelled or generation is None:
                self._cancel(running, "decode")
                continue
            before = generation.completion
            try:
                events = running.step(generation)
                wrote += generation.completion - before
                if running.job.first_token is None and generation.completion > before:
                    running.job.first_token = self._clock.now()
                    self.metrics.begun(running.job.first_token - running.job.arrived)
                self._send(running, events)
                if generation.malformed is not None:
                    self.metrics.malformed_calls.inc(running.note_malformed())
                    if self._ask_again(running, generation):
                        continue
                    self._send(running, generation.give_up())
                if generation.ending is not None:
                    self._finish(running, generation.ending)
                else:
                    stepping.append((running, generation))
            except SchemaError as error:
                # Its state is as good as before.
                self._release(running)
                log.info("request %d finish=error %s", running.job.number, error)
                self._replies.refuse(running.job, 400, str(error))
            except Exception as error:
                log.exception("request %d failed", running.job.number)
                self._fail(running, 500, text_of(error))
        self._replies.hand_over()
        self.metrics.completion_tokens.inc(wrote)
        if not stepping:
            return
        try:
            batch = [(running.slot.session, generation.fresh) for running, generation in stepping]
            self._watch.step(lambda: self.engine.step(batch, "keep"))
            self.metrics.step_seconds.observe(self._clock.now() - began)
            for running, generation in stepping:
                self.disk.stepped(running.slot, running.job.number, len(generation.fresh))
        except Exception as error:
            log.exception("a step of requests %s failed", [running.job.number for running, _ in stepping])
            for running, _ in stepping:
                self._fail(running, 500, text_of(error))

    def _ask_again(self, running: Running, generation: Generation) -> bool:
        """Tell the model that its calls were malformed, and let it answer anew, once. False: there is no room for that.

        The request goes back to those whose prompts are evaluated, so that others wait no longer than for a prompt.
        """
        job, session, tokenizer = running.job, running.slot.session, self.engine.tokenizer
        thinking = running.ids[-1] == tokenizer.think
        text = correction(generation.malformed or "", thinking, self.config.template)
        injected = tokenizer.encode_chat(text)
        ids = [*session.tokens, *generation.fresh, *injected]
        if self._room(job.request, len(ids)) < MIN_ROOM:
            return False
        log.info("request %d malformed tool call, asking the model again: %s", job.number, generation.malformed)
        self.trace.write(job.number, "inject", text=text)
        # The end of the sentence, with which the text begins, is no token of an answer.
        running.attempt_again(ids, generation.earlier(len(injected) - 1))
        self.metrics.completion_tokens.inc(len(injected) - 1)
        self._prefilling.append(running)
        self._decoding.remove(running)
        return True

    # -- the end of a request -----------------------------------------------------------------------------------------

    def _send(self, running: Running, events: list[Event]) -> None:
        if not events:
            return
        for event in events:
            if isinstance(event, CallBegin):
                running.call_ids.append(self.replay.new_id(running.job.request.call_prefix, running.call_ids))
        logprobs = running.generation.take_logprobs() if running.generation else ()
        self._replies.hold(running.job, Events(tuple(events), tuple(running.call_ids), logprobs, running.index))

    def _finish(self, running: Running, ending: Ending) -> None:
        job, slot = running.job, running.slot
        message, whole, logprobs = answer_of(running, ending, self.config.replay)
        calls = message.tool_calls
        if calls and message.raw_dsml:
            # Before the client has the ids: it may send them back at once.
            try:
                self.replay.put(calls, message.raw_dsml)
            except Exception:
                log.exception("request %d: its calls cannot be repeated", job.number)
        # Later requests may continue it by its id and those of its calls, however far it came.
        try:
            turn = turn_of(job.request, ending.reason, message, whole)
            if turn is not None:
                self.turns.put(turn)
            if turn is not None or calls:
                slot.spare = False
        except Exception:
            log.exception("request %d: its answer cannot be continued by its id", job.number)
        note_end(self.trace, running, ending.reason, message)
        left = job.end(running.usage)
        if ending.reason != "length" and running.generation is not None and running.generation.unreadable:
            self.metrics.malformed_calls.inc(running.note_malformed())
        self.metrics.answered(running, self._clock.now())
        # A stream ends with calls that cannot be read, and with it the answers that are left.
        broken = ending.reason == "error" and job.request.streamed
        if broken or not left:
            self._replies.ended(job, "malformed" if ending.reason == "error" else ending.reason)
        done = Done(ending.reason, message, job.usage, ending.stop_string, whole, logprobs, running.index, left)
        self._replies.deliver(job, done)
        job.closed = broken or not left
        if broken and left:
            job.cancel()
        # The answer is out; what follows only makes the next one cheaper.
        try:
            if ending.bindable or (ending.reason == "tool_calls" and ending.stop_string is None):
                slot.session.checkpoint()
                bind_reply(slot, job.prompt, message, self.engine.tokenizer, self.prompts.encode, self.config.template)
            self.disk.answered(running)
        except Exception:
            log.exception("request %d: its answer cannot be continued by what a client shows of it", job.number)
        finally:
            self._release(running)

    def _cancel(self, running: Running, phase: str) -> None:
        """The client left. What was computed stays: a repeated request goes on from there."""
        log.info("request %d finish=cancelled in %s", running.job.number, phase)
        self._replies.ended(running.job, "cancelled")
        self.trace.write(running.job.number, "cancel", phase=phase)
        self._release(running)

    def _fail(self, running: Running, status: int, message: str) -> None:
        log.info("request %d finish=error %s", running.job.number, message)
        self.trace.write(running.job.number, "error", message=message)
        self._release(running)
        try:
            # A step that broke off leaves a state nobody should continue.
            self._slots.drop(running.slot)
            self.metrics.evicted("failed")
        finally:
            self._replies.fail(running.job, Failed(status, message))

    def _release(self, running: Running) -> None:
        if running in self._prefilling:
            self._prefilling.remove(running)
        if running in self._decoding:
            self._decoding.remove(running)
        running.slot.busy = False
        self._slots.touch(running.slot)
