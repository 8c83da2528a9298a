"""Checks of real clients, without those of npm: their set-ups, what is read from a trace, the loops of the SDKs."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import client_check
import pytest
from client_checks import loops, network, setups
from client_checks.loops import Tool, Turn
from server_harness import serving, tokenizer

from ds4.engine import EngineConfig
from ds4.errors import Ds4Error
from ds4.server.config import parse_args
from ds4.server.scripted import load_script, scripted_backend

ROOT = Path(__file__).parents[2]
DOCS = (ROOT / "docs/clients.md").read_text(encoding="utf-8")
EVERY = [*setups.CLIENTS.values(), *setups.VARIANTS.values()]


@pytest.mark.parametrize("file", sorted(path.name for path in setups.SETUPS.iterdir()))
def test_the_documentation_shows_what_is_tried(file: str) -> None:
    shown = re.findall(r"^```\w+\n(.*?)^```$", DOCS, re.MULTILINE | re.DOTALL)
    assert (setups.SETUPS / file).read_text(encoding="utf-8") in shown
    assert any(file in client.files for client in setups.CLIENTS.values())


@pytest.mark.parametrize("client", [c for c in setups.CLIENTS.values() if c.package], ids=lambda c: c.name)
def test_the_documentation_shows_how_it_is_asked(client: setups.Client) -> None:
    words = [word for word in client.ask if word not in ("--title", "notes")]
    assert " ".join(words).format(question='"What does notes.txt say?"') in DOCS


def test_versions_are_pinned_and_documented_and_the_lock_has_no_addresses() -> None:
    wanted = json.loads((setups.NPM / "package.json").read_text(encoding="utf-8"))["dependencies"]
    lock = json.loads((setups.NPM / "package-lock.json").read_text(encoding="utf-8"))["packages"]
    assert set(wanted) == {client.package for client in EVERY if client.package}
    for package, version in wanted.items():
        assert lock[f"node_modules/{package}"]["version"] == version
        assert f"| {version} |" in DOCS
    assert all("resolved" not in entry and (not name or "integrity" in entry) for name, entry in lock.items())
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    for package in ("openai", "anthropic"):
        version = re.search(rf"^{package}==(.*)$", pinned, re.MULTILINE)
        assert version is not None
        assert version[1] in DOCS


@pytest.mark.parametrize("client", EVERY, ids=lambda client: client.name)
def test_a_client_is_set_up_for_its_server_and_knows_nothing_of_the_caller(
    client: setups.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS4_API_KEY", "secret")
    place = setups.install(client, tmp_path, "http://127.0.0.1:1234")
    assert set(place.environment) == {"HOME", "PATH", "LANG", "TERM"}
    assert Path(place.environment["HOME"]).is_relative_to(tmp_path)
    texts = [path.read_text(encoding="utf-8") for path in tmp_path.rglob("*") if path.is_file()]
    assert len(texts) == len(client.files)
    assert any("http://127.0.0.1:1234" in text for text in texts)
    assert not any(setups.URL in text for text in texts)
    originals = [(setups.SETUPS / name).read_text(encoding="utf-8") for name in client.files]
    assert all(any(old in text for text in originals) for old in client.changes)


PROMPTS = {
    "claude": ('{"name": "Bash", "input_schema": {"properties": {"command": {}}}}',
               '{"name": "Read", "input_schema": {"properties": {"file_path": {}, "limit": {}}}}'),
    "codex": ('{"type": "function", "name": "exec_command", "parameters": {"properties": {"cmd": {}}}}',
              '{"type": "web_search"}'),
    "opencode": ('{"name": "bash", "parameters": {"properties": {"command": {}}}}',
                 '{"name": "read", "parameters": {"properties": {"filePath": {}}}}'),
    "pi": ('{"name": "edit", "parameters": {"properties": {"path": {}}}}',
           '{"name": "read", "parameters": {"properties": {"path": {}}}}'),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "tool"),
    [
        ("claude", Tool("Read", "file_path", False)),
        ("codex", Tool("exec_command", "cmd", True)),
        ("opencode", Tool("read", "filePath", False)),
        ("pi", Tool("read", "path", False)),
    ],
)
def test_the_tool_that_reads_files_is_found(name: str, tool: Tool) -> None:
    prompt = "System text\n{not json\n" + "\n".join(PROMPTS[name]) + "\n<｜User｜>Read it."
    assert loops.reading_tool(prompt) == tool
    assert ("cat a.txt" in loops.call(tool, "a.txt")) == tool.shell


def test_a_client_that_cannot_read_is_named() -> None:
    with pytest.raises(Ds4Error, match="none of these tools reads a file: write"):
        loops.reading_tool('{"name": "write", "parameters": {"properties": {"path": {}}}}')


def turn(number: int, text: str, tokens: int, reused: int, reason: str, source: str = "live") -> Turn:
    return Turn(number, text, tokens, reused, source, "", 10, reason)


GOOD = [
    turn(1, "Question", 1000, 0, "tool_calls", "none"),
    turn(2, "Question one", 1040, 1009, "tool_calls"),
    turn(3, "Question one two", 1090, 1049, "stop"),
]


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({}, ""),
        ({1: {"reused": 999}}, "request 2 reads the conversation again: it reuses 999 of the 1010"),
        ({2: {"source": "checkpoint"}}, "request 3 reads"),
        ({2: {"text": "Question one"}}, "request 3 does not bring what is in the file"),
        ({0: {"text": "Question one"}}, "request 2 does not bring"),
        ({1: {"reason": "stop"}}, "the answers ended with"),
    ],
)
def test_a_loop_is_judged(change: dict[int, dict[str, Any]], wrong: str) -> None:
    loop = [replace(turn, **change.get(number, {})) for number, turn in enumerate(GOOD)]
    found = loops.problems(loop, ["one", "two"])
    assert wrong in "".join(found)
    assert bool(found) == bool(wrong)
    assert loops.problems(loop[:2], ["one", "two"])


@contextlib.contextmanager
def inner_server(flags: Sequence[str]) -> Iterator[str]:
    """What `load.server` does, in this process and with the small tokenizer."""
    config = replace(parse_args(flags), port=0, ctx=4096)
    assert config.scripted is not None
    backend = scripted_backend(load_script(config.scripted), tokenizer(), EngineConfig(context=config.ctx))
    with serving(backend, config) as running:
        yield running.url


@pytest.mark.parametrize("name", ["openai-sdk", "anthropic-sdk"])
def test_the_loops_of_the_sdks(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(client_check, "server", inner_server)
    client = setups.CLIENTS[name]
    result = client_check.check(client, tmp_path / "one", with_tiny=False, alone=False)
    assert result.wrong == []
    assert [turn.reason for turn in result.loop] == ["tool_calls", "tool_calls", "stop"]
    client_check.report(client, result)
    assert f"{name} : good" in capsys.readouterr().out


def test_a_client_that_fails_is_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_check, "server", inner_server)
    broken = replace(setups.OPENAI_SDK, changes={"from openai import OpenAI": "raise SystemExit('no such thing')"})
    result = client_check.check(broken, tmp_path / "one", with_tiny=False, alone=False)
    assert "openai-sdk ended with status 1: no such thing" in result.wrong[0]
    missing = replace(setups.PI, name="missing", ask=("no-such-program", "{question}"))
    assert "not installed" in client_check.check(missing, tmp_path / "two", False, False).wrong[0]


def test_names_are_answered_as_unknown() -> None:
    question = b"\x12\x34\x01\x00\x00\x01" + bytes(6) + b"\x06github\x03com\x00\x00\x01\x00\x01"
    name, end = network._name(question)
    assert (name, end) == ("github.com", len(question))
    answer = network.unknown(question, end)
    assert answer[:2] == question[:2]
    assert answer[2] & 0x80  # a response
    assert answer[3] & 0x0F == 3  # no such name
    assert answer[4:12] == b"\0\1" + bytes(6)
    assert answer[12:] == question[12:]


def test_an_unknown_client_is_a_mistake_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as status:
        client_check.parse(["emacs"])
    assert status.value.code == 2
    assert "emacs: not among claude, codex" in capsys.readouterr().err
