"""From a request to its prompt."""

from __future__ import annotations

from dataclasses import replace

import pytest
from server_harness import WEATHER, call_pieces, tokenizer

from ds4.chat.message import Message, ToolCall
from ds4.chat.tools import tool_schemas
from ds4.errors import ContextOverflowError
from ds4.server.config import ServerConfig
from ds4.server.prompting import PromptBuilder
from ds4.server.replay import ReplayMemory
from ds4.server.request import ChatRequest

BLOCK = "".join(call_pieces(("get_weather", [("city", "Rome", True)]))).replace(">\n", ">")
CALLS = (ToolCall("get_weather", '{"city": "Rome"}', "call_1"),)
ASKED = Message(role="user", content="q")


def builder(memory: ReplayMemory | None, context: int = 2048, **options: object) -> PromptBuilder:
    return PromptBuilder(tokenizer(), ServerConfig(ctx=context, **options), context, memory)  # type: ignore[arg-type]


def request(*messages: Message) -> ChatRequest:
    return ChatRequest("m", (ASKED, *messages), tool_schemas([WEATHER]), thinking=False)


def known() -> ReplayMemory:
    memory = ReplayMemory()
    memory.put(CALLS, BLOCK)
    return memory


def test_known_calls_are_written_as_they_were_sampled() -> None:
    called = Message(content="t", tool_calls=CALLS)
    made = builder(known()).prompt(request(called))
    assert f"</think>t{BLOCK}<｜end▁of▁sentence｜>" in made.text
    assert made.messages == (ASKED, replace(called, raw_dsml=BLOCK))
    assert dict(made.replay) == {"memory": 1}
    assert made.key == tokenizer().key_bytes(made.ids)
    assert made.ids == tokenizer().encode_chat(made.text)


@pytest.mark.parametrize("arguments", ['{"city": "Oslo"}', "no json"])
def test_edited_calls_are_written_anew(arguments: str) -> None:
    called = Message(tool_calls=(replace(CALLS[0], arguments=arguments),))
    made = builder(known()).prompt(request(called))
    assert BLOCK not in made.text
    assert made.messages == (ASKED, called)
    assert dict(made.replay) == {"canonical": 1}


def test_without_replay_nothing_is_counted_or_put_in() -> None:
    called = Message(content="t", tool_calls=CALLS)
    made = builder(None).prompt(request(called))
    assert BLOCK not in made.text
    assert (made.messages, dict(made.replay)) == ((ASKED, called), {})


def test_counting_says_what_building_takes_and_takes_what_does_not_fit() -> None:
    called = request(Message(content="t", tool_calls=CALLS))
    made = builder(known()).prompt(called)
    assert builder(known()).count(called) == len(made.ids)
    with pytest.raises(ContextOverflowError):
        builder(known(), context=len(made.ids)).prompt(called)
    assert builder(known(), context=len(made.ids)).count(called) == len(made.ids)
    assert len(builder(known(), context=len(made.ids) + 1).prompt(called).ids) == len(made.ids)


def test_a_raw_prompt_is_the_text_and_has_no_messages() -> None:
    raw = ChatRequest("m", (), text="a<｜User｜>b")
    made = builder(known()).prompt(raw)
    assert str(made.text) == "<｜begin▁of▁sentence｜>a<｜User｜>b"
    assert tokenizer().user not in made.ids
    assert made.messages == ()
    assert tokenizer().user in builder(known(), safe_client_text=False).prompt(raw).ids


@pytest.mark.parametrize("template", ["official", "ds4"])
@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize(
    "messages",
    [
        (ASKED, Message(content="An answer.")),
        (ASKED, Message(content="It ends in <think>")),
        (ASKED, Message(tool_calls=CALLS)),
        (Message(role="system", content="Be brief."),),
        (Message(role="system", content="Close it with </think>"),),
        (ASKED,),
        (ASKED, Message(content="An answer."), Message(role="system", content="Now in French.")),
    ],
)
def test_every_prompt_ends_in_an_open_turn(template: str, thinking: bool, messages: tuple[Message, ...]) -> None:
    made = builder(None, template=template).prompt(ChatRequest("m", messages, thinking=thinking))
    assert made.ids[-2:] == [tokenizer().assistant, tokenizer().think if thinking else tokenizer().end_think]
    assert made.ids.count(tokenizer().assistant) == sum(message.role == "assistant" for message in messages) + 1


def test_a_beginning_of_the_answer_is_continued() -> None:
    made = builder(None).prompt(ChatRequest("m", (ASKED, Message(content="It is", open_end=True)), thinking=False))
    assert made.text.endswith("</think>It is")
