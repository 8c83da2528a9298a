"""tiny: greedy texts of a small model against the CPU's."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gpu_checks import common
from gpu_checks.common import Report, error, random_ids, top_two

if TYPE_CHECKING:
    from ds4.engine import Engine

_NAMES = ("Ana", "Ben", "Chen", "Dora", "Emil", "Fatma", "Goran", "Hana")
_THINGS = ("lamp", "river", "boat", "garden", "bridge", "apple", "window", "horse", "paper", "mountain")
_LANDS = ("France", "Japan", "Italy", "Spain", "Egypt", "Norway", "Peru", "Canada")
_TEMPLATES = (
    "What is {a} + {b}?",
    "What is {b} - {a}?",
    "Which is larger, {a} or {b}?",
    "What is the capital of {land}?",
    "Hello, my name is {name}.",
    "Who are you, and who made you?",
    "What is a {thing}?",
    "Repeat after me: {thing} {other} {name}.",
    "The code word for the {thing} is {other}. What is the code word for the {thing}?",
    "Tell me a short story about {name} and the {thing}.",
    "List three things you can do with a {thing}.",
    "Write a Python function that returns {a} times x.",
    "What is the opposite of large?",
    "Spell the word {thing}.",
    "{name} has {a} {thing}s and buys {b} more. How many {thing}s does {name} have?",
    "Weisst du, was ein {thing} ist, {name}?",
)


def prompts(engine: Engine, count: int, seed: int) -> list[list[int]]:
    """Questions in the chat template, every fourth with thinking off; random ids for a model without a tokenizer."""
    generator = random.Random(seed)
    if not engine.has_tokenizer:
        return [random_ids(engine.shape, generator.randrange(3, 24), seed + i) for i in range(count)]
    from ds4.chat import render

    made = []
    for i in range(count):
        thing, other = generator.sample(_THINGS, 2)
        text = _TEMPLATES[i % len(_TEMPLATES)].format(
            a=generator.randrange(2, 60), b=generator.randrange(60, 200), land=generator.choice(_LANDS),
            name=generator.choice(_NAMES), thing=thing, other=other,
        )  # fmt: skip
        rendered = render([{"role": "user", "content": text}], thinking=i % 4 != 3)
        made.append(engine.tokenizer.encode_chat(rendered))
    return made


Greedy = tuple[list[int], list[float], Any]
"""Tokens, each one's lead over the next best, and the logits behind the prompt."""


def greedy(engine: Engine, batch: Sequence[list[int]], tokens: int) -> list[Greedy]:
    """Greedy continuations of prompts, in one batch; each ends with the end-of-sequence token."""
    eos = engine.tokenizer.eos if engine.has_tokenizer else -1
    sessions = [engine.session() for _ in batch]
    logits = []
    for session, ids in zip(sessions, batch, strict=True):
        session.sync(ids, boundaries=())
        logits.append(session.logits)
    made: list[Greedy] = [([], [], first) for first in logits]
    live = list(range(len(batch)))
    while live:
        for i in list(live):
            token, lead = top_two(logits[i])
            made[i][0].append(token)
            made[i][1].append(lead)
            if token == eos or len(made[i][0]) == tokens:
                live.remove(i)
        if live:
            for i, new in zip(live, engine.step([(sessions[i], [made[i][0][-1]]) for i in live]), strict=True):
                logits[i] = new
    for session in sessions:
        session.close()
    return made


_worker: Any = None


def _start_worker(path: Path | None, context: int, chunk: int) -> None:
    global _worker
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    _worker = common.cpu_engine(path, context, chunk, threads=1)


def _work(task: tuple[list[int], int]) -> Greedy:
    ids, tokens = task
    made, leads, first = greedy(_worker, [ids], tokens)[0]
    return made, leads, first.numpy()


def cpu_texts(
    path: Path | None, tasks: list[tuple[list[int], int]], options: argparse.Namespace
) -> Callable[[], list[Greedy]]:
    """Starts the CPU's texts on other processes; what is returned waits for them."""
    start = (path, options.context, 512)
    if not options.processes:
        _start_worker(*start)
        return lambda: [_work(task) for task in tasks]
    pool = multiprocessing.get_context("spawn").Pool(options.processes, _start_worker, start)
    pending = pool.map_async(_work, tasks, chunksize=2)

    def wait() -> list[Greedy]:
        try:
            return pending.get(timeout=600)
        finally:
            pool.terminate()

    return wait


def check_tiny(options: argparse.Namespace, report: Report) -> None:
    """Same greedy text as on the CPU, unless the two best tokens are within --tie of each other where it departs.

    The kernels of large models round activations to bytes, which the CPU does not. Texts are judged where an engine
    computes in float32, as it does by itself for a small model. With --bytes they are counted for the others too.
    """
    # The texts need the tokenizer only, so the CPU's are under way before the kernels are compiled.
    questions = prompts(_TokenizerOnly(common.open_file(options.file)), options.prompts, options.seed)
    start = time.perf_counter()
    wait = cpu_texts(options.file, [(ids, options.tokens) for ids in questions], options)
    expected: list[Greedy] | None = None
    for quality in (None, False) if options.bytes else (None,):
        config = common.config_of(options.context, max(options.batches) + 1, 512, quality=quality)
        engine = common.open_engine(options.device, options.file, config)
        mode = "float32" if engine.quality else "bytes"
        found = {}
        for batch in options.batches:
            begin, made = time.perf_counter(), []
            for first in range(0, len(questions), batch):
                if report.late(f"{mode} from text {first} on"):
                    break
                made += greedy(engine, questions[first : first + batch], options.tokens)
            seconds = time.perf_counter() - begin
            found[batch] = made
            report.line(f"{mode}, batch {batch}: {sum(len(t) for t, _, _ in made)} tokens in {seconds:.1f} s")
        if expected is None:
            expected = wait()
            count, seconds = sum(len(t) for t, _, _ in expected), time.perf_counter() - start
            report.line(f"CPU: {count} tokens; all in {seconds:.1f} s")
        for batch, texts in found.items():
            apart = _compare(report, mode, batch, texts, expected, options.tie) if texts else []
            if mode == "float32":
                report.judge(not apart and len(texts) == len(expected))


def _compare(
    report: Report, mode: str, batch: int, texts: Sequence[Greedy], expected: Sequence[Greedy], tie: float
) -> list[float]:
    """Counts one batch size; by how much the best token leads where texts depart and it is no tie."""
    import torch

    same = tied = steps = 0
    apart: list[float] = []
    errors = []
    for number, (here, there) in enumerate(zip(texts, expected, strict=False)):
        errors.append(error(here[2], torch.from_numpy(np.asarray(there[2]))))
        n = next((i for i, (a, b) in enumerate(zip(here[0], there[0], strict=False)) if a != b), None)
        steps += len(there[0]) if n is None else n
        if n is None:
            same += 1
            continue
        lead = min(here[1][n], there[1][n])
        departure = {"mode": mode, "batch": batch, "prompt": number, "step": n, "lead": lead}
        report.values.setdefault("departures", []).append(departure)
        if lead <= tie:
            tied += 1
        else:
            apart.append(lead)
    errors.sort()
    columns = ("mode", "batch", "texts", "same", "near-tied", "different", "steps same", "logits med", "logits max")
    row = (mode, batch, len(texts), same, tied, len(apart), steps, errors[len(errors) // 2], errors[-1])
    report.rows("texts", columns, row)
    if apart:
        report.line("  leads where they depart: " + " ".join(f"{lead:.3f}" for lead in sorted(apart)[::-1][:24]))
    return apart


class _TokenizerOnly:
    """As much of an engine as `prompts` needs."""

    def __init__(self, file: Any) -> None:
        from ds4.tokenizer import Tokenizer

        self.shape = file.shape
        self.has_tokenizer = "tokenizer.ggml.tokens" in file.metadata
        self.tokenizer: Any = Tokenizer.from_metadata(file.metadata) if self.has_tokenizer else None
