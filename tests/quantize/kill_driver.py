"""Runs a conversion in children that are killed with SIGKILL at given events, then once to its end.

    python kill_driver.py CHECKPOINT OUT JOBS EVENT...

Events are the calls that write, synchronise or rename, counted over one run: a child dies before event number n. What a
child may have left is printed, one word a line: killed, or done.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import torch

from ds4.quantize import convert as conversion
from ds4.quantize import journal
from ds4.quantize.checkpoint import open_checkpoint
from ds4.quantize.convert import Settings, convert, encode_unit
from ds4.quantize.plan import FilePlan, make_plans
from ds4.quantize.recipe import Recipe


def run(plans: list[FilePlan], jobs: int, last: int | None) -> None:
    """Convert; die before event `last`."""
    lock, count = threading.Lock(), 0

    def dying(call: Any) -> Any:
        def wrapped(*args: Any, **options: Any) -> Any:
            nonlocal count
            with lock:
                count += 1
                if count == last:
                    os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **options)

        return wrapped

    fake = type(os)("os")
    fake.__dict__.update(os.__dict__)
    for name in ("pwrite", "write", "fdatasync", "fsync", "replace", "ftruncate", "posix_fallocate"):
        setattr(fake, name, dying(getattr(os, name)))
    journal.os = fake  # type: ignore[attr-defined]
    convert(plans, Settings(jobs=jobs), lambda values, found: None, print)


def main() -> None:
    torch.set_num_threads(1)
    conversion.COMMIT_BYTES = 0  # each unit is a step to go on from
    checkpoint, out, jobs = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    plans = make_plans(open_checkpoint(checkpoint), out, Recipe("q4", 1))
    for unit in {unit.output.type: unit for unit in plans[0].units()}.values():
        encode_unit(unit, plans[0].shape.experts, Settings())  # compiled once, not in every child
    for event in map(int, sys.argv[4:]):
        if is_done(plans):
            break
        child = os.fork()
        if child == 0:
            torch.set_num_threads(
                1
            )  # makes PyTorch's pool anew after the fork, which several threads cannot do at once
            run(plans, jobs, event)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        print("killed" if os.WIFSIGNALED(status) else "done", flush=True)
    if not is_done(plans):
        run(plans, jobs, None)


def is_done(plans: list[FilePlan]) -> bool:
    """Every file has its name, and nothing of the work is left: the command would refuse to replace them."""
    return all(plan.path.exists() and not journal.journal_path(plan.path).exists() for plan in plans)


if __name__ == "__main__":
    main()
