"""What the terminal shows: answers with their thinking, progress bars, and Ctrl+C as a flag."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any, TextIO

from ds4.chat.events import ArgumentsDelta, CallBegin, CallEnd, Event, Problem, ReasoningDelta, TextDelta

if TYPE_CHECKING:
    from rich.progress import Progress

DIM, CYAN, RESET = "\x1b[2m", "\x1b[36m", "\x1b[0m"

# The model's text must not steer the terminal: control characters but tab and line feed are shown as one sign.
_CONTROLS = {code: "\ufffd" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\t\n"}

BAR_DELAY = 0.5
"""Seconds that work may take before it shows a bar."""


class AnswerPrinter:
    """Prints the events of answers.

    Args:
        out: takes the visible text and the calls.
        thinking: takes the thinking; None hides it. May be the same stream.

    Streams that are terminals get the thinking dimmed, calls coloured and control characters replaced; others get the
    text as it is.
    """

    def __init__(self, out: TextIO, thinking: TextIO | None) -> None:
        self._out, self._thinking = out, thinking
        self._part = ""
        self._fresh: dict[int, bool] = {}  # by id of a stream: at the start of a line

    def __call__(self, event: Event) -> None:
        """Print one event."""
        if isinstance(event, ReasoningDelta):
            if self._thinking is not None:
                self._enter("thinking", self._thinking)
                self._write(self._thinking, event.text, DIM)
        elif isinstance(event, TextDelta):
            self._enter("text", self._out)
            self._write(self._out, event.text)
        elif isinstance(event, CallBegin):
            self._enter(f"call {event.index}", self._out)
            self._write(self._out, f"call {event.name} ", CYAN)
        elif isinstance(event, ArgumentsDelta):
            self._write(self._out, event.text, CYAN)
        elif isinstance(event, CallEnd):
            self._line(self._out)
        elif isinstance(event, Problem) and event.streamed:
            self._enter("problem", self._out)
            self._write(self._out, f"[call not readable: {event.message}]\n")

    def end(self) -> None:
        """The answer is over: every stream ends its line."""
        if self._part:
            self._line(self._out)
            if self._thinking is not None and self._thinking is not self._out:
                self._line(self._thinking)
        self._part = ""

    def _enter(self, part: str, stream: TextIO) -> None:
        """Separate parts from each other: thinking by an empty line, calls by a new one."""
        before, self._part = self._part, part
        if before in ("", part):
            return
        if before == "thinking" and self._thinking is not None:
            self._line(self._thinking)
            if self._thinking is stream:
                self._write(stream, "\n")
        elif part != "text":
            self._line(stream)

    def _line(self, stream: TextIO) -> None:
        if not self._fresh.get(id(stream), True):
            self._write(stream, "\n")

    def _write(self, stream: TextIO, text: str, style: str = "") -> None:
        if not text:
            return
        self._fresh[id(stream)] = text.endswith("\n")
        if stream.isatty():
            text = text.translate(_CONTROLS)
            text = f"{style}{text}{RESET}" if style else text
        stream.write(text)
        stream.flush()


class Bar:
    """A progress bar for (done, total) calls; shown on terminals only, once the work has taken `BAR_DELAY` seconds."""

    def __init__(
        self, title: str, stream: TextIO, *, transfer: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._title, self._stream, self._transfer, self._clock = title, stream, transfer, clock
        self._start = clock()
        self._bar: Progress | None = None
        self._task: Any = None

    def __call__(self, done: int, total: int) -> None:
        """Show how far the work is."""
        if self._bar is None:
            if not self._stream.isatty() or self._clock() - self._start < BAR_DELAY or done >= total:
                return
            self._bar = self._make()
            self._task = self._bar.add_task(self._title, total=total)
            self._bar.start()
        self._bar.update(self._task, completed=done, total=total)

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _make(self) -> Progress:
        # Only work that is slow anyway waits for rich to load.
        from rich import progress
        from rich.console import Console

        amount = progress.DownloadColumn(binary_units=True) if self._transfer else progress.MofNCompleteColumn()
        return progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            amount,
            progress.TimeRemainingColumn(),
            console=Console(file=self._stream),
            transient=True,
        )


@contextlib.contextmanager
def interrupts() -> Iterator[Callable[[], bool]]:
    """Within the block Ctrl+C sets a flag, which the yielded function tells; a second one raises KeyboardInterrupt.

    So an answer stops between two tokens and its session stays valid. Outside the main thread nothing is changed.
    """
    hit = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield hit.is_set
        return

    def handler(number: int, frame: FrameType | None) -> None:
        if hit.is_set():
            raise KeyboardInterrupt
        hit.set()

    before = signal.signal(signal.SIGINT, handler)
    try:
        yield hit.is_set
    finally:
        signal.signal(signal.SIGINT, before)
