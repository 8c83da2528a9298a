"""The measurements of states on disk work; what they measure here means nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import kv_bench
import pytest


@pytest.fixture(autouse=True)
def interval() -> Iterator[None]:
    """Measuring changes how often threads take turns."""
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


def test_segments(capsys: pytest.CaptureFixture[str]) -> None:
    kv_bench.main(["segments", "--shape", "tiny", "--tokens", "3000", "--step", "1000", "--repeats", "1"])
    said = capsys.readouterr().out
    assert "bytes written / size of the whole state" in said
    assert "usable after" in said


def test_device(capsys: pytest.CaptureFixture[str]) -> None:
    short = "--tokens 3000 --step 1000 --repeats 1 --steps 3 --step-ms 1"
    assert kv_bench.main(["device", "--device", "cpu", "--shape", "tiny", *short.split()]) == 0
    said = capsys.readouterr().out
    assert "restored 3001 tokens, 3 segments" in said
    assert "longest step while saving" in said
