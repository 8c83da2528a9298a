"""Times Triton kernels on a GPU at full shapes and checks their results in the same run.

    python3 tools/kernel_bench.py                      every case
    python3 tools/kernel_bench.py gemv experts.down    cases whose name begins so
    python3 tools/kernel_bench.py --sweep gemv.head    other tiles too, the fastest last (--tiles REGEX: some of them)
    python3 tools/kernel_bench.py --compile experts    no GPU: compile for sm_90, print registers and spills
    python3 tools/kernel_bench.py --list

Times are replays of a CUDA graph that runs the kernel on as many sets of weights as defeat the L2 cache. "of read" is
the kernel's bytes per second over what a kernel that only reads reaches on the same card in the same run. Every result
is compared with float64 on the same inputs. Exit status 1 if an error is above its bar or a result is not finite.

A file of tools/kernel_cases adds cases: `CASES` maps a name to a function that takes the `Bench` and yields `Case`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import sys
import time
from pathlib import Path

import torch
import triton

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tools")]

import kernel_cases  # noqa: E402
from kernel_cases.harness import Bench, Result  # noqa: E402


def find_cases(wanted: list[str]) -> dict[str, kernel_cases.Maker]:
    """Name -> maker of the cases whose names begin with one of `wanted`, all without any."""
    found: dict[str, kernel_cases.Maker] = {}
    for module in pkgutil.iter_modules(kernel_cases.__path__):
        found.update(getattr(importlib.import_module(f"kernel_cases.{module.name}"), "CASES", {}))
    for name in wanted:
        if not any(key.startswith(name) for key in found):
            raise SystemExit(f"no case begins with {name!r}; --list names them all")
    return {key: make for key, make in found.items() if not wanted or any(key.startswith(name) for name in wanted)}


def line(result: Result, read: float) -> str:
    rate = f"{result.tbytes:6.2f} {result.tbytes / read:6.0%}" if read and result.us else " " * 13
    flops = f"{result.tflops:7.0f}" if result.tflops else " " * 7
    time_us = f"{result.us:9.2f}" if result.us else " " * 9
    error = f"{result.error:9.1e} {'ok' if result.ok else f'ABOVE {result.bar:g}'}" if result.checked else " " * 12
    return f"{result.name:44} {time_us} {rate} {flops}  {error:13}  {result.kernels}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="beginnings of names of cases")
    parser.add_argument("--shape", default="flash", choices=("flash", "pro", "tiny"))
    parser.add_argument("--rows", default="1,4,16,64", help="rows of a decode step, comma-separated")
    parser.add_argument("--tokens", default="4096", help="tokens of a prefill chunk, comma-separated")
    parser.add_argument("--sweep", action="store_true", help="try other tiles too")
    parser.add_argument("--tiles", default="", help="of a sweep only tiles whose text this regular expression finds")
    parser.add_argument("--compile", action="store_true", help="only compile, for sm_90, without a GPU")
    parser.add_argument("--no-check", action="store_true", help="only time")
    parser.add_argument("--json", type=Path, help="write all results here too")
    parser.add_argument("--list", action="store_true", help="only print the names of the cases")
    options = parser.parse_args()
    cases = find_cases(options.names)
    if options.list:
        print("\n".join(cases))
        return 0
    if not (options.compile or torch.cuda.is_available() or triton.knobs.runtime.interpret):
        raise SystemExit("kernel_bench: there is no CUDA device; --compile compiles without one")
    bench = Bench(
        shape=options.shape,
        rows=[int(n) for n in options.rows.split(",")],
        tokens=[int(n) for n in options.tokens.split(",")],
        sweep=options.sweep,
        compile_only=options.compile,
        check=not options.no_check,
        wanted_tiles=options.tiles,
    )
    print(f"{sys.argv[0]} {' '.join(sys.argv[1:])}", f"shape {bench.shape.name}", bench.machine(), sep="; ")
    read = 0.0
    if bench.on_gpu:
        read, copy, matmul = bench.ceilings()
        bench.free()
        print(f"read {read:.2f} TB/s, copy {copy:.2f} TB/s (read + write), bf16 matrix product {matmul:.0f} TFLOP/s")
    print(f"{'case':44} {'us':>9} {'TB/s':>6} {'of read':>6} {'TFLOP/s':>7}  {'error':13}  kernels")
    results: list[Result] = []
    for name, make in cases.items():
        start, seen = time.monotonic(), len(results)
        for case in make(bench):
            case.name = f"{name} {case.name}".strip()
            results.append(bench.run(case))
            print(line(results[-1], read), flush=True)
        if options.sweep and seen + 1 < len(results):
            best = min(results[seen:], key=lambda r: r.us)
            print(f"# fastest of {name}: {best.name} {best.us:.2f} us ({time.monotonic() - start:.0f} s)", flush=True)
        bench.free()
    if options.json:
        options.json.write_text(json.dumps({"read": read, "results": [vars(r) for r in results]}, indent=1))
    bad = [r.name for r in results if r.checked and not r.ok]
    print(f"{len(results)} results", f"above the bar: {bad}" if bad else "all within their bars", sep="; ")
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
