"""Rebuilds ds4-tiny: trains, rounds, exports, checks and measures it, in one command that can be stopped and repeated.

    python tools/tiny/build.py                         everything, from the initial values
    python tools/tiny/build.py --init DIR|FILE.gguf    the later runs only, from trained weights (or --runs polish)
    python tools/tiny/build.py --within 580            stops in time; the same command then goes on
    python tools/tiny/build.py --smoke                 the same code with a toy model, on any machine, in minutes

Stages, each skipped once it is done: main, finish, polish (training, about 27 minutes on one H200), export, check,
greedy, default (two measurements of 1,000 cases a task) and table. They leave everything in --work; the package's own
file is only replaced with --install. Exit status: 0 all done, 2 the time was over, else a stage failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SHIPPED = ROOT / "src" / "ds4" / "data" / "ds4-tiny.gguf"
MARGIN = 25.0  # seconds that a training process needs to start, and to save and end
RUNS = ("main", "finish", "polish")


@dataclass(frozen=True)
class Stage:
    """One step. `command` gets the seconds that are left, `done` looks only at what the step leaves behind."""

    name: str
    command: Callable[[float], list[str]]
    done: Callable[[], bool]


def trained(folder: Path) -> bool:
    """True if the folder holds a run that went on to its end."""
    path = folder / "info.json"
    if not path.is_file():
        return False
    info = json.loads(path.read_text())
    return bool(info["elapsed"] >= info["ends"])


def newer(path: Path, than: Path) -> bool:
    return path.is_file() and than.is_file() and path.stat().st_mtime_ns >= than.stat().st_mtime_ns


def stages(args: argparse.Namespace) -> list[Stage]:
    """The steps in order."""
    work: Path = args.work
    runs = ("smoke",) if args.smoke else args.runs
    out: list[Stage] = []
    before = str(args.init)
    for run in runs:
        out.append(training(args, run, before))
        before = str(work / run)
    last = work / runs[-1] / "info.json"
    file, checked = work / "ds4-tiny.gguf", work / "checked"

    def tool(name: str, *options: object) -> list[str]:
        return [sys.executable, str(HERE / name), *map(str, options)]

    out.append(
        Stage(
            "export",
            lambda _: tool("export.py", "--weights", last.parent, "--out", file, "--sharpen", args.sharpen),
            lambda: newer(file, last),
        )
    )
    out.append(
        Stage(
            "check",
            lambda _: tool("check.py", "--file", file, "--weights", last.parent, "--done", checked),
            lambda: newer(checked, file),
        )
    )
    for sampling in ("greedy", "default"):
        out.append(measurement(args, sampling, file))
    table = work / "table.md"
    results = [work / f"{s}.json" for s in ("greedy", "default")]
    out.append(
        Stage(
            "table",
            lambda _: tool("evaluate.py", "--table", *results, "--out", table),
            lambda: all(newer(table, path) for path in results),
        )
    )
    return out


def training(args: argparse.Namespace, run: str, init: str) -> Stage:
    folder = args.work / run

    def command(left: float) -> list[str]:
        options = ["--plan", run, "--out", str(folder), "--workers", str(args.workers)]
        if init:
            options += ["--init", init]
        if args.device:
            options += ["--device", args.device]
        if left < 1e8:
            options += ["--seconds", str(max(1.0, left - MARGIN))]
        return [sys.executable, str(HERE / "train.py"), *options]

    return Stage(run, command, lambda: trained(folder))


def measurement(args: argparse.Namespace, sampling: str, file: Path) -> Stage:
    path, marker = args.work / f"{sampling}.json", args.work / f"{sampling}.done"

    def command(left: float) -> list[str]:
        if not newer(path, file):  # results of an older model
            path.unlink(missing_ok=True)
        options = ["--model", str(file), "--cases", str(args.cases), "--seed", str(args.seed), "--sampling", sampling]
        options += ["--processes", str(args.processes), "--json", str(path), "--done", str(marker)]
        if sampling == "greedy":
            options += ["--index-selection", "topk,random,all"]
        if args.smoke:
            options += ["--tasks", "call,chain,recall_near"]
        if left < 1e8:
            options += ["--within", str(max(1.0, left - 30))]
        return [sys.executable, str(HERE / "evaluate.py"), *options]

    return Stage(sampling, command, lambda: newer(marker, file))


def run(args: argparse.Namespace, steps: list[Stage]) -> int:
    """Every stage that is not done, as long as there is time."""
    begin = time.monotonic()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), os.environ.get("PYTHONPATH", "")))}
    for stage in steps:
        if stage.done():
            print(f"{stage.name}: done before", flush=True)
            if stage.name == args.until:
                return 0
            continue
        left = args.within - (time.monotonic() - begin)
        if left < MARGIN:
            print(f"{stage.name}: no time left; the same command goes on here", flush=True)
            return 2
        print(f"{stage.name}: begins, {left:.0f} s are left" if left < 1e8 else f"{stage.name}: begins", flush=True)
        started = time.monotonic()
        code = subprocess.run(stage.command(left), env=environment, check=False).returncode
        print(f"{stage.name}: {time.monotonic() - started:.0f} s", flush=True)
        if code not in (0, 2):
            print(f"{stage.name}: failed with status {code}", flush=True)
            return code
        if not stage.done():
            print(f"{stage.name}: not finished; the same command goes on here", flush=True)
            return 2
        if stage.name == args.until:
            return 0
    if args.install:
        shutil.copyfile(args.work / "ds4-tiny.gguf", SHIPPED)
        print(f"installed as {SHIPPED}", flush=True)
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "tiny", help="folder for everything that is made")
    parser.add_argument("--init", default="", help="trained weights (folder or GGUF file) instead of the run `main`")
    parser.add_argument("--runs", default="", help="comma separated; without: all, or with --init those after `main`")
    parser.add_argument("--within", type=float, default=1e9, help="seconds after which to stop, saved")
    parser.add_argument("--until", default="", help="stop after this stage")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1), help="data processes")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="measuring processes")
    parser.add_argument("--device", default="", help="cuda or cpu; found out if left away")
    parser.add_argument("--cases", type=int, default=0, help="cases a task (1000)")
    parser.add_argument("--seed", type=int, default=1, help="of the cases")
    parser.add_argument("--sharpen", type=float, default=1.0, help="factor on all logits, see export.py")
    parser.add_argument("--smoke", action="store_true", help="a toy model and a few cases: shows that everything runs")
    parser.add_argument("--install", action="store_true", help="put the file into the package at the end")
    args = parser.parse_args(argv)
    args.work = args.work.resolve()
    if args.init:
        args.init = str(Path(args.init).resolve())
    args.runs = tuple(args.runs.split(",")) if args.runs else RUNS[1:] if args.init else RUNS
    if not set(args.runs) <= set(RUNS):
        parser.error(f"--runs {','.join(args.runs)}: the runs are {', '.join(RUNS)}")
    args.cases = args.cases or (4 if args.smoke else 1000)
    if args.smoke and args.install:
        parser.error("a toy model is not for the package: leave --install or --smoke away")
    names = [stage.name for stage in stages(args)]
    if args.until and args.until not in names:
        parser.error(f"no stage {args.until!r}; the stages are {', '.join(names)}")
    args.work.mkdir(parents=True, exist_ok=True)
    return run(args, stages(args))


if __name__ == "__main__":
    sys.exit(main())
