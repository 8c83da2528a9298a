"""`ds4 --bench`: tokens per second of prefill and decode at growing contexts, and the time to the first token."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np

from ds4.cli.diagnostics import STDOUT, write_json
from ds4.cli.options import BenchOptions, Options
from ds4.errors import Ds4Error

if TYPE_CHECKING:
    from ds4.engine import Engine, Session

Clock = Callable[[], float]

FIRST_TOKEN_QUESTION = "Hello"

_WARM_UP = 64
"""Tokens evaluated before anything is measured: the first products of a process are slow."""


@dataclass(frozen=True)
class Frontier:
    """What was measured at one length of context; speeds are medians in tokens per second.

    Attributes:
        context: tokens held when decoding began.
        prefilled: tokens of the measured prefill, from the frontier before to this one.
        decoded: tokens of the measured decoding, greedy.
        state_bytes: memory of the session's state.
    """

    context: int
    prefilled: int
    prefill_speed: float
    decoded: int
    decode_speed: float
    state_bytes: int


def run_bench(engine: Engine, options: Options, out: TextIO) -> int:
    """Measure and print; 0."""
    import torch

    bench = options.bench_options
    check_fits(engine, bench)
    threads = torch.get_num_threads()
    # The table is for people; where the JSON takes standard output it goes to the side.
    table = sys.stderr if bench.json == STDOUT else out
    table.write(f"{engine.shape.name}, {threads} CPU threads, medians of {bench.repeats}\n")
    table.write(f"{'context':>8} {'prefill':>9} {'tokens/s':>9} {'decode':>7} {'tokens/s':>9} {'state MiB':>10}\n")
    frontiers = []
    for row in measure(engine, bench):
        frontiers.append(row)
        table.write(
            f"{row.context:8} {row.prefilled:9} {row.prefill_speed:9.0f} {row.decoded:7} {row.decode_speed:9.1f}"
            f" {row.state_bytes / (1 << 20):10.2f}\n"
        )
        table.flush()
    seconds = first_token(options) if bench.first_token else None
    if seconds is not None:
        table.write(f"first token of a new process: {seconds:.2f} s\n")
    if bench.json:
        result: dict[str, Any] = {
            "model": options.model or "embedded",
            "profile": engine.shape.name,
            "threads": threads,
            "repeats": bench.repeats,
            "frontiers": [asdict(row) for row in frontiers],
            "first_token_seconds": seconds,
        }
        write_json(result, bench.json)
    return 0


def frontiers_of(bench: BenchOptions) -> list[int]:
    """The lengths of context at which is measured, ascending; the last one is `end`."""
    lengths, length = [], bench.start
    while length < bench.end:
        lengths.append(length)
        length = length + bench.increment if bench.increment else length * bench.multiply
    return [*lengths, bench.end]


def check_fits(engine: Engine, bench: BenchOptions) -> None:
    """Raise `Ds4Error` if the last frontier and its decoding do not fit the context."""
    needed = bench.end + bench.decode + 1
    if needed > engine.context:
        raise Ds4Error(
            f"the benchmark needs a context of {needed} tokens, but it has {engine.context}; lower --ctx-max"
        )


def measure(engine: Engine, bench: BenchOptions, clock: Clock = time.perf_counter) -> Iterator[Frontier]:
    """Walk the frontiers. Each run starts from a fork of the same session, so repeats do the same work.

    Raises:
        Ds4Error: the last frontier and its decoding do not fit the context.
    """
    check_fits(engine, bench)
    lengths = frontiers_of(bench)
    ids = bench_tokens(engine, lengths[-1])
    warm = engine.session()
    warm.sync(ids[:_WARM_UP])
    _decode(warm, 2, clock)
    warm.close()

    session = engine.session()
    for length in lengths:
        before = len(session.tokens)
        prefills, decodes = [], []
        for _ in range(bench.repeats):
            run = session.fork()
            start = clock()
            run.sync(ids[:length])
            prefills.append(clock() - start)
            size = run.state.nbytes
            if bench.decode:
                decodes.append(_decode(run, bench.decode, clock))
            run.close()
        session.sync(ids[:length])
        yield Frontier(
            context=length,
            prefilled=length - before,
            prefill_speed=_speed(length - before, prefills),
            decoded=bench.decode,
            decode_speed=_speed(bench.decode, decodes),
            state_bytes=size,
        )
    session.close()


def bench_tokens(engine: Engine, count: int) -> list[int]:
    """Token ids without meaning, the same ones every time, none of them special where there is a tokenizer."""
    special = set(engine.tokenizer.special.values()) if engine.has_tokenizer else set()
    usable = np.array([id for id in range(engine.shape.vocab) if id not in special])
    return [int(id) for id in np.random.default_rng(1).choice(usable, count)]


def first_token(options: Options, clock: Clock = time.perf_counter) -> float:
    """Seconds from the start of a new `ds4 -p` process to its first token; the median, after one run to warm up."""
    command = [sys.executable, "-m", "ds4.cli.main", "-p", FIRST_TOKEN_QUESTION, "-n", "1", "--nothink"]
    for flag, value in (
        ("-m", options.model),
        ("-c", options.context),
        ("-t", options.threads),
        ("--device", options.device),
    ):
        if value is not None:
            command += [flag, str(value)]
    seconds = [_time_to_output(command, clock) for _ in range(options.bench_options.repeats + 1)]
    return median(seconds[1:])


def _time_to_output(command: Sequence[str], clock: Clock) -> float:
    start = clock()
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        # An answer may begin with the end of the sequence: then the end of the output counts.
        process.stdout.read(1)
        seconds = clock() - start
        _, errors = process.communicate()
    if process.returncode:
        raise Ds4Error(f"the time to the first token could not be measured: {errors.decode(errors='replace').strip()}")
    return seconds


def _decode(session: Session, count: int, clock: Clock) -> float:
    """Seconds of `count` greedy steps."""
    start = clock()
    for _ in range(count):
        session.step(int(np.argmax(session.logits.numpy())))
    return clock() - start


def _speed(tokens: int, seconds: Sequence[float]) -> float:
    took = median(seconds) if seconds else 0.0
    return tokens / took if took > 0 else 0.0
