"""The trace: one JSON line for each thing the server decided or sampled, for people who debug a client or a prompt."""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import os
import threading
import time
from pathlib import Path
from typing import IO, Any

log = logging.getLogger("ds4.server")


class Trace:
    """Writes events to a file, one JSON object a line with `t`, `request`, `event` first. Thread-safe.

    `path` None: nothing is written. A file that cannot be written any more (a full disk) ends the trace with one line
    in the log, and nothing else: requests are worth more than their trace.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._lock = threading.Lock()
        self._file: IO[str] | None = None
        if path is not None:
            # It holds whole conversations: for this user only. A file that is there keeps its mode.
            opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            self._file = os.fdopen(opened, "w", encoding="utf-8", errors="replace")

    @property
    def active(self) -> bool:
        """Whether anything is written; callers can save the work of describing an event."""
        return self._file is not None

    def write(self, request: int, event: str, **values: Any) -> None:
        """Append an event of a request; it is on its way to the disk before this returns."""
        if self._file is None:
            return
        line = json.dumps(
            {"t": round(time.time(), 6), "request": request, "event": event, **values}, ensure_ascii=False
        )
        with self._lock:
            if self._file is None:
                return
            try:
                self._file.write(line + "\n")
                self._file.flush()
            except (OSError, ValueError) as error:
                log.error("the trace ends here, as its file cannot be written: %s", error)
                self._close()

    def close(self) -> None:
        """Close the file; later events are dropped."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            # Closing writes what is still buffered, which fails as the write before did.
            with contextlib.suppress(OSError, ValueError):
                file.close()


def printable(data: bytes) -> str:
    """Bytes as text, or `base64:...` if they are not UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "base64:" + base64.b64encode(data).decode()
