"""The errors of all kernels against their references as a Markdown table, from files that runs of the tests wrote.

    DS4_KERNEL_ERRORS=gpu.jsonl python3 -m pytest tests/ops/kernels
    python3 tools/kernel_errors.py interpreter.jsonl gpu.jsonl

Each line of such a file is one comparison of a test: its error (norm of the difference over the norm of the reference)
and the bar it has to be below. A row of the table is one test and one bar: the worst error in Triton's interpreter and
on a GPU, over all shapes, batches and formats. With --short a row is all tests of a kernel whose bars are up to 1e-4
(float32), up to 5e-3 (16 bits), or above (bytes). Which of the two a line is from stands in it, so the order of the
files does not matter. Exit status 1 if an error is not below its bar.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

Key = tuple[str, str, float]
"""Kernel, test, bar."""


def read(lines: Iterable[str]) -> dict[Key, dict[bool, list[float]]]:
    """The errors of each key, of the interpreter (False) and of a GPU (True)."""
    found: dict[Key, dict[bool, list[float]]] = defaultdict(lambda: {False: [], True: []})
    for line in lines:
        entry = json.loads(line)
        file, _, test = entry["test"].partition("::")
        kernel = Path(file).stem.removeprefix("test_")
        name = test.split("[")[0].removeprefix("test_").replace("_", " ")
        found[kernel, name, entry["bar"]][entry["gpu"]].append(entry["error"])
    return dict(found)


def shorten(found: dict[Key, dict[bool, list[float]]]) -> dict[Key, dict[bool, list[float]]]:
    """The same by kernel and kind of bar, under the largest bar of each."""
    kinds = ((1e-4, "float32"), (5e-3, "16 bits"), (math.inf, "bytes"))
    of_bar = {bar: next(kind for kind in kinds if bar <= kind[0]) for _, _, bar in found}
    bars: dict[tuple[str, str], float] = defaultdict(float)
    for kernel, _, bar in found:
        name = of_bar[bar][1]
        bars[kernel, name] = max(bars[kernel, name], bar)
    short: dict[Key, dict[bool, list[float]]] = defaultdict(lambda: {False: [], True: []})
    for (kernel, _, bar), errors in found.items():
        name = of_bar[bar][1]
        for gpu in (False, True):
            short[kernel, name, bars[kernel, name]][gpu] += errors[gpu]
    return dict(short)


def worst(errors: list[float]) -> float:
    """The largest, NaN if any is that."""
    return math.nan if any(math.isnan(e) for e in errors) else max(errors)


def table(found: dict[Key, dict[bool, list[float]]]) -> tuple[list[str], bool]:
    """Lines of Markdown, and whether all errors are below their bars."""
    lines = ["| kernel | test | bar | interpreter | comparisons | GPU | comparisons |", "|---|---|---|---|---|---|---|"]
    ok = True
    for (kernel, test, bar), errors in sorted(found.items()):
        cells = []
        for gpu in (False, True):
            if not errors[gpu]:
                cells += ["", ""]
                continue
            value = worst(errors[gpu])
            ok &= value < bar
            cells += [f"{value:.1e}" if value < bar else f"**{value:.1e}**", str(len(errors[gpu]))]
        lines.append(f"| {kernel} | {test} | {bar:g} | {' | '.join(cells)} |")
    return lines, ok


def main(argv: list[str] | None = None) -> int:
    """Print the table; 0 if all errors are below their bars."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--short", action="store_true", help="a row for each kernel and kind of bar")
    options = parser.parse_args(argv)
    found = read(line for path in options.files for line in path.read_text(encoding="utf-8").splitlines())
    rows, ok = table(found)
    print("\n".join(table(shorten(found))[0] if options.short else rows))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
