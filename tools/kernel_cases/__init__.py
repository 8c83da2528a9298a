"""Cases of tools/kernel_bench.py, one file for each group of kernels. `harness` is what they share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kernel_cases.harness import Bench, Case

Maker = Callable[[Bench], Iterator[Case]]
