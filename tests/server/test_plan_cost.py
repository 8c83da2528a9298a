"""What it costs to find where a prompt continues: the worker does it between two steps of all answers."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from server_harness import WEATHER, script_backend

from ds4.chat.message import Message
from ds4.chat.tools import tool_schemas
from ds4.engine import Engine
from ds4.server import continuation
from ds4.server.config import ServerConfig
from ds4.server.continuation import Plan, bind_reply, plan
from ds4.server.prompting import PromptBuilder
from ds4.server.request import ChatRequest, Prompt
from ds4.server.slots import Slot

CONTEXT = 1 << 16
SERVER = str(Path(continuation.__file__).parent)
CONFIG = ServerConfig(ctx=CONTEXT)
TOOLS = tool_schemas([WEATHER])
CLIENTS = ["keeps", "drops", "edits the start", "edits the middle", "edits the end", "keeps and edits the end"]
PIECES = ["thou", "ght ", "an", "sw", "er"]
"""Other tokens than the tokenizer chooses for the same text."""


class CountedList(list[int]):
    """A list that counts how many of its items are read."""

    read = 0

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        self.read += len(found) if isinstance(index, slice) else 1
        return found

    def __iter__(self) -> Any:
        self.read += len(self)
        return super().__iter__()

    def count(self, item: Any) -> int:
        """As a list's."""
        self.read += len(self)
        return super().count(item)

    def __eq__(self, other: object) -> bool:
        self.read += len(self)
        return super().__eq__(other)

    __hash__ = None


@dataclass
class Cost:
    """What a plan did.

    Attributes:
        calls: calls of functions of the server, and calls in them.
        read: tokens read from lists.
        to_bytes: tokens made to bytes.
        encoded: characters tokenised.
    """

    calls: int = 0
    read: int = 0
    to_bytes: int = 0
    encoded: int = 0


@dataclass
class Talk:
    """A conversation with reasoning in each answer, and the slot that holds it."""

    engine: Engine
    prompts: PromptBuilder
    slot: Slot
    messages: list[Message]

    @classmethod
    def of(cls, turns: int) -> Talk:
        """One of so many turns of equal size."""
        engine = script_backend({"pieces": PIECES}, config=CONFIG, chunk=512).engine
        talk = cls(engine, PromptBuilder(engine.tokenizer, CONFIG, CONTEXT, None), Slot(engine.session()), [])
        tokenizer: Any = engine.tokenizer
        thought, said = PIECES[:2], PIECES[2:]
        sampled = [*(tokenizer.piece(piece.encode()) for piece in thought * 10), tokenizer.end_think]
        sampled += [tokenizer.piece(piece.encode()) for piece in said * 10]
        answer = Message(reasoning="".join(thought * 10), content="".join(said * 10))
        for turn in range(turns):
            talk.messages.append(Message(role="user", content=f"question {turn:4} " + "of many words " * 20))
            wanted = talk.prompt(talk.messages)
            chosen = talk.plan(wanted, [talk.slot])
            assert chosen.whole == (turn > 0)
            talk.slot.keep(chosen.kept)
            talk.slot.session.sync([*chosen.ids, *sampled])
            talk.slot.session.pending = tokenizer.eos
            bind_reply(talk.slot, wanted, answer, tokenizer, talk.prompts.encode, "official")
            talk.messages.append(answer)
        return talk

    def prompt(self, messages: Iterable[Message]) -> Prompt:
        """The prompt of a request."""
        return self.prompts.prompt(ChatRequest("m", tuple(messages), TOOLS))

    def plan(self, wanted: Prompt, slots: list[Slot], context: int = CONTEXT) -> Plan:
        """Where it continues."""
        return plan(wanted, slots, self.engine.tokenizer, context, 1000)

    def cost(
        self, wanted: Prompt, slots: list[Slot], context: int, monkeypatch: pytest.MonkeyPatch
    ) -> tuple[Cost, Plan]:
        """What it costs to say so."""
        cost, tokenizer = Cost(), self.engine.tokenizer
        wanted = replace(wanted, ids=CountedList(wanted.ids))
        for slot in slots:
            slot.session.tokens = CountedList(slot.session.tokens)
        key_bytes, encode = tokenizer.key_bytes, tokenizer.encode_chat

        def counted_key_bytes(ids: Iterable[int]) -> bytes:
            ids = list(ids)
            cost.to_bytes += len(ids)
            return key_bytes(ids)

        def counted_encode(text: str) -> list[int]:
            cost.encoded += len(text)
            return encode(text)

        def on_call(frame: FrameType, event: str, arg: object) -> None:
            cost.calls += event in ("call", "c_call") and frame.f_code.co_filename.startswith(SERVER)

        with monkeypatch.context() as patch:
            patch.setattr(tokenizer, "key_bytes", counted_key_bytes, raising=False)
            patch.setattr(tokenizer, "encode_chat", counted_encode, raising=False)
            before = sys.getprofile()
            sys.setprofile(on_call)
            try:
                chosen = self.plan(wanted, slots, context)
            finally:
                sys.setprofile(before)
        cost.read = sum(tokens.read for tokens in [wanted.ids, *(slot.session.tokens for slot in slots)])  # type: ignore[attr-defined]
        return cost, chosen

    def history(self, client: str) -> list[Message]:
        """The conversation as a client sends it back, and a question."""
        messages = list(self.messages)
        if not client.startswith("keeps"):
            messages = [replace(message, reasoning="") for message in messages]
        if client == "edits the start":
            messages[1] = replace(messages[1], reasoning="other", content="other")
        elif client == "edits the middle":
            messages[len(messages) // 2 | 1] = Message(content="other")
        elif client.endswith("edits the end"):
            messages[-1] = Message(content="other")
        return [*messages, Message(role="user", content="next")]


@pytest.fixture(scope="module")
def talks() -> tuple[Talk, Talk]:
    """A conversation, and one that is twice as long."""
    return Talk.of(16), Talk.of(32)


@pytest.mark.parametrize("slots", [1, 8])
@pytest.mark.parametrize("room", ["wide", "short", "none"])
@pytest.mark.parametrize("client", CLIENTS)
def test_a_plan_reads_each_token_a_few_times_however_long_the_conversation(
    client: str, room: str, slots: int, talks: tuple[Talk, Talk], monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = []
    for talk in talks:
        live = [talk.slot, *(talk.slot.fork() for _ in range(slots - 1))]
        wanted, held = talk.prompt(talk.history(client)), len(talk.slot.session.tokens)
        # Where it is not wide, most of what is hidden leaves too little room, or none, and is looked at in vain.
        context = {"wide": CONTEXT, "short": held + 200, "none": len(wanted.ids) + 1}[room]
        cost, chosen = talk.cost(wanted, live, context, monkeypatch)
        assert chosen.whole == ((client, room) in (("keeps", "wide"), ("keeps", "short"), ("drops", "wide")))
        assert chosen.reused < held // 2 or room == "wide" or client.startswith("keeps")
        turns = len(talk.messages) // 2
        assert held > 100 * turns
        # Lists of tokens are compared and copied whole; what is done one by one depends on the turns only.
        assert cost.read < 6 * (slots + 1) * held, cost
        assert cost.calls < 120 * (slots + 1) * turns, cost
        assert cost.to_bytes < 64 * (slots + 1) * (turns + 4 if room == "short" else 4), cost
        assert cost.encoded < 1000, cost
        costs.append(cost)
    short, long = costs
    assert long.read < 2.2 * short.read
    assert long.calls < 2.2 * short.calls
    assert long.to_bytes < 2.2 * short.to_bytes + 256 * slots


def test_a_key_is_made_once_and_then_grows(talks: tuple[Talk, Talk], monkeypatch: pytest.MonkeyPatch) -> None:
    talk = talks[0]
    slot = talk.slot.fork()
    slot.key()
    made: list[int] = []
    key_bytes = talk.engine.tokenizer.key_bytes

    def counted(ids: list[int]) -> bytes:
        made.append(len(ids))
        return key_bytes(ids)

    monkeypatch.setattr(talk.engine.tokenizer, "key_bytes", counted, raising=False)
    size = len(slot.session.tokens)
    slot.key()
    assert sum(made) == 0
    slot.session.sync([*slot.session.tokens, *range(100, 200)])
    slot.key()
    slot.fork().key()
    assert sum(made) == 100
    slot.session.rewind(size // 2)
    slot.key()
    assert sum(made) < 200
    monkeypatch.undo()
    assert slot.key().data == key_bytes(slot.session.tokens)
