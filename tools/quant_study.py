"""Compares ways to quantise the routed experts, on ds4-tiny: NLL and tool-call success, several seeds.

    python tools/quant_study.py --weights DIR --out DIR [--seeds 1,2,3] [--cases 60] [--processes 1] [--within SECONDS]
    python tools/quant_study.py --out DIR --table

`--weights` is a folder that tools/tiny/train.py wrote: weights before rounding, bfloat16. Everything but the experts is
as in the published files (Q8_0, F16, F32), except in `bf16`. A seed means: conversations for the importance matrix (of
the training split), held-out conversations for the NLL, and held-out cases for the calls.

* NLL: nats a token over what the model itself writes in held-out conversations (tools, chat, arithmetic, recall).
* text: the same over plain English, which the model predicts badly: there its probabilities are spread.
* KL: how far the probabilities are from those of `bf16`, in nats a token, over the conversations and over the text.
* calls: share of right answers of tools/tiny/evaluate.py's tasks, generated greedily.

Intervals are 95 %: of NLL and KL from their spread over conversations, of differences to `q2` likewise, conversation by
conversation; of shares Wilson's. What is measured is kept in DIR/results.json, and the same command goes on, also with
more seeds or cases.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parent / "tiny"))

import numpy as np
import torch
from data.cases import TASKS, Cases
from data.generator import TOKENIZER, Generator
from evaluate import Runner, wilson
from gguf import GGMLQuantizationType as Type
from tokenizers import Tokenizer as FastTokenizer

import ds4
from ds4.engine import EngineConfig
from ds4.engine.loading import tensors_from_transformers
from ds4.evals.nll import logits_before
from ds4.files import replacing
from ds4.gguf.shape import Shape, expected_tensors
from ds4.gguf.writer import save
from ds4.quantize import codes, imatrix
from ds4.quantize.calibration import read_prompts
from ds4.quantize.collect import collect

VARIANTS = {
    "bf16": "all weights bfloat16",
    "q8": "experts Q8_0",
    "q4": "experts Q4_K, no importance",
    "q2": "gate and up IQ2_XXS, down Q2_K, no importance",
    "q2-energy": "the same, importance from the weights' own squares",
    "q2-imatrix": "the same, importance from activations over conversations",
    "q2-mixed": "the same, importance from activations over conversations and plain English",
    "q2-training": "the same types, codes of tools/tiny/quantize.py, which training rounded with",
}
ACTIVATIONS = ("q2-imatrix", "q2-mixed")
BASE = "q2"
"""What differences are told against."""
TOOL_TASKS = ("call", "parallel", "chain")
EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
TEXT_KINDS = {"tools": 8, "chat": 4, "arith": 3, "copy": 2, "recall": 1}
"""Kinds of conversations and how many of each stand together."""
NLL_SEED, CALIBRATION_SEED = 40_000, 50_000
SCORED = ("nll", "text")
PART = 20
"""Cases of one cell."""


@dataclass(frozen=True)
class Settings:
    """What is measured. Results with other numbers of tokens cannot stand in the same folder."""

    seeds: tuple[int, ...] = (1, 2, 3)
    cases: int = 60
    tasks: tuple[str, ...] = TOOL_TASKS
    calibration_tokens: int = 40_000
    nll_tokens: int = 10_000


# --- texts ------------------------------------------------------------------------------------------------------------


def dialogs(seed: int, split: str) -> Iterator[tuple[str, Any, Generator]]:
    """Endless conversations of `TEXT_KINDS`, with the generator that made them."""
    generator = Generator(seed, FastTokenizer.from_file(str(TOKENIZER)), split=split)
    while True:
        for kind, count in TEXT_KINDS.items():
            for _ in range(count):
                generator.rng.wild = generator.wildness()
                yield kind, generator.dialog(kind, 1200, 1200), generator


def write_calibration(path: Path, seed: int, tokens: int, mixed: bool) -> None:
    """Conversations of the training split as lines of JSON, of about so many tokens; half plain English if mixed."""
    left, english = tokens, 0
    with replacing(path) as new, new.open("w", encoding="utf-8") as file:
        for _, dialog, generator in dialogs(CALIBRATION_SEED + seed, "train"):
            value = {"messages": dialog.messages, "thinking": dialog.thinking}
            file.write(json.dumps({**value, "tools": dialog.tools} if dialog.tools else value) + "\n")
            used = len(generator.encode(dialog, "tools")[0])
            left, english = left - used, english + used
            while mixed and english > 0:
                file.write(json.dumps({"text": generator.filler.text(generator.rng, 200)}) + "\n")
                left, english = left - 200, english - 200
            if left <= 0:
                return


def held_out(seed: int, what: str) -> Iterator[tuple[list[int], list[float], str]]:
    """Endless documents: conversations for "nll", plain English for "text"."""
    for kind, dialog, generator in dialogs(NLL_SEED + seed, "eval"):
        yield generator.encode(dialog, kind) if what == "nll" else generator.text(200, 200)


def scored_texts(seed: int, what: str, tokens: int) -> list[tuple[list[int], list[int]]]:
    """Held-out documents: (ids, places of what is scored: in conversations what the model itself writes)."""
    found: list[tuple[list[int], list[int]]] = []
    left = tokens
    for ids, weights, _ in held_out(seed, what):
        places = [i for i, weight in enumerate(weights) if weight]
        if places:
            found.append((ids, places))
            left -= len(ids)
        if left <= 0:
            break
    return found


# --- files ------------------------------------------------------------------------------------------------------------


def source_tensors(weights: Path) -> tuple[Shape, dict[str, torch.Tensor]]:
    """The unrounded weights under their GGUF names."""
    import model as m
    from weights import load, read_info

    info = read_info(weights) or {}
    shape = m.toy_shape() if info.get("shape") == "custom" else m.tiny_shape()
    module = m.new_model(shape)
    load(module, weights)
    return shape, tensors_from_transformers(module, shape)


def expert_codes(
    name: str, value: torch.Tensor, kind: Type, variant: str, importance: imatrix.Imatrix | None
) -> torch.Tensor:
    """uint8 [experts, rows, bytes of a row]."""
    if variant == "q2-training":
        import quantize

        return torch.from_numpy(quantize.encode(value.float(), kind.name))
    experts, _, cols = value.shape
    vectors = None if importance is None else importance.rows(name, experts, cols)
    blocks = []
    for expert, matrix in enumerate(value.float()):
        own = None if vectors is None else vectors[expert]
        if variant == "q2-energy":
            own = codes.importance_from_weights(matrix)
        blocks.append(codes.encode(matrix, kind, own))
    return torch.from_numpy(np.stack(blocks))


def write_model(
    path: Path, shape: Shape, source: dict[str, torch.Tensor], variant: str, importance: imatrix.Imatrix | None = None
) -> None:
    """A model file of profile custom."""
    from export import tokenizer_keys

    tensors, types = {}, {}
    for name, spec in expected_tensors(replace(shape, name="tiny")).items():
        value, kind = source[name].detach().cpu(), spec.types[0]
        expert = any(part in name for part in EXPERTS)
        if kind == Type.I32:
            tensors[name] = value
        elif variant == "bf16":
            tensors[name] = value.bfloat16() if value.dim() > 1 else value.float()
        elif expert:
            two = Type.Q2_K if "down" in name else Type.IQ2_XXS
            types[name] = {"q8": Type.Q8_0, "q4": Type.Q4_K}.get(variant, two)
            tensors[name] = expert_codes(name, value, types[name], variant, importance)
        elif kind == Type.Q8_0:
            types[name] = kind
            blocks = codes.encode(value.float().flatten(0, -2), kind)
            tensors[name] = torch.from_numpy(blocks).view(*value.shape[:-1], -1)
        else:
            tensors[name] = value.half() if kind == Type.F16 else value.float()
    save(path, replace(shape, name="custom"), tensors, tokenizer=tokenizer_keys(TOKENIZER), types=types)


def model_path(out: Path, variant: str, seed: int) -> Path:
    """Only importance from activations depends on the seed."""
    return out / (f"{variant}-{seed}.gguf" if variant in ACTIVATIONS else f"{variant}.gguf")


def prepare(weights: Path, out: Path, settings: Settings) -> None:
    """Make the files that are missing: models, calibration texts, importance matrices."""
    out.mkdir(parents=True, exist_ok=True)
    wanted = [(variant, seed) for variant in VARIANTS for seed in settings.seeds]
    if all(model_path(out, variant, seed).is_file() for variant, seed in wanted):
        return
    shape, source = source_tensors(weights)
    for variant, seed in wanted:
        path = model_path(out, variant, seed)
        if path.is_file():
            continue
        importance = activations(out, variant, seed, settings) if variant in ACTIVATIONS else None
        write_model(path, shape, source, variant, importance)
        print(f"{path.name}: {path.stat().st_size} bytes", file=sys.stderr, flush=True)


def activations(out: Path, variant: str, seed: int, settings: Settings) -> imatrix.Imatrix:
    """The importance matrix of the unrounded model over a seed's text."""
    text, path = out / f"{variant}-{seed}.jsonl", out / f"{variant}-{seed}.dat"
    if not path.is_file():
        write_calibration(text, seed, settings.calibration_tokens, mixed=variant == "q2-mixed")
        config = EngineConfig(threads=1, checkpoint_interval=0)
        collect(ds4.load(model_path(out, "bf16", seed), "cpu", config=config), read_prompts(text), path)
    return imatrix.load(path)


# --- measuring --------------------------------------------------------------------------------------------------------

Cell = dict[str, Any]


def log_probabilities(engine: ds4.Engine, ids: list[int], places: list[int]) -> torch.Tensor:
    """float64 [places, vocab], of the tokens at these places."""
    logits = torch.cat([rows for _, rows in logits_before(engine, ids, 1)])
    return torch.log_softmax(logits[torch.tensor(places) - 1].double(), dim=-1)


@lru_cache(maxsize=1)
def exact_texts(out: Path, seed: int, what: str, tokens: int) -> list[tuple[list[int], list[int], torch.Tensor]]:
    """`scored_texts`, each with what `bf16` says; kept for the variants of a seed, which are measured one by one."""
    engine = ds4.load(model_path(out, "bf16", seed), "cpu", config=EngineConfig(threads=1))
    return [(ids, places, log_probabilities(engine, ids, places)) for ids, places in scored_texts(seed, what, tokens)]


def measure(out: Path, variant: str, seed: int, what: str, settings: Settings) -> Cell:
    """One cell: `what` is "nll", "text", or a task and the number of its first case."""
    torch.set_num_threads(1)
    begin = time.monotonic()
    config = EngineConfig(threads=1)
    engine = ds4.load(model_path(out, variant, seed), "cpu", config=config)
    if what in SCORED:
        cell: Cell = {"sums": [], "kl": [], "tokens": []}
        for ids, places, wanted in exact_texts(out, seed, what, settings.nll_tokens):
            own = log_probabilities(engine, ids, places)
            targets = torch.tensor([ids[i] for i in places])[:, None]
            cell["sums"].append(-float(own.gather(1, targets).sum()))
            cell["kl"].append(float((wanted.exp() * (wanted - own)).sum()))
            cell["tokens"].append(len(places))
    else:
        task, first = what.split("@")
        part = slice(int(first), int(first) + PART)
        cases = Cases(seed, FastTokenizer.from_file(str(TOKENIZER))).make(task, part.stop)[part]
        outcome = Runner(engine, ds4.Sampling(temperature=0.0)).run(cases)
        cell = {"right": outcome.right, "cases": outcome.cases}
    return {**cell, "seconds": round(time.monotonic() - begin, 1)}


class Results:
    """Finished cells in a file: "variant/seed/what" -> counts."""

    def __init__(self, path: Path, settings: Settings) -> None:
        self.path, self.settings = path, settings
        self.cells: dict[str, Cell] = {}
        self.texts = {"calibration_tokens": settings.calibration_tokens, "nll_tokens": settings.nll_tokens}
        if path.is_file():
            found = json.loads(path.read_text("utf-8"))
            if found["texts"] != self.texts:
                raise SystemExit(f"{path} holds results over other texts ({found['texts']}): give another --out")
            self.cells = found["cells"]

    def todo(self) -> list[tuple[str, int, str]]:
        """Cells that are missing, all variants together, so that a stopped study compares the same cases."""
        parts = [f"{task}@{first}" for first in range(0, self.settings.cases, PART) for task in self.settings.tasks]
        every = [
            (variant, seed, what) for what in (*SCORED, *parts) for seed in self.settings.seeds for variant in VARIANTS
        ]
        return [cell for cell in every if "/".join(map(str, cell)) not in self.cells]

    def add(self, variant: str, seed: int, what: str, cell: Cell) -> None:
        self.cells[f"{variant}/{seed}/{what}"] = cell
        value = {"texts": self.texts, "cells": self.cells}
        with replacing(self.path) as new:
            new.write_text(json.dumps(value, indent=1) + "\n", "utf-8")

    def of(self, variant: str, what: str) -> list[Cell]:
        """The cells of all seeds, and of all parts of a task, that are there for every variant."""
        found = []
        for seed in self.settings.seeds:
            for first in range(0, 1 if what in SCORED else self.settings.cases, PART):
                part = what if what in SCORED else f"{what}@{first}"
                if all(f"{other}/{seed}/{part}" in self.cells for other in VARIANTS):
                    found.append(self.cells[f"{variant}/{seed}/{part}"])
        return found


def _one(job: tuple[Path, str, int, str, Settings]) -> tuple[str, int, str, Cell]:
    out, variant, seed, what, settings = job
    return variant, seed, what, measure(out, variant, seed, what, settings)


def run(out: Path, settings: Settings, processes: int, within: float) -> bool:
    """Measure what is missing; False if the time was over before."""
    deadline = time.monotonic() + within
    results = Results(out / "results.json", settings)
    jobs = [(out, variant, seed, what, settings) for variant, seed, what in results.todo()]
    if processes == 1 or len(jobs) < 2:
        return _keep(map(_one, jobs), results, deadline)
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        return _keep(pool.imap_unordered(_one, jobs), results, deadline)


def _keep(cells: Iterable[tuple[str, int, str, Cell]], results: Results, deadline: float) -> bool:
    for variant, seed, what, cell in cells:
        results.add(variant, seed, what, cell)
        print(f"{variant} {seed} {what}: {cell['seconds']} s", file=sys.stderr, flush=True)
        if time.monotonic() > deadline:
            break
    return not results.todo()


# --- the table --------------------------------------------------------------------------------------------------------


def ratio(sums: Sequence[float], weights: Sequence[float]) -> tuple[float, float]:
    """sum of sums / sum of weights, and half of its 95 % interval over conversations."""
    n, total = len(sums), math.fsum(weights)
    value = math.fsum(sums) / total
    residuals = math.fsum((s - value * w) ** 2 for s, w in zip(sums, weights, strict=True))
    return value, 1.96 * math.sqrt(residuals * n / max(n - 1, 1)) / total


def joined(cells: Sequence[Cell], key: str) -> list[float]:
    """The lists of several seeds one behind the other."""
    return [value for cell in cells for value in cell[key]]


def table(results: Results) -> str:
    """Markdown: a row for each variant."""
    tasks = results.settings.tasks
    diff = f"against {BASE}"
    heads = ["experts", "NLL", diff, "text", diff, "each seed", "KL", diff, "text KL", diff, *tasks, "all calls"]
    rows = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    if not all(results.of(BASE, what) for what in SCORED):
        return "nothing is measured yet for all variants"
    for variant in VARIANTS:
        nll, text = (results.of(variant, what) for what in SCORED)
        base = {what: results.of(BASE, what) for what in SCORED}
        seeds = ", ".join(f"{ratio(c['sums'], c['tokens'])[0]:.4f}" for c in text)
        shares = [share(results.of(variant, task)) for task in tasks]
        whole = share([cell for task in tasks for cell in results.of(variant, task)])
        numbers = [mean(nll, "sums"), against(nll, base["nll"], "sums")]
        numbers += [mean(text, "sums"), against(text, base["text"], "sums"), seeds]
        numbers += [
            mean(nll, "kl"),
            against(nll, base["nll"], "kl"),
            mean(text, "kl"),
            against(text, base["text"], "kl"),
        ]
        numbers += [*shares, whole]
        rows.append(f"| {variant} | {' | '.join(numbers)} |")
    legend = [f"* {variant}: {text}" for variant, text in VARIANTS.items()]
    s = results.settings
    facts = (
        f"Seeds {', '.join(map(str, s.seeds))}; NLL and KL over conversations of about {s.nll_tokens} tokens a seed;"
        f" importance over about {s.calibration_tokens} tokens a seed."
    )
    return "\n".join([*rows, "", facts, "", *legend])


def mean(cells: Sequence[Cell], key: str) -> str:
    """Nats a token of all cells, with its interval."""
    return "{:.5f} +- {:.5f}".format(*ratio(joined(cells, key), joined(cells, "tokens")))


def against(cells: Sequence[Cell], base: Sequence[Cell], key: str) -> str:
    """The difference to the same cells of another variant, document by document; empty for the variant itself."""
    if cells == base:
        return ""
    pairs = zip(joined(cells, key), joined(base, key), strict=True)
    return "{:+.5f} +- {:.5f}".format(*ratio([a - b for a, b in pairs], joined(cells, "tokens")))


def share(cells: Sequence[Cell]) -> str:
    """Right answers of all seeds with Wilson's interval."""
    right, n = sum(c["right"] for c in cells), sum(c["cases"] for c in cells)
    if not n:
        return ""
    low, high = wilson(right, n)
    return f"{right} / {n} = {100 * right / n:.1f} % ({100 * low:.1f} to {100 * high:.1f})"


def main(argv: list[str] | None = None) -> int:
    """0: everything is measured; 2: the time was over before."""
    default = Settings()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, help="folder that tools/tiny/train.py wrote")
    parser.add_argument("--out", type=Path, required=True, help="folder for models and results")
    parser.add_argument("--seeds", default=",".join(map(str, default.seeds)), help="comma separated")
    parser.add_argument("--cases", type=int, default=default.cases, help="cases a task and seed")
    parser.add_argument("--tasks", default=",".join(default.tasks), help=f"comma separated, of {', '.join(TASKS)}")
    parser.add_argument("--calibration-tokens", type=int, default=default.calibration_tokens)
    parser.add_argument("--nll-tokens", type=int, default=default.nll_tokens)
    parser.add_argument("--processes", type=int, default=1, help="worker processes, one thread each")
    parser.add_argument("--within", type=float, default=math.inf, help="begin no new cell after this many seconds")
    parser.add_argument("--table", action="store_true", help="print what is measured, and measure nothing")
    args = parser.parse_args(argv)
    try:
        seeds = tuple(int(seed) for seed in args.seeds.split(","))
    except ValueError:
        parser.error(f"--seeds {args.seeds}: whole numbers with commas between are needed")
    tasks = tuple(args.tasks.split(","))
    if unknown := [task for task in tasks if task not in TASKS]:
        parser.error(f"--tasks: {', '.join(unknown)} unknown; tasks are {', '.join(TASKS)}")
    settings = Settings(seeds, args.cases, tasks, args.calibration_tokens, args.nll_tokens)
    done = True
    if not args.table:
        if args.weights is None or not any(args.weights.glob("weights-*.pt")):
            parser.error(
                f"--weights {args.weights}: a folder with weights-0.pt is needed (tools/tiny/train.py writes it)"
            )
        prepare(args.weights, args.out, settings)
        done = run(args.out, settings, args.processes, args.within)
    print(table(Results(args.out / "results.json", settings)))
    return 0 if done else 2


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ds4.Ds4Error as error:
        sys.exit(f"quant_study: {error}")
