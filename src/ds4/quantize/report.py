"""What the command shows: the table of a dry run, errors of tensors, progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from gguf import GGMLQuantizationType
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from ds4.quantize.compare import Comparison
from ds4.quantize.plan import FilePlan
from ds4.quantize.recipe import family

_QUIET_STEPS = 10


def size_table(plan: FilePlan) -> Table:
    """Tensors by family and type, with their values, bytes and bits per value."""
    rows: dict[tuple[str, str], list[int]] = {}
    for output in plan.outputs:
        entry = rows.setdefault((family(output.name), output.type.name), [0, 0, 0])
        for i, value in enumerate((1, output.n_values, output.nbytes)):
            entry[i] += value
    title = f"{plan.path} (profile {plan.shape.name}{', drafts' if plan.draft else ''})"
    table = Table(title=escape(title), title_justify="left")
    for name in ("family", "type"):
        table.add_column(name)
    for name in ("tensors", "values", "bytes", "bits"):
        table.add_column(name, justify="right")
    for (kind, type), (count, values, nbytes) in sorted(rows.items(), key=lambda item: -item[1][2]):
        table.add_row(kind, type, str(count), f"{values:,}", f"{nbytes:,}", f"{8 * nbytes / values:.2f}")
    values = sum(output.n_values for output in plan.outputs)
    table.add_section()
    table.add_row("file", "", str(len(plan.outputs)), f"{values:,}", f"{plan.size:,}", f"{8 * plan.size / values:.2f}")
    return table


def rounding_line(plans: Iterable[FilePlan]) -> str | None:
    """What MXFP4 cannot take over as it is; None if there is nothing."""
    outputs = [output for plan in plans for output in plan.outputs if output.type == GGMLQuantizationType.MXFP4]
    exact = [output.source.is_fp4(part) for output in outputs for part in range(len(output.source.parts))]
    if all(exact):
        return None
    return f"MXFP4: {exact.count(False)} of {len(exact)} matrices are not FP4 in the checkpoint and are rounded"


def memory_line(plans: Iterable[FilePlan], jobs: int, memory: int) -> str:
    """What a conversion takes at most: program and tables as measured, and the units in work by their bound."""
    largest = max(unit.work_bytes for plan in plans for unit in plan.units())
    most = gib(max(min(jobs * largest, memory), largest))
    return (
        f"memory: {gib(_peak())} for program, tables and importance; at most {most} for the units in work "
        f"({jobs} jobs, {gib(largest)} for the largest unit, --memory-gib {memory / (1 << 30):g})"
    )


def _peak() -> int:
    """Most bytes of memory that the process has had so far; `ru_maxrss` can be that of the process that started it."""
    text = Path("/proc/self/status").read_text(encoding="utf-8", errors="replace")
    return next(int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("VmHWM:"))


def gib(nbytes: float) -> str:
    """Bytes as text, in the unit that suits."""
    return f"{nbytes / (1 << 30):.2f} GiB" if nbytes >= 1 << 30 else f"{nbytes / (1 << 20):.1f} MiB"


def comparison_table(results: Iterable[Comparison]) -> Table:
    """One line per tensor."""
    table = Table(title="File against checkpoint", title_justify="left")
    table.add_column("tensor", overflow="fold")
    table.add_column("type")
    for name in ("values", "max error", "at", "rms error", "rms / rms", "weighted", "weights"):
        table.add_column(name, justify="right")
    for r in results:
        place = ", ".join(map(str, r.place))
        weights = "imatrix" if r.by_importance else "squares"
        numbers = (f"{r.largest:.3e}", f"[{place}]", f"{r.rms:.3e}", f"{r.relative:.5f}", f"{r.weighted:.5f}")
        table.add_row(r.name, r.type.name, f"{r.n_values:,}", *map(escape, numbers), weights)
    return table


@contextmanager
def progress(total: int, console: Console) -> Iterator[Callable[[int, bool], None]]:
    """A function to call with the values that are done; a bar with the time left, or a line for every tenth."""
    if not console.is_terminal:
        yield _Lines(total, console)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[speed]}"),
               TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(elapsed_when_finished=True))  # fmt: skip
    with Progress(*columns, console=console, speed_estimate_period=120) as bar:
        task = bar.add_task("converting", total=total, speed="")
        start, made = time.monotonic(), 0

        def advance(values: int, found: bool) -> None:
            nonlocal made
            if found:  # from an earlier run; it must not count as speed
                bar.reset(task, completed=int(bar.tasks[0].completed) + values)
                return
            made += values
            seconds = time.monotonic() - start
            bar.update(task, advance=values, speed=f"{made / 1e6 / seconds:.1f} M values/s" if seconds > 1 else "")

        yield advance


class _Lines:
    """Progress for a log: found work is not counted into the speed."""

    def __init__(self, total: int, console: Console) -> None:
        self._total, self._console, self._start = total, console, time.monotonic()
        self._done = self._made = self._shown = 0

    def __call__(self, values: int, found: bool) -> None:
        self._done += values
        self._made += 0 if found else values
        step = self._done * _QUIET_STEPS // self._total
        if step <= self._shown:
            return
        self._shown = step
        if found:
            return
        seconds = time.monotonic() - self._start
        speed = self._made / seconds if seconds > 0 else 0.0
        left = f", {(self._total - self._done) / speed:.0f} s left" if speed and step < _QUIET_STEPS else ""
        self._console.print(
            f"{100 * step // _QUIET_STEPS} %, {speed / 1e6:.1f} M values/s{left}", highlight=False, soft_wrap=True
        )
