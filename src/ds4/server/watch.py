"""The time that requests and steps take: a clock, and a watch for a step that does not return."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


class Clock:
    """The time of this machine. Tests have one of their own."""

    def now(self) -> float:
        """Seconds since some moment; never goes back."""
        return time.monotonic()

    def wait(self, condition: threading.Condition, seconds: float) -> None:
        """Wait until the condition is notified, or for some seconds."""
        condition.wait(min(seconds, threading.TIMEOUT_MAX))


class StepLostError(BaseException):
    """The step of this thread took too long, and another thread has its work. No error that anybody may handle."""


class StepWatch:
    """Watches the steps of one thread, which lasts until one of them takes longer than `seconds`; 0: for ever.

    Then the thread is given up: a step cannot be ended from outside. If it ever returns, its thread ends right behind
    it, so that nothing is touched by two threads.
    """

    def __init__(self, seconds: float, clock: Clock) -> None:
        self.seconds = seconds
        self._clock = clock
        self._changed = threading.Condition()
        self._owner: threading.Thread | None = None
        self._began: float | None = None
        self._closed = False

    def enter(self) -> None:
        """Watch the steps of this thread from now on."""
        with self._changed:
            self._owner = threading.current_thread()

    def step(self, work: Callable[[], Result]) -> Result:
        """Do a piece of work. Raises StepLostError, whatever the work does, if it took too long."""
        with self._changed:
            self._began = self._clock.now()
        try:
            return work()
        finally:
            with self._changed:
                if self._owner is not threading.current_thread():
                    raise StepLostError
                self._began = None

    def wait_for_stuck(self) -> bool:
        """Wait until a step takes too long, and give its thread up; False if the watch was closed before."""
        with self._changed:
            while not self._closed:
                # A step that begins while this waits cannot be overdue before it looks again.
                left = self.seconds if self._began is None else self._began + self.seconds - self._clock.now()
                if left <= 0:
                    self._owner = self._began = None
                    return True
                self._clock.wait(self._changed, left)
            return False

    def close(self) -> None:
        """End `wait_for_stuck`."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
