"""The interactive session, played without a terminal, and once on a real one."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import ds4
from ds4.cli import repl
from ds4.cli.conversation import Conversation
from ds4.cli.options import COMMANDS, Options
from ds4.cli.prompt import Style
from ds4.cli.repl import Repl, history_path
from ds4.cli.terminal import DIM, RESET
from ds4.engine import Engine
from tests.cli.conftest import Screen
from tests.cli.scripted import scripted_engine

Play = Callable[..., tuple[str, Conversation]]


@pytest.fixture
def play(engine: Engine, tokenizer: ds4.Tokenizer) -> Play:
    def run(
        lines: list[str | type[BaseException]], *replies: str, context: int | None = None
    ) -> tuple[str, Conversation]:
        """Type the lines; the screen and the conversation at the end."""
        scripted = scripted_engine(engine.shape, tokenizer, *replies, context=context)
        conversation = Conversation(scripted, Style(), ds4.Sampling(temperature=0))
        screen, waiting = Screen(), iter(lines)

        def read(prompt: str) -> str:
            line = next(waiting, EOFError)
            if isinstance(line, str):
                screen.write(f"{prompt}{line}\n")
                return line
            raise line

        Repl(conversation, read, screen).run()
        return screen.getvalue(), conversation

    return run


def test_two_turns_end_with_ctrl_d(play: Play) -> None:
    screen, conversation = play(["2+2?", "3+3?"], "hm</think>Four.", "so</think>Six.")
    assert f"{DIM}h{RESET}{DIM}m{RESET}" in screen
    assert "Four.\n[prompt " in screen
    assert "reused" in screen.split("3+3?")[1]
    assert [m.text for m in conversation.messages] == ["2+2?", "Four.", "3+3?", "Six."]


@pytest.mark.parametrize("command", ["/quit", "/exit"])
def test_quit_leaves(command: str, play: Play) -> None:
    _, conversation = play([command, "2+2?"], "x</think>Four.")
    assert conversation.messages == []


def test_ctrl_c_at_the_prompt_throws_the_line_away(play: Play) -> None:
    _, conversation = play([KeyboardInterrupt, "2+2?"], "x</think>Four.")
    assert len(conversation.messages) == 2


def test_modes(play: Play, tokenizer: ds4.Tokenizer) -> None:
    screen, conversation = play(["/nothink", "2+2?"], "Four.")
    assert "[answering at once]" in screen
    assert conversation.messages[-1].text == "Four."
    screen, conversation = play(["/nothink", "/think", "2+2?"], "hm</think>Four.")
    assert conversation.messages[-1].reasoning == "hm"
    screen, conversation = play(["/think-max", "2+2?"], "hm</think>Four.")
    assert "too small" in screen
    assert "Reasoning Effort" not in tokenizer.decode(conversation.session.tokens).decode()


def test_help_lists_the_commands(play: Play) -> None:
    screen, _ = play(["/help"])
    for name in COMMANDS:
        assert name in screen


def test_read_sends_a_file(play: Play, tmp_path: Path) -> None:
    path = tmp_path / "question.txt"
    path.write_text("What is\nthis?\n", encoding="utf-8")
    screen, conversation = play([f"/read {path}", "/read", "/read /nowhere/x", f"/read {tmp_path}"], "x</think>A file.")
    assert [m.text for m in conversation.messages] == ["What is\nthis?", "A file."]
    assert "[/read needs the name of a file]" in screen
    assert "[/nowhere/x: cannot be read: No such file or directory]" in screen
    assert f"[{tmp_path}: cannot be read: Is a directory]" in screen


def test_a_file_of_nobody_is_a_message(play: Play) -> None:
    screen, conversation = play(["/read ~nosuchuser/x", "/read a\0b", "/read " + "x" * 5000, "/nothink", "Hi"], "Ho")
    assert "[~nosuchuser/x: cannot be read: there is no such user]" in screen
    assert "cannot be read: this is not the name of a file]" in screen
    assert "cannot be read: File name too long]" in screen
    assert [m.text for m in conversation.messages] == ["Hi", "Ho"]


def test_an_empty_file_is_not_sent(play: Play, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    screen, conversation = play([f"/read {tmp_path / 'empty'}"])
    assert "is empty" in screen
    assert conversation.messages == []


def test_ctx_shows_and_changes_the_context(play: Play) -> None:
    screen, conversation = play(["/ctx", "/ctx 100", "/nothink", "Hi", "/ctx 2", "/ctx x", "/ctx 99999"], "Ho")
    assert "[context 4096 tokens, 0 in use]" in screen
    assert "[context 100 tokens, 0 in use]" in screen
    assert "more than 2; /new forgets it]" in screen
    assert "[/ctx takes a number from 1 to 4096, not 'x']" in screen
    assert "not '99999'" in screen
    assert conversation.engine.context == 100


def test_ctx_takes_numbers_of_any_length(play: Play) -> None:
    screen, conversation = play(["/ctx " + "1" * 4400, "/ctx " + "0" * 4400, "/ctx " + "0" * 4400 + "200"])
    assert screen.count("[/ctx takes a number from 1 to 4096, not '") == 2
    assert "1" * 41 not in screen.replace("/ctx " + "1" * 4400, "")
    assert conversation.engine.context == 200


def test_a_full_context_is_explained_and_can_be_raised(play: Play) -> None:
    lines = ["/nothink", "Hi", "More", "/ctx 4096", "More"]
    screen, conversation = play(lines, "word " * 50, "Ok.", context=24)
    assert "; the context is full]" in screen
    assert "but the configured context size is 24 tokens; /ctx N raises it" in screen
    assert conversation.messages[-1].text == "Ok."


def test_new_forgets(play: Play) -> None:
    screen, conversation = play(["/nothink", "Hi", "/new"], "Ho")
    assert "[forgotten" in screen
    assert conversation.messages == []


def test_a_forgotten_conversation_takes_no_context(play: Play) -> None:
    screen, conversation = play(["/nothink", "Hi", "/ctx", "/new", "/ctx", "/ctx 8", "/ctx 4096", "Hi"], "word " * 50)
    assert "[context 4096 tokens, 0 in use]" not in screen.split("/new")[0]
    assert "[context 4096 tokens, 0 in use]" in screen.split("/new")[1]
    assert "[context 8 tokens, 0 in use]" in screen
    assert conversation.messages[-1].text.startswith("word word")


def test_unknown_commands_are_named_and_a_space_makes_a_question(play: Play) -> None:
    screen, conversation = play(["/frob x", "/power 50", " /etc/passwd?", "   "], "x</think>A file.")
    assert "[there is no command /frob; /help lists them." in screen
    assert "[/power is not built yet]" in screen
    assert [m.text for m in conversation.messages] == ["/etc/passwd?", "A file."]


@pytest.mark.parametrize(
    ("layout", "quality", "text"),
    [
        (None, None, "tokens. /help"),
        (None, False, "tokens. /help"),
        ("a", False, "tokens, experts in layout A. /help"),
        ("b", True, "tokens, computed in float32, experts in layout B. /help"),
    ],
)
def test_the_first_line_says_how_the_model_is_computed(
    play: Play,
    layout: str | None,
    quality: bool | None,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Left:
        def prompt(self, text: str) -> str:
            raise EOFError

    monkeypatch.setattr(repl, "_prompt_session", lambda path: Left())
    monkeypatch.setattr(Engine, "expert_layout", layout)
    _, conversation = play([])
    monkeypatch.setattr(conversation.engine, "config", replace(conversation.engine.config, quality=quality))
    assert repl.run_repl(conversation, Options(model="m.gguf")) == 0
    assert capsys.readouterr().out.startswith("m.gguf, context 4096 " + text)


def test_history_is_kept_in_the_folder_for_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert history_path() == tmp_path / "ds4" / "history"
    for value in ("", "relative"):
        monkeypatch.setenv("XDG_STATE_HOME", value)
        monkeypatch.setenv("HOME", str(tmp_path))
        assert history_path() == tmp_path / ".local" / "state" / "ds4" / "history"


class Terminal:
    """A process on a terminal of its own; reading waits for text, never for time to pass."""

    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        self._master, slave = pty.openpty()
        # The child makes the terminal its own, so that Ctrl+C reaches it as a signal.
        start = (
            "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", start, *command],
            stdin=slave, stdout=slave, stderr=slave, env=env, start_new_session=True,
        )  # fmt: skip
        os.close(slave)
        self.text = ""
        self._seen = 0

    def until(self, wanted: str, limit: float = 120) -> None:
        """Read until `wanted` comes behind what was waited for before."""
        while wanted not in self.text[self._seen :]:
            ready, _, _ = select.select([self._master], [], [], limit)
            assert ready, f"{wanted!r} did not come; the screen is {self.text!r}"
            self.text += os.read(self._master, 4096).decode("utf-8", "replace")
        self._seen = self.text.index(wanted, self._seen) + len(wanted)

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)


def first_words(engine: Engine, question: str) -> str:
    """How the random model begins its most probable answer."""
    conversation = Conversation(engine, Style(mode="none"), ds4.Sampling(temperature=0), max_tokens=3)
    return conversation.ask(question, lambda event: None).message.text.strip()


def test_ctrl_c_stops_an_answer_on_a_real_terminal(model_file: Path, engine: Engine, tmp_path: Path) -> None:
    env = {**os.environ, "XDG_STATE_HOME": str(tmp_path), "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}
    # The random model does not end by itself for a long time.
    flags = ["-m", str(model_file), "--temp", "0", "--nothink"]
    terminal = Terminal([sys.executable, "-m", "ds4.cli.main", *flags], env)
    try:
        terminal.until("ds4>")
        terminal.type("Hello\r")
        terminal.until(first_words(engine, "Hello"))
        terminal.type("\x03")
        terminal.until("; stopped]")
        terminal.until("ds4>")
        terminal.type("/ctx\r")
        terminal.until(" in use]")
        terminal.type("/quit\r")
        assert terminal.process.wait(timeout=60) == 0
    finally:
        terminal.close()
    assert "Traceback" not in terminal.text
    assert "+Hello" in (tmp_path / "ds4" / "history").read_text()
