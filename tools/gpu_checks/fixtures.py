"""fixtures: logits and greedy texts of another engine on the same file."""

from __future__ import annotations

import argparse
import json
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from gpu_checks import common
from gpu_checks.common import Report, step, top_two

if TYPE_CHECKING:
    from ds4.engine import Engine, Session

COSINE = 0.99
"""Least cosine with the logits of the other engine."""
RMS = 0.6
"""Most rms difference of logits: beyond it nothing counts as tied, and the case fails."""


def check_fixtures(options: argparse.Namespace, report: Report) -> None:
    """Logits and greedy texts of another engine on the same file.

    The logits of two engines differ by rounding, which the tied routers of random weights amplify: by 0.27 rms where
    that engine is compared with its own exact kernels. A difference of two logits then moves by 1.4 times as much, so a
    token counts as near-tied if in the other engine's logits it is at most --tie times the rms difference of the same
    case behind the best. Of the texts each step is compared, always going on with the other engine's token. A case is
    right if the cosine is high enough, the rms difference is at most RMS, and each best token is the same or near-tied.
    """
    from check_full import compare

    stored = np.load(options.fixtures / f"{options.name}-reference.npz", allow_pickle=False)
    cases = [c for c in stored.files if not c.endswith("_tokens") and c != "long-quality"]
    if options.cases:
        cases = [c for c in cases if any(c.startswith(wanted) for wanted in options.cases.split(","))]
    cases.sort(key=lambda c: (c.startswith("frontier"), c != "short", c))
    longest = max([4096, *(int(c.split("_")[1]) for c in cases if c.startswith("frontier"))])
    config = common.config_of(longest + 256, 3, options.chunk)
    engine = common.open_engine(options.device, options.file, config, common.loading(report))
    text: list[int] = []
    frontier: Session | None = None
    columns = ("case", "tokens", "cosine", "rms", "std", "same top", "gap", "top 20", "tokens/s", "ok")
    for case in cases:
        if report.late(case):
            continue
        begin, held = time.perf_counter(), 0
        if case.startswith("frontier"):
            text = text or engine.tokenizer.encode((options.fixtures / "bench-33000.txt").read_text(encoding="utf-8"))
            ids = text[: int(case.split("_")[1])]
            session = frontier = frontier or engine.session()
            held = len(session.tokens)
        else:
            session, ids = engine.session(), _templated(stored[f"{case}_tokens"].tolist())
        session.sync(ids, boundaries=())
        logits = session.logits.numpy()
        rate = (len(ids) - held) / (time.perf_counter() - begin)
        for name in (case, "long-quality") if case == "long" and "long-quality" in stored.files else (case,):
            reference = stored[name]
            try:
                c = compare(logits, reference)
            except ValueError as problem:
                report.line(f"{name}: {problem}")
                report.judge(False)
                continue
            gap = float(reference.max() - reference[int(logits.argmax())])
            close = c.rms_difference <= RMS and gap <= options.tie * c.rms_difference
            ok = report.judge(c.cosine >= COSINE and close)
            row = (name, len(ids), c.cosine, c.rms_difference, float(reference.std()), c.same_top_1, gap)
            report.rows("logits", columns, (*row, c.shared_top_20, rate, ok))
        stored_text = options.fixtures / f"{options.name}-{case}.logprobs.json"
        if stored_text.exists():
            _continue(options, report, engine, session, case, json.loads(stored_text.read_text()))
        if session is not frontier:
            session.close()


def _templated(ids: list[int]) -> list[int]:
    """The question of a chat without system text, thinking off, in the V4 vocabulary."""
    return [0, 128803, *ids, 128804, 128822]


def _continue(
    options: argparse.Namespace, report: Report, engine: Engine, session: Session, case: str, expected: Any
) -> None:
    """Compare each greedy step, always going on with the other engine's token."""
    logits, same = session.logits, 0
    differences: list[float] = []
    departures: list[tuple[int, float, float]] = []
    for number, wanted in enumerate(expected["steps"]):
        theirs = int(wanted["selected"]["id"])
        scores = {int(t["token"]["id"]): float(t["logit"]) for t in wanted["top_logprobs"]}
        differences += [float(logits[id]) - score for id, score in scores.items()]
        ours, _ = top_two(logits)
        same += ours == theirs
        if ours != theirs:
            behind = scores[theirs] - scores[ours] if ours in scores else float("inf")
            departures.append((number, behind, float(logits[ours] - logits[theirs])))
        logits = step(engine, session, theirs)
    rms = float(np.sqrt(np.mean(np.square(differences))))
    apart = sum(behind > options.tie * rms for _, behind, _ in departures)
    report.judge(rms <= RMS and apart == 0)
    found = {"steps": len(expected["steps"]), "same": same, "near-tied": len(departures) - apart, "apart": apart}
    found |= {"rms": rms, "furthest / rms": max((behind / rms for _, behind, _ in departures), default=0.0)}
    report.values.setdefault("departures", {})[case] = departures
    report.rows("texts", ("text", *found), (case, *found.values()))
    if departures:
        report.line("  behind there/ahead here: " + " ".join(f"{n}:{a:.2f}/{b:.2f}" for n, a, b in departures))
