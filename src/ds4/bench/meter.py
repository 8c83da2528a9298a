"""The clock, the memory and the machine that is measured on."""

from __future__ import annotations

import gc
import os
import platform
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

import torch

COPY_BYTES = 1 << 30
"""Of a buffer whose copy is timed on a CUDA device."""
COPY_BYTES_CPU = 256 << 20
"""The same on a CPU: far more than its caches."""
_COPIES, _AT_ONCE = 7, 10


class Meter:
    """Time and memory of one device.

    Attributes:
        device: the one that computes.
        clock: seconds; tests put another in its place.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self.device, self.clock = device, clock
        self._host_peak = 0

    @property
    def on_cuda(self) -> bool:
        return self.device.type == "cuda"

    def synchronize(self) -> None:
        """Wait for all that the device was given to do."""
        if self.on_cuda:
            torch.cuda.synchronize(self.device)

    def now(self) -> float:
        """Seconds, once the device has nothing left to do."""
        self.synchronize()
        return self.clock()

    # -- memory ------------------------------------------------------------------------------------------------------

    def begin_peak(self) -> None:
        """Peaks count from now on."""
        self._host_peak = host_bytes()
        if self.on_cuda:
            torch.cuda.reset_peak_memory_stats(self.device)

    def note_host(self) -> None:
        """Look at the host's memory; between two looks a peak passes unseen."""
        self._host_peak = max(self._host_peak, host_bytes())

    def peaks(self) -> tuple[int, int | None]:
        """Most bytes since `begin_peak`: of the host, and of tensors on the device (None on the CPU)."""
        self.note_host()
        return self._host_peak, torch.cuda.max_memory_allocated(self.device) if self.on_cuda else None

    def held(self) -> dict[str, int]:
        """Bytes held now: `host`, on a CUDA device also `allocated`, `reserved` (by PyTorch) and `used` of the card."""
        gc.collect()
        found = {"host": host_bytes()}
        if self.on_cuda:
            self.synchronize()
            free, total = torch.cuda.mem_get_info(self.device)
            found["allocated"] = torch.cuda.memory_allocated(self.device)
            found["reserved"] = torch.cuda.memory_reserved(self.device)
            found["used"] = total - free
        return found

    # -- what limits -------------------------------------------------------------------------------------------------

    def copy_bandwidth(self, nbytes: int | None = None) -> float:
        """Bytes a second of a copy inside this device's memory, read and written ones: the median of seven.

        nbytes: of the buffer; None: 1 GiB, or a quarter of what is free on the card, on the CPU 256 MiB.
        """
        if nbytes is None:
            nbytes = COPY_BYTES_CPU
            if self.on_cuda:
                nbytes = min(COPY_BYTES, int(torch.cuda.mem_get_info(self.device)[0]) // 4)
        source = torch.ones(nbytes // 4, dtype=torch.float32, device=self.device)
        target = torch.empty_like(source)
        copies = _AT_ONCE if self.on_cuda else 1  # there one takes hardly longer than starting it
        seconds = []
        for _ in range(_COPIES + 1):
            start = self.now()
            for _ in range(copies):
                target.copy_(source)
            seconds.append((self.now() - start) / copies)
        del source, target
        if self.on_cuda:
            torch.cuda.empty_cache()
        return 2 * (nbytes // 4) * 4 / max(median(seconds[1:]), 1e-9)

    def machine(self) -> dict[str, Any]:
        """What the numbers depend on besides the program."""
        found: dict[str, Any] = {
            "device": str(self.device),
            "cpu": _cpu_name(),
            "cpus": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": _version("triton"),
            "cuda": torch.version.cuda,
            "gpu": None,
        }
        if self.on_cuda:
            found["gpu"] = torch.cuda.get_device_name(self.device)
            found["gpu_bytes"] = torch.cuda.get_device_properties(self.device).total_memory
        return found


def host_bytes() -> int:
    """Anonymous memory of this process: not the mapped model file. 0 where /proc does not tell."""
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
    except OSError:
        return 0
    lines = (line.split() for line in status.splitlines() if line.startswith("RssAnon:"))
    return next((int(parts[1]) * 1024 for parts in lines), 0)


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
