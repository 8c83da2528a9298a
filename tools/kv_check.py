"""Whether states on disk are to be trusted: the embedded model's, stored, killed, damaged, and restored.

    .venv/bin/python tools/kv_check.py exact                 restored in a new process, they go on to the bit
    .venv/bin/python tools/kv_check.py kills --count 300     SIGKILL at random moments of saving and evicting
    .venv/bin/python tools/kv_check.py damage --count 2000   files with something cut, added, flipped or exchanged
    .venv/bin/python tools/kv_check.py share --seconds 60    processes that save, load and evict in one directory

Each prints what it found and returns 1 if a restored state was another one than that of a fresh session, a whole entry
was lost, or something broke down.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import ds4
from ds4.engine.packing import ModelCodec
from ds4.errors import Ds4Error, FileFormatError
from ds4.kvstore.container import Reason
from ds4.kvstore.disk import Files
from ds4.kvstore.reading import Entry, verify
from ds4.kvstore.store import NewState, Store

LENGTHS = (1, 127, 128, 129, 511, 4096, 20_000)
MORE = 3
"""Tokens that a restored state is continued by."""


def load(context: int = 32_768, device: str = "cpu", quality: bool | None = None) -> ds4.Engine:
    """The embedded model."""
    return ds4.load(device=device, config=ds4.EngineConfig(context=context, checkpoint_bytes=0, quality=quality))


def some_tokens(count: int, seed: int = 0) -> list[int]:
    """Token ids."""
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(count)]


def key_of(tokens: Sequence[int]) -> bytes:
    """A key: what the tokens are does not matter, only that it begins with the key of fewer."""
    return b"".join(token.to_bytes(2, "little") for token in tokens)


def save(store: Store, session: ds4.Session, parent: Entry | None = None) -> Entry | None:
    """Store a session as it is."""
    snapshot = session.snapshot()
    codec = store.codec
    assert codec is not None
    try:
        parts = lambda start: codec.parts(snapshot, start)  # noqa: E731
        return store.put(NewState(key_of(snapshot.tokens), snapshot.tokens, parts, Reason.CONTINUED, parent))
    finally:
        snapshot.release()


def fingerprints(session: ds4.Session) -> list[str]:
    """Hashes of the logits now, and behind each of some more tokens."""
    found = [_hash(session)]
    for token in some_tokens(MORE, len(session.tokens)):
        session.step(token)
        found.append(_hash(session))
    return found


def _hash(session: ds4.Session) -> str:
    return hashlib.blake2b(session.logits.numpy().tobytes(), digest_size=8).hexdigest()


def restore(store: Store, engine: ds4.Engine, entry: Entry) -> ds4.Session:
    """A new session with a stored state."""
    stored, exported = store.load(entry)
    session = engine.session()
    session.import_state(stored.tokens, exported)
    return session


# ---- exact -----------------------------------------------------------------------------------------------------------


def exact(options: argparse.Namespace) -> int:
    """Store states of several lengths, each as a segment, and compare what a new process makes of them."""
    engine, lengths = load(device=options.device, quality=options.quality), sorted(options.lengths)
    ids, session = some_tokens(max(lengths)), engine.session()
    wrong = 0
    with tempfile.TemporaryDirectory() as directory:
        store = Store(Files(directory), ModelCodec(engine))
        expected, parent = {}, None
        for n in lengths:
            session.sync(ids[:n])
            parent = save(store, session, parent)
            fork = session.fork()
            expected[str(n)] = fingerprints(fork)
            fork.close()
        command = [sys.executable, __file__, "continue", directory, "--device", options.device]
        command += [] if options.quality is None else ["--bytes"]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    for n in lengths:
        same = found.get(str(n)) == expected[str(n)]
        wrong += not same
        print(f"{n:6} tokens: {'the same bits' if same else 'OTHER LOGITS'}, at once and {MORE} tokens on")
    return 1 if wrong else 0


def go_on(options: argparse.Namespace) -> int:
    """What `exact` runs in a new process."""
    engine = load(device=options.device, quality=options.quality)
    store = Store(Files(options.directory), ModelCodec(engine))
    print(json.dumps({entry.tokens: fingerprints(restore(store, engine, entry)) for entry in store.entries()}))
    return 0


# ---- kills -----------------------------------------------------------------------------------------------------------


class ToldFiles(Files):
    """A directory that tells each thing it is about to do."""

    def __init__(self, path: str, pipe: int) -> None:
        super().__init__(path)
        self.pipe = pipe

    def _tell(self) -> None:
        os.write(self.pipe, b".")

    def create(self, name: str, size: int) -> tuple[int, str]:
        self._tell()
        return super().create(name, size)

    def write(self, fd: int, data: bytes | memoryview, offset: int) -> None:
        self._tell()
        super().write(fd, data, offset)

    def sync(self, fd: int) -> None:
        self._tell()
        super().sync(fd)

    def commit(self, temporary: str, name: str) -> None:
        self._tell()
        super().commit(temporary, name)
        self._tell()

    def write_header(self, name: str, data: bytes) -> None:
        self._tell()
        super().write_header(name, data)
        self._tell()

    def remove(self, name: str) -> None:
        self._tell()
        super().remove(name)
        self._tell()


def kills(options: argparse.Namespace) -> int:
    """Kill a process that saves, uses and evicts; then look at what is left, and let the next one go on with it."""
    engine = load(2048)
    codec = ModelCodec(engine)
    chains, logits = [], {}
    for seed in range(3):
        chain = []
        for n in (70, 150, 260):
            session = engine.session()
            session.sync(some_tokens(n, seed))
            logits[key_of(session.tokens)] = _hash(session)
            chain.append(session)
        chains.append(chain)
    with tempfile.TemporaryDirectory() as sized:
        store, parent = Store(Files(sized), codec), None
        for session in chains[0]:
            parent = save(store, session, parent)
        budget = int(store.total() * 1.6)

    def work(directory: str, pipe: int) -> None:
        store = Store(ToldFiles(directory, pipe), codec, budget)
        while True:
            for chain in chains:
                parent = None
                for session in chain:
                    parent = save(store, session, parent)
                    if parent is not None:
                        store.touch(parent)

    rng, wrong, intact = random.Random(options.seed), 0, 0
    with tempfile.TemporaryDirectory() as directory:
        for _ in range(options.count):
            reader, writer = os.pipe()
            child = os.fork()
            if child == 0:
                try:
                    os.close(reader)
                    work(directory, writer)
                finally:
                    os._exit(1)
            os.close(writer)
            left = rng.randrange(1, 1500)
            while left > 0 and (told := os.read(reader, left)):
                left -= len(told)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.close(reader)
            wrong += left > 0
            there = {name for name in os.listdir(directory) if name.endswith(".kv")}
            store = Store(Files(directory), codec, budget)
            entries = store.entries()
            wrong += {entry.name for entry in entries} != there or bool(store.broken()) or store.total() > budget
            wrong += any(".tmp." in name for name in os.listdir(directory))
            for entry in entries:
                intact += 1
                try:
                    verify(store.files, entry.name)
                    stored = store.read(entry)
                    wrong += _hash(restore(store, engine, entry)) != logits[stored.key]
                except (Ds4Error, OSError) as error:
                    print(error)
                    wrong += 1
            store.close()
    print(f"{options.count} kills, {intact} entries left by them and restored, {wrong} wrong")
    return 1 if wrong else 0


# ---- damage ----------------------------------------------------------------------------------------------------------


def damage(options: argparse.Namespace) -> int:
    """Damage one of two files that make a state, and restore what can be."""
    engine = load(2048)
    codec, rng = ModelCodec(engine), random.Random(options.seed)
    ids, session = some_tokens(200), engine.session()
    counts = {"noticed": 0, "right all the same": 0, "WRONG": 0}
    with tempfile.TemporaryDirectory() as directory:
        store, parent, logits = Store(Files(directory), codec), None, {}
        for n in (130, 200):
            session.sync(ids[:n])
            logits[n] = _hash(session)
            parent = save(store, session, parent)
        good = {entry.name: (Path(directory) / entry.name).read_bytes() for entry in store.entries()}
        store.close()
        for _ in range(options.count):
            victim = rng.choice(sorted(good))
            for name in os.listdir(directory):
                os.unlink(Path(directory) / name)
            for name, data in good.items():
                (Path(directory) / name).write_bytes(damaged(rng, data) if name == victim else data)
            store = Store(Files(directory), codec)
            noticed = victim in store.broken()
            for entry in store.lookup(key_of(ids)):
                try:
                    again = restore(store, engine, entry)
                except Ds4Error:
                    noticed = True
                    continue
                if again.tokens != ids[: len(again.tokens)] or _hash(again) != logits[len(again.tokens)]:
                    counts["WRONG"] += 1
            try:
                verify(store.files, victim)
            except (FileFormatError, OSError):
                noticed = True
            counts["noticed" if noticed else "right all the same"] += 1
            store.close()
    print(", ".join(f"{count} {name}" for name, count in counts.items()))
    return 1 if counts["WRONG"] else 0


def damaged(rng: random.Random, data: bytes) -> bytes:
    """The bytes with something cut, added, flipped, exchanged or overwritten."""
    at = rng.randrange(len(data) if rng.random() < 0.5 else 2000)
    out = bytearray(data)
    kind = rng.randrange(5)
    if kind == 0:
        del out[at:]
    elif kind == 1:
        out += rng.randbytes(rng.randrange(1, 100))
    elif kind == 2:
        out[at] ^= 1 << rng.randrange(8)
    elif kind == 3:
        other = rng.randrange(len(out))
        out[at], out[other] = out[other], out[at]
    else:
        piece = rng.randbytes(rng.randrange(1, 64))
        out[at : at + len(piece)] = piece
    return bytes(out)


# ---- share -----------------------------------------------------------------------------------------------------------


class Complaints(logging.Handler):
    """Keeps what the store says of files that it deletes or ignores as damaged."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.getMessage())


def share(options: argparse.Namespace) -> int:
    """Let processes use one directory that has room for a part of what they store, and watch its size meanwhile."""
    engine = load(2048)
    codec = ModelCodec(engine)
    sessions, logits = [], {}
    for seed in range(8):
        chain = []
        for n in (40, 90, 200):
            session = engine.session()
            session.sync(some_tokens(n, seed))
            logits[key_of(session.tokens)] = _hash(session)
            chain.append(session)
        sessions.append(chain)
    with tempfile.TemporaryDirectory() as sized:
        store, parent = Store(Files(sized), codec), None
        for session in sessions[0]:
            parent = save(store, session, parent)
        budget = store.total() * 3

    def work(directory: str, seed: int) -> None:
        complaints, rng, counts = Complaints(), random.Random(seed), Counter[str]()
        logging.getLogger("ds4.kvstore").addHandler(complaints)
        store = Store(Files(directory), codec, budget)
        ends = time.monotonic() + options.seconds
        while time.monotonic() < ends:
            chain = rng.choice(sessions)
            parent = None
            for session in chain[: rng.randrange(1, len(chain) + 1)]:
                parent = save(store, session, parent)
                counts["stored" if parent is not None else "not stored"] += 1
            store.refresh()
            for entry in store.lookup(key_of(rng.choice(sessions)[-1].tokens)):
                try:
                    again = restore(store, engine, entry)
                except Ds4Error:
                    counts["gone meanwhile"] += 1
                    continue
                counts["loaded"] += 1
                if _hash(again) != logits[key_of(again.tokens)]:
                    complaints.found.append("other logits")
                again.close()
                store.touch(entry)
        counts["damaged"] = sum("is deleted" in said or "is ignored" in said or "other" in said
                                for said in complaints.found)  # fmt: skip
        print(f"process {seed}: " + ", ".join(f"{count} {name}" for name, count in sorted(counts.items())), flush=True)
        if counts["damaged"]:
            print("\n".join(complaints.found), flush=True)
        os._exit(1 if counts["damaged"] else 0)

    with tempfile.TemporaryDirectory() as directory:
        Store(Files(directory), codec, budget).close()
        children = []
        for seed in range(options.processes):
            child = os.fork()
            if child == 0:
                try:
                    work(directory, seed)
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(2)
            children.append(child)
        looks, most, wrong = 0, 0, 0
        while children:
            for child in list(children):  # not any child: this process may have others
                ended, status = os.waitpid(child, os.WNOHANG)
                if ended:
                    children.remove(child)
                    wrong += status != 0
            if (size := settled_size(directory)) is not None:
                looks, most = looks + 1, max(most, size)
            time.sleep(0.001)
        store = Store(Files(directory), codec, budget)
        wrong += bool(store.broken()) + any(".tmp." in name for name in os.listdir(directory))
        for entry in store.entries():
            verify(store.files, entry.name)
            wrong += _hash(restore(store, engine, entry)) != logits[store.read(entry).key]
    wrong += most > budget
    print(f"looked {looks} times: at most {most} of {budget} bytes; {wrong} wrong")
    return 1 if wrong else 0


def settled_size(directory: str) -> int | None:
    """Bytes of all files of a directory, if nothing changed while they were counted."""

    def look() -> list[tuple[str, int, int, int]]:
        found = []
        with os.scandir(directory) as listing:
            for entry in listing:
                status = entry.stat(follow_symlinks=False)
                found.append((entry.name, status.st_ino, status.st_ctime_ns, status.st_size))
        return sorted(found)

    try:
        first = look()
        return sum(size for *_, size in first) if look() == first else None
    except FileNotFoundError:
        return None


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("exact", help="states restored in a new process")
    one.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    one.set_defaults(run=exact)
    two = commands.add_parser("continue")
    two.add_argument("directory")
    two.set_defaults(run=go_on)
    for command in (one, two):
        command.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (cpu)")
        rounded = "with activations in bytes on a CUDA device, as large models have them"
        command.add_argument("--bytes", dest="quality", action="store_const", const=False, help=rounded)
    three = commands.add_parser("share", help="several processes in one directory")
    three.add_argument("--processes", type=int, default=4)
    three.add_argument("--seconds", type=float, default=60)
    three.set_defaults(run=share)
    for name, run, count in (("kills", kills, 300), ("damage", damage, 2000)):
        command = commands.add_parser(name)
        command.add_argument("--count", type=int, default=count)
        command.add_argument("--seed", type=int, default=0)
        command.set_defaults(run=run)
    options = parser.parse_args(argv)
    try:
        return int(options.run(options))
    except Ds4Error as error:
        print(f"kv_check: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
