"""What answers look like, progress bars, and Ctrl+C."""

from __future__ import annotations

import io
import signal

import pytest

from ds4.chat.events import ArgumentsDelta, CallBegin, CallEnd, Event, Problem, ReasoningDelta, TextDelta
from ds4.cli.terminal import CYAN, DIM, RESET, AnswerPrinter, Bar, interrupts
from tests.cli.conftest import Screen

THOUGHT: list[Event] = [ReasoningDelta("let me "), ReasoningDelta("see"), TextDelta("Four"), TextDelta(".")]
CALLS: list[Event] = [
    TextDelta("Looking."),
    CallBegin(0, "read"),
    ArgumentsDelta(0, '{"path":'),
    ArgumentsDelta(0, '"a"}'),
    CallEnd(0),
    CallBegin(1, "list"),
    ArgumentsDelta(1, "{}"),
    CallEnd(1),
]


def printed(events: list[Event], out: io.StringIO, thinking: io.StringIO | None) -> str:
    printer = AnswerPrinter(out, thinking)
    for event in events:
        printer(event)
    printer.end()
    return out.getvalue()


def test_a_terminal_shows_the_thinking_dimmed_before_the_answer() -> None:
    screen = Screen()
    assert printed(THOUGHT, screen, screen) == f"{DIM}let me {RESET}{DIM}see{RESET}\n\nFour.\n"


def test_a_pipe_gets_the_answer_alone() -> None:
    out, err = io.StringIO(), io.StringIO()
    assert printed(THOUGHT, out, err) == "Four.\n"
    assert err.getvalue() == "let me see\n"


def test_hidden_thinking_leaves_no_trace() -> None:
    assert printed(THOUGHT, Screen(), None) == "Four.\n"


def test_calls_stand_on_lines_of_their_own() -> None:
    assert printed(CALLS, io.StringIO(), None) == 'Looking.\ncall read {"path":"a"}\ncall list {}\n'
    screen = printed(CALLS, Screen(), None)
    assert f"{CYAN}call read {RESET}" in screen


def test_an_unreadable_call_is_named() -> None:
    events: list[Event] = [CallBegin(0, "read"), ArgumentsDelta(0, "{}"), CallEnd(0), Problem("cut off", True)]
    assert printed(events, io.StringIO(), None) == "call read {}\n[call not readable: cut off]\n"


def test_an_answer_that_ends_its_line_gets_no_second_end() -> None:
    assert printed([TextDelta("Four.\n")], io.StringIO(), None) == "Four.\n"


def test_no_answer_prints_nothing() -> None:
    assert printed([], Screen(), None) == ""


def test_several_answers_do_not_run_together() -> None:
    screen = Screen()
    printer = AnswerPrinter(screen, screen)
    for event in (*THOUGHT, None, *THOUGHT):
        printer.end() if event is None else printer(event)
    assert screen.getvalue().count(".\n") == 1
    assert screen.getvalue().count(f"{DIM}let me ") == 2


def test_the_model_cannot_steer_a_terminal_but_a_pipe_gets_every_byte() -> None:
    text = "a\x1b[2Jb\x07\tc\x9b\n"
    assert printed([TextDelta(text)], Screen(), None) == "a\ufffd[2Jb\ufffd\tc\ufffd\n"
    assert printed([TextDelta(text)], io.StringIO(), None) == text


class Clock:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_bar_shows_up_when_work_takes_long() -> None:
    screen, clock = Screen(), Clock()
    with Bar("loading", screen, clock=clock) as bar:
        bar(1, 4)
        assert screen.getvalue() == ""
        clock.now = 1.0
        bar(2, 4)
        bar(4, 4)
    assert "loading" in screen.getvalue()
    assert "4/4" in screen.getvalue()


def test_no_bar_for_quick_work_or_a_pipe() -> None:
    clock, screen, pipe = Clock(), Screen(), io.StringIO()
    for stream in (screen, pipe):
        with Bar("loading", stream, clock=clock) as bar:
            bar(1, 2)
            clock.now += 9 if stream is pipe else 0
            bar(1, 2)
            bar(2, 2)
        assert stream.getvalue() == ""


def test_ctrl_c_sets_a_flag_and_a_second_one_raises() -> None:
    before = signal.getsignal(signal.SIGINT)

    def twice() -> None:
        with interrupts() as stopped:
            assert not stopped()
            signal.raise_signal(signal.SIGINT)
            assert stopped()
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        twice()
    assert signal.getsignal(signal.SIGINT) is before
