"""How the threads of PyTorch's CPU code wait for one another."""

from __future__ import annotations

import os


def wait_passively() -> None:
    """Let idle OpenMP threads sleep instead of spinning. Works before torch is imported; a setting of the user's stays.

    Where there are fewer free processors than threads (a container with a quota, a busy machine), a spinning thread
    takes the processor from the one it waits for: measured with the Tiny shape and two threads on one processor's worth
    of time, more than ten times slower.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
