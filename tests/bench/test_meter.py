"""Memory and bandwidth; no time is judged."""

from __future__ import annotations

import torch

from ds4.bench.meter import Meter, host_bytes
from tests.bench.conftest import meter


def test_the_bandwidth_counts_what_is_read_and_written() -> None:
    assert meter().copy_bandwidth(1 << 20) == 2 * (1 << 20) / 0.25


def test_the_peak_keeps_what_is_gone_again() -> None:
    found = meter()
    found.begin_peak()
    before, device = found.peaks()
    held = torch.ones(8 << 20)
    found.note_host()
    del held
    assert found.peaks()[0] >= before + (24 << 20)
    assert device is None
    found.begin_peak()
    assert abs(found.peaks()[0] - host_bytes()) < (8 << 20)


def test_the_machine_is_named() -> None:
    found = Meter(torch.device("cpu")).machine()
    assert found["torch"] == torch.__version__
    assert (found["device"], found["gpu"]) == ("cpu", None)
    assert found["cpu"]
