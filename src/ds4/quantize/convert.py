"""The conversion itself: units of work on threads, bounded memory, a journal, files that appear when they are whole."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType

from ds4.errors import Ds4Error
from ds4.gguf.file import collect_problems
from ds4.gguf.header import map_file, read_header
from ds4.quantize.encoder import check_type, encode_rows, encode_table
from ds4.quantize.importance import Importance, importance_of
from ds4.quantize.journal import Workfile, checksum, was_published
from ds4.quantize.plan import FilePlan, Unit

ENCODING = 2
"""Raised when the same input gives other bytes than before; it is part of the fingerprint."""

COMMIT_SECONDS = 5.0
COMMIT_BYTES = 256 << 20

Progress = Callable[[int, bool], None]
"""Called with the values of a unit that is done, and whether it was found done."""


@dataclass(frozen=True)
class Settings:
    """How the work is done.

    Attributes:
        jobs: units that are worked on at the same time.
        memory: bytes that these may take together, by the bound that each unit states; one always runs.
        device: where values are decoded and encoded.
        importance: what `ds4.quantize.importance.fit` made of a file.
        importance_id: what tells one importance file from another.
    """

    jobs: int = 1
    memory: int = 8 << 30
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    importance: Importance = field(default_factory=dict)
    importance_id: str = ""


def convert(plans: Sequence[FilePlan], settings: Settings, progress: Progress, note: Callable[[str], None]) -> None:
    """Write all files; none of them appears before all are whole.

    What a run that was stopped has left is taken up, if it was for the same input and options.

    Args:
        note: called with sentences for the user.

    Raises:
        Ds4Error: the input is bad, in which case nothing stays; or a file cannot be written.
        KeyboardInterrupt, OSError: what was done stays for the next run.
    """
    workfiles: dict[Path, Workfile] = {}
    try:
        for type in {output.type for plan in plans for output in plan.outputs}:
            check_type(type, settings.device)  # what is missing for it is told before anything is touched
        _open_all(plans, settings, workfiles)
        for plan in plans:
            if plan.path not in workfiles:
                progress(sum(output.n_values for output in plan.outputs), True)
                continue
            work = workfiles[plan.path]
            if work.started_over:
                note(f"{work.part} was of another conversion and is started over")
            try:
                _write_file(plan, work, settings, progress, note)
                _verify(plan, work)
            except Ds4Error:
                for other in workfiles.values():
                    other.discard()
                raise
        # The model last: while it is not there, a run that was stopped here can be told from one that was done.
        for work in reversed(workfiles.values()):
            work.publish()
        for plan in plans:
            Workfile.forget(plan.path)
    finally:
        for work in workfiles.values():
            work.close()


def _open_all(plans: Sequence[FilePlan], settings: Settings, workfiles: dict[Path, Workfile]) -> None:
    """Open every file that is not there yet, so that lack of room shows before the work begins."""
    try:
        for plan in plans:
            mark = fingerprint(plan, settings)
            if not was_published(plan.path, mark):
                workfiles[plan.path] = Workfile(plan.path, plan.size, mark)
    except Ds4Error:
        for work in workfiles.values():
            if not work.known:
                work.discard()
        raise


def check_outputs(plans: Sequence[FilePlan], settings: Settings) -> None:
    """Raise `Ds4Error` if a file exists that this conversion would replace."""
    for plan in plans:
        if plan.path.exists() and not was_published(plan.path, fingerprint(plan, settings)):
            raise Ds4Error(
                f"{plan.path}: exists; give another --out, or --force to replace it when the new one is whole"
            )


def fingerprint(plan: FilePlan, settings: Settings) -> str:
    """Of everything that the bytes of the file depend on: header, sources, importance, device, version of the code."""
    digest = hashlib.sha256(f"{ENCODING}\0{settings.importance_id}\0{settings.device.type}\0".encode())
    digest.update(plan.header)
    shards: dict[Path, int] = {}
    for output in plan.outputs:
        digest.update(f"{output.source.tile}\n".encode())
        for part in output.source.parts:
            for stored in (part.weight, part.scale):
                if stored is not None:
                    number = shards.setdefault(stored.file, len(shards))
                    digest.update(f"{number}\0{stored.name}\0{stored.dtype}\0{stored.shape}\n".encode())
    for shard in shards:
        info = shard.stat()
        digest.update(f"{shard.name}\0{info.st_size}\0{info.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _write_file(
    plan: FilePlan, work: Workfile, settings: Settings, progress: Progress, note: Callable[[str], None]
) -> None:
    """Header and every unit that the journal does not have."""
    units = list(plan.units())
    done = work.finished(units, lambda unit: progress(unit.n_values, True))
    if done:
        note(f"{work.part}: {len(done)} of {len(units)} pieces are there from an earlier run")
    work.write(memoryview(plan.header), 0)
    with Pool(settings.jobs, settings.memory) as pool:
        last, waiting = time.monotonic(), 0
        todo = ((number, unit) for number, unit in enumerate(units) if number not in done)
        try:
            for number, sum in pool.run(todo, lambda unit: _do(unit, work, plan, settings)):
                work.note(number, sum)
                waiting += units[number].nbytes
                if waiting >= COMMIT_BYTES or time.monotonic() - last >= COMMIT_SECONDS:
                    work.commit()
                    last, waiting = time.monotonic(), 0
                progress(units[number].n_values, False)
        finally:
            work.commit()
    work.sync()


def _do(unit: Unit, work: Workfile, plan: FilePlan, settings: Settings) -> int:
    """Read, encode and write one unit; the checksum of its bytes."""
    data = encode_unit(unit, plan.shape.experts, settings)
    if data.nbytes != unit.nbytes:
        raise ValueError(f"{unit.output.name}: {data.nbytes} bytes were made of rows that have {unit.nbytes}")
    view = memoryview(data.data)
    work.write(view, unit.offset)
    return checksum(view)


def encode_unit(unit: Unit, experts: int, settings: Settings) -> npt.NDArray[np.uint8]:
    """The bytes of a unit, uint8 [bytes].

    Raises:
        Ds4Error: values that are no numbers or beyond the type, or a shard that cannot be read.
    """
    output = unit.output
    source, type = output.source, output.type
    if type == GGMLQuantizationType.I32:
        data = encode_table(source.read_integers(), experts, output.name)
    elif type == GGMLQuantizationType.MXFP4 and source.is_fp4(unit.part):
        data = source.read_mxfp4(unit.part, unit.start, unit.stop).numpy()
    else:
        values = source.read(unit.part, unit.start, unit.stop, settings.device)
        data = encode_rows(values, type, importance_of(unit, settings.importance), output.name)
    return np.ascontiguousarray(data).reshape(-1)


def _verify(plan: FilePlan, work: Workfile) -> None:
    """Raise unless the finished file is what the plan says, and a model file is one that can be loaded."""
    found = read_header(work.part, map_file(work.part)).tensors
    for output in plan.outputs:
        info = found[output.name]
        if (info.offset, info.nbytes, info.type) != (output.offset, output.nbytes, output.type):
            raise ValueError(f"{output.name} lies at {info.offset}, but was written to {output.offset}")
    problems = [] if plan.draft else collect_problems(work.part)
    if problems:
        raise Ds4Error(f"{plan.path}: not written, the file could not be loaded: {problems[0]}")


class Pool:
    """Threads that work on units while their memory fits a budget. One unit always runs, however large it is.

    Attributes:
        peak: most bytes that were in work at once, by the units' own bounds.
    """

    def __init__(self, jobs: int, memory: int) -> None:
        self._jobs, self._memory = jobs, memory
        self._threads = ThreadPoolExecutor(jobs, thread_name_prefix="quantize")
        self.peak = 0
        self._stop = threading.Event()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def run(self, todo: Iterable[tuple[int, Unit]], job: Callable[[Unit], int]) -> Iterable[tuple[int, int]]:
        """(number, result) of every unit, as they end. The first error ends it."""
        running: dict[Future[int], tuple[int, int]] = {}
        used = 0
        for number, unit in todo:
            while running and (len(running) >= self._jobs or used + unit.work_bytes > self._memory):
                ended, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in sorted(ended, key=lambda f: running[f][0]):
                    done, size = running.pop(future)
                    used -= size
                    yield done, future.result()
            running[self._threads.submit(self._guarded, job, unit)] = (number, unit.work_bytes)
            used += unit.work_bytes
            self.peak = max(self.peak, used)
        while running:
            ended, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in sorted(ended, key=lambda f: running[f][0]):
                done, _size = running.pop(future)
                yield done, future.result()

    def _guarded(self, job: Callable[[Unit], int], unit: Unit) -> int:
        if self._stop.is_set():
            raise RuntimeError("stopped")
        return job(unit)
