"""Many conversations, little room on disk, and servers that start again: is every answer the one of a fresh session?

    .venv/bin/python tools/kv_soak.py --requests 10000

Requests of the embedded model, greedy, go to a worker with two live conversations and a budget on disk for less than
half of all. They continue, repeat or edit their conversation, and some are cancelled half way. After each answer its
state is compared with what a new session makes of the same tokens, to the bit. Returns 1 if one differs.
"""

from __future__ import annotations

import argparse
import queue
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

import ds4
from ds4.chat.message import Message
from ds4.engine import Sampling
from ds4.engine.packing import ModelCodec
from ds4.server.backend import Backend
from ds4.server.config import ServerConfig
from ds4.server.request import Admitted, ChatRequest, Done, Failed, Reply
from ds4.server.worker import Worker

WORDS = ["the", "river", "seven", "walks", "under", "a", "red", "house", "and", "sings", "12", "+", "plus", "who"]
ROLES = ("user", "assistant")


def text(rng: random.Random, words: int) -> str:
    """Some words."""
    return " ".join(rng.choice(WORDS) for _ in range(words))


def request(texts: Sequence[str], tokens: int) -> ChatRequest:
    """A conversation, of which user and assistant say one text each in turn."""
    messages = tuple(Message(role=ROLES[i % 2], content=content) for i, content in enumerate(texts))
    sampling = Sampling(temperature=0)
    return ChatRequest("m", messages, thinking=False, sampling=sampling, max_tokens=tokens)


def ask(worker: Worker, asked: ChatRequest, cancel: bool) -> Done | None:
    """An answer; None if it was cancelled."""
    replies: queue.Queue[Reply] = queue.Queue()
    job = worker.submit(asked, worker.prompts.prompt(asked), replies.put)
    while not isinstance(reply := replies.get(timeout=600), Done):
        if isinstance(reply, Failed):
            raise SystemExit(f"a request failed: {reply.message}")
        if cancel and not isinstance(reply, Admitted):
            job.cancel()
            worker.wait_idle()
            return None
    worker.wait_idle()
    return reply


def right(worker: Worker, checked: ds4.Session) -> bool:
    """Whether the state that was used last is the one of a new session."""
    slot = max(worker._slots.slots, key=lambda slot: slot.used)
    checked.sync(slot.session.tokens)
    return torch.equal(checked.logits, slot.session.logits)


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--conversations", type=int, default=50)
    parser.add_argument("--restarts", type=int, default=20, help="how often the server starts again")
    parser.add_argument("--mb", type=int, default=5, help="MiB on disk")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng, wrong, counts = random.Random(options.seed), 0, Counter[str]()
    engine = ds4.load(config=ds4.EngineConfig(context=2048, prefill_chunk=128))
    fresh = ds4.load(config=ds4.EngineConfig(context=2048, checkpoint_bytes=0))
    said = [[text(rng, 60)] for _ in range(options.conversations)]
    with tempfile.TemporaryDirectory() as directory:
        config = ServerConfig(
            ctx=2048, max_sessions=2, kv_disk_dir=Path(directory), kv_disk_space_mb=options.mb,
            kv_cache_min_tokens=32, kv_cache_boundary_align_tokens=64,
        )  # fmt: skip
        done = 0
        for life in range(options.restarts):
            worker = Worker(Backend(engine, "ds4-tiny", codec=ModelCodec(engine)), config)
            worker.start()
            while done < options.requests * (life + 1) // options.restarts:
                texts = rng.choice(said)
                kind = rng.random()
                if len(texts) > 1 and (kind < 0.15 or len(texts) > 9):
                    del texts[-2:]
                elif kind < 0.25:
                    texts[-1] = text(rng, 20)
                answer = ask(worker, request(texts, rng.randrange(1, 12)), cancel=rng.random() < 0.1)
                done += 1
                if answer is None:
                    counts["cancelled"] += 1
                    continue
                counts["with reused tokens" if answer.usage.reused else "from nothing"] += 1
                session = fresh.session()
                wrong += not right(worker, session)
                session.close()
                texts += [answer.message.text, text(rng, 10)]
            if not worker.stop(600):
                raise SystemExit("the worker did not end")
            held = sum(file.stat().st_size for file in Path(directory).iterdir())
            wrong += held > options.mb << 20
            samples = {sample.labels["event"]: sample.value for family in worker.metrics.registry.collect()
                       if family.name == "ds4_disk_states" for sample in family.samples
                       if sample.name.endswith("_total")}  # fmt: skip
            counts.update({f"states {event}": int(value) for event, value in samples.items()})
            print(f"{done} requests, {life + 1} servers: {wrong} wrong", flush=True)
    print(f"{done} requests: {', '.join(f'{count} {name}' for name, count in sorted(counts.items()))}")
    print(f"{wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
