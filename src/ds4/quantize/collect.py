"""Collecting the importance of the routed experts' inputs while prompts are evaluated.

For each expert of each layer: the mean square of every input channel of gate and up, and of every input channel of the
down projection, the routing weight multiplied in, over the tokens that the router gave to the expert. Sums are float64.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ds4.engine import Engine
from ds4.errors import Ds4Error
from ds4.files import replacing
from ds4.gguf.shape import Shape
from ds4.model import Taps
from ds4.ops import ExpertEnergy
from ds4.quantize.calibration import Prompt
from ds4.quantize.imatrix import Imatrix

SAVE_SECONDS = 300.0
"""How often what was collected is kept, so that a stopped run can go on."""


class Collector:
    """Sums per layer, on the device that they come from, and how much went into them."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.layers: dict[int, ExpertEnergy] = {}
        self.prompts = 0
        self.tokens = 0
        self.chunks = 0
        self.taps = Taps(expert_energy=self._add)

    def _add(self, layer: int, energy: ExpertEnergy) -> None:
        s, device = self.shape, energy.gate_up.device
        sums = self.layers.get(layer)
        if sums is None:
            sums = self.layers[layer] = ExpertEnergy.zeros(s.experts, s.hidden, s.expert_hidden, device)
        elif sums.gate_up.device != device:  # they were restored
            sums = ExpertEnergy(*(t.to(device) for t in (sums.gate_up, sums.down, sums.counts)))
            self.layers[layer] = sums
        sums.add(energy)

    def evaluate(self, engine: Engine, ids: Sequence[int]) -> None:
        """Take in one prompt; it must fit the context. If this breaks off, the sums hold a part of it."""
        session = engine.session()
        try:
            for start in range(0, len(ids), engine.prefill_chunk):
                engine.step([(session, ids[start : start + engine.prefill_chunk])], "none", taps=self.taps)
                self.chunks += 1
        finally:
            session.close()
        self.prompts += 1
        self.tokens += len(ids)

    def imatrix(self, dataset: str = "") -> Imatrix:
        """Means of squares so far; 1 everywhere for an expert that no token went to, as other programs have it."""
        result = Imatrix(chunks=min(self.chunks, 2**31 - 1), dataset=dataset)
        for layer in sorted(self.layers):
            sums = self.layers[layer]
            counts = sums.counts.cpu().numpy()
            inner = _means(sums.gate_up, counts)
            for kind, means in (("gate", inner), ("up", inner), ("down", _means(sums.down, counts))):
                name = f"blk.{layer}.ffn_{kind}_exps.weight"
                result.vectors[name], result.counts[name] = means, counts
        return result

    def state(self) -> dict[str, NDArray[Any]]:
        """All of it as arrays."""
        arrays = {"progress": np.array([self.prompts, self.tokens, self.chunks], dtype=np.int64)}
        for layer, sums in self.layers.items():
            arrays[f"{layer}.gate_up"] = sums.gate_up.cpu().numpy()
            arrays[f"{layer}.down"] = sums.down.cpu().numpy()
            arrays[f"{layer}.counts"] = sums.counts.cpu().numpy()
        return arrays

    def restore(self, arrays: dict[str, NDArray[Any]]) -> None:
        """Go on from what `state` gave. Raises ValueError or KeyError if it is not of this shape."""
        s = self.shape
        prompts, tokens, chunks = (int(n) for n in arrays["progress"])
        layers = {}
        for layer in {int(name.split(".")[0]) for name in arrays if name != "progress"}:
            gate_up, down, counts = (arrays[f"{layer}.{part}"] for part in ("gate_up", "down", "counts"))
            found = [(a.shape, a.dtype.name) for a in (gate_up, down, counts)]
            expected = [((s.experts, s.hidden), "float64"), ((s.experts, s.expert_hidden), "float64")]
            if found != [*expected, ((s.experts,), "int64")] or layer not in range(s.layers):
                raise ValueError("sums of another model")
            layers[layer] = ExpertEnergy(*(torch.from_numpy(a) for a in (gate_up, down, counts)))
        self.layers, self.prompts, self.tokens, self.chunks = layers, prompts, tokens, chunks


def _means(sums: torch.Tensor, counts: NDArray[np.int64]) -> NDArray[np.float32]:
    values = sums.cpu().numpy() / np.maximum(counts, 1)[:, None]
    values[counts == 0] = 1.0
    return np.asarray(values, dtype=np.float32)


@dataclass(frozen=True)
class Limits:
    """When to end before the text does; None: not at all."""

    prompts: int | None = None
    tokens: int | None = None


@dataclass(frozen=True)
class Outcome:
    """How far a run came.

    Attributes:
        done: all prompts within the limits were evaluated, and the file is written.
        prompts, tokens: evaluated in all, those of earlier runs that this one went on from included.
        resumed: prompts taken over from an earlier run.
        cut: prompts whose end did not fit the context.
        unseen: experts (of all layers) that no token went to.
    """

    done: bool
    prompts: int
    tokens: int
    resumed: int
    cut: int
    unseen: int


def collect(
    engine: Engine,
    prompts: Sequence[Prompt],
    out: str | os.PathLike[str],
    *,
    dataset: str = "",
    model: str = "",
    limits: Limits = Limits(),
    progress: Callable[[int, int], None] | None = None,
    saved: Callable[[Collector], None] | None = None,
    stopped: Callable[[], bool] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Outcome:
    """Evaluate prompts and write the importance of the experts' inputs.

    What was collected is kept every `SAVE_SECONDS`, and when the run is stopped, in the file `<out>.progress`: the same
    call goes on from there, and gives the same bytes as a run that was not stopped. The file is deleted at the end.

    Args:
        prompts: each is evaluated by itself; what does not fit the context is cut off its end.
        out: the file to write, in the format of `ds4.quantize.imatrix`.
        dataset: the name of the text, for the file.
        model: what identifies the model; a run goes on only with the same one.
        progress: called with (prompts done, prompts in all) before each prompt.
        saved: called after the progress was kept.
        stopped: asked before each prompt; True ends the run there.

    Raises:
        Ds4Error: `out` or the progress cannot be written, the progress there belongs to another run, or no prompt has
            a token.
    """
    if not engine.has_tokenizer:
        raise Ds4Error("this model has no tokenizer: text cannot be evaluated")
    collector = Collector(engine.shape)
    keeper = _Keeper(Path(f"{os.fspath(out)}.progress"), _fingerprint(engine, prompts, model))
    resumed = keeper.load(collector)
    total = min(len(prompts), limits.prompts if limits.prompts is not None else len(prompts))
    cut, last = 0, clock()
    for number in range(collector.prompts, total):
        room = engine.context if limits.tokens is None else min(engine.context, limits.tokens - collector.tokens)
        if room < 1:
            break
        if progress is not None:
            progress(number, total)
        if stopped is not None and stopped():
            keeper.save(collector)
            return Outcome(False, collector.prompts, collector.tokens, resumed, cut, _unseen(collector))
        ids = engine.tokenizer.encode_chat(prompts[number].text)
        cut += len(ids) > engine.context
        collector.evaluate(engine, ids[:room])
        if clock() - last >= SAVE_SECONDS:
            keeper.save(collector)
            last = clock()
            if saved is not None:
                saved(collector)
    if not collector.layers:
        raise Ds4Error("no token was evaluated: the limits leave none; raise --imatrix-max-tokens or -prompts")
    collector.imatrix(dataset).save(out)
    keeper.forget()
    return Outcome(True, collector.prompts, collector.tokens, resumed, cut, _unseen(collector))


def _unseen(collector: Collector) -> int:
    return sum(int((sums.counts == 0).sum()) for sums in collector.layers.values())


def _fingerprint(engine: Engine, prompts: Sequence[Prompt], model: str) -> dict[str, Any]:
    digest = hashlib.sha256()
    for prompt in prompts:
        data = prompt.text.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)
    return {"model": model, "shape": repr(engine.shape.name), "text": digest.hexdigest(), "context": engine.context}


class _Keeper:
    """The progress of a run in a file: arrays, and what the run is made of."""

    def __init__(self, path: Path, run: dict[str, Any]) -> None:
        self.path, self.run = path, run

    def save(self, collector: Collector) -> None:
        """Keep what was collected, behind whole prompts."""
        run = np.frombuffer(json.dumps(self.run).encode(), dtype=np.uint8)
        with replacing(self.path) as new, new.open("wb") as file:
            np.savez(file, run=run, **collector.state())  # type: ignore[arg-type]

    def load(self, collector: Collector) -> int:
        """Take over what is kept; how many prompts that are. Raises Ds4Error if it belongs to another run."""
        again = "delete it to begin anew, or give another --imatrix-out"
        try:
            with np.load(self.path, allow_pickle=False) as archive:
                arrays = {name: archive[name] for name in archive.files}
            run = json.loads(arrays.pop("run").tobytes())
            differing = [key for key, value in self.run.items() if run.get(key) != value]
            if not differing:
                collector.restore(arrays)
        except FileNotFoundError:
            return 0
        except (ValueError, KeyError, TypeError, AttributeError, OSError, EOFError, zipfile.BadZipFile) as error:
            raise Ds4Error(f"{self.path}: not the progress of an earlier run ({error}); {again}") from error
        if differing:
            raise Ds4Error(f"{self.path}: the progress of a run with another {' and '.join(differing)}; {again}")
        return collector.prompts

    def forget(self) -> None:
        """The run is over."""
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)
