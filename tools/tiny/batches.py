"""Worker processes that turn the generator's rows into training batches.

A batch is a dict of numpy arrays: ids int32 [rows, length]; weight float32 (loss weight of predicting the NEXT
token); group uint8 (which statistic the next token belongs to, 0 = no loss); positions int64 and strength float32
[rows, SAMPLES] (queries on which the indexer is trained).
"""

from __future__ import annotations

import multiprocessing as mp
import queue
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from light import light_package

HERE = Path(__file__).resolve().parent
SAMPLES = 128
# A statistic per kind of document; "value" groups hold only the first token of a recalled value.
GROUPS = (
    "none",
    "tools",
    "chat",
    "arith",
    "text",
    "short",
    "copy",
    "recall",
    "value:repeat",
    "value:tokens",
    "value:kv",
    "value:near",
    "value:far",
)


@dataclass(frozen=True)
class Part:
    """One kind of batch: its share of the steps, its size, the generator's row kind and knobs."""

    share: float
    kind: str
    length: int = 3072
    rows: int = 12
    knobs: dict[str, Any] = field(default_factory=dict)
    boost: float = 1.0  # factor on the loss weight of recalled values
    tools: dict[str, int] = field(default_factory=dict)  # other weights of the generator's kinds of tool dialogue
    pack: int = 1  # a row is this many shorter rows in a sequence


class Maker:
    """Builds batches in one process; split "eval" makes rows of what is never trained."""

    def __init__(self, seed: int, split: str = "train") -> None:
        light_package()
        from data import Generator
        from data.words import CITIES, VALUES

        self.seed, self.split, self.new, self.rng = seed, split, Generator, np.random.default_rng(seed)
        self.generators: dict[str, Any] = {}
        first = Generator(seed)
        words = (*VALUES, *CITIES)
        texts = [*words, *(" " + w for w in words), *("=" + w for w in words)]
        self.value_ids = np.zeros(first.tokenizer.get_vocab_size(), bool)
        self.value_ids[[first.tokenizer.encode(t, add_special_tokens=False).ids[0] for t in texts]] = True
        self.eos, self.bos = first.eos, first.bos
        self.words = np.array(first.words)

    def row(self, part: Part) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        if part.pack > 1:
            pieces = [self.row(replace(part, length=part.length // part.pack, pack=1)) for _ in range(part.pack)]
            return tuple(np.concatenate(p) for p in zip(*pieces, strict=True))
        if part.kind in ("spaced", "repeat"):
            return getattr(self, part.kind)(part.length, **part.knobs)
        key = repr((sorted(part.knobs.items()), part.tools))
        if key not in self.generators:
            made = self.generators[key] = self.new(
                self.seed * 1009 + len(self.generators), split=self.split, **part.knobs
            )
            made.tools.kinds = tuple((n, make, part.tools.get(n, w)) for n, make, w in made.tools.kinds)
        ids, weight, meta = self.generators[key].row(part.length, part.kind)
        weight, group = weight.copy(), np.zeros(part.length, np.uint8)
        far = part.knobs.get("distance", (0, 0))[0] >= 900
        for start, end, kind in meta["documents"]:
            inside = weight[start:end] > 0
            name = kind if kind in GROUPS else "recall"
            if kind == "tokens":
                group[start:end][inside] = GROUPS.index("value:tokens")
            elif kind in ("kv", "recall", "long"):
                group[start:end][inside] = GROUPS.index("recall")
                values = self.values(ids[start:end], inside) + start
                if kind != "kv" or part.boost != 1.0:
                    weight[values] *= part.boost
                group[values] = GROUPS.index("value:kv" if kind == "kv" else "value:far" if far else "value:near")
            else:
                group[start:end][inside] = GROUPS.index(name)
        return ids, weight, group

    def spaced(self, length: int, gap: int = 8, fresh: float = 0.35) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Random token pairs with up to `gap` random tokens between them; loss on the value of every repeated key.

        How far back the repeated key lies is log-uniform, so that window and compressed rows both have to answer.
        """
        rng, pool = self.rng, self.words
        ids, weight, table, last = [self.bos], [0.0], [], {}
        while len(ids) < length:
            if len(table) < 2 or rng.random() < fresh:
                key, value = (int(t) for t in rng.choice(pool, 2))
                if key in last:
                    continue
                table.append((key, value))
                loss = 0.0
            else:
                back = int(np.exp(rng.random() * np.log(len(table))))
                key, value = table[-back]
                loss = 1.0
            last[key] = value
            n = int(rng.integers(0, gap + 1))
            ids += [key, value, *rng.choice(pool, n).tolist()]
            weight += [0.0, loss, *[0.0] * n]
        ids, weight = np.array(ids[:length], np.int32), np.array(weight[:length], np.float32)
        return ids, weight, np.where(weight > 0, GROUPS.index("value:tokens"), 0).astype(np.uint8)

    def repeat(self, length: int, period: tuple[int, int] = (8, 120)) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Stretches of random tokens, each repeated three times; loss on the repetitions."""
        rng, ids, weight = self.rng, [self.bos], [0.0]
        while len(ids) < length:
            n = int(rng.integers(*period))
            ids += rng.choice(self.words, n).tolist() * 3
            weight += [0.0] * (n + 1) + [1.0] * (2 * n - 1)
        ids, weight = np.array(ids[:length], np.int32), np.array(weight[:length], np.float32)
        return ids, weight, np.where(weight > 0, GROUPS.index("value:repeat"), 0).astype(np.uint8)

    def values(self, ids: np.ndarray, inside: np.ndarray) -> np.ndarray:
        """Index of the value's first token in every answer of a recall document."""
        out, last = [], -1
        for n in np.flatnonzero(inside):
            if ids[n] == self.eos:
                if last >= 0:
                    out.append(last)
                last = -1
            elif self.value_ids[ids[n]]:
                last = n
        return np.array(out, np.int64)

    def batch(self, part: Part) -> dict[str, np.ndarray]:
        rows = [self.row(part) for _ in range(part.rows)]
        ids = np.stack([r[0] for r in rows]).astype(np.int32)
        weight, group = (np.stack([r[i] for r in rows]) for i in (1, 2))
        weight = np.pad(weight[:, 1:], ((0, 0), (0, 1))).astype(np.float32)
        group = np.pad(group[:, 1:], ((0, 0), (0, 1)))
        value = group >= GROUPS.index("value:repeat")
        strength = np.where(value, 3.0, np.where(weight > 0, 1.0, 0.1)).astype(np.float32)
        order = np.argsort(-(strength * self.rng.random(strength.shape) + 2.0 * (strength == 3)), axis=1)[
            :, : SAMPLES - 16
        ]
        other = self.rng.integers(0, part.length, (part.rows, 16))
        positions = np.concatenate((order, other), 1)
        return {"ids": ids, "weight": weight, "group": group, "positions": positions,
                "strength": np.take_along_axis(strength, positions, 1)}  # fmt: skip


def answers(weight: np.ndarray) -> np.ndarray:
    """Number of the answer that each position's next token belongs to, int64 like `weight`; -1: of none.

    An answer is a stretch of weights above 0: one turn of the model, up to its end token.
    """
    inside = weight > 0
    first = inside & ~np.pad(inside[:, :-1], ((0, 0), (1, 0)))
    return np.where(inside, np.cumsum(first).reshape(first.shape) - 1, -1)


def _work(seed: int, stages: list[list[Part]], stage: Any, out: Any) -> None:
    maker = Maker(seed)
    while True:
        parts = stages[stage.value]
        part = parts[maker.rng.choice(len(parts), p=np.array([p.share for p in parts]) / sum(p.share for p in parts))]
        out.put(maker.batch(part))


class Batches:
    """Batches from `workers` processes; `stage` says which list of parts they draw from."""

    def __init__(self, stages: list[list[Part]], workers: int, seed: int, depth: int = 32) -> None:
        context = mp.get_context("spawn")
        self.stage = context.Value("i", 0)
        self.queue = context.Queue(depth)
        self.waited = 0.0
        self.processes = [
            context.Process(target=_work, args=(seed * 10_007 + n, stages, self.stage, self.queue), daemon=True)
            for n in range(workers)
        ]
        for p in self.processes:
            p.start()

    def next(self) -> dict[str, np.ndarray]:
        begin = time.monotonic()
        while True:
            try:
                batch = self.queue.get(timeout=20)
                break
            except queue.Empty:
                if not any(p.is_alive() for p in self.processes):
                    raise RuntimeError("every data worker has ended; see the error above") from None
        self.waited += time.monotonic() - begin
        return batch

    def close(self) -> None:
        for p in self.processes:
            p.terminate()
