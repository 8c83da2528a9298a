"""speed: loading, prefill, decode, kernels, memory."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from gpu_checks import common
from gpu_checks.common import Report, numbers, random_ids, step, synchronize, top_two

if TYPE_CHECKING:
    from ds4.engine import Engine, Session

GIB = 1 << 30


def check_speed(options: argparse.Namespace, report: Report) -> None:
    """How fast the parts are, and what they take; nothing is judged.

    Kernels are compiled before, as a server does. A prompt of 4,096 tokens and the chunk sizes are medians of three
    runs behind one that does not count. Host memory is RssAnon of Linux: what the process holds beyond the mapped file.
    """
    import torch
    from check_full import MemoryPeak, anonymous_bytes

    from ds4.bench.decoding import Decoder, timed_decode
    from ds4.bench.meter import Meter

    on_gpu = options.device != "cpu"
    contexts, chunks, chunk = sorted(numbers(options.contexts)), numbers(options.chunks), options.chunk
    context = max(*contexts, options.prefill_tokens, options.first_token, *chunks) + 512
    layout = options.expert_layout
    config = common.config_of(context, options.batch + 3, max(chunk, *chunks), expert_layout=layout)
    if on_gpu:
        torch.zeros(1, device=options.device)
    before = anonymous_bytes()
    with MemoryPeak(0.05) as memory:
        engine = common.open_engine(options.device, options.file, config, common.loading(report))
        synchronize(options.device)
    runner: Any = engine.runner
    report.values["expert layout"] = engine.expert_layout
    report.line(f"layout of IQ2_XXS experts: {engine.expert_layout or 'there are none'}")
    begin = time.perf_counter()
    if on_gpu:
        engine.warm_up()
    report.values["warm-up seconds"] = time.perf_counter() - begin
    report.line(f"kernels compiled, steps captured: {report.values['warm-up seconds']:.1f} s")
    report.values |= {"anonymous GiB before loading": before / GIB, "anonymous GiB at most": memory.peak / GIB}
    report.line(f"host anonymous memory: {before / GIB:.2f} GiB before loading, {memory.peak / GIB:.2f} GiB at most")
    _memory(report, engine, options)
    ids = random_ids(engine.shape, context, options.seed)

    meter = Meter(torch.device(options.device))
    clock = meter.now

    def timed_prefill(session: Session, length: int, size: int) -> list[tuple[int, float]]:
        """(tokens in the session, when) at the start and after each chunk."""
        marks = [(len(session.tokens), clock())]
        prompt = [*session.tokens, *ids[len(session.tokens) : length]]
        session.sync(prompt, chunk=size, boundaries=(), progress=lambda done, _: marks.append((done, clock())))
        return marks

    def decode(sessions: Sequence[Session], steps: int) -> float:
        """Seconds of a greedy step."""
        Decoder(engine, sessions).steps(2)
        return timed_decode(engine, sessions, steps, meter) / steps

    def replay(sessions: Sequence[Session]) -> float:
        """Milliseconds of the captured step alone."""
        buffers = _fill(runner, sessions)
        if not on_gpu:
            return 0.0
        graph = runner._graph(buffers)
        _fill(runner, sessions)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        graph.replay()
        events[0].record()
        for _ in range(10):
            graph.replay()
        events[1].record()
        torch.cuda.synchronize()
        return events[0].elapsed_time(events[1]) / 10

    begin = clock()
    session = engine.session()
    session.sync(ids[: min(contexts[0], chunk)], chunk=chunk, boundaries=())
    report.line(f"first prefill of {len(session.tokens)}: {clock() - begin:.2f} s")
    begin = clock()
    step(engine, session, ids[contexts[0]])
    report.line(f"first decode: {clock() - begin:.3f} s")
    session.close()

    def prefills(count: int, size: int) -> list[float]:
        """Seconds of three prefills behind one that is not counted, to the logits on the host."""
        times = []
        for _ in range(4):
            session = engine.session()
            begin = clock()
            session.sync(ids[:count], chunk=size, boundaries=())
            top_two(session.logits)
            times.append(clock() - begin)
            session.close()
        return times[1:]

    if not report.late("first token"):
        count = options.first_token
        seconds = median(prefills(count, chunk))
        report.values["first token"] = {"tokens": count, "seconds": seconds}
        report.line(f"time to first token of {count}: {seconds:.3f} s ({count / seconds:.0f} t/s)")

    session = engine.session()
    columns = ("context", "prefill t/s", "last chunk", "batch", "decode t/s", "ms a step", "graph ms")
    for length in contexts:
        if report.late(f"context {length}"):
            break
        marks = timed_prefill(session, length, chunk)
        rate = (length - marks[0][0]) / (marks[-1][1] - marks[0][1])
        last = (marks[-1][0] - marks[-2][0]) / (marks[-1][1] - marks[-2][1])
        fork = session.fork()
        seconds = decode([fork], options.steps)
        row = (length, rate, last, 1, 1 / seconds, 1e3 * seconds, replay([fork]))
        fork.close()
        report.rows("contexts", columns, row)
        if length == options.batch_context and not report.late("batch"):
            forks = [session.fork() for _ in range(options.batch)]
            for number, each in enumerate(forks):
                step(engine, each, ids[number])
            seconds = decode(forks, options.steps)
            alone = replay(forks)
            row = (length, 0.0, 0.0, options.batch, options.batch / seconds, 1e3 * seconds, alone)
            report.rows("contexts", columns, row)
            buffers = _fill(runner, forks)
            if not report.late("profile of the batch"):
                _profile(report, f"batch of {options.batch}", lambda b=buffers: runner.model.decode(b), engine)
            for each in forks:
                each.close()
        if length in (contexts[0], contexts[-1]) and not report.late("profile of decode"):
            fork = session.fork()
            buffers = _fill(runner, [fork])
            _profile(report, f"decode at {length}", lambda b=buffers: runner.model.decode(b), engine)
            fork.close()
    session.close()

    for size in chunks:
        if report.late(f"chunk {size}"):
            break
        count = max(size, options.prefill_tokens // size * size)
        times = prefills(count, size)
        row = (size, count, count / median(times), count / max(times), count / min(times))
        report.rows("chunks", ("chunk", "tokens", "prefill t/s", "slowest", "fastest"), row)
    if not report.late("profile of prefill"):
        session = engine.session()
        _profile(report, f"prefill of {chunk}", lambda: engine.step([(session, ids[:chunk])]), engine)
        session.close()
    _memory(report, engine, options)


def _memory(report: Report, engine: Engine, options: argparse.Namespace) -> None:
    """What is held on the device now and was at most, and what the plan says of it."""
    import torch

    from ds4.engine.device import plan_for

    planned = plan_for(common.open_file(options.file), engine.config, 1 << 50).card_bytes / GIB
    found = {"planned": planned}
    if options.device != "cpu":
        free, total = torch.cuda.mem_get_info()
        found["allocated"] = torch.cuda.memory_allocated() / GIB
        found["allocated at most"] = torch.cuda.max_memory_allocated() / GIB
        found["reserved at most"] = torch.cuda.max_memory_reserved() / GIB
        found["used of the card"] = (total - free) / GIB
    report.values.setdefault("device GiB", []).append(found)
    report.line("device GiB: " + ", ".join(f"{name} {value:.2f}" for name, value in found.items()))


def _fill(runner: Any, sessions: Sequence[Session]) -> Any:
    """The buffers of a decode step of these sessions; they do not move on."""
    from ds4.model.cuda import runner as runners

    buffers = runner.model.buffers(len(sessions))
    rows = []
    for session in sessions:
        state: Any = session.state
        state.prepare(1)
        rows.append((state.length, state.slot, session.tokens[-1]))
    runners._fill(buffers, rows)
    return buffers


def _profile(report: Report, name: str, run: Callable[[], object], engine: Engine) -> None:
    """Kernels of a step: how many, and the ones that take most time."""
    import torch

    if not torch.cuda.is_available():
        run()
        return
    from torch.profiler import ProfilerActivity, profile

    from ds4.bench.kernels import cuda_kernels

    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    kernels: dict[str, list[float]] = {}
    for kernel, launches, us in cuda_kernels(profiler):
        entry = kernels.setdefault(kernel[:60], [0, 0.0])
        entry[0] += launches
        entry[1] += us
    count, total = sum(int(k[0]) for k in kernels.values()), sum(k[1] for k in kernels.values())
    layers = engine.shape.layers
    report.line(f"{name}: {count} kernels, {count / layers:.1f} a layer, {total / 1e3:.2f} ms in kernels")
    top = sorted(kernels.items(), key=lambda item: -item[1][1])[:40]
    report.values.setdefault("profiles", {})[name] = {"kernels": count, "us": total, "top": top}
    for kernel, (times, us) in top[:12]:
        report.line(f"   {us:9.0f} us {us / total:5.1%} {times:5.0f} x {us / times:8.1f} us  {kernel[:44]}")
    report.save()
