"""The interactive `ds4`: questions, answers and commands. The terminal is passed in, so that tests can play it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from ds4.chat.effort import MAX_EFFORT_CONTEXT
from ds4.cli.conversation import Answer, Conversation
from ds4.cli.options import COMMANDS, Mode, Options
from ds4.cli.prompt import read_text
from ds4.cli.terminal import AnswerPrinter, Bar, interrupts
from ds4.errors import ContextOverflowError, Ds4Error

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession

PROMPT = "ds4> "

_MAX_SHOWN = 40
"""Characters of a mistyped argument that a message repeats."""

Read = Callable[[str], str]
"""Asks for a line; raises EOFError at Ctrl+D and KeyboardInterrupt at Ctrl+C."""


class Repl:
    """The loop of an interactive session.

    Args:
        conversation: what the user talks to.
        read: asks for the next line.
        out: takes the answers and what the commands say.
        hide_thinking: print the answers only.
    """

    def __init__(self, conversation: Conversation, read: Read, out: TextIO, hide_thinking: bool = False) -> None:
        self.conversation = conversation
        self._read, self._out = read, out
        self._printer = AnswerPrinter(out, None if hide_thinking else out)

    def run(self) -> None:
        """Read and answer until the user leaves."""
        while True:
            try:
                line = self._read(PROMPT)
            except EOFError:
                return
            except KeyboardInterrupt:
                # The line that was being typed is thrown away, as in a shell.
                continue
            try:
                if not self.take(line):
                    return
            except Ds4Error as error:
                self._say(self._advice(error))
            except KeyboardInterrupt:
                self._printer.end()
                self._say("stopped")

    def take(self, line: str) -> bool:
        """Answer one line or obey it; False if the user wants to leave.

        Raises:
            Ds4Error: the line cannot be answered; the conversation stays as it was.
        """
        text = line.strip()
        if not text:
            return True
        # A space before the slash makes it a question.
        if not line.startswith("/"):
            self._ask(text)
            return True
        name, _, argument = text.partition(" ")
        commands: dict[str, Callable[[str], None]] = {
            "/help": self._help,
            "/think": lambda argument: self._set_mode("high", "thinking before the next answers"),
            "/think-max": lambda argument: self._set_mode("max", "thinking as hard as possible"),
            "/nothink": lambda argument: self._set_mode("none", "answering at once"),
            "/read": self._read_file,
            "/ctx": self._context,
            "/new": self._new,
        }
        if name in ("/quit", "/exit"):
            return False
        if name == "/power":
            self._say("/power is not built yet")
        elif name in commands:
            commands[name](argument.strip())
        else:
            self._say(f"there is no command {name}; /help lists them. A line that begins with a space is a question.")
        return True

    def _ask(self, text: str) -> None:
        try:
            with interrupts() as stopped, Bar("reading the prompt", self._out) as bar:
                answer = self.conversation.ask(text, self._printer, stopped=stopped, progress=bar)
        finally:
            self._printer.end()
        self._say(self._summary(answer))

    def _summary(self, answer: Answer) -> str:
        notes = {
            "stop": "",
            "length": "; ended by --tokens",
            "context": "; the context is full",
            "interrupted": "; stopped",
        }
        note = notes[answer.end]
        if answer.end == "interrupted" and not self.conversation.remembers(answer):
            note += " and forgotten"
        return answer.speed() + note

    def _help(self, argument: str) -> None:
        for name, text in COMMANDS.items():
            self._out.write(f"  {name:14} {text}\n")
        self._out.flush()

    def _set_mode(self, mode: Mode, text: str) -> None:
        self.conversation.style = replace(self.conversation.style, mode=mode)
        if mode == "max" and self.conversation.engine.context < MAX_EFFORT_CONTEXT:
            text = (
                f"a context of {self.conversation.engine.context} tokens is too small for that (it takes"
                f" {MAX_EFFORT_CONTEXT}): thinking as usual"
            )
        self._say(text)

    def _read_file(self, argument: str) -> None:
        if not argument:
            self._say("/read needs the name of a file")
            return
        text = read_text(argument).strip()
        if not text:
            self._say(f"{argument} is empty")
            return
        self._ask(text)

    def _context(self, argument: str) -> None:
        engine, used = self.conversation.engine, self.conversation.used
        if argument:
            limit = engine.shape.context
            digits = argument.lstrip("0")
            # Python refuses to read numbers of thousands of digits.
            readable = argument.isascii() and argument.isdigit() and len(digits) <= len(str(limit))
            wanted = int(digits or "0") if readable else 0
            if not 0 < wanted <= limit:
                shown = argument if len(argument) <= _MAX_SHOWN else f"{argument[:_MAX_SHOWN]}..."
                self._say(f"/ctx takes a number from 1 to {limit}, not {shown!r}")
                return
            if wanted < used:
                self._say(f"the conversation has {used} tokens already, more than {wanted}; /new forgets it")
                return
            engine.context = wanted
        self._say(f"context {engine.context} tokens, {used} in use")

    def _new(self, argument: str) -> None:
        self.conversation.forget()
        self._say("forgotten; the next question begins anew")

    def _advice(self, error: Ds4Error) -> str:
        more = "; /ctx N raises it, /new forgets the conversation" if isinstance(error, ContextOverflowError) else ""
        return f"{error}{more}"

    def _say(self, text: str) -> None:
        self._out.write(f"[{text}]\n")
        self._out.flush()


def run_repl(conversation: Conversation, options: Options) -> int:
    """The interactive session on this terminal; 0 when the user leaves."""
    session = _prompt_session(history_path())
    name = options.model or "the small model that comes with ds4"
    engine = conversation.engine
    exact = ", computed in float32" if engine.config.quality else ""
    layout = f", experts in layout {engine.expert_layout.upper()}" if engine.expert_layout else ""
    print(f"{name}, context {engine.context} tokens{exact}{layout}. /help lists the commands, Ctrl+D leaves.")
    Repl(conversation, session.prompt, sys.stdout, options.hide_thinking).run()
    return 0


def history_path() -> Path:
    """The file of the lines typed: ds4/history in the user's folder for state (XDG base directories)."""
    base = os.environ.get("XDG_STATE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".local" / "state") / "ds4" / "history"


def _prompt_session(path: Path) -> PromptSession[str]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory, History, InMemoryHistory

    history: History
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.touch(mode=0o600)
        history = FileHistory(str(path))
    except OSError:
        # A home that cannot be written costs the memory of typed lines, not the session.
        history = InMemoryHistory()
    return PromptSession(history=history)
