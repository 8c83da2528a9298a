"""Speed and error of the quantisers next to the C ones of ggml, on the same tensors in the same run.

    python3 tools/quantize_bench.py                          one thread each; needs numba and pywhispercpp
    python3 tools/quantize_bench.py --threads 8              speed of ours with 8 threads
    python3 tools/quantize_bench.py --device cuda            speed on a GPU; needs triton
    python3 tools/quantize_bench.py --types IQ2_XXS Q2_K --rows 512

Speed is bytes of bf16 input per second: of CPU time for one thread, so that other work on the machine changes little,
else of the clock. Error is sum importance (x - x')^2 / sum importance x^2 over a tensor. Hours are for the routed
experts of Flash: 43 layers x 256 experts x 3 matrices of 4096 x 2048.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType, GGUFReader, quants

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tools")]

import ggml_quantize  # noqa: E402

from ds4.quantize import codes  # noqa: E402

Array = npt.NDArray[np.float32]

TYPES = ("Q8_0", "Q2_K", "Q4_K", "IQ2_XXS")
EXPERT_VALUES = 4096 * 2048
FLASH_MATRICES = 43 * 256 * 3
COLS = 2048


def tensors(rows: int) -> Iterator[tuple[str, Array]]:
    """Names and matrices of rows * 2048 values to quantise."""
    rng = np.random.default_rng(9)
    yield "gaussian", 0.02 * rng.standard_normal((rows, COLS), dtype=np.float32)
    yield "student t, 4", (0.02 * rng.standard_t(4, (rows, COLS))).astype(np.float32)
    outliers = 0.02 * rng.standard_normal((rows, COLS), dtype=np.float32)
    outliers[::4, ::97] *= 20
    yield "rows with outliers", outliers
    yield from tiny_tensors(rows)


def tiny_tensors(rows: int) -> Iterator[tuple[str, Array]]:
    """Weights of the embedded model, decoded: two kinds that are stored in 8 bits, and routed experts."""
    reader = GGUFReader(ROOT / "src" / "ds4" / "data" / "ds4-tiny.gguf")
    for label in ("attn_q_b", "ffn_down_shexp", "ffn_gate_exps", "ffn_down_exps"):
        found = [tensor for tensor in reader.tensors if f".{label}." in tensor.name]
        values = np.concatenate([quants.dequantize(t.data, t.tensor_type).reshape(-1) for t in found])
        yield f"ds4-tiny {label}", values[: rows * COLS].reshape(-1, 256).astype(np.float32)


def importances(cols: int) -> Iterator[tuple[str, Array | None]]:
    """Shapes of importance: none, mild, heavy-tailed, and few channels that carry nearly all."""
    rng = np.random.default_rng(10)
    yield "none", None
    yield "mild", rng.gamma(2, 1, cols).astype(np.float32)
    yield "heavy", np.exp(1.5 * rng.standard_normal(cols)).astype(np.float32)
    few = rng.gamma(2, 1, cols).astype(np.float32)
    few[rng.permutation(cols)[: cols // 50]] *= 1000
    yield "few channels", few


def weighted_error(values: Array, stored: npt.NDArray[np.uint8], kind: GGMLQuantizationType, weight: Array) -> float:
    """sum weight (x - x')^2 / sum weight x^2, in float64."""
    x = values.astype(np.float64)
    return float((weight * (x - codes.decode(stored, kind)) ** 2).sum() / (weight * x * x).sum())


def seconds(run: Callable[[], object], clock: Callable[[], float], repeats: int = 3) -> float:
    """The shortest of a few runs."""
    best = math.inf
    for _ in range(repeats):
        start = clock()
        run()
        best = min(best, clock() - start)
    return best


def speed(kind: GGMLQuantizationType, rows: int, device: str, threads: int) -> tuple[float, float]:
    """Bytes per second of bf16 input: of ours, and of the C quantiser on one thread (0 where it is not asked for)."""
    rng = np.random.default_rng(11)
    values = torch.from_numpy(0.02 * rng.standard_normal((rows, COLS), dtype=np.float32)).bfloat16().to(device)
    importance = rng.gamma(2, 1, COLS).astype(np.float32)
    alone = device == "cpu" and threads == 1
    clock = time.thread_time if alone else time.perf_counter

    def ours() -> object:
        return codes.encode(values, kind, importance, device=device, threads=threads)

    ours()  # compiles
    mine = values.numel() * 2 / seconds(ours, clock)
    if not alone:
        return mine, 0.0
    try:
        theirs = seconds(lambda: ggml_quantize.encode(values.float().numpy(), kind, importance), clock)
    except ImportError:
        return mine, 0.0
    return mine, values.numel() * 2 / theirs


def hours(bytes_per_second: float, share: float) -> float:
    """For a share of the routed experts of Flash."""
    return share * FLASH_MATRICES * EXPERT_VALUES * 2 / bytes_per_second / 3600


def print_speeds(kinds: list[GGMLQuantizationType], rows: int, device: str, threads: int) -> None:
    print(f"speed on {device}, {threads} thread(s), {rows} x {COLS} values; MB/s of bf16 input")
    print(f"{'type':8} {'ours':>9} {'C':>9} {'ours / C':>9} {'hours of Flash experts':>23}")
    found = {}
    for kind in kinds:
        mine, theirs = found[kind.name] = speed(kind, rows, device, threads)
        compared = f"{theirs / 1e6:9.1f} {mine / theirs:9.2f}" if theirs else f"{'-':>9} {'-':>9}"
        print(f"{kind.name:8} {mine / 1e6:9.1f} {compared} {hours(mine, 1):23.2f}", flush=True)
    if {"IQ2_XXS", "Q2_K"} <= set(found):
        total = hours(found["IQ2_XXS"][0], 2 / 3) + hours(found["Q2_K"][0], 1 / 3)
        print(f"recipe q2 (gate and up IQ2_XXS, down Q2_K): {total:.2f} hours")


def print_errors(kinds: list[GGMLQuantizationType], rows: int, device: str) -> None:
    print(f"\n{'type':8} {'values':24} {'importance':14} {'error, ours':>12} {'C':>10} {'ours / C':>9}")
    for kind in kinds:
        ratios = []
        for label, values in tensors(rows):
            for shape, importance in importances(values.shape[1]):
                weight = np.ones(values.shape[1], np.float32) if importance is None else importance
                mine = weighted_error(values, codes.encode(values, kind, importance, device=device), kind, weight)
                theirs = weighted_error(values, ggml_quantize.encode(values, kind, importance), kind, weight)
                ratio = mine / theirs if theirs else math.inf if mine else 1.0
                ratios.append(ratio)
                print(f"{kind.name:8} {label:24} {shape:14} {mine:12.6f} {theirs:10.6f} {ratio:9.4f}", flush=True)
        print(f"{kind.name:8} ours / C: median {statistics.median(ratios):.4f}, largest {max(ratios):.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", nargs="+", choices=TYPES, default=list(TYPES))
    parser.add_argument("--rows", type=int, help="rows of the tensors that are timed (64; on a GPU 65536)")
    parser.add_argument("--error-rows", type=int, default=32, help="rows of the tensors whose error is taken")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--no-error", action="store_true", help="speed only")
    args = parser.parse_args()
    torch.set_num_threads(1)
    kinds = [GGMLQuantizationType[name] for name in args.types]
    print_speeds(kinds, args.rows or (64 if args.device == "cpu" else 65536), args.device, args.threads)
    if args.no_error:
        return
    try:
        print_errors(kinds, args.error_rows, args.device)
    except ImportError as error:
        print(f"no errors: {error}")


if __name__ == "__main__":
    main()
