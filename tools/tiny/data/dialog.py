"""One conversation: OpenAI-style messages, tools, and what a good answer must satisfy at each assistant turn."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from ds4.chat import render

Json = dict[str, Any]
Call = tuple[str, Json]
SAY_FIRST = "Say what you will do before you call a tool."


@dataclass
class Dialog:
    """Messages in order; `checks[i]` says what message i, an assistant turn, must satisfy when generated freely."""

    thinking: bool = True
    tools: list[Json] = field(default_factory=list)
    messages: list[Json] = field(default_factory=list)
    checks: dict[int, Json] = field(default_factory=dict)

    def system(self, text: str) -> None:
        if text:
            self.messages.append({"role": "system", "content": text})

    def user(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})

    def say(self, content: str, reasoning: str = "", **check: Any) -> None:
        """An assistant answer. `check`: task, and one of number=, must=[...], equals=[...]."""
        self._assistant({"role": "assistant", "content": content}, reasoning, check)

    def call(self, calls: list[Call], reasoning: str = "", content: str = "", task: str = "") -> list[str]:
        """An assistant turn that calls tools; returns the call ids."""
        ids = [f"call_{len(self.messages)}_{n}" for n in range(len(calls))]
        items = [
            {"id": i, "type": "function", "function": {"name": name, "arguments": json.dumps(args, ensure_ascii=False)}}
            for i, (name, args) in zip(ids, calls, strict=True)
        ]
        check = {"task": task, "calls": [[name, args] for name, args in calls]} if task else {}
        self._assistant({"role": "assistant", "content": content, "tool_calls": items}, reasoning, check)
        return ids

    def results(self, ids: list[str], texts: list[str]) -> None:
        for i, text in zip(ids, texts, strict=True):
            self.messages.append({"role": "tool", "tool_call_id": i, "content": text})

    def copy(self) -> Dialog:
        """A dialogue of its own with the same turns so far."""
        return Dialog(self.thinking, self.tools, [dict(m) for m in self.messages], dict(self.checks))

    @property
    def says_first(self) -> bool:
        """True if the system text wants words before a call; no text of evaluation does."""
        return bool(self.messages) and self.messages[0]["role"] == "system" and SAY_FIRST in self.messages[0]["content"]

    @property
    def open_call(self) -> bool:
        """True if the last turn is a call whose results are missing."""
        return bool(self.messages and self.messages[-1].get("tool_calls"))

    def _assistant(self, message: Json, reasoning: str, check: Json) -> None:
        if self.thinking:
            message["reasoning_content"] = reasoning
        if check.get("task"):
            self.checks[len(self.messages)] = check
        self.messages.append(message)

    def text(self, until: int | None = None) -> str:
        """The rendered conversation; with `until`, the prompt that opens assistant turn number `until`."""
        return render(self.messages[:until], tools=self.tools or None, thinking=self.thinking, profile="official")


def schema(name: str, description: str, properties: Json, required: list[str] | None = None) -> Json:
    """One OpenAI tool."""
    parameters: Json = {"type": "object", "properties": properties}
    parameters["required"] = list(properties) if required is None else required
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}
