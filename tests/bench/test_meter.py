"""Memory and bandwidth; no time is judged."""

from __future__ import annotations

import pytest
import torch

from ds4.bench import meter as meter_module
from ds4.bench.meter import Meter, host_bytes
from tests.bench.conftest import meter


def test_the_bandwidth_counts_what_is_read_and_written() -> None:
    assert meter().copy_bandwidth(1 << 20) == 2 * (1 << 20) / 0.25


def test_the_peak_keeps_what_is_gone_again(monkeypatch: pytest.MonkeyPatch) -> None:
    held = iter((100, 120, 350, 110, 200, 130))
    monkeypatch.setattr(meter_module, "host_bytes", lambda: next(held))
    found = Meter(torch.device("cpu"))
    found.begin_peak()
    found.note_host()
    found.note_host()
    assert found.peaks() == (350, None)
    found.begin_peak()
    assert found.peaks() == (200, None)


def test_memory_of_the_process_is_seen() -> None:
    """Far more than anything that was given back could hold."""
    before = host_bytes()
    held = torch.ones(64 << 20)
    assert host_bytes() >= before + 4 * (32 << 20)
    del held


def test_the_machine_is_named() -> None:
    found = Meter(torch.device("cpu")).machine()
    assert found["torch"] == torch.__version__
    assert (found["device"], found["gpu"]) == ("cpu", None)
    assert found["cpu"]
