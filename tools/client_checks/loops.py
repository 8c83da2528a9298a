"""A tool loop with a scripted model: which call a client's tools allow, the script, and what the trace says of it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from script_lines import calls

from ds4.errors import Ds4Error

REUSED = 0.99
"""Part of what was evaluated before that a request has to continue."""

_FILE_KEYS = ("file_path", "filePath", "path")
_SHELL_KEYS = ("cmd", "command")


@dataclass(frozen=True)
class Tool:
    """A tool that reads files: its name, the parameter that says what, and whether that is a shell command."""

    name: str
    key: str
    shell: bool


@dataclass(frozen=True)
class Turn:
    """A request as the trace has it.

    Attributes:
        number, text: its number and its prompt.
        tokens, reused, completion: tokens of the whole prompt, of those that were there already, and of the answer.
        source, detail: where the reused ones were, and how they were recognised.
        reason: how the answer ended.
    """

    number: int
    text: str
    tokens: int
    reused: int
    source: str
    detail: str
    completion: int
    reason: str

    @property
    def state(self) -> int:
        """Tokens that the live state holds behind this turn."""
        return self.tokens + self.completion


def declared_tools(prompt: str) -> dict[str, Mapping[str, Any]]:
    """The tools that a prompt shows the model: name to parameters."""
    tools: dict[str, Mapping[str, Any]] = {}
    for line in prompt.splitlines():
        if not line.startswith("{"):
            continue
        try:
            shown = json.loads(line)
        except ValueError:
            continue
        schema = shown.get("parameters") or shown.get("input_schema")
        if isinstance(shown.get("name"), str) and isinstance(schema, dict):
            tools[shown["name"]] = schema.get("properties") or {}
    return tools


def reading_tool(prompt: str) -> Tool:
    """The tool that reads a file: one of that name, or else a shell. Raises Ds4Error if there is none."""
    tools = declared_tools(prompt)
    for shell, keys in ((False, _FILE_KEYS), (True, _SHELL_KEYS)):
        for name, parameters in tools.items():
            for key in keys:
                if key in parameters and (shell or name.lower().startswith("read")):
                    return Tool(name, key, shell)
    raise Ds4Error(f"none of these tools reads a file: {', '.join(tools) or 'there are none'}")


def call(tool: Tool, path: str) -> list[str]:
    """The pieces of an answer that reads a file."""
    return calls((tool.name, {tool.key: f"cat {path}" if tool.shell else path}), reasoning=f"I read {path}.")


def turns(trace: Iterable[str]) -> list[Turn]:
    """The requests of a trace that got an answer, in the order of their prompts."""
    prompts: dict[int, dict[str, Any]] = {}
    found = []
    for line in trace:
        event = json.loads(line)
        if event["event"] == "prompt":
            prompts[event["request"]] = event
        elif event["event"] == "finish":
            prompt = prompts[event["request"]]
            found.append(
                Turn(
                    event["request"], prompt["text"], prompt["effective_tokens"], prompt["reused"], prompt["source"],
                    prompt["detail"], event["usage"]["completion"], event["reason"],
                )
            )  # fmt: skip
    return sorted(found, key=lambda turn: turn.number)


def problems(loop: Sequence[Turn], secrets: Sequence[str]) -> list[str]:
    """What is wrong with a loop in which each turn but the last one reads a file, and each file has a secret."""
    wanted = [*["tool_calls"] * len(secrets), "stop"]
    if [turn.reason for turn in loop] != wanted:
        return [f"the answers ended with {[turn.reason for turn in loop]}, not with {wanted}"]
    wrong = []
    for before, turn, secret in zip(loop, loop[1:], secrets, strict=False):
        if secret in before.text or secret not in turn.text:
            wrong.append(f"request {turn.number} does not bring what is in the file")
        wrong += continues(before, turn)
    return wrong


def continues(before: Turn, turn: Turn) -> list[str]:
    """What is wrong with a turn that should continue the state of the one before it."""
    if turn.source == "live" and turn.reused >= REUSED * before.state:
        return []
    part = f"{turn.reused} of the {before.state} tokens that were there ({turn.source})"
    return [f"request {turn.number} reads the conversation again: it reuses {part}"]
