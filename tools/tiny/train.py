"""Trains ds4-tiny, or goes on with it.

    python tools/tiny/train.py --plan main --seconds 500 --out DIR
    python tools/tiny/train.py --plan finish --init DIR|FILE.gguf --out DIR2 [--total 540] [--seconds 300]

A plan (plans.py) is a list of stages over its time, `--total` seconds if given. `--seconds` ends this process earlier,
with everything saved; the same command then goes on where it stopped, if DIR2 holds the plan's unfinished run. Weights
to begin with come from a folder of shards or from a GGUF file (its blocks decoded). Progress is by wall clock, so the
result depends on the machine's speed; data and initial values are seeded.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

import batches as b
import model as m
import plans
import quantize
import weights
from muon import Optimiser


class Statistics:
    """Sums kept on the device and read every few steps."""

    def __init__(self, device) -> None:
        n = len(b.GROUPS)
        self.right, self.count, self.ce = (torch.zeros(n, device=device) for _ in range(3))
        self.smooth: dict[str, float] = {}

    def add(self, right, ce, group) -> None:
        flat = group.flatten().long()
        self.right.index_add_(0, flat, right.flatten().float())
        self.ce.index_add_(0, flat, ce.flatten())
        self.count.index_add_(0, flat, torch.ones_like(flat, dtype=torch.float32))

    def read(self) -> dict[str, float]:
        right, count, ce = self.right.tolist(), self.count.tolist(), self.ce.tolist()
        for t in (self.right, self.count, self.ce):
            t.zero_()
        out = {}
        for i, name in enumerate(b.GROUPS):
            if i and count[i] >= 20:
                out[name] = right[i] / count[i]
                out[name + "/ce"] = ce[i] / count[i]
                self.smooth[name] = out[name]
        return out


class Run:
    """One training process."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.begin = time.monotonic()
        self.args, self.plan = args, plans.PLANS[args.plan]
        if args.total:
            self.plan = self.plan.lasting(args.total)
        self.ends = self.plan.ends or self.plan.total
        self.device = args.device
        self.shape = m.toy_shape() if args.plan == "smoke" else m.tiny_shape()
        self.model = m.new_model(self.shape, args.seed)
        self.start = self.restore(Path(args.out), Path(args.init) if args.init else None)
        self.model.to(self.device)
        fast = self.device == "cuda"
        dtype = torch.bfloat16 if fast else torch.float32
        self.forward = m.Forward(self.model, self.shape, self.device, dtype, compiled=fast, flex=fast)
        self.optimiser = Optimiser(self.model, self.shape, lr=args.lr)
        self.statistics = Statistics(self.device)
        self.load_sum = torch.zeros(self.shape.layers, self.shape.experts, device=self.device)
        self.steps, self.tokens, self.stage = 0, 0, 0
        self.train_begin: float | None = None
        self.held_out: dict[str, dict] = {}
        self.scores: dict[str, float] = {}
        self.stop = False

    def restore(self, out: Path, init: Path | None) -> float:
        """Weights of this plan's unfinished run, else those to begin with; returns the seconds that are done."""
        info = weights.read_info(out)
        if info and info["plan"] == self.args.plan:
            weights.load(self.model, out)
            print(f"goes on after {info['elapsed']:.0f} s and {info['steps']} steps of {out}", flush=True)
            return float(info["elapsed"])
        if init is not None:
            weights.load(self.model, init)
            print("begins with", init, flush=True)
        return 0.0

    def elapsed(self) -> float:
        """Seconds of the plan that are used: earlier runs and this one, start-up and compilation included."""
        return self.start + time.monotonic() - self.begin

    def over(self) -> bool:
        """True if the plan or this process's share of it is done."""
        limits = (self.args.seconds and time.monotonic() - self.begin >= self.args.seconds, self.stop)
        return any(limits) or self.elapsed() >= self.ends or 0 < self.args.steps <= self.steps

    def scale(self) -> float:
        """Learning-rate factor: warm-up, flat, then down along a cosine or a line."""
        part = min(1.0, self.elapsed() / self.plan.total)
        warm = min(1.0, (self.steps + 1) / 100)
        fall = max(0.0, part - self.plan.flat) / (1 - self.plan.flat)
        if self.plan.linear:
            return warm * max(self.plan.floor, self.plan.peak * (1 - fall))
        return warm * self.plan.peak * (0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * fall)))

    def step(self, batch: dict) -> None:
        t = {k: torch.from_numpy(v) for k, v in batch.items()}
        if self.device == "cuda":  # pinned, so that the copy does not wait for the kernels before it
            t = {k: v.pin_memory().to(self.device, non_blocking=True) for k, v in t.items()}
        ids = t["ids"].long()
        targets = torch.roll(ids, -1, 1)
        now = self.elapsed()
        select = self.shape.index_top_k if now >= self.plan.select_at else 0
        if now >= self.plan.round_at and (
            self.forward.delta is None or not self.rounding or self.steps % self.plan.round_every == 0
        ):
            self.forward.delta, self.rounding = quantize.expert_deltas(self.model), True
        if self.forward.delta is None:  # zeros, so that the compiled function stays the same one
            e = [layer.mlp.experts for layer in self.model.model.layers]
            self.forward.delta = [(torch.zeros_like(x.gate_up_proj), torch.zeros_like(x.down_proj)) for x in e]
            self.rounding = False
        ce, right, kl, held, used = self.forward.loss(
            ids, targets, (t["positions"], t["strength"]), qat=self.args.qat, select=select
        )
        loss = (ce * t["weight"]).sum() / t["weight"].sum().clamp_min(1.0)
        (loss + sum(kl)).backward()
        self.optimiser.step(self.scale())
        self.optimiser.zero_grad(self.model)
        with torch.no_grad():
            self.statistics.add(right, ce.detach(), t["group"])
            self.balance(used)
        self.last = (loss.detach(), [k.detach() for k in kl], held)
        self.steps += 1
        self.tokens += ids.numel()

    def balance(self, used) -> None:
        """Moves each router's selection bias against the load, averaged over the recent batches of every kind."""
        for i, use in enumerate(used):
            self.load_sum[i].lerp_(use.float().mean((0, 1)), 0.1)
            if i >= self.shape.hash_layers:
                load = self.load_sum[i]
                self.model.model.layers[i].mlp.gate.e_score_correction_bias.add_(
                    self.plan.balance * torch.sign(load.mean() - load)
                )

    def verify(self, batch: dict, rows: int = 8) -> None:
        """Compares the compiled bfloat16 path (loss on the first rows) with the plain float32 one on those rows."""
        ids = torch.from_numpy(batch["ids"]).to(self.device).long()
        targets, at = (
            torch.roll(ids, -1, 1),
            (torch.from_numpy(batch["positions"]).to(self.device), torch.from_numpy(batch["strength"]).to(self.device)),
        )
        plain = m.Forward(self.model, self.shape, self.device, torch.float32)
        for select in (0, self.shape.index_top_k):
            begin, found = time.monotonic(), []
            for forward, n in ((self.forward, len(ids)), (plain, rows)):
                ce, _, kl, _, _ = forward.loss(
                    ids[:n], targets[:n], (at[0][:n], at[1][:n]), qat=self.args.qat, select=select
                )
                (ce[:rows].mean() + (sum(kl) if n == rows else 0)).backward()
                found.append(
                    (
                        ce[:rows].detach(),
                        {k: p.grad.clone() for k, p in self.model.named_parameters() if p.grad is not None},
                    )
                )
                self.optimiser.zero_grad(self.model)
            (ce0, g0), (ce1, g1) = found
            cosines = {
                k: torch.cosine_similarity(g0[k].flatten(), g1[k].flatten(), 0).item() for k in g0 if "indexer" not in k
            }
            worst = sorted(cosines, key=cosines.get)[:4]
            print(
                "verify select",
                select,
                "ce",
                ce0.mean().item(),
                ce1.mean().item(),
                "mean |d|",
                (ce0 - ce1).abs().mean().item(),
                "worst gradient cosines",
                {k: round(cosines[k], 4) for k in worst},
                "seconds",
                round(time.monotonic() - begin, 1),
                flush=True,
            )

    def score(self) -> None:
        """Prints the share of wholly right answers (arg-max of every token) on unseen rows of the held-out split.

        Teacher-forced, so these are higher than what free generation gives. Same shapes and gradients as in training,
        so that nothing is compiled again.
        """
        if not self.plan.held_out:
            return
        if not self.held_out:
            maker = b.Maker(self.args.seed + 77, split="eval")
            self.held_out = {name: maker.batch(part) for name, part in self.plan.held_out.items()}
        select = self.shape.index_top_k if self.elapsed() >= self.plan.select_at else 0
        for name, batch in self.held_out.items():
            t = {k: torch.from_numpy(v).to(self.device) for k, v in batch.items()}
            ids = t["ids"].long()
            sample = (t["positions"], t["strength"])
            _, right, _, _, _ = self.forward.loss(ids, torch.roll(ids, -1, 1), sample, qat=self.args.qat, select=select)
            filler = np.isin(batch["group"], [b.GROUPS.index("text"), b.GROUPS.index("short")])
            number = torch.from_numpy(b.answers(np.where(filler, 0, batch["weight"]))).to(self.device)
            count = int(number.max()) + 1
            wrong = torch.zeros(count, device=self.device)
            wrong.index_add_(0, number[number >= 0], (~right[number >= 0]).float())
            self.scores[name] = round((wrong == 0).float().mean().item(), 4)
        print(json.dumps({"t": round(self.elapsed(), 1), "held-out answers": self.scores}), flush=True)

    def log(self, waited: float) -> None:
        loss, kl, held = self.last
        found = self.statistics.read()
        load = self.load_sum[self.shape.hash_layers :]
        rate = self.tokens / (time.monotonic() - self.train_begin) if self.train_begin else 0
        line = {
            "t": round(self.elapsed(), 1),
            "step": self.steps,
            "stage": self.stage,
            "lr": round(self.scale(), 3),
            "tok/s": round(rate),
            "wait": round(waited, 1),
            "loss": round(loss.item(), 4),
            "kl": [round(k.item(), 3) for k in kl],
            "held": [round(h.item(), 3) for h in held],
            "load": [round(load.min().item(), 2), round(load.max().item(), 2)],
            **{k: round(v, 4) for k, v in found.items()},
        }
        print(json.dumps(line), flush=True)

    def advance(self, source: b.Batches) -> None:
        """Next stage when its time is over or its goal is reached."""
        stage = self.plan.stages[self.stage]
        done = self.elapsed() >= stage.until
        if stage.goal:
            done = done or all(self.statistics.smooth.get(k, 0) >= v for k, v in stage.goal.items())
        if done and self.stage + 1 < len(self.plan.stages):
            self.stage += 1
            source.stage.value = self.stage
            print("stage", self.stage, flush=True)

    def train(self) -> None:
        if self.over():
            print("nothing left to do: the plan's time is used", flush=True)
            return
        source = b.Batches([s.parts for s in self.plan.stages], self.args.workers, self.args.seed + 1 + int(self.start))
        while self.stage + 1 < len(self.plan.stages) and self.start >= self.plan.stages[self.stage].until:
            self.stage += 1
        source.stage.value = self.stage
        if self.args.verify:
            self.verify(source.next())
        gc.disable()
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "stop", True))
        every, saved = 1 if self.device == "cpu" else 50, time.monotonic()
        try:
            while not self.over():
                self.step(source.next())
                if self.steps % 500 == 20:  # the collector's pauses cost more than its garbage
                    gc.collect()
                if self.steps == 3:
                    if self.device == "cuda":
                        torch.cuda.synchronize()
                    self.train_begin, self.tokens = time.monotonic(), 0
                    print("compiled and ready after", round(self.train_begin - self.begin, 1), flush=True)
                if self.steps % every == 0:
                    self.log(source.waited)
                    self.advance(source)
                if self.steps % self.args.score_every == 10:
                    self.score()
                if time.monotonic() - saved > 100:
                    self.save()
                    saved = time.monotonic()
        except BaseException:
            source.close()
            raise
        self.score()
        self.save()
        if self.args.profile:
            self.profile([source.next() for _ in range(4)])
        source.close()
        if self.device == "cuda":
            print("peak GiB", torch.cuda.max_memory_allocated() / 2**30, flush=True)

    def profile(self, some: list[dict]) -> None:
        """Prints which kernels the time of a step goes to."""
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as record:
            for batch in some:
                self.step(batch)
            torch.cuda.synchronize()
        print(
            record.key_averages().table(sort_by="self_cuda_time_total", row_limit=28, max_name_column_width=60),
            flush=True,
        )

    def save(self) -> None:
        info = {
            "elapsed": self.elapsed(),
            "ends": self.ends,
            "steps": self.steps,
            "tokens": self.tokens,
            "shape": self.shape.name,
            "plan": self.args.plan,
            "accuracy": self.statistics.smooth,
            "held_out": self.scores,
        }
        weights.save(self.model, Path(self.args.out), info)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--plan", default="main", choices=sorted(plans.PLANS))
    p.add_argument("--total", type=float, default=0.0, help="seconds of the whole plan, if not its own number")
    p.add_argument("--seconds", type=float, default=0.0, help="end this process, saved, after this many seconds")
    p.add_argument("--steps", type=int, default=0, help="end this process after this many steps")
    p.add_argument("--init", default="", help="folder of a saved run, or a GGUF file, to begin with")
    p.add_argument("--out", required=True, help="folder for the weights; an unfinished run in it is continued")
    p.add_argument("--score-every", type=int, default=500, help="steps between two scores on held-out rows")
    p.add_argument("--lr", type=float, default=0.02)
    p.add_argument("--no-qat", dest="qat", action="store_false")
    p.add_argument("--verify", action="store_true", help="first compare the compiled path with the plain one")
    p.add_argument("--profile", action="store_true", help="at the end, print where the time of a step goes")
    p.add_argument("--workers", type=int, default=14)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = p.parse_args()
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.cache_size_limit = 64
    threads = os.environ.get("OMP_NUM_THREADS")
    if args.device == "cpu" and threads:
        torch.set_num_threads(int(threads))
    Run(args).train()


if __name__ == "__main__":
    main()
