"""How each client is set up: files of setups/ and their places, and commands. docs/clients.md shows the same."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

SETUPS = Path(__file__).parent / "setups"
NPM = Path(__file__).parent / "npm"
BIN = NPM / "node_modules" / ".bin"

URL = "http://127.0.0.1:8000"
"""The server's address in the set-ups; a check puts that of its own server there."""


@dataclass(frozen=True)
class Client:
    """A client of the server.

    Attributes:
        name: as the check's command line has it.
        files: files of setups/ and their places under the user's home.
        ask: the command that asks `{question}` and ends; its first word is a program, or a file of setups/.
        go_on: the command that asks another question in the same conversation; empty: the client has none.
        package: the npm package it comes from; None: a Python script of setups/.
        changes: what is different in its files: text to text.
    """

    name: str
    files: Mapping[str, str]
    ask: tuple[str, ...]
    go_on: tuple[str, ...] = ()
    package: str | None = None
    changes: Mapping[str, str] = field(default_factory=dict)


CLAUDE = Client(
    "claude",
    {"claude-ds4": "bin/claude-ds4"},
    ("claude-ds4", "-p", "{question}", "--allowedTools", "Read"),
    ("claude-ds4", "-p", "--continue", "{question}", "--allowedTools", "Read"),
    "@anthropic-ai/claude-code",
)
CODEX = Client(
    "codex",
    {"codex.toml": ".codex/config.toml"},
    ("codex", "exec", "--skip-git-repo-check", "{question}"),
    ("codex", "exec", "resume", "--last", "--skip-git-repo-check", "{question}"),
    "@openai/codex",
)
OPENCODE = Client(
    "opencode",
    {"opencode.json": ".config/opencode/opencode.json", "opencode-ds4": "bin/opencode-ds4"},
    ("opencode-ds4", "run", "--title", "notes", "{question}"),
    ("opencode-ds4", "run", "--continue", "{question}"),
    "opencode-ai",
)
PI = Client(
    "pi",
    {"pi-models.json": ".pi/agent/models.json", "pi-ds4": "bin/pi-ds4"},
    ("pi-ds4", "-p", "{question}"),
    ("pi-ds4", "-p", "--continue", "{question}"),
    "@mariozechner/pi-coding-agent",
)
OPENAI_SDK = Client("openai-sdk", {"openai_sdk.py": "openai_sdk.py"}, ("python3", "openai_sdk.py", "{question}"))
ANTHROPIC_SDK = Client(
    "anthropic-sdk", {"anthropic_sdk.py": "anthropic_sdk.py"}, ("python3", "anthropic_sdk.py", "{question}")
)
CLIENTS = {client.name: client for client in (CLAUDE, CODEX, OPENCODE, PI, OPENAI_SDK, ANTHROPIC_SDK)}
_COMPLETIONS, _COMPATIBLE = "openai-completions", "@ai-sdk/openai-compatible"
_HIGH = {"ask": ("pi-ds4", "--thinking", "high", *PI.ask[1:]), "go_on": ("pi-ds4", "--thinking", "high", *PI.go_on[1:])}
_SUMMARIES = 'model_reasoning_summary = "auto"\nmodel_supports_reasoning_summaries = true\n'
_EFFORT = 'model_reasoning_effort = "high"\n'
VARIANTS = {
    client.name: client
    for client in (
        replace(PI, name="pi-high", **_HIGH),
        replace(PI, name="pi-responses", changes={_COMPLETIONS: "openai-responses"}, **_HIGH),
        replace(PI, name="pi-messages", changes={_COMPLETIONS: "anthropic-messages", f"{URL}/v1": URL}, **_HIGH),
        replace(OPENCODE, name="opencode-responses", changes={_COMPATIBLE: "@ai-sdk/openai"}),
        replace(OPENCODE, name="opencode-messages", changes={_COMPATIBLE: "@ai-sdk/anthropic"}),
        replace(CODEX, name="codex-high", changes={"web_search =": f"{_SUMMARIES}{_EFFORT}web_search ="}),
        replace(CLAUDE, name="claude-max", ask=("claude-ds4", "--effort", "max", *CLAUDE.ask[1:])),
        replace(CLAUDE, name="claude-bare", ask=("claude-ds4", "--bare", *CLAUDE.ask[1:]), go_on=()),
    )
}
"""The same agents over other APIs, and with other efforts of thinking."""


@dataclass(frozen=True)
class Place:
    """A user with one client: a home, a folder to work in, and nothing of the environment that runs the check.

    Attributes:
        home, work: the folders.
        environment: what the client's process gets.
    """

    home: Path
    work: Path
    environment: dict[str, str] = field(repr=False)


def install(client: Client, folder: Path, url: str) -> Place:
    """Set a client up in an empty folder, for a server at `url`."""
    home, work = folder / "home", folder / "work"
    for path in (home, work):
        path.mkdir(parents=True, exist_ok=True)
    for name, place in client.files.items():
        target = (work if client.package is None else home) / place
        target.parent.mkdir(parents=True, exist_ok=True)
        text = (SETUPS / name).read_text(encoding="utf-8")
        for old, new in (*client.changes.items(), (URL, url)):
            text = text.replace(old, new)
        target.write_text(text, encoding="utf-8")
        target.chmod((SETUPS / name).stat().st_mode)
    node = shutil.which("node")
    path = [home / "bin", BIN, Path(node).parent if node else BIN, Path("/usr/local/bin"), "/usr/bin", "/bin"]
    environment = {"HOME": str(home), "PATH": os.pathsep.join(map(str, path)), "LANG": "C.UTF-8", "TERM": "dumb"}
    return Place(home, work, environment)


def command(client: Client, words: tuple[str, ...], question: str) -> list[str]:
    """A command with its question."""
    filled = [word.format(question=question) if word == "{question}" else word for word in words]
    return [sys.executable, *filled[1:]] if client.package is None else filled
