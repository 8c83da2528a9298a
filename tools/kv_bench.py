"""What states on disk cost: bytes written, how long a save holds up the engine, how long a restart takes.

    .venv/bin/python tools/kv_bench.py segments              a 100,000-token conversation, stored every 10,000 tokens
    .venv/bin/python tools/kv_bench.py restart               a server is killed, and goes on with its conversations
    .venv/bin/python tools/kv_bench.py device                restoring into the memory of a CUDA device, and steps while
                                                             a state of 100,000 tokens is saved

Each prints its numbers, with the bars that they are held against, and returns 1 if one was missed. `segments` fills
states of the shape Flash (or `--shape`) with random rows, without a model: what is stored and how is the real thing;
its times are those of the CPU, and have no bars. `restart` runs ds4-server with the embedded model, kills it with
SIGKILL, and looks at what the next one reuses; of a shorter prompt (`--tokens`) a new question alone may be more than
1 %. `device` needs no model either: its pool has the shape Flash (or `--shape`) and random rows, and its steps are
products of matrices in a CUDA graph that take `--step-ms`. With `--device cpu` it shows that all of it works, and its
numbers mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ds4.engine import Engine, Snapshot
from ds4.engine.device import choose
from ds4.engine.packing import Part, Receiver, Segment, Target, fingerprint, pack, target
from ds4.errors import Ds4Error
from ds4.gguf.file import Identity
from ds4.gguf.shape import PROFILES, Shape
from ds4.kvstore.container import Reason
from ds4.kvstore.disk import Files
from ds4.kvstore.reading import Entry
from ds4.kvstore.store import NewState, Store
from ds4.model.cache import Checkpoint, KVCache, SequenceState
from ds4.model.cuda.pool import DeviceCache
from ds4.server.disk import SWITCH_SECONDS

MAX_WRITTEN = 1.5
MAX_HELD_MS = 10.0
MAX_RESTORE_S = {100_000: 0.25, 24_576: 0.06}
MIN_REUSED = 0.99
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]


class RandomCodec:
    """The codec of a shape without a model."""

    quant_bits = 0

    def __init__(self, shape: Shape, receive: Callable[[int], Receiver]) -> None:
        self.shape, self._receive = shape, receive
        self.fingerprint = fingerprint(shape, Identity("random"))

    def of(self, engine: Engine) -> RandomCodec:
        """See `StateCodec`."""
        return self

    def parts(self, snapshot: Snapshot, start: int) -> Iterator[Part]:
        """See `StateCodec`."""
        return pack(self.shape, snapshot, start)

    def target(self, segments: Sequence[Segment]) -> Target:
        """See `StateCodec`."""
        return target(self.shape, segments, self._receive)


def grow(state: SequenceState, tokens: int) -> None:
    """Add random rows as an evaluation of so many tokens would."""
    cache = state.cache
    state.prepare(tokens)
    for layer, ratio in enumerate(cache.shape.ratios):
        if ratio:
            first, end = state.length // ratio, (state.length + tokens) // ratio
            for kind, width in cache.frontier_kinds(layer).items():
                state.append(layer, kind, first, torch.randn(end - first, width))
    state.advance(tokens)


def segments(options: argparse.Namespace) -> int:
    """Store a growing state and load it."""
    shape = next(shape for shape in PROFILES if shape.name == options.shape)
    cache = KVCache(shape, True)
    state = cache.new_state()
    rng, tokens = random.Random(0), [0] * 0
    logits = torch.zeros(shape.vocab)
    codec = RandomCodec(shape, cache.receive)
    written, held, saved = 0, [], []
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        store = Store(Files(directory), codec)
        parent = None
        for n in range(options.step, options.tokens + 1, options.step):
            while state.length < n:
                grow(state, min(2000, n - state.length))
            tokens += [rng.randrange(shape.vocab) for _ in range(n - len(tokens))]
            began = time.perf_counter()
            snapshot = Snapshot(tuple(tokens), state.checkpoint(logits), state.hold(n))
            held.append(1000 * (time.perf_counter() - began))
            began = time.perf_counter()
            key = b"text" * n
            parts = lambda start, snapshot=snapshot: codec.parts(snapshot, start)  # noqa: E731
            parent = store.put(NewState(key, snapshot.tokens, parts, Reason.CONTINUED, parent))
            saved.append(time.perf_counter() - began)
            snapshot.release()
            if parent is None:
                print("a state was not stored")
                return 1
            written += parent.size
            print(f"{n:8} tokens: {parent.size / 2**20:8.1f} MiB in {saved[-1]:.2f} s, held up for {held[-1]:.1f} ms")
        snapshot = Snapshot(tuple(tokens), state.checkpoint(logits), state.hold(len(tokens)))
        whole = sum(part.size for part in codec.parts(snapshot, 0))
        snapshot.release()
        ok = bar("bytes written / size of the whole state", written / whole, MAX_WRITTEN)
        print(f"longest time that a save held up the thread of the engine: {max(held):.1f} ms")
        best = []
        for _ in range(options.repeats):
            began = time.perf_counter()
            assert parent is not None
            _, exported = store.load(parent)
            read = time.perf_counter() - began
            other = KVCache(shape, True).new_state()
            other.import_state(exported)
            best.append((time.perf_counter() - began, read))
        seconds, read = min(best)
        print(f"read and checked in {read:.3f} s, from the page cache, all segments: {written / 2**20:.0f} MiB")
        print(f"usable after {seconds:.3f} s (CPU)")
    return 0 if ok else 1


def bar(name: str, value: float, limit: float, least: bool = False) -> bool:
    """Print a number and whether it keeps its limit."""
    kept = value >= limit if least else value <= limit
    print(f"{name}: {value:.4g} ({'at least' if least else 'at most'} {limit:g}): {'ok' if kept else 'MISSED'}")
    return kept


# ---- a device --------------------------------------------------------------------------------------------------------


class StandIn:
    """What decodes without weights: a pool of a shape, and steps that take as long as those of a model.

    Attributes:
        state: a sequence of random rows.
    """

    def __init__(self, shape: Shape, device: torch.device, tokens: int, step_ms: float) -> None:
        self.shape, self.device = shape, device
        self.cache = DeviceCache(shape, device, 3, tokens + 32_768)
        self.codec = RandomCodec(shape, self.cache.receive)
        self._lanes = self.cache.lanes
        self.state = self.cache.new_state()
        self.state.prepare(tokens)
        self.state.advance(tokens)
        generator = torch.Generator().manual_seed(0)
        for pool in self.cache.pools.values():
            for page in range(pool.used_pages):
                pool.write([page], torch.randint(0, 100, (1, pool.page_bytes), generator=generator, dtype=torch.uint8))
        self.tokens = [7] * tokens
        self._logits = torch.zeros(shape.vocab, device=device)
        side = 4096 if device.type == "cuda" else 512
        self._matrices = [torch.randn(side, side, device=device) for _ in range(3)]
        self._products, self._graph = 1, None
        for _ in range(5):
            self._capture()
            self._run()
            seconds = min(timed(self._run) for _ in range(3))
            self._products = max(1, round(self._products * step_ms / (1000 * seconds)))
        self._capture()

    def _work(self) -> None:
        a, b, out = self._matrices
        for _ in range(self._products):
            torch.matmul(a, b, out=out)
        self._logits.add_(1)

    def _capture(self) -> None:
        if self.device.type != "cuda":
            return
        stream = torch.cuda.Stream(self.device)
        with torch.cuda.stream(stream):
            self._work()
        torch.cuda.synchronize(self.device)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._work()

    def _run(self) -> None:
        if self._graph is None:
            self._work()
        else:
            self._graph.replay()
        self._logits.to("cpu", copy=True)

    def step(self) -> None:
        """What a decode step does beside computing: room for rows, page tables, logits to the host."""
        self.state.prepare(1)
        self._run()
        self.state.advance(1)
        self.tokens.append(7)

    def snapshot(self, length: int | None = None) -> Snapshot:
        """As of a session; a shorter one has the rings of now."""
        n = len(self.tokens) if length is None else length
        kept = self.state.checkpoint(torch.zeros(self.shape.vocab)) if length is None else self._at(n)
        return Snapshot(tuple(self.tokens[:n]), kept, self.state.hold(n))

    def _at(self, n: int) -> Checkpoint:
        other = self.cache.new_state()
        try:
            other.advance(n)
            return other.checkpoint(torch.zeros(self.shape.vocab))
        finally:
            other.release()

    def restore(self, store: Store, entry: Entry) -> float:
        """Seconds until a stored state can be used."""
        began = time.perf_counter()
        _, exported = store.load(entry)
        state = self.cache.new_state()
        state.import_state(exported)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        seconds = time.perf_counter() - began
        state.release()
        return seconds


def timed(work: Callable[[], object]) -> float:
    """Seconds that something takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def put(store: Store, snapshot: Snapshot, parent: Entry | None = None) -> Entry:
    """Store a snapshot."""
    codec = store.codec
    assert codec is not None
    key = len(snapshot.tokens).to_bytes(4, "little") + b"text" * len(snapshot.tokens)
    entry = store.put(NewState(key, snapshot.tokens, partial(codec.parts, snapshot), Reason.CONTINUED, parent))
    if entry is None:
        raise SystemExit("a state was not stored")
    return entry


def device(options: argparse.Namespace) -> int:
    """Restore states into a device, and step while one is saved."""
    shape = next(shape for shape in PROFILES if shape.name == options.shape)
    sys.setswitchinterval(SWITCH_SECONDS)
    on = choose(options.device)
    if on.type == "cuda" and on.index is not None:
        torch.cuda.set_device(on)
    with torch.no_grad(), tempfile.TemporaryDirectory(dir=options.directory) as directory:
        stand_in = StandIn(shape, on, options.tokens, options.step_ms)
        store = Store(Files(directory), stand_in.codec)
        ok = restores(stand_in, store, options)
        ok &= steps_while_saving(stand_in, store, options)
    return 0 if ok or options.device == "cpu" else 1


def restores(stand_in: StandIn, store: Store, options: argparse.Namespace) -> bool:
    """Restore states that are one file, and one that is many."""
    ok, entries = True, {}
    for n in sorted({min(24_576, options.tokens), options.tokens}):
        snapshot = stand_in.snapshot(n)
        entries[f"{n} tokens, one file"] = put(store, snapshot), n
        snapshot.release()
    parent = None
    for n in range(options.step, options.tokens, options.step):
        snapshot = stand_in.snapshot(n)
        parent = put(store, snapshot, parent)
        snapshot.release()
    stand_in.step()
    snapshot = stand_in.snapshot()
    entries[f"{len(snapshot.tokens)} tokens, {options.tokens // options.step} segments"] = (
        put(store, snapshot, parent),
        options.tokens,
    )
    snapshot.release()
    for name, (entry, n) in entries.items():
        seconds = sorted(stand_in.restore(store, entry) for _ in range(options.repeats))
        print(f"restored {name}: {', '.join(f'{1000 * s:.1f}' for s in seconds)} ms")
        if (limit := MAX_RESTORE_S.get(n)) is not None:
            ok &= bar(f"seconds to restore {name}, median", seconds[len(seconds) // 2], limit)
    return ok


def steps_while_saving(stand_in: StandIn, store: Store, options: argparse.Namespace) -> bool:
    """Steps alone, and while another thread writes a snapshot."""

    for _ in range(20):
        stand_in.step()
    alone = sorted(timed(stand_in.step) for _ in range(options.steps))
    usual = alone[len(alone) // 2]
    during: list[float] = []
    held: list[float] = []
    wrote: list[float] = []
    for _ in range(options.repeats):
        began = time.perf_counter()
        snapshot = stand_in.snapshot()
        held.append(time.perf_counter() - began)
        writer = threading.Thread(target=lambda snapshot=snapshot: wrote.append(timed(lambda: put(store, snapshot))))
        writer.start()
        waited = held[-1]  # the step that comes after the snapshot is later by so much
        while writer.is_alive():
            during.append(waited + timed(stand_in.step))
            waited = 0.0
        snapshot.release()
    print(f"{len(alone)} steps alone: {1000 * usual:.2f} ms each, longest {1000 * alone[-1]:.2f} ms")
    print(f"{len(wrote)} saves of {options.tokens} tokens: {min(wrote):.2f} to {max(wrote):.2f} s each")
    print(f"{len(during)} steps meanwhile: longest {1000 * max(during):.2f} ms")
    print(f"snapshots: {1000 * max(held):.2f} ms at most")
    return bar("longest step while saving - usual step, ms", 1000 * (max(during) - usual), MAX_HELD_MS)


# ---- a server that is killed -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def server(directory: str, *flags: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A ds4-server of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "ds4.server.main", "--port", str(port), "--kv-disk-dir", directory, *flags]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            try:
                urllib.request.urlopen(url + "/health", timeout=5).read()
                break
            except OSError:
                if process.poll() is not None:
                    raise SystemExit("the server did not start") from None
                time.sleep(0.1)
        yield url, process
    finally:
        process.kill()
        process.wait()


def ask(url: str, messages: list[dict[str, Any]]) -> tuple[dict[str, Any], float, str]:
    """An answer's message, the part of its prompt that was reused, and its tokens and seconds in words."""
    body = {"messages": messages, "tools": TOOLS, "temperature": 0, "max_tokens": 64, "reasoning_effort": "none"}
    request = urllib.request.Request(
        url + "/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    began = time.perf_counter()
    with urllib.request.urlopen(request, timeout=3000) as response:
        value: dict[str, Any] = json.load(response)
    usage = value["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    spent = f"{usage['prompt_tokens']} tokens, {time.perf_counter() - began:.2f} s"
    return value["choices"][0]["message"], cached / usage["prompt_tokens"], spent


def next_turn(message: dict[str, Any]) -> list[dict[str, Any]]:
    """What an agent sends behind its history: the message, and the results of its calls, or a question."""
    calls = message.get("tool_calls") or []
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "sunny, 21 degrees"} for call in calls]
    return [message, *(results or [{"role": "user", "content": "And then?"}])]


def wait_stored(directory: str) -> None:
    """Wait until nothing is being written and something is there, for a second."""
    quiet, last = 0, None
    while quiet < 10:
        names = sorted(os.listdir(directory))
        quiet = quiet + 1 if names == last and not any(".tmp." in name for name in names) else 0
        last = names
        time.sleep(0.1)


def restart(options: argparse.Namespace) -> int:
    """Kill a server between the turns of its conversations."""
    rng, ok = random.Random(1), True
    words = ["the", "river", "seven", "walks", "under", "a", "red", "house", "and", "sings"]

    def prompt(size: int) -> str:
        return " ".join(rng.choice(words) for _ in range(size))

    flags = ("-c", str(options.tokens * 2 + 2000), "--max-sessions", "1")
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        os.chmod(directory, 0o700)
        questions = ("What is the weather in Paris?", "What walks under the house?")
        talks: list[list[dict[str, Any]]] = [
            [{"role": "system", "content": prompt(options.tokens)}, {"role": "user", "content": question}]
            for question in questions
        ]
        answers = []
        with server(directory, *flags) as (url, process):
            for talk in talks:
                message, _, spent = ask(url, talk)
                answers.append(message)
                print(f"cold, {spent}: {'a call' if message.get('tool_calls') else 'a text'}", flush=True)
                wait_stored(directory)
            process.send_signal(signal.SIGKILL)
        for name in ("continued", "regenerated", "edited"):
            with server(directory, *flags) as (url, process):
                for talk, message in zip(talks, answers, strict=True):
                    asked = {
                        "continued": [*talk, *next_turn(message)],
                        "regenerated": talk,
                        "edited": [talk[0], {"role": "user", "content": "Who sings in it?"}],
                    }[name]
                    again, reused, spent = ask(url, asked)
                    ok &= bar(f"{name} after a kill, {spent}: part reused", reused, MIN_REUSED, least=True)
                    if name == "regenerated" and again["content"] != message["content"]:
                        print("the answer is another one: MISSED")
                        ok = False
                wait_stored(directory)
                process.send_signal(signal.SIGKILL)
        # One process now, and one live conversation: each turn of one drives the other out.
        with server(directory, *flags) as (url, _):
            for turn in range(3):
                for i, talk in enumerate(talks):
                    talk += next_turn(answers[i])
                    answers[i], reused, spent = ask(url, talk)
                    ok &= bar(f"alternating, turn {turn}, {spent}: part reused", reused, MIN_REUSED, least=True)
    return 0 if ok else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("segments", help="bytes and times of a state that grows")
    one.add_argument("--shape", choices=[shape.name for shape in PROFILES], default="flash")
    one.add_argument("--tokens", type=int, default=100_000)
    one.add_argument("--step", type=int, default=10_000)
    one.add_argument("--repeats", type=int, default=3)
    one.set_defaults(run=segments)
    two = commands.add_parser("restart", help="what a server reuses after it was killed")
    two.add_argument("--tokens", type=int, default=20_000, help="words of the system message")
    two.set_defaults(run=restart)
    three = commands.add_parser("device", help="times of a device: restoring, and steps while a state is saved")
    three.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu (cuda)")
    three.add_argument("--shape", choices=[shape.name for shape in PROFILES], default="flash")
    three.add_argument("--tokens", type=int, default=100_000)
    three.add_argument("--step", type=int, default=10_000, help="tokens of a segment")
    three.add_argument("--steps", type=int, default=300, help="steps without a save")
    three.add_argument("--step-ms", type=float, default=8.0, help="about how long a step takes")
    three.add_argument("--repeats", type=int, default=5)
    three.set_defaults(run=device)
    for each in (one, two, three):
        each.add_argument("--directory", type=Path, help="where temporary files go")
    options = parser.parse_args(argv)
    try:
        return int(options.run(options))
    except Ds4Error as error:
        print(f"kv_bench: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
