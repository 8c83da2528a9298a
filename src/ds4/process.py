"""What the commands set for the whole process."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType


def wait_passively() -> None:
    """Let idle OpenMP threads sleep instead of spinning. Works before torch is imported; a setting of the user's stays.

    Where there are fewer free processors than threads (a container with a quota, a busy machine), a spinning thread
    takes the processor from the one it waits for: measured with the Tiny shape and two threads on one processor's worth
    of time, more than ten times slower.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@contextlib.contextmanager
def exit_at_interrupt() -> Iterator[None]:
    """Within the block Ctrl+C ends the process with status 130 at once.

    An exception would not do: raised while libraries load, it comes out as an ImportError or is swallowed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, _exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _exit(number: int, frame: FrameType | None) -> None:
    with contextlib.suppress(OSError):
        if os.isatty(2):
            # A progress bar may have hidden the cursor.
            os.write(2, b"\x1b[?25h\n")
    os._exit(130)
