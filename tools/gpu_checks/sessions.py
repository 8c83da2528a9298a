"""sessions: however a state came about, it gives the same bits."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gpu_checks import common
from gpu_checks.common import Report, error, random_ids, step

if TYPE_CHECKING:
    from ds4.engine import Session

BUCKETS = (1, 2, 4, 8, 16, 32, 64)
"""Rows of a decode step: the sessions are filled up to one of these."""


def check_sessions(options: argparse.Namespace, report: Report) -> None:
    """Fork, rewind, truncate, edit, export, batch: the same chunks and the same bucket give the same bits.

    With --bytes a model that computes in float32, as a small one does by itself, is checked as large ones are, too.
    """
    for quality in (None, False) if options.bytes else (None,):
        _check(options, report, quality)


def _check(options: argparse.Namespace, report: Report, quality: bool | None) -> None:
    rows, n, chunk = options.batch, options.length, options.chunk
    config = common.config_of(n + 2 * options.steps + 256, rows + 6, chunk, chunk, quality=quality)
    engine = common.open_engine(options.device, options.file, config)
    mode = "float32" if engine.quality else "bytes"
    report.line(f"loaded at {report.seconds:.1f} s, computes in {mode}")
    ids, more = random_ids(engine.shape, n, options.seed), random_ids(engine.shape, options.steps, options.seed + 1)
    cut = max(1, min(12, options.steps - 1))
    began = time.perf_counter()

    def fresh(prompt: Sequence[int] = ids) -> Session:
        session = engine.session()
        session.sync(prompt, boundaries=())
        return session

    def decode(session: Session, tokens: Sequence[int]) -> list[Any]:
        return [step(engine, session, token) for token in tokens]

    def compare(name: str, here: Sequence[Any], there: Sequence[Any]) -> None:
        nonlocal began
        worst = max(float((a - b).abs().max()) for a, b in zip(here, there, strict=True))
        bits = all(np.array_equal(_bits(a), _bits(b)) for a, b in zip(here, there, strict=True))
        finite = all(bool(b.isfinite().all()) for b in there)
        ok = report.judge(bits and finite)
        now = time.perf_counter()
        columns = ("mode", "same bits", "largest", "seconds", "what")
        report.rows("sessions", columns, (mode, ok, worst, now - began, name))
        began = now

    first = fresh()
    start = first.logits
    compare("prefill of the same prompt again", [(again := fresh()).logits], [start])
    first.checkpoint()
    fork, base = first.fork(), first.fork()
    reference = decode(first, more)
    compare("decode after the same prefill", decode(again, more), reference)
    compare("fork, decoded after its origin", decode(fork, more), reference)
    first.truncate(n + options.steps - cut)
    compare("truncate, decode the same", decode(first, more[-cut:]), reference[-cut:])
    first.rewind(n)
    compare("rewind to a checkpoint", [first.logits], [start])
    compare("decode after the rewind", decode(first, more[:4]), reference[:4])
    moved = engine.session()
    moved.import_state(again.tokens, again.export())
    compare("export and import", [step(engine, moved, 5)], [step(engine, again, 5)])
    for session in (fork, moved, again):
        session.close()

    edit = n // 2 + 3
    changed = [*ids[:edit], *random_ids(engine.shape, n - edit, options.seed + 2)]
    first.sync(changed, boundaries=())
    again = fresh(changed)
    report.line(f"edit at {edit}: {first.reused} tokens reused, {first.recomputed} evaluated")
    compare("prompt edited in the middle", [first.logits], [again.logits])
    compare("decode after the edit", decode(first, more[:4]), decode(again, more[:4]))
    for session in (first, again):
        session.close()

    def company(order: Sequence[int]) -> dict[int, list[Any]]:
        """The logits of forks that went on differently and at different lengths, and decode together."""
        sessions = {}
        for i in order:
            sessions[i] = base.fork()
            engine.step([(sessions[i], random_ids(engine.shape, 2 + i % 5, i))], "none")
        logits: dict[int, list[Any]] = {i: [] for i in order}
        for token in more[:4]:
            step_of = engine.step([(sessions[i], [token + i]) for i in order])
            for i, value in zip(order, step_of, strict=True):
                logits[i].append(value)
        for session in sessions.values():
            session.close()
        return logits

    places = list(range(rows))
    bucket = next(size for size in BUCKETS if size >= rows)
    few = max((rows + bucket // 2) // 2, bucket // 2 + 1)  # fills the same bucket up
    together = company(places)
    backwards = company(places[::-1])
    fewer = company(places[:few])

    def flat(found: dict[int, list[Any]], some: Sequence[int]) -> list[Any]:
        return [value for i in some for value in found[i]]

    compare(f"{rows} in a batch, the other way round", flat(backwards, places), flat(together, places))
    compare(f"{few} of them, also in the bucket of {bucket}", flat(fewer, places[:few]), flat(together, places[:few]))
    alone = company([1])[1]
    worst = max(error(a, b) for a, b in zip(alone, together[1], strict=True))
    report.line(f"alone against in a batch of {rows} (another bucket): relative error {worst:.2e}")
    report.values["bucket error"] = worst


def _bits(tensor: Any) -> Any:
    return tensor.contiguous().numpy().view(np.uint32)
