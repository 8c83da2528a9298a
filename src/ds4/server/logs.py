"""The server's log on standard error, and Ctrl+C while the server starts. Nobody ever waits for either."""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading

MAX_WAITING = 10_000
"""Lines that may wait for the reader of standard error; further ones are dropped and counted."""


class DroppingHandler(logging.Handler):
    """Writes log lines to a file descriptor in a thread of its own.

    A terminal that is stopped or a pipe that nobody reads blocks that thread and nothing else: neither requests nor
    signal handlers nor the end of the process.
    """

    def __init__(self, descriptor: int, max_waiting: int = MAX_WAITING) -> None:
        super().__init__()
        self.dropped = 0
        self._descriptor, self._max_waiting = descriptor, max_waiting
        # Its put is reentrant: a signal handler may log while the thread it interrupts does.
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write_all, name="ds4-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue one record, or drop it."""
        try:
            line = self.format(record) + "\n"
        except Exception:
            # A message that does not fit its arguments is a defect; the place it came from helps to find it.
            line = f"unreadable log message {record.msg!r} ({record.pathname}:{record.lineno})\n"
        if self._lines.qsize() >= self._max_waiting:
            self.dropped += 1
        else:
            self._lines.put(line)

    def close(self) -> None:
        """Give the lines that wait a second to be written."""
        self._lines.put(None)
        self._thread.join(1.0)
        super().close()

    def _write_all(self) -> None:
        told = 0
        while (line := self._lines.get()) is not None:
            if self.dropped != told:
                told, missing = self.dropped, self.dropped - told
                line += f"{missing} lines of this log were dropped, as nobody read it\n"
            # Not sys.stderr: the interpreter waits for its lock when it ends.
            self._write(line.encode("utf-8", "backslashreplace"))

    def _write(self, data: bytes) -> None:
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
        except OSError:
            # A log that cannot be written is no reason to stop.
            self.dropped += 1


def start_log() -> logging.Handler | None:
    """Send the log to standard error; None if the program that called us has set its logging up already."""
    root = logging.getLogger()
    logging.getLogger("ds4.server").setLevel(logging.INFO)
    if root.handlers:
        return None
    try:
        handler: logging.Handler = DroppingHandler(sys.stderr.fileno())
    except (AttributeError, OSError):
        # Standard error is closed.
        handler = logging.NullHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    return handler


def end_log(handler: logging.Handler | None) -> None:
    """Write what is left of the log and take the handler away."""
    if handler is not None:
        logging.getLogger().removeHandler(handler)
        handler.close()
