"""A log that nobody has to read, and Ctrl+C at the start."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from ds4.process import exit_at_interrupt
from ds4.server.logs import DroppingHandler, end_log, start_log


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    read, write = os.pipe()
    yield read, write
    os.close(read)
    os.close(write)


def record(text: str, *arguments: object) -> logging.LogRecord:
    return logging.LogRecord("ds4.server", logging.INFO, __file__, 1, text, arguments, None)


def test_lines_arrive_in_order(pipe: tuple[int, int]) -> None:
    handler = DroppingHandler(pipe[1])
    for text in ("one", "two \udcff"):
        handler.handle(record(text))
    handler.handle(record("%d", "no number"))
    handler.close()
    lines = os.read(pipe[0], 4096).decode().splitlines()
    assert lines[:2] == ["one", "two \\udcff"]
    assert lines[2].startswith("unreadable log message '%d'")


def test_a_full_pipe_costs_lines_and_no_time_and_says_so(pipe: tuple[int, int]) -> None:
    handler = DroppingHandler(pipe[1], max_waiting=5)
    for _ in range(100):
        handler.handle(record("x" * 100_000))
    # One is being written, five wait.
    assert 94 <= handler.dropped <= 95
    text = b""
    while text.count(b"\n") < 100 - handler.dropped + 1:
        text += os.read(pipe[0], 1 << 16)
    assert f"{handler.dropped} lines of this log were dropped".encode() in text
    handler.close()


def test_a_log_that_cannot_be_written_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    handler = DroppingHandler(write)
    handler.handle(record("x"))
    handler.close()
    os.close(write)
    assert handler.dropped == 1


def test_the_callers_logging_is_left_alone() -> None:
    assert logging.getLogger().handlers
    assert start_log() is None
    end_log(None)


def test_ctrl_c_while_libraries_load_is_status_130_and_never_an_exception() -> None:
    program = (
        "import signal\n"
        "from ds4.process import exit_at_interrupt\n"
        "with exit_at_interrupt():\n"
        "    try: signal.raise_signal(signal.SIGINT)\n"
        "    except BaseException: print('swallowed')\n"
        "print('went on')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_afterwards_ctrl_c_is_an_exception_again() -> None:
    before = signal.getsignal(signal.SIGINT)
    with exit_at_interrupt():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before
