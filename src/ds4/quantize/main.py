"""The console command `ds4-quantize`: a checkpoint folder to a GGUF file."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ds4.errors import Ds4Error
from ds4.files import destination, refuse_input
from ds4.process import exit_at_interrupt, wait_passively
from ds4.quantize.options import Options, parse

if TYPE_CHECKING:
    import torch

    from ds4.quantize.convert import Settings
    from ds4.quantize.importance import Importance
    from ds4.quantize.plan import FilePlan

OK, FAILED, INTERRUPTED = 0, 1, 130

GPU_JOBS = 4
"""Enough to read and write while a GPU encodes."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; its exit status: 0, 1 for an error, 2 for wrong flags, 130 after Ctrl+C."""
    wait_passively()
    for stream in (sys.stdout, sys.stderr):  # a name of a file need not be text that the terminal can show
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        options = parse(sys.argv[1:] if argv is None else argv)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else FAILED
    try:
        with exit_at_interrupt():
            import ds4.quantize.report  # noqa: F401  (torch and rich take a second)
        return _run(options)
    except Ds4Error as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        _fail("interrupted; the same command goes on where it stopped")
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return FAILED
    except MemoryError:
        return _fail(_MEMORY)
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        return _fail(
            f"{place}{error.strerror or error}; when that is mended, the same command goes on where it stopped"
        )


_MEMORY = "not enough memory; give fewer --jobs or a lower --memory-gib, and the same command goes on where it stopped"


def _fail(text: str) -> int:
    print(f"ds4-quantize: {text}", file=sys.stderr, flush=True)
    return FAILED


def _run(options: Options) -> int:
    import torch
    from rich.console import Console

    from ds4.quantize import report
    from ds4.quantize.checkpoint import open_checkpoint
    from ds4.quantize.convert import Settings, check_outputs, convert
    from ds4.quantize.importance import describe, fit
    from ds4.quantize.plan import make_plans
    from ds4.quantize.recipe import LAST_LAYERS, Recipe, parse_overrides

    torch.set_num_threads(1)  # the jobs are the threads
    last = LAST_LAYERS if options.last_layers is None else options.last_layers
    recipe = Recipe(options.recipe, last, parse_overrides(options.overrides))
    out = _target(options)
    device = _device(options.device)
    vectors, identity, recorded = _importance(options.imatrix)
    checkpoint = open_checkpoint(options.checkpoint)
    plans = make_plans(
        checkpoint, out, recipe, name=options.name, with_drafts=options.drafts,
        skip=options.skip, imatrix=recorded,
    )  # fmt: skip
    importance = {} if options.imatrix is None else fit(plans, vectors, options.imatrix)
    jobs = options.jobs or (len(os.sched_getaffinity(0)) if device.type == "cpu" else GPU_JOBS)
    settings = Settings(jobs, int(options.memory_gib * (1 << 30)), device, importance, identity)
    console, side = Console(width=None if sys.stdout.isatty() else 160), Console(stderr=True)

    def note(text: str) -> None:
        side.print(text, highlight=False, markup=False, soft_wrap=True)

    if options.imatrix is not None:
        for line in describe(plans, vectors, importance):
            note(f"{options.imatrix}: {line}")
    if (rounding := report.rounding_line(plans)) is not None:
        note(rounding)
    if options.dry_run:
        for plan in plans:
            console.print(report.size_table(plan))
        console.print(report.memory_line(plans, settings.jobs, settings.memory), highlight=False, soft_wrap=True)
        return OK
    if options.compare is not None:
        return _compare(plans, options.compare, settings, console)
    plans = [replace(plan, path=destination(plan.path)) for plan in plans]
    inputs = (*checkpoint.files, *([] if options.imatrix is None else [options.imatrix]))
    for plan in plans:
        refuse_input(plan.path, inputs)
    if not options.force:
        check_outputs(plans, settings)
    total = sum(output.n_values for plan in plans for output in plan.outputs)
    try:
        with report.progress(total, side) as progress:
            convert(plans, settings, progress, note)
    except torch.OutOfMemoryError as error:
        raise MemoryError from error
    for plan in plans:
        print(f"{plan.path}: {plan.size:,} bytes, {len(plan.outputs)} tensors")
    return OK


def _target(options: Options) -> Path:
    """The file to write; raises `Ds4Error` for a place that cannot be one."""
    if options.out is None:
        return Path(f"{os.path.basename(os.path.realpath(options.checkpoint))}-{options.recipe}.gguf")
    return destination(options.out)


def _device(name: str) -> torch.device:
    """The device of a name; "auto" is CUDA where PyTorch finds one."""
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise Ds4Error(f"device {name!r} is not available: use auto, cpu, cuda or cuda:N with the number of a card")
    if device.type == "cuda" and not (torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count()):
        raise Ds4Error(f"device {name!r} is not available: PyTorch does not find it here; use cpu")
    return device


def _importance(path: Path | None) -> tuple[Importance, str, tuple[str, int] | None]:
    """Vectors by GGUF name, what tells the file from another, and what is recorded of it."""
    if path is None:
        return {}, "", None
    from ds4.quantize import imatrix

    vectors = imatrix.load(path).measured()
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return vectors, digest, (path.name, len(vectors))


def _compare(plans: list[FilePlan], pattern: str, settings: Settings, console: object) -> int:
    from rich.console import Console

    from ds4.quantize.compare import compare
    from ds4.quantize.report import comparison_table

    assert isinstance(console, Console)
    for plan in plans:
        if not plan.path.is_file() and not plan.draft:
            raise Ds4Error(f"{plan.path}: no such file; make it first, then compare")
    console.print(comparison_table(compare(plans, pattern, settings)))
    return OK


if __name__ == "__main__":
    sys.exit(main())
