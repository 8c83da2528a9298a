"""What states on disk cost: bytes written, how long a save holds up the engine, how long a restart takes.

    .venv/bin/python tools/kv_bench.py segments              a 100,000-token conversation, stored every 10,000 tokens
    .venv/bin/python tools/kv_bench.py restart --tokens 2000 a server is killed, and goes on with its conversations

`segments` fills states of the shape Flash (or `--shape`) with random rows, without a model: what is stored and how is
the real thing. It prints each number with the bar it is held against, and returns 1 if one was missed. `restart` runs
ds4-server with the embedded model, kills it with SIGKILL, and looks at what the next one reuses.
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
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ds4.engine import Snapshot
from ds4.engine.packing import Part, Segment, Target, fingerprint, pack, target
from ds4.gguf.shape import PROFILES, Shape
from ds4.kvstore.container import Reason
from ds4.kvstore.disk import Files
from ds4.kvstore.store import NewState, Store
from ds4.model.cache import KVCache, SequenceState

MAX_WRITTEN = 1.5
MAX_HELD_MS = 10.0
MAX_RESTORE_S = {100_000: 0.25, 24_576: 0.06}
MIN_REUSED = 0.99


class RandomCodec:
    """The codec of a shape without a model."""

    quant_bits = 0

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.fingerprint = fingerprint(shape, "random")

    def parts(self, snapshot: Snapshot, start: int) -> Iterator[Part]:
        """See `StateCodec`."""
        return pack(self.shape, snapshot, start)

    def target(self, segments: list[Segment]) -> Target:
        """See `StateCodec`."""
        return target(self.shape, segments)


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
    state = KVCache(shape, True).new_state()
    rng, tokens = random.Random(0), [0] * 0
    logits = torch.zeros(shape.vocab)
    codec = RandomCodec(shape)
    ok, written, held, saved = True, 0, [], []
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        store = Store(Files(directory), codec)  # type: ignore[arg-type]
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
        ok &= bar("bytes written / size of the whole state", written / whole, MAX_WRITTEN)
        ok &= bar("longest time that a save held up the thread of the engine, ms", max(held), MAX_HELD_MS)
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
        limit = MAX_RESTORE_S.get(options.tokens)
        if limit is not None:
            ok &= bar("seconds until the state can be used (CPU)", seconds, limit)
        else:
            print(f"usable after {seconds:.3f} s (CPU)")
    return 0 if ok else 1


def bar(name: str, value: float, limit: float, least: bool = False) -> bool:
    """Print a number and whether it keeps its limit."""
    kept = value >= limit if least else value <= limit
    print(f"{name}: {value:.4g} ({'at least' if least else 'at most'} {limit:g}): {'ok' if kept else 'MISSED'}")
    return kept


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


def ask(url: str, messages: list[dict[str, str]]) -> tuple[str, float, float]:
    """An answer, the part of its prompt that was reused, and its seconds."""
    body = {"messages": messages, "temperature": 0, "max_tokens": 24, "reasoning_effort": "none"}
    request = urllib.request.Request(
        url + "/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    began = time.perf_counter()
    with urllib.request.urlopen(request, timeout=3000) as response:
        value: dict[str, Any] = json.load(response)
    usage = value["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return value["choices"][0]["message"]["content"] or "", cached / usage["prompt_tokens"], time.perf_counter() - began


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
        talks = [[{"role": "system", "content": prompt(options.tokens)}] for _ in range(2)]
        for talk in talks:
            talk.append({"role": "user", "content": "What walks under the house?"})
        answers = []
        with server(directory, *flags) as (url, process):
            for talk in talks:
                content, _, seconds = ask(url, talk)
                answers.append(content)
                print(f"cold: {seconds:.1f} s")
                wait_stored(directory)
            process.send_signal(signal.SIGKILL)
        for name in ("continued", "regenerated", "edited"):
            with server(directory, *flags) as (url, process):
                for talk, content in zip(talks, answers, strict=True):
                    more = {"role": "user", "content": "And then?"}
                    asked = {
                        "continued": [*talk, {"role": "assistant", "content": content}, more],
                        "regenerated": talk,
                        "edited": [talk[0], {"role": "user", "content": "Who sings in it?"}],
                    }[name]
                    again, reused, seconds = ask(url, asked)
                    ok &= bar(f"{name} after a kill, {seconds:.2f} s: part reused", reused, MIN_REUSED, least=True)
                    if name == "regenerated" and again != content:
                        print("the answer is another one: MISSED")
                        ok = False
                wait_stored(directory)
                process.send_signal(signal.SIGKILL)
    return 0 if ok else 1


def main() -> int:
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
    two.add_argument("--tokens", type=int, default=2000, help="words of the system message")
    two.set_defaults(run=restart)
    for each in (one, two):
        each.add_argument("--directory", type=Path, help="where temporary files go")
    options = parser.parse_args()
    return int(options.run(options))


if __name__ == "__main__":
    sys.exit(main())
