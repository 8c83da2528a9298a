"""Measures ds4-tiny by free generation through the engine, on held-out cases.

    PYTHONPATH=src python tools/tiny/evaluate.py --model FILE|embedded --cases 1000 --seed S --sampling greedy|default \
        [--tasks call,none,...] [--index-selection topk|random|all] [--processes N] [--json OUT]

Every answer is sampled token by token up to its end token and then judged (data/cases.py): a call must be valid DSML
with the right tool and the right arguments, an answer must hold what the tool result says, and so on. "think closed"
counts over all generated turns that began inside reasoning. Intervals are 95 % Wilson intervals. The result does not
depend on the number of processes.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import queue
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from data.cases import TASKS, Case, Cases
from data.generator import TOKENIZER
from tokenizers import Tokenizer as FastTokenizer

import ds4
from ds4.chat.dsml import DecodeState
from ds4.engine.sampling import Sampler

SHARE = 24  # prompts with at least this many common tokens evaluate them once
INDEX_SELECTIONS = ("topk", "random", "all")


@dataclass
class Job:
    """One case on its way: the session, what is still to be evaluated, what was generated in the present turn."""

    case: Case
    number: int
    ids: list[int]
    at: int = 0
    session: Any = None
    todo: list[int] = field(default_factory=list)
    made: list[int] = field(default_factory=list)
    sampler: Sampler | None = None
    state: DecodeState | None = None
    reason: str | None = None


@dataclass
class Outcome:
    """Counts of one task; `reasons` of its failures."""

    right: int = 0
    cases: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    thinking_turns: int = 0
    thinking_closed: int = 0
    tokens: int = 0
    seconds: float = 0.0
    failures: list[dict[str, str]] = field(default_factory=list)

    def add(self, other: Outcome) -> None:
        """Take over the counts of another part of the same task."""
        self.right += other.right
        self.cases += other.cases
        self.reasons += other.reasons
        self.thinking_turns += other.thinking_turns
        self.thinking_closed += other.thinking_closed
        self.tokens += other.tokens
        self.failures += other.failures


def common(a: list[int], b: list[int]) -> int:
    """Length of the common prefix."""
    n = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    return min(len(a), len(b)) if n is None else n


def admissions(engine: Any, jobs: list[Job], base: Any = None, depth: int = 0) -> Iterator[Job]:
    """Each job with a session that holds the prompt it shares with its neighbours; `jobs` sorted by their ids."""
    start = 0
    while start < len(jobs):
        end = start + 1
        while end < len(jobs) and common(jobs[start].ids[depth:], jobs[end].ids[depth:]) >= SHARE:
            end += 1
        group = jobs[start:end]
        if len(group) == 1:
            job = group[0]
            job.session = base.fork() if base is not None else engine.session()
            job.todo = job.ids[len(job.session.tokens) :]
            yield job
        else:
            shared = min(common(group[0].ids, other.ids) for other in group[1:])
            shared = min(shared, *(len(job.ids) - 1 for job in group))
            node = base.fork() if base is not None else engine.session()
            if shared > len(node.tokens):
                node.sync(group[0].ids[:shared])
            yield from admissions(engine, group, node, shared) if shared > depth else split_all(group, node)
            node.close()
        start = end


def split_all(group: list[Job], node: Any) -> Iterator[Job]:
    """Equal prompts: each a fork."""
    for job in group:
        job.session = node.fork()
        job.todo = job.ids[len(job.session.tokens) :]
        yield job


class Runner:
    """Generates the turns of many cases, a batch a step."""

    def __init__(
        self, engine: Any, sampling: ds4.Sampling, *, batch: int = 48, step_tokens: int = 768, max_tokens: int = 400
    ) -> None:
        self.engine, self.sampling = engine, sampling
        self.batch, self.step_tokens, self.max_tokens = batch, step_tokens, max_tokens
        self.tokenizer = engine.tokenizer

    def run(self, cases: list[Case], first: int = 0) -> Outcome:
        """Every case, all its turns as long as they are right; `first` is the number of the first one."""
        outcome = Outcome(cases=len(cases))
        jobs = [
            Job(case, n, self.tokenizer.encode_chat(case.prompt(case.turns[0]))) for n, case in enumerate(cases, first)
        ]
        for job in jobs:
            self.open_turn(job)
        waiting = admissions(self.engine, sorted(jobs, key=lambda job: job.ids))
        active: list[Job] = []
        more = True
        while more or active:
            while more and len(active) < self.batch:
                job = next(waiting, None)
                if job is None:
                    more = False
                else:
                    active.append(job)
            if not active:
                break
            self.step(active)
            for job in [j for j in active if not j.todo]:
                if self.advance(job, outcome):
                    job.session.close()
                    active.remove(job)
        return outcome

    def open_turn(self, job: Job) -> None:
        job.made = []
        seed = self.sampling.seed
        if seed is None:
            job.sampler = Sampler(self.sampling)
        else:
            job.sampler = Sampler(replace(self.sampling, seed=seed + 7919 * job.number + job.at + 1))
        job.state = DecodeState(job.case.thinking, job.case.dialog.tools) if job.case.dialog.tools else None

    def step(self, active: list[Job]) -> None:
        """Evaluate what is to be evaluated, at most `step_tokens` in all."""
        left = self.step_tokens
        items: list[tuple[Job, list[int]]] = []
        for job in sorted(active, key=lambda j: len(j.todo)):
            part = job.todo[:left]
            if part:
                items.append((job, part))
                left -= len(part)
        self.engine.step([(job.session, part) for job, part in items], logits="last")
        for job, part in items:
            job.todo = job.todo[len(part) :]

    def advance(self, job: Job, outcome: Outcome) -> bool:
        """Sample the next token of a job that is up to date; True if the case is finished."""
        assert job.sampler is not None
        greedy = job.state is not None and job.state.greedy
        token = job.sampler.sample(job.session.logits, greedy=greedy)
        if token != self.tokenizer.eos and len(job.made) < self.max_tokens:
            job.made.append(token)
            job.todo = [token]
            if job.state is not None:
                job.state.push(self.tokenizer.token_bytes(token))
            if job.state is None or not job.state.saw_end:
                return False
        turn = job.case.turns[job.at]
        text = self.tokenizer.decode(job.made).decode("utf-8", "replace")
        # As in the server, the end of a block of calls ends the turn.
        ended = token == self.tokenizer.eos or (job.state is not None and job.state.saw_end)
        outcome.tokens += len(job.made)
        if job.case.thinking:
            outcome.thinking_turns += 1
            outcome.thinking_closed += "</think>" in text
        reason = job.case.check(turn, text) if ended else "no end"
        if reason:
            outcome.reasons[reason.split(" lacks ")[0]] += 1
            gold = job.case.gold(turn)
            outcome.failures.append(
                {"reason": reason, "prompt": job.case.prompt(turn)[-600:], "gold": gold, "text": text}
            )
            return True
        job.at += 1
        if job.at == len(job.case.turns):
            outcome.right += 1
            return True
        job.case.accept(turn, text)
        ids = self.tokenizer.encode_chat(job.case.prompt(job.case.turns[job.at]))
        known = job.session.tokens
        if ids[: len(known)] != known:
            job.session.sync(ids[:-1])
        job.todo = ids[len(job.session.tokens) :]
        self.open_turn(job)
        return False


@dataclass(frozen=True)
class Plan:
    """What one worker process needs to know."""

    model: str
    selection: str
    sampling: ds4.Sampling
    seed: int
    count: int
    batch: int


def work(plan: Plan, parts: Queue[tuple[str, int, int] | None], done: Queue[tuple[str, Outcome | str]]) -> None:
    """A worker process: load the model once, then run parts of tasks until there are no more."""
    try:
        torch.set_num_threads(1)  # the processes share the cores
        engine = ds4.load(None if plan.model == "embedded" else plan.model, index_selection=plan.selection)
        cases = Cases(plan.seed, FastTokenizer.from_file(str(TOKENIZER)))
        runner = Runner(engine, plan.sampling, batch=plan.batch)
        while (part := parts.get()) is not None:
            task, start, end = part
            done.put((task, runner.run(cases.make(task, plan.count)[start:end], start)))
    except ds4.Ds4Error as error:
        done.put(("", str(error)))


def measure(plan: Plan, tasks: list[str], processes: int) -> dict[str, Outcome]:
    """The outcome of each task, made by worker processes in parts of the cases."""
    size = max(8, -(-plan.count // (3 * processes)))
    context = multiprocessing.get_context("spawn")
    parts, done = context.Queue(), context.Queue()
    todo = [(task, n, min(n + size, plan.count)) for task in tasks for n in range(0, plan.count, size)]
    for item in [*todo, *[None] * processes]:
        parts.put(item)
    workers = [context.Process(target=work, args=(plan, parts, done), daemon=True) for _ in range(processes)]
    for worker in workers:
        worker.start()
    outcomes = {task: Outcome() for task in tasks}
    started = time.monotonic()
    for _ in todo:
        task, outcome = wait_for(done, workers)
        outcomes[task].add(outcome)
        outcomes[task].seconds = time.monotonic() - started
        if outcomes[task].cases == plan.count:
            print(line(task, outcomes[task].right, plan.count), file=sys.stderr, flush=True)
    for worker in workers:
        worker.join()
    return outcomes


def wait_for(done: Queue[tuple[str, Outcome | str]], workers: list[Any]) -> tuple[str, Outcome]:
    """The next finished part; ends the program if a worker could not go on."""
    while True:
        try:
            task, outcome = done.get(timeout=5)
        except queue.Empty:
            if any(worker.exitcode not in (None, 0) for worker in workers):
                raise SystemExit("a worker process ended early: see its message above") from None
            continue
        if isinstance(outcome, str):
            raise SystemExit(outcome)
        return task, outcome


def wilson(right: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """95 % interval of a share."""
    if n == 0:
        return 0.0, 1.0
    p = right / n
    middle, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, (middle - half) / (1 + z * z / n)), min(1.0, (middle + half) / (1 + z * z / n))


def line(name: str, right: int, n: int, more: str = "") -> str:
    low, high = wilson(right, n)
    return (
        f"| {name} | {right} / {n} | {100 * right / max(n, 1):.1f} % | {100 * low:.1f} - {100 * high:.1f} % | {more} |"
    )


def report(outcomes: dict[str, Outcome]) -> str:
    """The table, one line a task, most frequent failures last."""
    rows = ["| task | right / cases | share | 95 % interval | failures |", "|---|---|---|---|---|"]
    for name, outcome in outcomes.items():
        rows.append(
            line(name, outcome.right, outcome.cases, ", ".join(f"{r} {n}" for r, n in outcome.reasons.most_common(4)))
        )
    turns, closed = sum(o.thinking_turns for o in outcomes.values()), sum(o.thinking_closed for o in outcomes.values())
    rows.append(line("think closed (turns)", closed, turns))
    return "\n".join(rows)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded", help="a GGUF file, or 'embedded' for the one that ships")
    parser.add_argument("--cases", type=int, default=1000, help="cases per task")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sampling", choices=("greedy", "default"), default="greedy")
    parser.add_argument("--tasks", default=",".join(TASKS), help="comma separated")
    parser.add_argument(
        "--index-selection", default="topk", help="comma separated, of topk, random, all: each for the recall tasks"
    )
    parser.add_argument("--batch", type=int, default=48, help="sessions stepped together")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="worker processes, one thread each")
    parser.add_argument("--json", help="write counts and up to 20 failures per task here")
    args = parser.parse_args(argv)
    tasks, selections = args.tasks.split(","), args.index_selection.split(",")
    unknown = [t for t in tasks if t not in TASKS] + [s for s in selections if s not in INDEX_SELECTIONS]
    if unknown:
        parser.error(
            f"unknown: {', '.join(unknown)}; tasks are {', '.join(TASKS)}, selections {', '.join(INDEX_SELECTIONS)}"
        )
    sampling = ds4.Sampling(temperature=0.0) if args.sampling == "greedy" else ds4.Sampling(seed=args.seed)
    outcomes: dict[str, Outcome] = {}
    for selection in selections:
        plan = Plan(args.model, selection, sampling, args.seed, args.cases, args.batch)
        wanted = [task for task in tasks if selection == "topk" or task.startswith("recall")]
        for task, outcome in measure(plan, wanted, args.processes).items():
            outcomes[task if selection == "topk" else f"{task} ({selection})"] = outcome
    print(report(outcomes))
    if args.json:
        rows = {
            name: {
                "right": o.right,
                "cases": o.cases,
                "interval": wilson(o.right, o.cases),
                "reasons": dict(o.reasons),
                "tokens": o.tokens,
                "thinking_turns": o.thinking_turns,
                "thinking_closed": o.thinking_closed,
                "seconds": round(o.seconds, 1),
                "failures": o.failures[:20],
            }
            for name, o in outcomes.items()
        }
        settings = {"model": args.model, "cases": args.cases, "seed": args.seed, "sampling": args.sampling}
        Path(args.json).write_text(
            json.dumps({**settings, "tasks": rows}, indent=1, ensure_ascii=False) + "\n", "utf-8"
        )


if __name__ == "__main__":
    main()
