"""Any conversation, whatever its client does: what is reused is what the client may mean, and answers do not change."""

from __future__ import annotations

import json
import queue
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pytest
from server_harness import WEATHER, call_pieces, random_engine, script_backend, tokenizer

from ds4.chat.message import Message, Part, ToolCall
from ds4.chat.template import ASSISTANT, EOS, THINK
from ds4.chat.tools import ToolSchema, tool_schemas
from ds4.engine import Sampling, Session
from ds4.engine.sampling import Choice
from ds4.server.backend import Backend
from ds4.server.config import ServerConfig
from ds4.server.decode import TokenRules
from ds4.server.request import ChatRequest, Done, Failed, Reply
from ds4.server.worker import Worker

MARK, THINK_MARK, END = (b"\xff" + text.encode() for text in (ASSISTANT, THINK, EOS))
TOOLS = tool_schemas([WEATHER])
OTHER_TOOLS = tool_schemas([{**WEATHER, "function": {**WEATHER["function"], "description": "Weather"}}])

THOUGHTS = ("", "why", " hm\n", "a</thin")
TEXTS = ("Let me look", "  Hm.\n", "", "2 < 3 &amp; </think>", "ü😀")
CALLS = (
    "".join(call_pieces(("get_weather", [("city", "Rome", True), ("days", "3", False)]))),
    "".join(call_pieces(("get_weather", [("city", " x < y & ", True)]), ("get_weather", []))),
    '\n\n<｜DSML｜tool_calls><｜DSML｜invoke name="get_weather"></｜DSML｜invoke></｜DSML｜tool_calls>',
)


@dataclass(frozen=True)
class Written:
    """What the model writes."""

    thought: str
    text: str
    calls: str

    def pieces(self, thinking: bool) -> list[str]:
        """Its tokens: markers alone, and all between them cut in two."""
        made = [self.thought[:2], self.thought[2:], "</think>"] if thinking else []
        made += [self.text[:3], self.text[3:]]
        for i, part in enumerate(self.calls.split("｜DSML｜")):
            made += [*(["｜DSML｜"] if i else []), part[:7], part[7:]]
        return [piece for piece in made if piece]


@dataclass(frozen=True)
class Client:
    """How a client shows earlier turns."""

    reasoning: str  # keeps, drops, drops old, trims
    text: str  # keeps, drops beside calls, trims, cuts in parts
    rewrites: bool  # the JSON of calls
    parts: bool  # results are parts of a user's message

    def shows(self, answer: Message, old: bool) -> Message:
        """An answer as it is sent back."""
        reasoning, content, calls = answer.reasoning, answer.text, answer.tool_calls
        if self.reasoning == "drops" or (self.reasoning == "drops old" and old):
            reasoning = ""
        elif self.reasoning == "trims":
            reasoning = reasoning.strip()
        if self.text == "drops beside calls" and calls:
            content = ""
        elif self.text == "trims":
            content = content.strip()
        parts = tuple(Part("text", content[i : i + 2]) for i in range(0, len(content), 2))
        if self.rewrites:
            calls = tuple(replace(call, arguments=json.dumps(json.loads(call.arguments), indent=1)) for call in calls)
        return Message(reasoning, parts if self.text == "cuts in parts" else content, calls)

    def answers(self, calls: Sequence[ToolCall], text: str) -> list[Message]:
        """Results of all calls."""
        if self.parts:
            parts = [Part("tool_result", tool_call_id=call.id, parts=(Part("text", text),)) for call in calls]
            return [Message(role="user", content=(*parts, Part("text", "!")))]
        return [Message(role="tool", tool_call_id=call.id, content=text) for call in reversed(calls)]


EDITS = ["edit question", "edit answer", "edit call", "edit reasoning"]
ACTIONS = [*["go on"] * 8, *["think"] * 2, "regenerate", *EDITS, "other", "tools"]


def any_client(random: Random) -> Client:
    """Some client."""
    return Client(
        random.choice(["keeps", "drops", "drops", "drops old", "trims"]),
        random.choice(["keeps", "drops beside calls", "trims", "cuts in parts"]),
        random.random() < 0.5,
        random.random() < 0.5,
    )


@dataclass
class Turn:
    """A question or results, what was answered, and what the client made of the answer."""

    asked: list[Message]
    answer: Message | None = None
    edited: Message | None = None


class Conversation:
    """A client's side of a conversation."""

    def __init__(self, worker: Worker, client: Client) -> None:
        self.worker, self.client = worker, client
        self.turns = [Turn([Message(role="user", content="How is Rome?")])]
        self.tools: tuple[ToolSchema, ...] = TOOLS
        self.thinking = True
        self.count = 0

    def request(self) -> ChatRequest:
        """What the client sends now."""
        messages = [Message(role="system", content="You know the weather of every city.")]
        asked = [i for i, turn in enumerate(self.turns) if turn.asked[0].role == "user"]
        for i, turn in enumerate(self.turns):
            messages += turn.asked
            if turn.answer is not None:
                messages.append(turn.edited or self.client.shows(turn.answer, i < asked[-1]))
        sampling = Sampling(temperature=0)
        return ChatRequest("m", tuple(messages), self.tools, thinking=self.thinking, sampling=sampling, max_tokens=300)

    def step(self, action: str, number: int) -> tuple[ChatRequest, Done]:
        """Do something, and ask."""
        self.count += 1
        turn = self.turns[min(number, len(self.turns) - 1)]
        if action == "tools":
            self.tools = OTHER_TOOLS if self.tools is TOOLS else TOOLS
        elif action == "think":
            self.thinking = not self.thinking
        elif action == "regenerate":
            self.turns[-1].answer = self.turns[-1].edited = None
        elif action == "edit question":
            del self.turns[self.turns.index(turn) + 1 :]
            self.turns[-1] = Turn([Message(role="user", content=f"Edited {self.count}")])
        elif action.startswith("edit") and turn.answer is not None:
            turn.edited = self._edit(action, turn.edited or self.client.shows(turn.answer, old=False))
        last = self.turns[-1]
        if last.answer is not None:
            calls = (last.edited or last.answer).tool_calls
            question = Message(role="user", content=f"question {self.count}")
            self.turns.append(Turn(self.client.answers(calls, f"result {self.count}") if calls else [question]))
        request = self.request()
        done = ask(self.worker, request)
        self.turns[-1].answer = done.message
        return request, done

    def _edit(self, action: str, shown: Message) -> Message:
        if action == "edit answer":
            return replace(shown, content=shown.text + "No.")
        if action == "edit reasoning":
            return replace(shown, reasoning=shown.reasoning + "so")
        if not shown.tool_calls:
            return shown
        changed = replace(shown.tool_calls[0], arguments='{"city":"Oslo"}')
        return replace(shown, tool_calls=(changed, *shown.tool_calls[1:]))


def ask(worker: Worker, request: ChatRequest) -> Done:
    """Answer a request, and wait until nothing runs."""
    replies: queue.Queue[Reply] = queue.Queue()
    worker.submit(request, worker.prompts.prompt(request), replies.put)
    while not isinstance(reply := replies.get(timeout=60), Done):
        assert not isinstance(reply, Failed), reply
    assert worker.wait_idle(30)
    return reply


def newest(worker: Worker) -> Session:
    """The session that was used last; the worker is idle."""
    return max(worker._slots.slots, key=lambda slot: slot.used).session


# ---- what may be reused ----------------------------------------------------------------------------------------------


def segments(key: bytes) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """The closed turns of a prompt, each as what is before its think marker and what is behind; and the rest."""
    *closed, rest = key.split(END)
    return [(before + mark, said) for before, mark, said in (one.rpartition(MARK) for one in closed)], rest


class Oracle:
    """Says whether an effective prompt is one that a client's messages can mean. It knows nothing of states."""

    def __init__(self) -> None:
        self.known: dict[bytes, list[Message]] = {}

    def learn(self, said: bytes, message: Message) -> None:
        """What stood behind `<｜Assistant｜>` for a message: sampled, or in a prompt."""
        self.known.setdefault(said, []).append(message)

    def check(self, prompt: bytes, effective: bytes, messages: Sequence[Message]) -> None:
        """Raises AssertionError if the two differ by more than what clients leave out of the model's turns."""
        wanted, open_end = segments(prompt)
        taken, open_taken = segments(effective)
        assert open_taken == open_end
        spoken = [message for message in messages if message.role == "assistant"]
        for (before, said), (true_before, true_said), shown in zip(wanted, taken, spoken, strict=True):
            assert true_before == before
            if not said.startswith(THINK_MARK):
                shown = replace(shown, reasoning="")
            assert true_said == said or any(self.shows(shown, true) for true in self.known[true_said])
            self.learn(said, shown)

    @staticmethod
    def shows(shown: Message, true: Message) -> bool:
        """Whether a client that was told one message may send it back as another."""
        if [call.id for call in shown.tool_calls] != [call.id for call in true.tool_calls]:
            return False
        for a, b in zip(shown.tool_calls, true.tool_calls, strict=True):
            if (a.name, json.loads(a.arguments)) != (b.name, json.loads(b.arguments)):
                return False
        same_text = shown.text.strip() == true.text.strip()
        if shown.tool_calls:
            return same_text or not shown.text.strip()
        return same_text and shown.reasoning.strip() in ("", true.reasoning.strip())


@pytest.mark.parametrize("seed", range(100))
def test_a_state_is_reused_only_for_what_the_client_shows_of_it(seed: int) -> None:
    random = Random(seed)
    steps = []
    for _ in range(random.randint(3, 8)):
        written = Written(random.choice(THOUGHTS), random.choice(TEXTS), random.choice(["", "", *CALLS]))
        steps.append((random.choice(ACTIONS), written, random.randrange(4)))
    thinking, lines = True, []
    for action, written, _ in steps:
        thinking ^= action == "think"
        if action == "other":
            lines.append({"pieces": ["x", "</think>", "y"]})
        lines.append({"pieces": written.pieces(thinking)})
    config = ServerConfig(
        ctx=4096,
        template=random.choice(["official", "ds4"]),
        replay=random.random() < 0.7,
        max_sessions=random.randint(1, 3),
    )
    worker = Worker(script_backend(*lines, config=config, chunk=32), config)
    key_bytes = worker.engine.tokenizer.key_bytes
    conversation, oracle = Conversation(worker, any_client(random)), Oracle()
    worker.start()
    undisturbed, held = True, 0
    for action, _, number in steps:
        if action == "other":
            ask(worker, ChatRequest("m", (Message(role="user", content="Hello"),), max_tokens=9))
        request, done = conversation.step(action, number)
        session, size = newest(worker), done.usage.prompt
        oracle.check(worker.prompts.prompt(request).key, key_bytes(session.tokens[:size]), request.messages)
        pending = () if session.pending in (None, session.engine.tokenizer.eos) else (session.pending,)
        oracle.learn(key_bytes([*session.tokens[size - 1 :], *pending]), done.message)
        # A client that only goes on, whatever it drops and trims, has nothing evaluated twice.
        undisturbed &= action in ("go on", "think", "regenerate")
        if undisturbed and action != "regenerate":
            assert done.usage.reused == held, (action, done.usage)
        held = len(session.tokens)
    assert worker.stop(10)


# ---- what is answered ------------------------------------------------------------------------------------------------


class Writer:
    """Chooses tokens: those it is told to, and where none is told, the model's own."""

    def __init__(self, tokens: list[int | None], unsaid: frozenset[int], log: list[int]) -> None:
        self.tokens, self.unsaid, self.log = tokens, unsaid, log

    def choose(self, session: Session, rules: TokenRules) -> Choice:
        """The next of them."""
        token = self.tokens.pop(0)
        self.log.append(best(session.logits, self.unsaid) if token is None else token)
        return Choice(self.log[-1])

    def count(self, tokens: Any) -> None:
        """Nothing."""

    def skipped(self, choice: Choice, rules: TokenRules) -> list[int]:
        """None."""
        return []

    def again(self, session: Session) -> Writer:
        """The same."""
        return self


def best(logits: Any, unsaid: frozenset[int]) -> int:
    """The most probable token that may be said."""
    logits = logits.clone()
    logits[list(unsaid)] = float("-inf")
    return int(logits.argmax())


@pytest.mark.parametrize("seed", range(5))
def test_answers_from_live_state_are_those_to_its_prompt_on_a_fresh_server(seed: int) -> None:
    """The model thinks, says some words of its own, and calls; whatever was reused, the words are the same."""
    random = Random(seed)
    actions = ["go on", *(random.choice(["go on", "go on", "think", "regenerate", *EDITS]) for _ in range(4))]
    engine, base, log = random_engine(), tokenizer(), []
    unsaid = frozenset({base.eos, base.dsml, base.user})

    def chooser(session: Session, sampling: Sampling) -> Writer:
        thought = [*base.encode(random.choice(THOUGHTS)), base.end_think] if conversation.thinking else []
        calls = CALLS[2] if conversation.count < 3 or random.random() < 0.5 else ""
        log.clear()
        return Writer([*thought, *[None] * 4, *base.encode_chat(calls), base.eos], unsaid, log)

    worker = Worker(Backend(engine, "m", chooser), ServerConfig(ctx=4096, max_sessions=random.randint(1, 3)))
    conversation = Conversation(worker, any_client(random))
    worker.start()
    reused = []
    for action in actions:
        _, done = conversation.step(action, random.randrange(4))
        reused.append(done.usage.reused)
        effective = newest(worker).tokens[: done.usage.prompt]
        thought = log.index(base.end_think) + 1 if conversation.thinking else 0
        fresh = engine.session()
        fresh.sync([*effective, *log[:thought]])
        for token in log[thought : thought + 4]:
            assert best(fresh.logits, unsaid) == token
            fresh.step(token)
        fresh.close()
    assert min(reused[1:]) > 0
    assert worker.stop(10)
