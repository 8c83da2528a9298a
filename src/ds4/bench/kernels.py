"""Which kernels a step of decode or of prefill launches, and what part of the floor each takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ds4.bench.decoding import Decoder
from ds4.bench.meter import Meter

if TYPE_CHECKING:
    from ds4.engine import Engine, Session
    from ds4.engine.session import Prefill

STEPS, STEPS_CPU = 8, 2
"""Decode steps of a profile; on the CPU a step has many operators."""
_COPIES = ("Memcpy", "Memset")


@dataclass(frozen=True)
class Kernel:
    """One kernel (on the CPU: one operator of PyTorch), over a step.

    Attributes:
        launches: of a step.
        us: microseconds of a step.
        share: of the time of all kernels.
        floor_share: of the floor, the time in which the step's bytes can be copied; None for prefill, which has none.
    """

    name: str
    launches: float
    us: float
    share: float
    floor_share: float | None


@dataclass(frozen=True)
class Profile:
    """The kernels of a step at one context, the longest first.

    Attributes:
        tokens: of a step.
        launches: of a step, copies and fills left out.
        us: microseconds in kernels, of a step.
        floor_us: the floor of a step; None for prefill.
    """

    kind: Literal["decode", "prefill"]
    ctx_tokens: int
    tokens: int
    steps: int
    launches: float
    us: float
    floor_us: float | None
    kernels: tuple[Kernel, ...]


def profile_steps(
    engine: Engine, sessions: Sequence[Session], context: int, floor: float, meter: Meter, most: int
) -> Profile:
    """Profile up to `most` greedy steps of these sessions, the choice of tokens included, after one that is not.

    floor: seconds of a step.
    """
    steps = max(1, min(most - 1, STEPS if meter.on_cuda else STEPS_CPU))
    decoder = Decoder(engine, sessions)
    decoder.steps(1)
    events = _profiled(lambda: decoder.steps(steps), meter)
    return summary("decode", events, context, len(sessions), steps, floor)


def profile_prefill(prefill: Prefill, meter: Meter) -> Profile:
    """Profile the next step of a prefill, one chunk; at the context that it began with."""
    session = prefill.session
    before = len(session.tokens)
    events = _profiled(prefill.step, meter)
    return summary("prefill", events, before, len(session.tokens) - before, 1, None)


def summary(
    kind: Literal["decode", "prefill"], events: Iterable[tuple[str, int, float]], context: int, tokens: int, steps: int,
    floor: float | None,
) -> Profile:  # fmt: skip
    """Sum (name, launches, microseconds) of all steps up by name; `floor`: seconds."""
    floor_us = None if floor is None else 1e6 * floor
    sums: dict[str, list[float]] = {}
    for name, launches, us in events:
        entry = sums.setdefault(name, [0.0, 0.0])
        entry[0] += launches
        entry[1] += us
    total = sum(us for _, us in sums.values())
    kernels = tuple(
        Kernel(name, launches / steps, us / steps, us / total if total else 0.0, floor_us and us / steps / floor_us)
        for name, (launches, us) in sorted(sums.items(), key=lambda entry: -entry[1][1])
    )
    count = sum(kernel.launches for kernel in kernels if not kernel.name.startswith(_COPIES))
    return Profile(kind, context, tokens, steps, count, total / steps, floor_us, kernels)


def _profiled(run: Callable[[], object], meter: Meter) -> list[tuple[str, int, float]]:
    from torch.profiler import ProfilerActivity, profile

    meter.synchronize()
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if meter.on_cuda else [])]) as profiler:
        run()
        meter.synchronize()
    if meter.on_cuda:
        return list(cuda_kernels(profiler))
    return [(entry.key, entry.count, float(entry.self_cpu_time_total)) for entry in profiler.key_averages()]


def cuda_kernels(profiler: Any) -> Iterator[tuple[str, int, float]]:
    """Name, 1 and microseconds of everything that ran on CUDA devices."""
    for event in profiler.events():
        if event.device_type.name == "CUDA":
            yield event.name, 1, float(getattr(event, "device_time_total", 0.0) or event.time_range.elapsed_us())
