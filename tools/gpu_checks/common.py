"""What the checks share: engines, tables, tokens, errors."""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ds4.engine import Engine, EngineConfig, Session
    from ds4.gguf.file import ModelFile
    from ds4.gguf.shape import Shape

Progress = Callable[[int, int], None]


def open_engine(device: str, path: Path | None, config: EngineConfig, progress: Progress | None = None) -> Engine:
    """An engine whose model runs in kernels on `device`, on "cpu" in Triton's interpreter; None: the embedded model."""
    import ds4

    if device != "cpu":
        return ds4.load(path, device=device, config=config, progress=progress)
    os.environ["TRITON_INTERPRET"] = "1"
    import torch

    from ds4.engine.device import load_runner
    from ds4.tokenizer import Tokenizer

    file = open_file(path)
    runner, config = load_runner(file, torch.device("cpu"), config, progress, room=1 << 40)
    tokenizer = Tokenizer.from_metadata(file.metadata) if "tokenizer.ggml.tokens" in file.metadata else None
    return ds4.Engine(runner, tokenizer, config)


def open_file(path: Path | None) -> ModelFile:
    from ds4.gguf.file import embedded_model_path, open_model

    return open_model(embedded_model_path() if path is None else path)


def config_of(context: int, sessions: int, chunk: int, interval: int = 0, **more: Any) -> EngineConfig:
    """A configuration; checkpoints are taken every `interval` tokens, never for 0."""
    from ds4.engine import EngineConfig

    return EngineConfig(
        context=context, prefill_chunk=chunk, checkpoint_interval=interval, sessions=sessions, **more
    )  # fmt: skip


def cpu_engine(path: Path | None, context: int, chunk: int, threads: int | None = None) -> Engine:
    """The same model in torch on the CPU."""
    import ds4

    config = ds4.EngineConfig(context=context, prefill_chunk=chunk, checkpoint_interval=0, threads=threads)
    return ds4.load(path, device="cpu", config=config)


class Report:
    """What is printed, and what JSON gets."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.values: dict[str, Any] = {"check": options.check, "ok": True}
        self._path: Path | None = options.json
        self._start = time.perf_counter()
        self._budget: float = options.budget

    def line(self, text: str) -> None:
        print(text, flush=True)

    def rows(self, name: str, columns: Sequence[str], row: Sequence[Any]) -> None:
        """One more row of a table; the first brings the names of its columns."""
        table = self.values.setdefault(name, [])
        if not table:
            self.line("  ".join(_cell(column) for column in columns))
        table.append(dict(zip(columns, row, strict=True)))
        self.line("  ".join(_cell(value) for value in row))
        self.save()

    def judge(self, ok: bool) -> bool:
        self.values["ok"] = bool(self.values["ok"] and ok)
        return ok

    def late(self, what: str) -> bool:
        """Whether the time is up, in which case `what` is left out."""
        if self._budget and time.perf_counter() - self._start > self._budget:
            self.line(f"no time left for {what}")
            self.values.setdefault("left out", []).append(what)
            return True
        return False

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._start

    def save(self) -> None:
        self.values["seconds"] = round(self.seconds, 1)
        if self._path:
            self._path.write_text(json.dumps(self.values, indent=1, default=str))

    def end(self) -> int:
        self.save()
        self.line(f"{self.values['check']}: {'ok' if self.values['ok'] else 'NOT OK'}, {self.values['seconds']} s")
        return 0 if self.values["ok"] else 1


def _cell(value: Any) -> str:
    if isinstance(value, float):
        value = f"{value:.4g}" if abs(value) < 1e5 else f"{value:.0f}"
    return f"{value!s:>10}"


def loading(report: Report) -> Progress:
    """Notes how long loading takes, once it is through."""
    begin = time.perf_counter()

    def progress(done: int, total: int) -> None:
        if done >= total and "load seconds" not in report.values:
            seconds = time.perf_counter() - begin
            report.values |= {"load seconds": seconds, "load GB/s": total / seconds / 1e9}
            report.line(f"loaded {total / 1e9:.1f} GB in {seconds:.1f} s, {total / seconds / 1e9:.2f} GB/s")

    return progress


def synchronize(device: str) -> None:
    if device != "cpu":
        import torch

        torch.cuda.synchronize()


def numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",") if n]


def random_ids(shape: Shape, count: int, seed: int) -> list[int]:
    """Ids of ordinary tokens: the protocol's own ones stand at the ends of a vocabulary."""
    generator = random.Random(seed)
    return [generator.randrange(shape.vocab // 8, shape.vocab * 7 // 8) for _ in range(count)]


def top_two(logits: Any) -> tuple[int, float]:
    """The most probable token and how far the next one is behind it."""
    values, ids = logits.topk(2)
    return int(ids[0]), float(values[0] - values[1])


def step(engine: Engine, session: Session, token: int) -> Any:
    """Decode one token; the logits behind it."""
    return engine.step([(session, [token])])[0]


def error(a: Any, b: Any) -> float:
    """Norm of the difference over the norm of `b`."""
    return float((a.double() - b.double()).norm() / b.double().norm())
