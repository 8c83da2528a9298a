"""What a server counts and measures, for Prometheus at /metrics and as JSON at /stats."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

from ds4 import __version__
from ds4.engine import Engine, Session
from ds4.server.continuation import Plan
from ds4.server.running import Running, TimedJob

_PREFIX = "ds4_"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
_QUANTILES = (0.5, 0.9, 0.99)


class Registry(CollectorRegistry):
    """One without the times at which series were made, a line for each. The library leaves them out for all or none."""

    def collect(self) -> Iterator[Metric]:
        """What is exposed."""
        for family in super().collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family


class Metrics:
    """The numbers of one worker, in a registry of their own. It keeps nothing of the requests that it is told of.

    The worker's thread counts, any thread may read. Numbers that are not counted but looked up, such as the length of
    the queue, are asked for when they are read.
    """

    def __init__(self, model: str, context: int, max_sessions: int) -> None:
        self.registry = registry = Registry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(_PREFIX + name, text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: Sequence[float] = _SECONDS) -> Histogram:
            return Histogram(_PREFIX + name, text, buckets=buckets, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(_PREFIX + name, text, labels, registry=registry)

        self._requests = counter("requests", "Requests that ended, by how they ended", "outcome")
        self._responses = counter("http_responses", "HTTP responses that began, streams included", "path", "status")
        self._prompt = counter("prompt_tokens", "Tokens of prompts, by where their state came from", "source")
        self._prefixes = counter(
            "prefix_matches", "Requests, by the state they continued and how it was recognised", "source", "detail"
        )
        self._replayed = counter("replayed_turns", "Earlier turns with calls, by how they were written", "way")
        self._evictions = counter("session_evictions", "Live conversations that were given up, by why", "reason")
        self._recoveries = counter("recoveries", "Answers that went on after a mistake in a call", "kind")
        self._disk = counter("disk_states", "States of conversations on disk, by what happened to them", "event")
        self._waiting = gauge("requests_waiting", "Requests that wait for a conversation")
        self._running = gauge("requests_running", "Answers that are being prepared or written")
        self._sessions = gauge("sessions", "Live conversations")
        self._kv = gauge("kv_bytes", "Bytes of live state; what forks share counts for each of them", "kind")
        self._kv_tokens = gauge("kv_tokens", "Evaluated tokens of the live conversations")
        self.completion_tokens = counter("completion_tokens", "Tokens that were sampled or injected into answers")
        self.malformed_calls = counter("malformed_calls", "Tool calls that could not be read")
        self.stuck_steps = counter("stuck_steps", "Steps that were given up (--step-timeout)")
        self._queue_seconds = histogram("queue_seconds", "From a request's arrival to its admission")
        self._first_token_seconds = histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token"
        )
        self._token_seconds = histogram(
            "time_per_token_seconds", "Between two tokens of an answer, on average over the answer", _TOKEN_SECONDS
        )
        self._request_seconds = histogram("request_seconds", "From a request's arrival to the end of its last answer")
        self.step_seconds = histogram("step_seconds", "One step of all running answers", _TOKEN_SECONDS)
        gauge("sessions_limit", "Conversations that may be live (--max-sessions)").set(max_sessions)
        gauge("context_tokens", "Tokens that a conversation may have").set(context)
        Info("ds4", "The server", registry=registry).info({"model": model, "version": __version__})
        ProcessCollector(registry=registry)
        # A series that is missing until something happens for the first time has no rate for that time.
        for metric, values in (
            (
                self._requests,
                ("stop", "length", "tool_calls", "malformed", "cancelled", "failed", "overdue", "refused"),
            ),
            (self._prompt, ("evaluated", "live", "checkpoint", "disk")),
            (self._disk, ("stored", "loaded", "evicted", "failed")),
            (self._replayed, ("memory", "disk", "canonical", "missing")),
            (self._evictions, ("room", "failed", "stuck")),
            (self._recoveries, ("second_attempt", "closed_reasoning")),
            (self._kv, ("sessions", "checkpoints")),
        ):
            for value in values:
                metric.labels(value)
        self._prefixes.labels("none", "none")
        for source in ("live", "checkpoint", "disk"):
            for detail in ("memory-token", "memory-text", "visible", "calls"):
                self._prefixes.labels(source, detail)
        # Once a chunk of a prompt: without a look-up.
        self._evaluated = self._prompt.labels("evaluated")

    # -- counting ------------------------------------------------------------------------------------------------------

    def follow(self, status: Callable[[], Mapping[str, int]]) -> None:
        """Ask for what waits, runs and is live whenever it is read (see `Worker.status`)."""
        self._waiting.set_function(lambda: status()["waiting"])
        self._running.set_function(lambda: status()["running"])
        self._sessions.set_function(lambda: status()["sessions"])

    def admitted(self, job: TimedJob, plan: Plan, now: float) -> None:
        """A request has a conversation."""
        self._queue_seconds.observe(now - job.arrived)
        self._prefixes.labels(plan.source, plan.detail or "none").inc()
        for way, count in job.prompt.replay.items():
            self._replayed.labels(way).inc(count)

    def evaluated(self, running: Running) -> None:
        """A chunk of a prompt was evaluated."""
        self._evaluated.inc(running.evaluated)
        if running.found:
            source = running.source if running.source in ("live", "disk") else "checkpoint"
            self._prompt.labels(source).inc(running.found)

    def begun(self, seconds: float) -> None:
        """A request has its first token, so long after its arrival."""
        self._first_token_seconds.observe(seconds)

    def answered(self, running: Running, now: float) -> None:
        """An answer ended."""
        first_token, generation = running.job.first_token, running.generation
        if running.first is not None and not running.malformed:
            self._recoveries.labels("second_attempt").inc()
        if generation is None:
            return
        if generation.recovered:
            self._recoveries.labels("closed_reasoning").inc()
        # Between two attempts a prompt is evaluated, and its tokens count as the answer's.
        if first_token is not None and generation.completion > 1 and running.first is None:
            self._token_seconds.observe((now - first_token) / (generation.completion - 1))

    def ended(self, outcome: str, seconds: float) -> None:
        """A request ended as a whole, so long after its arrival."""
        self._requests.labels(outcome).inc()
        self._request_seconds.observe(seconds)

    def refused(self) -> None:
        """A request was not taken, as too many wait or the server is shutting down."""
        self._requests.labels("refused").inc()

    def evicted(self, reason: str, count: int = 1) -> None:
        """Live conversations were given up: to make `room`, as a step on them `failed`, or is `stuck`."""
        self._evictions.labels(reason).inc(count)

    def disk(self, event: str) -> None:
        """A state was `stored`, `loaded`, `evicted` to make room, or one of these `failed`. Any thread may call it."""
        self._disk.labels(event).inc()

    def responded(self, path: str, status: int) -> None:
        """A response began; `path` is one of few."""
        self._responses.labels(path, str(status)).inc()

    def look_at(self, engine: Engine, sessions: Sequence[Session]) -> None:
        """What the live conversations hold now. Only the thread that owns them may call it."""
        self._kv.labels("sessions").set(sum(session.state.nbytes for session in sessions))
        self._kv.labels("checkpoints").set(engine.checkpoint_budget.used())
        self._kv_tokens.set(sum(len(session.tokens) for session in sessions))

    # -- reading -------------------------------------------------------------------------------------------------------

    def exposition(self, accept: str = "") -> tuple[bytes, str]:
        """All numbers in a format that an Accept header takes, and its content type."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type

    def stats(self) -> dict[str, Any]:
        """All numbers by their names without the prefix; labels are keys. Of times also estimated quantiles."""
        result: dict[str, Any] = {}
        for family in self.registry.collect():
            name = "info" if family.type == "info" else family.name.removeprefix(_PREFIX)
            result[name] = _value(family)
        return result


def _value(family: Metric) -> Any:
    samples = family.samples
    if family.type == "histogram":
        return _distribution(samples)
    if family.type == "info":
        return dict(samples[0].labels)
    value: dict[str, Any] = {}
    for sample in samples:
        if not sample.labels:
            return _number(sample.value)
        *path, last = sample.labels.values()
        place = value
        for key in path:
            place = place.setdefault(key, {})
        place[last] = _number(sample.value)
    return value


def _number(value: float) -> float | int:
    return int(value) if float(value).is_integer() else value


def _distribution(samples: Sequence[Sample]) -> Mapping[str, float | int | None]:
    """Count, sum and quantiles; these are None for an empty distribution."""
    buckets = [(float(sample.labels["le"]), sample.value) for sample in samples if sample.name.endswith("_bucket")]
    count = buckets[-1][1]
    total = next(sample.value for sample in samples if sample.name.endswith("_sum"))
    quantiles = {f"p{100 * part:g}": _quantile(buckets, part * count) if count else None for part in _QUANTILES}
    return {"count": int(count), "sum": total, "mean": total / count if count else None, **quantiles}


def _quantile(buckets: Sequence[tuple[float, float]], rank: float) -> float:
    """The value of a rank, by even spread in its bucket; of the last bucket the lower end."""
    low, before = 0.0, 0.0
    for high, upto in buckets:
        if upto >= rank:
            return low if high == inf else low + (high - low) * (rank - before) / (upto - before)
        low, before = high, upto
    return low
