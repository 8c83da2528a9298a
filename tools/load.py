"""How a server behaves under load: many streams, clients that leave, and what HTTP costs.

    .venv/bin/python tools/load.py streams          200 clients for a minute, some of them slow
    .venv/bin/python tools/load.py disconnects      1,000 clients that leave anywhere
    .venv/bin/python tools/load.py steps            16 streams of a scripted model, with HTTP and without

Each starts a server of its own (`--flags` are flags for it), or takes the one at `--url`, prints what it measured and a
line for each bar, and returns 1 if one was missed. Answers are greedy, and are compared with those that the same server
gave to the same requests one by one before.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from load_client import APIS, Answer, Ask, Connection, Pace, StreamError, ask

from ds4.errors import Ds4Error

FIRST_BYTE = 1.5
"""Seconds within which an accepted stream has its first byte."""

FLAT = 0.05
"""Part by which memory may grow from the middle of a run to its end."""

STALL = 3.0
"""Seconds in which the model may evaluate nothing."""

SETTLE = 60.0
"""Seconds in which a server has to come to rest that nobody asks any more."""

LOOK = 0.5
"""Seconds between two looks at a server under load."""

HTTP_SHARE = 0.95
"""Part of the steps without HTTP that there must be with it."""

SLOW = Pace(256, 0.05)
TOPICS = ("2 + 3", "17 + 25", "the capital of Norway", "a short greeting", "counting to five", "the weather in Oslo")


# ---- servers --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def server(flags: Sequence[str]) -> Iterator[str]:
    """A server in a process of its own; its URL. Raises Ds4Error with the end of its log if it does not start."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "ds4.server.main", "--port", str(port), *flags]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stderr=log, env={**os.environ, "PYTHONUNBUFFERED": "1"})
        try:
            deadline = time.monotonic() + 120
            while not _lives(url):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise Ds4Error("the server did not start: " + log.read()[-2000:].decode(errors="replace"))
                time.sleep(0.1)
            yield url
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _lives(url: str) -> bool:
    try:
        return bool(read(url, "/health"))
    except OSError:
        return False


def read(url: str, path: str) -> dict[str, Any]:
    """A JSON document of a server."""
    try:
        # A proxy of the machine is not meant for its own servers.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(url + path, timeout=30) as answer:
            value: dict[str, Any] = json.load(answer)
            return value
    except urllib.error.HTTPError as error:
        raise Ds4Error(f"{url}{path} answers {error.code}: {error.read()[:500].decode(errors='replace')}") from None


def busy(numbers: dict[str, Any]) -> str:
    """What a server still does; empty: nothing runs or waits."""
    running, waiting = numbers["requests_running"], numbers["requests_waiting"]
    return f"{running} requests run and {waiting} wait for nobody" if running or waiting else ""


async def at_rest(url: str) -> dict[str, Any]:
    """The numbers of a server once nothing runs and waits in two looks, or those after SETTLE seconds."""
    deadline = time.monotonic() + SETTLE
    looks = 0
    while True:
        now = await asyncio.to_thread(read, url, "/stats")
        # A request may be on its way from its connection to the queue.
        looks = 0 if busy(now) else looks + 1
        if looks == 2 or time.monotonic() > deadline:
            return now
        await asyncio.sleep(0.05)


async def settled(url: str) -> dict[str, Any]:
    """The numbers of a server at rest. Raises Ds4Error if it does not come to that."""
    now = await at_rest(url)
    if busy(now):
        raise Ds4Error(busy(now))
    return now


def requests(tokens: int) -> list[Ask]:
    """Different requests to all APIs."""
    return [
        Ask(api, f"Tell me about {topic}, please.", tokens, thinking=bool(number % 2) and api != "completions")
        for number, topic in enumerate(TOPICS)
        for api in APIS
    ]


# ---- many streams ---------------------------------------------------------------------------------------------------


@dataclass
class Load:
    """What many streams did.

    Attributes:
        answers: those that ended as they should.
        first_bytes: seconds to the first byte of each.
        problems: what went wrong, and how often.
        memory: (second, resident bytes) of the server.
        stalls: longest time in which the server evaluated nothing, in seconds, as far as looks twice a second show.
            Of a server that could not be looked at up to the end neither is known: there is no memory, and `stalls` is
            not a number.
    """

    answers: list[Answer] = field(default_factory=list)
    first_bytes: list[float] = field(default_factory=list)
    problems: Counter[str] = field(default_factory=Counter)
    memory: list[tuple[float, int]] = field(default_factory=list)
    stalls: float = 0.0


async def references(url: str, asks: Sequence[Ask]) -> dict[Ask, Answer]:
    """The answers to requests, one by one."""
    return {one: await ask(url, one) for one in asks}


async def streams(
    url: str,
    wanted: dict[Ask, Answer],
    clients: int,
    slow: int,
    seconds: float,
    rounds: int | None = None,
    pace: Pace = SLOW,
) -> Load:
    """Let clients ask one request after another, `slow` of them reading at a slow pace, and compare the answers.

    A client takes `rounds` requests, or begins new ones for some seconds; all streams are read to their ends.
    """
    load = Load()
    begun = time.monotonic()

    async def client(number: int) -> None:
        chosen = random.Random(number)
        count = 0
        while (time.monotonic() - begun < seconds) if rounds is None else (count < rounds):
            count += 1
            one = chosen.choice(list(wanted))
            try:
                answer = await ask(url, one, pace if number < slow else None)
            except (OSError, StreamError) as error:
                load.problems[f"{one.api}: {type(error).__name__}: {error}"] += 1
                continue
            load.first_bytes.append(answer.first_byte)
            if answer == wanted[one]:
                load.answers.append(answer)
            else:
                load.problems[f"{one.api}: {answer} instead of {wanted[one]}"] += 1

    over = asyncio.Event()

    async def watch() -> None:
        known, moved = -1, begun
        ended = False
        while not ended:
            # The last look comes when all clients are done.
            ended = over.is_set()
            now = await asyncio.to_thread(read, url, "/stats")
            at = time.monotonic()
            load.memory.append((at - begun, now["process_resident_memory_bytes"]))
            done = now["step_seconds"]["count"] + now["prompt_tokens"]["evaluated"]
            if done != known:
                known, moved = done, at
            load.stalls = max(load.stalls, at - moved)
            if not ended:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(over.wait(), LOOK)

    watching = asyncio.create_task(watch())
    try:
        await asyncio.gather(*(client(number) for number in range(clients)))
        over.set()
        await asyncio.wait([watching])
    finally:
        watching.cancel()
    if error := watching.exception():
        load.problems[f"the server could not be watched: {type(error).__name__}: {error}"] += 1
        load.memory.clear()
        load.stalls = math.nan
    return load


def growth(memory: Sequence[tuple[float, int]]) -> float:
    """Part by which memory grew from the middle of a run to its end, each the mean of a few looks; nan: no looks."""
    values = [size for _, size in memory]
    if not values:
        return math.nan
    middle = values[len(values) // 2 :][:5]
    end = values[-5:]
    return (sum(end) / len(end)) / (sum(middle) / len(middle)) - 1


def quantile(values: Sequence[float], part: float) -> float:
    """The value below which a part of them is; nan: there are none."""
    ordered = sorted(values)
    return math.nan if not ordered else ordered[min(len(ordered) - 1, int(part * len(ordered)))]


async def run_streams(url: str, options: argparse.Namespace) -> bool:
    """Many clients for some time; whether all bars are met."""
    wanted = await references(url, requests(options.tokens))
    before = await settled(url)
    begun = time.monotonic()
    load = await streams(url, wanted, options.clients, options.slow, options.seconds)
    took = time.monotonic() - begun
    after = await settled(url)
    tokens = after["completion_tokens"] - before["completion_tokens"]
    steps = after["step_seconds"]["count"] - before["step_seconds"]["count"]
    print(
        f"{options.clients} clients ({options.slow} slow), {took:.0f} s: {len(load.answers)} answers, {tokens} tokens"
    )
    print(
        f"{tokens} tokens, {tokens / took:.0f} tokens/s, {steps / took:.1f} steps/s, {tokens / max(1, steps):.1f} each"
    )
    for part in (0.5, 0.9, 0.99, 1):
        print(f"first byte, {part:.0%} of the streams: {quantile(load.first_bytes, part):.2f} s")
    looks = load.memory[:: max(1, len(load.memory) // 10)]
    print("memory in MiB:", ", ".join(f"{at:.0f} s {size / 2**20:.0f}" for at, size in looks))
    for problem, count in load.problems.most_common(10):
        print(f"{count} times: {problem}")
    ends = {name: count - before["requests"][name] for name, count in after["requests"].items()}
    failed = {name: count for name, count in ends.items() if count and name not in ("stop", "length")}
    slowest = quantile(load.first_bytes, 1)
    # What is not a number meets no bar.
    return all(
        [
            bar("every stream ends, with no event lost and the answer that it has alone", not load.problems),
            bar(f"no request fails {failed or ''}", not failed),
            bar(f"the first byte of every stream within {FIRST_BYTE} s", slowest <= FIRST_BYTE),
            bar(
                f"the model goes on while clients read slowly (longest pause {load.stalls:.1f} s)", load.stalls < STALL
            ),
            bar(f"memory is flat ({growth(load.memory):+.1%} in the second half)", growth(load.memory) < FLAT),
        ]
    )


def bar(text: str, met: bool) -> bool:
    """Print whether a bar is met."""
    print(("met:    " if met else "MISSED: ") + text)
    return met


# ---- clients that leave ---------------------------------------------------------------------------------------------

PHASES = ("connected", "head", "body", "sent", "headers", "stream", "end")


async def leave(url: str, request: Ask, chosen: random.Random, patience: float) -> str:
    """One client that leaves in a random phase, which is returned."""
    phase = chosen.choice(PHASES)
    connection = await Connection.open(url, Pace(chosen.choice((64, 1024, 1 << 16))))
    try:
        head, body = request.head("load"), request.body()
        if phase == "connected":
            return phase
        if phase == "head":
            connection.writer.write(head[: chosen.randrange(1, len(head))])
        elif phase == "body":
            connection.writer.write(head + body[: chosen.randrange(len(body))])
        else:
            connection.writer.write(head + body)
        await connection.writer.drain()
        if phase in ("head", "body", "sent"):
            # From at once to somewhere in the queue, the prompt or the answer.
            await asyncio.sleep(patience * chosen.choice((0, chosen.random() / 50, chosen.random())))
            return phase
        await connection.head()
        events = {"headers": 0, "stream": chosen.randrange(1, 20), "end": 1 << 30}[phase]
        frames = connection.frames()
        while events and (frame := await anext(frames, None)) is not None:
            events -= 1
            if phase == "end" and ("[DONE]" in frame or "message_stop" in frame or "response.completed" in frame):
                return phase
        return phase
    finally:
        connection.close()


async def disconnects(
    url: str, asks: Sequence[Ask], times: int, together: int, seed: int, patience: float
) -> Counter[str]:
    """Let clients leave, some at the same time; how many left in which phase."""
    chosen = random.Random(seed)
    phases: Counter[str] = Counter()
    left = times

    async def client() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            phases[await leave(url, chosen.choice(asks), chosen, patience)] += 1

    await asyncio.gather(*(client() for _ in range(together)))
    return phases


async def together(url: str, asks: Sequence[Ask]) -> tuple[int, list[Answer]]:
    """The answers to all at once, and how many ran at the same time: a session that was not given back is missing."""
    answers = asyncio.gather(*(ask(url, one) for one in asks))
    peak = 0
    while not answers.done():
        peak = max(peak, (await asyncio.to_thread(read, url, "/stats"))["requests_running"])
    return peak, await answers


async def run_disconnects(url: str, options: argparse.Namespace) -> bool:
    """Many clients that leave; whether nothing of them stays."""
    asks = requests(options.tokens)
    wanted = await references(url, asks)
    before = await settled(url)
    phases = await disconnects(url, asks, options.times, options.clients, options.seed, options.patience)
    after = await at_rest(url)
    print("clients left:", ", ".join(f"{phase} {phases[phase]}" for phase in PHASES))
    ended = {name: count - before["requests"][name] for name, count in after["requests"].items()}
    print("requests ended:", ", ".join(f"{name} {count}" for name, count in ended.items() if count))
    peak, answers = await together(url, asks)
    wrong = [one for one, answer in zip(asks, answers, strict=True) if answer != wanted[one]]
    final = await at_rest(url)
    full = min(len(asks), int(final["sessions_limit"]))
    files = final["process_open_fds"] - before["process_open_fds"]
    memory = [value["process_resident_memory_bytes"] / 2**20 for value in (before, after, final)]
    print("memory in MiB before, after, at the end:", ", ".join(f"{size:.0f}" for size in memory))
    return all(
        [
            bar(
                f"{options.times} clients left, and nothing runs or waits for them {busy(after)}".strip(),
                not busy(after),
            ),
            bar(f"nor for the next ones {busy(final)}".strip(), not busy(final)),
            bar("no more sessions than may be live", final["sessions"] <= final["sessions_limit"]),
            bar(f"all of them can be used: {peak} of {full} ran at the same time", peak >= full),
            bar("no request failed", not (ended["failed"] or ended["overdue"] or ended["malformed"])),
            bar(f"the next requests are right {[one.text for one in wrong] or ''}", not wrong),
            bar(f"no connection is left open ({files:+d} files)", files <= 2),
        ]
    )


# ---- what HTTP costs ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pacing:
    """A run of equal streams of a scripted model: how many, and how long each is."""

    streams: int
    tokens: int
    step_ms: float

    def script(self) -> str:
        """Its script."""
        words = [f" word{number % 50}" for number in range(self.tokens)]
        return json.dumps({"pieces": ["</think>", *words], "step_ms": self.step_ms}) + "\n"

    def asks(self) -> list[Ask]:
        """Its requests."""
        return [
            Ask(APIS[number % len(APIS)], f"Stream {number}", self.tokens + 10, thinking=True)
            for number in range(self.streams)
        ]


async def paced(url: str, pacing: Pacing) -> float:
    """Steps a second of a server while all streams run."""
    begun = read(url, "/stats")["step_seconds"]["count"]
    start = time.monotonic()
    answers = await asyncio.gather(*(ask(url, one) for one in pacing.asks()))
    took = time.monotonic() - start
    if any(answer.tokens != pacing.tokens + 1 for answer in answers):
        raise Ds4Error(f"an answer has not {pacing.tokens + 1} tokens: {[answer.tokens for answer in answers]}")
    return float(read(url, "/stats")["step_seconds"]["count"] - begun) / took


def without_http(script: Path, pacing: Pacing) -> float:
    """Steps a second of the same run without HTTP: a worker that is given the requests at once."""
    from ds4.server.api.base import ApiContext
    from ds4.server.api.registry import APIS as SERVED
    from ds4.server.config import ServerConfig
    from ds4.server.request import Done, Failed
    from ds4.server.serve import load_backend
    from ds4.server.worker import Worker

    config = ServerConfig(scripted=script, max_sessions=pacing.streams, ctx=4096)
    worker = Worker(load_backend(config), config)
    context = ApiContext(config, worker.backend.name, worker.turns, worker.engine.shape.vocab)
    parsers = {api.path: api.parse for api in SERVED}
    ended: list[Done | Failed] = []
    for one in pacing.asks():
        request = parsers[one.path](json.loads(one.body()), context).request
        prompt = worker.prompts.prompt(request)
        worker.submit(request, prompt, lambda reply: ended.append(reply) if isinstance(reply, Done | Failed) else None)
    start = time.monotonic()
    worker.start()
    worker.wait_idle()
    took = time.monotonic() - start
    steps = worker.metrics.stats()["step_seconds"]["count"]
    worker.stop(10)
    if len(ended) != pacing.streams or not all(isinstance(end, Done) for end in ended):
        raise Ds4Error(f"not all requests ended well: {ended}")
    return float(steps) / took


def run_steps(options: argparse.Namespace) -> bool:
    """The steps of both kinds of run, in turns; whether HTTP costs little enough."""
    pacing = Pacing(options.streams, options.tokens, options.step_ms)
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "script.jsonl")
        script.write_text(pacing.script(), encoding="utf-8")
        flags = ["--scripted", str(script), "--max-sessions", str(pacing.streams), "--ctx", "4096", *options.flags]
        alone, served = [], []
        for _ in range(options.rounds):
            command = [sys.executable, __file__, "steps", "--without-http", str(script)]
            command += ["--streams", str(pacing.streams), "--tokens", str(pacing.tokens)]
            alone.append(float(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
            with server(flags) as url:
                served.append(asyncio.run(paced(url, pacing)))
    for kind, values in (("without HTTP", alone), ("with HTTP", served)):
        listed = ", ".join(f"{value:.1f}" for value in values)
        print(f"steps/s {kind}: {listed}; median {statistics.median(values):.1f}, best {max(values):.1f}")
    share = statistics.median(served) / statistics.median(alone)
    ceiling = 1000 / pacing.step_ms if pacing.step_ms else 0
    print(f"{pacing.streams} streams of {pacing.tokens} tokens; at most {ceiling:.0f} steps/s with this step_ms")
    print(f"of the best runs {max(served) / max(alone):.1%}")
    return bar(f"with HTTP {share:.1%} of the steps without it, by the medians", share >= HTTP_SHARE)


# ---- the command line -----------------------------------------------------------------------------------------------


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    many = commands.add_parser("streams", help="many clients, some of them slow")
    many.add_argument("--clients", type=int, default=200)
    many.add_argument("--slow", type=int, default=20, help="how many of them read slowly")
    many.add_argument("--seconds", type=float, default=60)
    many.add_argument("--tokens", type=int, default=24)
    gone = commands.add_parser("disconnects", help="clients that leave anywhere")
    gone.add_argument("--times", type=int, default=1000)
    gone.add_argument("--clients", type=int, default=20, help="how many at the same time")
    gone.add_argument("--patience", type=float, default=1.0, help="most seconds before one leaves that waits")
    gone.add_argument("--tokens", type=int, default=24)
    gone.add_argument("--seed", type=int, default=1)
    for command in (many, gone):
        command.add_argument("--url", help="a server that runs already; its model must answer greedily")
    steps = commands.add_parser("steps", help="what HTTP costs")
    steps.add_argument("--streams", type=int, default=16)
    steps.add_argument("--tokens", type=int, default=1500)
    steps.add_argument("--step-ms", type=float, default=3.3)
    steps.add_argument("--rounds", type=int, default=5, help="of each kind; their medians are compared")
    steps.add_argument("--without-http", type=Path, metavar="SCRIPT", help=argparse.SUPPRESS)
    for command in (many, gone, steps):
        command.add_argument(
            "--flags", type=shlex.split, default=[], help='for ds4-server: --flags="--max-sessions 64"'
        )
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run one of them; returns the exit code."""
    options = parse(arguments)
    try:
        if options.command == "steps":
            if options.without_http:
                print(without_http(options.without_http, Pacing(options.streams, options.tokens, 0)))
                return 0
            return 0 if run_steps(options) else 1
        measure = run_streams if options.command == "streams" else run_disconnects
        with contextlib.nullcontext(options.url) if options.url else server(options.flags) as url:
            return 0 if asyncio.run(measure(url, options)) else 1
    except (Ds4Error, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
