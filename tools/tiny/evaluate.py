"""Measures ds4-tiny by free generation through the engine, on held-out cases.

    python tools/tiny/evaluate.py --model FILE|embedded --cases 1000 --seed S --sampling greedy|default \
        [--tasks call,none,...] [--index-selection topk,random,all] [--processes N] [--json OUT [--within SECONDS]]
    python tools/tiny/evaluate.py --table GREEDY.json DEFAULT.json

Every answer is sampled token by token up to its end token and then judged (data/cases.py): a call must be valid DSML
with the right tool and the right arguments, an answer must hold what the tool result says, and so on. "think closed"
counts over all generated turns that began inside reasoning. Intervals are 95 % Wilson intervals. The result depends
neither on the number of processes nor on the number of sessions stepped together.

With --json every finished part is written at once, and the same command goes on where it was stopped; --within stops it
in time. A file with results of another model, seed or sampling is not continued but refused. --table prints such files
as the table of docs/ds4-tiny.md.
"""

from __future__ import annotations

import argparse
import hashlib
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

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from data.cases import TASKS, Case, Cases
from data.generator import TOKENIZER
from explain import explain
from tokenizers import Tokenizer as FastTokenizer

import ds4
from ds4.chat.dsml import DecodeState
from ds4.engine.sampling import Sampler
from ds4.gguf.file import embedded_model_path

SHARE = 24  # prompts with at least this many common tokens evaluate them once
INDEX_SELECTIONS = ("topk", "random", "all")
PART = 40  # cases that a process runs together
SHOWN = 3  # failures of a part that are kept in full
# The rows of the table: task, what is right, the bar in percent.
ROWS = (
    ("call", "one call: right tool, all arguments right, valid DSML", 93),
    ("none", "no tool fits: no call", None),
    ("parallel", "two or three calls at once", 80),
    ("chain", "a chain of two calls and the answer", 80),
    ("result", "a tool's result used rightly in the answer", 88),
    ("result_json", "the same, JSON with more keys than needed", None),
    ("arithmetic", "arithmetic of its range", 95),
    ("chat", "chat", None),
    ("think closed", "`</think>` closed (turns)", 99),
    ("recall_window", "recall inside the window of 128 tokens", None),
    ("recall_near", "recall over 150 to 600 tokens", None),
    ("recall_near (random)", "... indexer replaced by random rows", None),
    ("recall_near (all)", "... indexer replaced by all rows", None),
    ("recall_far", "recall over 1,500 to 3,000 tokens", 80),
    ("recall_far (random)", "... indexer replaced by random rows", None),
    ("recall_far (all)", "... indexer replaced by all rows", None),
)


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
    """Counts of some cases of one task; `reasons` of the checker and finer `kinds` of the failures."""

    right: int = 0
    cases: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    thinking_turns: int = 0
    thinking_closed: int = 0
    tokens: int = 0
    seconds: float = 0.0
    failures: list[dict[str, str]] = field(default_factory=list)

    def __iadd__(self, other: Outcome) -> Outcome:
        """Take over the counts of another part of the same task."""
        self.right += other.right
        self.cases += other.cases
        self.reasons += other.reasons
        self.kinds += other.kinds
        self.thinking_turns += other.thinking_turns
        self.thinking_closed += other.thinking_closed
        self.tokens += other.tokens
        self.seconds += other.seconds
        self.failures += other.failures
        return self


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
            case, prompt = job.case, str(job.case.prompt(turn))
            kind = explain(case.dialog.checks[turn], reason, text, case.thinking, case.dialog.tools, prompt)
            outcome.reasons[reason.split(" lacks ")[0]] += 1
            outcome.kinds[kind] += 1
            outcome.failures.append(
                {"reason": reason, "kind": kind, "prompt": prompt[-600:], "gold": case.gold(turn), "text": text}
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
    """What one worker process needs to know. `deadline` is a time.monotonic()."""

    model: str
    sampling: ds4.Sampling
    seed: int
    count: int
    batch: int
    deadline: float = math.inf


@dataclass(frozen=True)
class Part:
    """Cases `start` to `end` of a task, under one selection of the indexer."""

    task: str
    selection: str
    start: int
    end: int

    @property
    def name(self) -> str:
        """The row of the table."""
        return self.task if self.selection == "topk" else f"{self.task} ({self.selection})"


class Results:
    """Finished parts, in a file if there is one: settings, tasks (name: summary), parts (name: first case: counts)."""

    def __init__(self, settings: dict[str, Any], path: Path | None = None) -> None:
        self.settings, self.path = settings, path
        self.parts: dict[str, dict[str, Outcome]] = {}
        if path is None or not path.is_file():
            return
        found = json.loads(path.read_text("utf-8"))
        differing = [key for key, value in settings.items() if found.get(key) != value]
        if differing:
            raise SystemExit(f"{path} holds results with another {differing[0]}: give another file, or delete it")
        for name, parts in found["parts"].items():
            self.parts[name] = {start: outcome_of(values) for start, values in parts.items()}

    def has(self, part: Part) -> bool:
        return str(part.start) in self.parts.get(part.name, {})

    def add(self, part: Part, outcome: Outcome) -> None:
        outcome.failures = outcome.failures[:SHOWN]
        self.parts.setdefault(part.name, {})[str(part.start)] = outcome
        self.write()

    def outcomes(self) -> dict[str, Outcome]:
        """The sum of each task's parts, in the order of the table."""
        order = [name for name, _, _ in ROWS]
        sums = {}
        for name in sorted(self.parts, key=order.index):
            sums[name] = Outcome()
            for start in sorted(self.parts[name], key=int):
                sums[name] += self.parts[name][start]
        return sums

    def write(self) -> None:
        """The whole file, by renaming: a stopped process leaves a complete one."""
        if self.path is None:
            return
        tasks = {
            name: {"right": o.right, "cases": o.cases, "interval": wilson(o.right, o.cases), "kinds": dict(o.kinds)}
            for name, o in self.outcomes().items()
        }
        parts = {name: {start: vars(o) for start, o in some.items()} for name, some in self.parts.items()}
        text = json.dumps({**self.settings, "tasks": tasks, "parts": parts}, indent=1, ensure_ascii=False)
        new = self.path.with_suffix(".new")
        new.write_text(text + "\n", "utf-8")
        os.replace(new, self.path)


def outcome_of(values: dict[str, Any]) -> Outcome:
    return Outcome(**{**values, "reasons": Counter(values["reasons"]), "kinds": Counter(values["kinds"])})


def work(plan: Plan, parts: Queue[Part | None], done: Queue[tuple[Part | None, Outcome | str]]) -> None:
    """A worker process: run parts until there are no more, or the time is over."""
    try:
        torch.set_num_threads(1)  # the processes share the cores
        cases = Cases(plan.seed, FastTokenizer.from_file(str(TOKENIZER)))
        path = None if plan.model == "embedded" else plan.model
        made: tuple[str, list[Case]] = ("", [])
        engine, selection = None, ""
        while time.monotonic() < plan.deadline and (part := parts.get()) is not None:
            if engine is None or part.selection != selection:
                engine, selection = ds4.load(path, index_selection=part.selection), part.selection  # type: ignore[arg-type]
            if part.task != made[0]:
                made = (part.task, cases.make(part.task, plan.count))
            begin = time.monotonic()
            outcome = Runner(engine, plan.sampling, batch=plan.batch).run(made[1][part.start : part.end], part.start)
            outcome.seconds = time.monotonic() - begin
            done.put((part, outcome))
        done.put((None, ""))
    except ds4.Ds4Error as error:
        done.put((None, str(error)))


def measure(plan: Plan, todo: list[Part], processes: int, results: Results) -> None:
    """Runs the parts in worker processes and adds what they find to `results`."""
    context = multiprocessing.get_context("spawn")
    processes = min(processes, len(todo))
    parts, done = context.Queue(), context.Queue()
    for item in [*todo, *[None] * processes]:
        parts.put(item)
    workers = [context.Process(target=work, args=(plan, parts, done), daemon=True) for _ in range(processes)]
    for worker in workers:
        worker.start()
    left = Counter(part.name for part in todo)
    running = processes
    while running:
        part, outcome = wait_for(done, workers)
        if part is None:
            running -= 1
            if outcome:
                raise SystemExit(outcome)
            continue
        results.add(part, outcome)
        left[part.name] -= 1
        if not left[part.name]:
            whole = results.outcomes()[part.name]
            print(line(part.name, whole.right, whole.cases), file=sys.stderr, flush=True)
    parts.cancel_join_thread()  # what is left after the deadline need not be read
    for worker in workers:
        worker.join()


def wait_for(done: Queue[tuple[Part | None, Any]], workers: list[Any]) -> tuple[Part | None, Any]:
    """The next message of a worker; ends the program if a worker could not go on."""
    while True:
        try:
            return done.get(timeout=5)
        except queue.Empty:
            if any(worker.exitcode not in (None, 0) for worker in workers):
                raise SystemExit("a worker process ended early: see its message above") from None


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
            line(name, outcome.right, outcome.cases, ", ".join(f"{r} {n}" for r, n in outcome.kinds.most_common(5)))
        )
    closed = thinking(outcomes)
    rows.append(line("think closed (turns)", closed.right, closed.cases))
    return "\n".join(rows)


def thinking(outcomes: dict[str, Outcome]) -> Outcome:
    """How many of the turns that began inside reasoning closed it, the real indexer's alone."""
    some = [o for name, o in outcomes.items() if "(" not in name]
    return Outcome(right=sum(o.thinking_closed for o in some), cases=sum(o.thinking_turns for o in some))


def table(paths: list[Path]) -> str:
    """Saved results as the table of docs/ds4-tiny.md: a column for each file, 95 % intervals in brackets."""
    columns, heads = [], []
    for path in paths:
        found = json.loads(path.read_text("utf-8"))
        results = Results({}, path)
        outcomes = results.outcomes()
        columns.append({**outcomes, "think closed": thinking(outcomes)})
        heads.append(f"{found['sampling']}, seed {found['seed']}")
    rows = [f"| task | wanted | {' | '.join(heads)} |", "|---|" + "---|" * (len(heads) + 1)]
    for name, text, bar in ROWS:
        cells = []
        for column in columns:
            one = column.get(name)
            if one is None or not one.cases:
                cells.append("")
                continue
            low, high = wilson(one.right, one.cases)
            share = 100 * one.right / one.cases
            cells.append(f"{one.right} / {one.cases} = {share:.1f} % ({100 * low:.1f} to {100 * high:.1f})")
        if any(cells):
            rows.append(f"| {text} | {f'{bar} %' if bar else ''} | {' | '.join(cells)} |")
    return "\n".join(rows)


def main(argv: list[str] | None = None) -> int:
    """0: everything is measured; 2: the time was over before."""
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
    parser.add_argument(
        "--json", type=Path, help="file of results, written after every part and continued if it is there"
    )
    parser.add_argument("--within", type=float, default=math.inf, help="begin no new part after this many seconds")
    parser.add_argument("--done", type=Path, help="file to make when everything is measured")
    parser.add_argument("--table", nargs="+", type=Path, metavar="JSON", help="print saved results as a table")
    parser.add_argument("--out", type=Path, help="file for that table")
    args = parser.parse_args(argv)
    if args.table:
        text = table(args.table)
        print(text)
        if args.out:
            args.out.write_text(text + "\n", "utf-8")
        return 0
    tasks, selections = args.tasks.split(","), args.index_selection.split(",")
    unknown = [t for t in tasks if t not in TASKS] + [s for s in selections if s not in INDEX_SELECTIONS]
    if unknown:
        parser.error(
            f"unknown: {', '.join(unknown)}; tasks are {', '.join(TASKS)}, selections {', '.join(INDEX_SELECTIONS)}"
        )
    deadline = time.monotonic() + args.within
    sampling = ds4.Sampling(temperature=0.0) if args.sampling == "greedy" else ds4.Sampling(seed=args.seed)
    file = embedded_model_path() if args.model == "embedded" else Path(args.model)
    if not file.is_file():
        parser.error(f"{file}: there is no such file")
    digest = hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    settings = {"model": digest, "cases": args.cases, "seed": args.seed, "sampling": args.sampling}
    results = Results(settings, args.json)
    wanted = [(task, s) for s in selections for task in tasks if s == "topk" or task in ("recall_near", "recall_far")]
    every = [Part(t, s, n, min(n + PART, args.cases)) for t, s in wanted for n in range(0, args.cases, PART)]
    todo = [part for part in every if not results.has(part)]
    if todo:
        measure(Plan(args.model, sampling, args.seed, args.cases, args.batch, deadline), todo, args.processes, results)
    print(report(results.outcomes()))
    missing = sum(not results.has(part) for part in every)
    if missing:
        print(f"not finished: {missing} of {len(every)} parts are missing; the same command goes on", file=sys.stderr)
        return 2
    if args.done:
        args.done.touch()
    return 0


if __name__ == "__main__":
    sys.exit(main())
