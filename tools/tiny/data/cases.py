"""Evaluation cases: prompts of the held-out split and what a freely generated answer must satisfy."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from ds4.chat import parse

from . import arith, corpus
from .chat import Chat
from .dialog import Dialog, Json
from .filler import Filler
from .recall import Recall
from .toolbox import KNOWN
from .tools import Tools, apart
from .words import Source

TASKS = (
    "call",
    "none",
    "parallel",
    "chain",
    "result",
    "result_json",
    "arithmetic",
    "chat",
    "recall_window",
    "recall_near",
    "recall_far",
)
SHARED = 4  # requests per set of tools, questions per long text: their common prompt is evaluated once
DISTANCES = {"recall_window": (16, 110), "recall_near": (150, 600), "recall_far": (1500, 3000)}


@dataclass
class Case:
    """One conversation and the assistant turns to generate, in order; the case is right if every turn is."""

    task: str
    dialog: Dialog
    turns: list[int]
    distance: int = 0  # recall: tokens from the end of the fact to the end of the prompt

    @property
    def thinking(self) -> bool:
        return self.dialog.thinking

    def prompt(self, turn: int) -> str:
        """The rendered prompt of assistant turn `turn` (a message index)."""
        return self.dialog.text(turn)

    def gold(self, turn: int) -> str:
        """What the data says for this turn, from behind the prompt up to the end of sentence."""
        prompt = self.prompt(turn)
        whole = self.dialog.text(turn + 1)
        return whole[len(prompt) :]

    def check(self, turn: int, text: str) -> str:
        """Empty if the generated text is right, else a short reason; `text` is without prompt and end token."""
        return check(self.dialog.checks[turn], text, self.thinking, self.dialog.tools)

    def accept(self, turn: int, text: str) -> None:
        """Put the generated turn in place of the data's, so that the next prompt holds what the model wrote."""
        message = parse(text, thinking=self.thinking, tools=self.dialog.tools or None)
        old = self.dialog.messages[turn]
        new: Json = {"role": "assistant", "content": message.text, "reasoning_content": message.reasoning}
        if message.tool_calls:
            free = list(old["tool_calls"])
            new["tool_calls"] = []
            for call in message.tool_calls:
                same_call = next(c for c in free if same(_pair(c), (call.name, json.loads(call.arguments))))
                free.remove(same_call)
                new["tool_calls"].append(
                    {
                        "id": same_call["id"],
                        "type": "function",
                        "function": {"name": call.name, "arguments": call.arguments},
                    }
                )
            new["raw_dsml"] = message.raw_dsml
        self.dialog.messages[turn] = new


def _pair(call: Json) -> tuple[str, Any]:
    return call["function"]["name"], json.loads(call["function"]["arguments"])


def same(a: Any, b: Any) -> bool:
    """Equal as JSON: true is not 1, 3.0 is 3, the order of keys does not matter."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return (type(a) in (int, float) and type(b) in (int, float) and a == b) or (type(a) is type(b) and a == b)


def holds(text: str, wanted: str) -> bool:
    """True if `wanted` stands in `text`, not as a part of a longer word or number."""
    before = r"(?<![\w])" if wanted[:1].isalnum() else ""
    after = r"(?!\w|\.\d)" if wanted[-1:].isalnum() else ""
    return re.search(before + re.escape(wanted) + after, text) is not None


def check(want: Json, text: str, thinking: bool, tools: list[Json] | None) -> str:
    """Judge one generated turn; empty if right, else the reason."""
    if thinking and "</think>" not in text:
        return "thinking not closed"
    message = parse(text, thinking=thinking, tools=tools or None)
    if "calls" in want:
        if not message.tool_calls:
            return "no call"
        if message.problems or not message.complete:
            return "malformed call"
        try:
            made = [(c.name, json.loads(c.arguments)) for c in message.tool_calls]
        except ValueError:
            return "arguments are not JSON"
        if sorted(n for n, _ in made) != sorted(n for n, _ in want["calls"]):
            return "wrong tool"
        left = list(made)
        for name, args in want["calls"]:
            found = next((m for m in left if same(m, (name, args))), None)
            if found is None:
                return "wrong arguments"
            left.remove(found)
        return ""
    if message.tool_calls or "｜DSML｜" in text:
        return "unwanted call"
    content = message.text.strip()
    if not content:
        return "empty answer"
    if want["task"] == "none":
        return ""
    if "number" in want:
        numbers = re.findall(r"-?\d+(?:\.\d+)?", content)
        return "" if numbers and float(numbers[-1]) == want["number"] else "wrong number"
    if "equals" in want:
        return "" if content in want["equals"] else "other answer"
    if "value" in want:
        return "" if holds(content, want["value"]) and len(content) <= want["longest"] else "wrong value"
    missing = [m for m in want["must"] if not holds(content, m)]
    return f"answer lacks {missing[0]!r}" if missing else ""


class Cases:
    """Makes the cases of every task from one seed; the same seed gives the same cases."""

    def __init__(self, seed: int, tokenizer: Tokenizer) -> None:
        text = corpus.load()
        self.seed, self.tokenizer = seed, tokenizer
        self.filler = Filler(text)
        self.chat = Chat(text)
        self.tools = Tools(self.chat, self.filler)
        self.varied = Tools(self.chat, self.filler, varied=1.0)
        self.recall = Recall(self.chat, self.filler)

    def make(self, task: str, count: int) -> list[Case]:
        """`count` cases of a task of `TASKS`."""
        if task not in TASKS:
            raise ValueError(f"unknown task {task!r}; the tasks are {', '.join(TASKS)}")
        rng = Source(f"cases/{task}/{self.seed}", "eval")
        streams: dict[str, Callable[[Source], Iterator[Case]]] = {
            "call": self.calls,
            "result": self.answers,
            "result_json": self.json_answers,
            "arithmetic": self.arithmetic,
            "chat": self.chats,
        }

        def stream() -> Iterator[Case]:
            if task in DISTANCES:
                return self.recalls(rng, task, *DISTANCES[task])
            return streams[task](rng) if task in streams else self.others(rng, task)

        out: list[Case] = []
        while len(out) < count:
            out += stream()
        return out[:count]

    def room(self, rng: Source) -> int:
        return rng.randint(60, 300) if rng.chance(0.3) else 0

    def calls(self, rng: Source) -> Iterator[Case]:
        """Single calls: a random tool in six of ten, a known one else."""
        if rng.chance(0.6):
            tools = self.tools.some_tools(rng, rng.choices((1, 2, 3, 4), (25, 35, 25, 15))[0])
            base = self.tools.open(rng, [t.schema for t in tools], self.room(rng))
            for _ in range(SHARED):
                dialog = base.copy()
                self.tools.use_random(dialog, rng, rng.choice(tools), 0)
                yield from self.first(dialog, "call", len(base.messages))
        else:
            known, spelling = apart(rng.sample(KNOWN, rng.randint(1, 4))), rng.randrange(6)
            base = self.tools.open(rng, [k.schema(spelling) for k in known], self.room(rng))
            for _ in range(SHARED):
                dialog = base.copy()
                self.tools.use_known(dialog, rng, rng.choice(known), spelling, 0)
                yield from self.first(dialog, "call", len(base.messages))

    def first(self, dialog: Dialog, task: str, start: int) -> Iterator[Case]:
        """The first turn at or behind `start` that is of the task."""
        for turn in sorted(dialog.checks):
            if turn >= start and dialog.checks[turn]["task"] == task:
                yield Case(task, dialog, [turn])
                return

    def answers(self, rng: Source) -> Iterator[Case]:
        """The answer behind a call and its result, both given."""
        for _ in range(SHARED):
            dialog = self.tools.conversation(
                rng, self.room(rng), rng.choice(("random", "known", "random", "known", "parallel"))
            )
            yield from self.first(dialog, "result", 0)

    def json_answers(self, rng: Source) -> Iterator[Case]:
        """The answer behind a call and its result, a JSON text with more keys than the answer needs."""
        dialog = self.varied.conversation(rng, self.room(rng), rng.choice(("random", "known")))
        for case in self.first(dialog, "result", 0):
            before = dialog.messages[case.turns[0] - 1]["content"]
            if before.lstrip().startswith(("{", "[")) and ":" in before and not before.startswith('{"error"'):
                yield case

    def others(self, rng: Source, task: str) -> Iterator[Case]:
        dialog = self.tools.conversation(rng, self.room(rng), task)
        if task == "chain":
            yield Case(task, dialog, [t for t in sorted(dialog.checks) if dialog.checks[t]["task"] == "chain"])
        else:
            yield from self.first(dialog, task, 0)

    def arithmetic(self, rng: Source) -> Iterator[Case]:
        dialog = Dialog(thinking=rng.chance(0.5))
        arith.exchange(dialog, rng)
        yield Case("arithmetic", dialog, [len(dialog.messages) - 1])

    def chats(self, rng: Source) -> Iterator[Case]:
        dialog = self.chat.conversation(rng)
        turns = [t for t in sorted(dialog.checks) if dialog.checks[t]["task"] == "chat"]
        if turns:
            yield Case("chat", dialog, [rng.choice(turns)])

    def recalls(self, rng: Source, task: str, low: int, high: int) -> Iterator[Case]:
        """Questions about one planted text, each a case; only those whose distance lies in the range."""
        base = Dialog(thinking=rng.chance(0.25))
        near = task == "recall_window"
        most = high if task == "recall_far" else int(high * 0.85)
        planted = self.recall.plant(
            base, rng, rng.randint(2, 30) if near else rng.randint(low, most), (3, 4) if near else (8, 12)
        )
        for fact, line in planted:
            dialog = base.copy()
            self.recall.ask(dialog, rng, fact)
            turn = len(dialog.messages) - 1
            prompt = dialog.text(turn)
            at = prompt.index(line) + len(line)
            distance = len(self.tokenizer.encode(str(prompt)[at:], add_special_tokens=False).ids)
            if low <= distance <= high:
                yield Case(task, dialog, [turn], distance)
