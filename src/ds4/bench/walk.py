"""The walk over contexts: prefill what was added, decode on forks of it, which leaves it as it was; the first token.

Nothing is kept besides: the engine is to be made without automatic checkpoints (`checkpoint_interval=0`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from ds4.bench.decoding import Decoder, diverge, timed_decode
from ds4.bench.meter import Meter
from ds4.bench.settings import Settings
from ds4.bench.traffic import Traffic
from ds4.engine.synthetic import fill_session
from ds4.errors import Ds4Error

if TYPE_CHECKING:
    from torch import Tensor

    from ds4.bench.kernels import Profile
    from ds4.engine import Engine, Session


@dataclass(frozen=True)
class Row:
    """What was measured at one context. The first six stand first in the CSV, under the C engine's names.

    Attributes:
        ctx_tokens: tokens held when decoding began.
        prefill_tokens, prefill_tps: of the measured prefill, and its tokens a second.
        gen_tokens, gen_tps: tokens that each session decoded, and tokens a second of all sessions together.
        kvcache_bytes: memory of one session's state.
        prefill_ms, step_ms: milliseconds of the prefill, and of a decode step.
        filled: whether the context was random state.
        kv_bytes_per_token: by which a state grows with a token.
        step_bytes: that a step has to read (`Traffic.step`).
        bytes_per_token: the same for each token that it gives.
        bandwidth_fraction: of the copy bandwidth, at which the step's bytes were read.
        kernels: launched for a step; None where no profile was made. On the CPU: operators of PyTorch.
        host_peak_bytes, device_peak_bytes: most memory while this was measured; on the CPU there is no second.
        prefill_seconds, gen_seconds: of every run.
    """

    ctx_tokens: int
    prefill_tokens: int
    prefill_tps: float | None
    gen_tokens: int
    gen_tps: float | None
    kvcache_bytes: int
    prefill_ms: float | None
    step_ms: float | None
    sessions: int
    filled: bool
    kv_bytes_per_token: float
    step_bytes: float
    bytes_per_token: float
    bandwidth_fraction: float | None
    kernels: float | None
    host_peak_bytes: int
    device_peak_bytes: int | None
    prefill_seconds: tuple[float, ...]
    gen_seconds: tuple[float, ...]


@dataclass(frozen=True)
class FirstToken:
    """The time from a prompt to its first token on the host: the median."""

    tokens: int
    ms: float
    tps: float
    seconds: tuple[float, ...]


class Walk:
    """A measurement of an engine.

    Attributes:
        copy_bandwidth: bytes a second.
        profiles: of the contexts so far, if `profiling`.
    """

    def __init__(
        self, engine: Engine, settings: Settings, ids: Sequence[int], traffic: Traffic, meter: Meter,
        copy_bandwidth: float, profiling: bool = False,
    ) -> None:  # fmt: skip
        """`ids`: the tokens of the longest context.

        Raises:
            Ds4Error: the contexts do not fit the engine's, or there are too few ids.
        """
        if settings.longest > engine.context:
            raise Ds4Error(
                f"the benchmark needs a context of {settings.longest} tokens, but it has {engine.context}; lower"
                " --ctx-max or --fill-context, or raise --ctx-alloc"
            )
        self._engine, self._settings, self._traffic, self._meter = engine, settings, traffic, meter
        needed = max(settings.contexts()[-1][1], settings.first_token)
        if len(ids) < needed:
            raise Ds4Error(f"the prompt has {len(ids)} tokens, but {needed} are needed; lower --ctx-max")
        self._ids = list(ids)
        self.copy_bandwidth, self._profiling = copy_bandwidth, profiling
        self.profiles: list[Profile] = []

    def warm_up(self) -> None:
        """Do once what else the first measured run would wait for: a chunk of prefill, and steps of all sessions."""
        begin, end = self._settings.contexts()[0]
        base = self._engine.session()
        base.sync(self._ids[: min(max(end - begin, 1), self._engine.prefill_chunk)], boundaries=())
        if self._settings.decode:
            with _Forks(base, self._settings.sessions) as sessions:
                diverge(self._engine, sessions, self._ids)
                Decoder(self._engine, sessions).steps(2)
        base.close()
        self._meter.synchronize()

    def rows(self, seen: Callable[[int, Tensor], None] | None = None) -> Iterator[Row]:
        """Measure at each context; `seen` gets each context and the logits there."""
        base = self._engine.session()
        for begin, end in self._settings.contexts():
            if self._settings.fill:
                base.close()
                base = self._engine.session()
                fill_session(base, self._ids[:begin], self._settings.seed)
            base, row = self._at(base, begin, end)
            if seen is not None:
                seen(end, base.logits)
            yield row
        base.close()

    def first_token(self) -> FirstToken | None:
        """The time to the first token of a new session; None if it is not wanted."""
        count = self._settings.first_token
        if not count:
            return None
        seconds = []
        for run in range(self._settings.repeats + 1):
            start = self._meter.now()
            session = self._engine.session()
            session.sync(self._ids[:count], boundaries=())
            Decoder(self._engine, [session]).choose()
            took = self._meter.clock() - start  # the token is here, whatever the device does ahead
            session.close()
            if run:
                seconds.append(took)
        middle = median(seconds)
        return FirstToken(count, 1e3 * middle, _speed(count, middle) or 0.0, tuple(seconds))

    def _at(self, base: Session, begin: int, end: int) -> tuple[Session, Row]:
        """Measure from `base`, which holds `begin` tokens; the session of `end` tokens takes its place."""
        s, meter = self._settings, self._meter
        prefills: list[float] = []
        decodes: list[float] = []
        if self._profiling and end > begin:
            self._profile_prefill(base, end)
        meter.begin_peak()
        for last in range(s.repeats - 1, -1, -1):
            run = base.fork()
            # To look at a million ids takes longer than to evaluate some of them, so it stays out of the time.
            prefill = run.begin(self._ids[:end], boundaries=()) if end > begin else None
            start = meter.now()
            while prefill is not None and not prefill.done:
                prefill.step()
            prefills.append(meter.now() - start)
            meter.note_host()
            if s.decode:
                with _Forks(run, s.sessions) as sessions:
                    diverge(self._engine, sessions, self._ids)
                    decodes.append(timed_decode(self._engine, sessions, s.decode, meter))
                    meter.note_host()
            (base if not last else run).close()
        row = self._row(run, begin, end, prefills, decodes)
        return run, row

    def _row(self, run: Session, begin: int, end: int, prefills: list[float], decodes: list[float]) -> Row:
        s, traffic = self._settings, self._traffic
        host, device = self._meter.peaks()
        prefill = median(prefills) if end > begin else None
        step = median(decodes) / s.decode if decodes else None
        # The middle of what was decoded stands for all of it.
        step_bytes = traffic.step(end + s.decode // 2, s.sessions)
        return Row(
            ctx_tokens=end,
            prefill_tokens=end - begin,
            prefill_tps=_speed(end - begin, prefill),
            gen_tokens=s.decode,
            gen_tps=_speed(s.sessions, step),
            kvcache_bytes=run.state.nbytes,
            prefill_ms=None if prefill is None else 1e3 * prefill,
            step_ms=None if step is None else 1e3 * step,
            sessions=s.sessions,
            filled=bool(s.fill),
            kv_bytes_per_token=traffic.kv_per_token(),
            step_bytes=step_bytes,
            bytes_per_token=step_bytes / s.sessions,
            bandwidth_fraction=None if not step else step_bytes / step / self.copy_bandwidth,
            kernels=self._profile(run, end, step_bytes) if self._profiling and s.decode else None,
            host_peak_bytes=host,
            device_peak_bytes=device,
            prefill_seconds=tuple(prefills) if end > begin else (),
            gen_seconds=tuple(decodes),
        )

    def _profile_prefill(self, base: Session, end: int) -> None:
        from ds4.bench.kernels import profile_prefill

        with _Forks(base, 1) as (run,):
            self.profiles.append(profile_prefill(run.begin(self._ids[:end], boundaries=()), self._meter))

    def _profile(self, run: Session, context: int, step_bytes: float) -> float:
        from ds4.bench.kernels import profile_steps

        s, floor = self._settings, step_bytes / self.copy_bandwidth
        with _Forks(run, s.sessions) as sessions:
            diverge(self._engine, sessions, self._ids)
            found = profile_steps(self._engine, sessions, context, floor, self._meter, s.decode)
        self.profiles.append(found)
        return found.launches


class _Forks:
    """Equal sessions for the length of a block."""

    def __init__(self, session: Session, count: int) -> None:
        self._session, self._count = session, count
        self._forks: list[Session] = []

    def __enter__(self) -> list[Session]:
        while len(self._forks) < self._count:
            self._forks.append(self._session.fork())
        return self._forks

    def __exit__(self, *_: object) -> None:
        for fork in self._forks:
            fork.close()


def _speed(tokens: int, seconds: float | None) -> float | None:
    return tokens / seconds if seconds and tokens else None
