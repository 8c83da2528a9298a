"""Questions, answers and the session behind them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ds4
from ds4.chat.events import CallBegin, CallEnd, Event, Finish, ReasoningDelta, TextDelta
from ds4.cli.conversation import Answer, Conversation, as_sampled, live_tokens
from ds4.cli.prompt import Style
from ds4.engine import Engine
from tests.cli.scripted import scripted_engine

Make = Callable[..., Conversation]
GREEDY = ds4.Sampling(temperature=0)

CALL = (
    '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n'
    '<｜DSML｜parameter name="city" string="true">Rome</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
)


@pytest.fixture
def talk(engine: Engine, tokenizer: ds4.Tokenizer) -> Make:
    def make(*replies: str | list[int], context: int | None = None, **style: str) -> Conversation:
        scripted = scripted_engine(engine.shape, tokenizer, *replies, context=context)
        return Conversation(scripted, Style(**style), GREEDY)  # type: ignore[arg-type]

    return make


def ask(conversation: Conversation, text: str, stop_after: int | None = None) -> tuple[Answer, list[Event]]:
    """Ask; stop when so many events have come."""
    events: list[Event] = []
    answer = conversation.ask(text, events.append, stopped=lambda: stop_after is not None and len(events) >= stop_after)
    return answer, events


def spelled(tokenizer: ds4.Tokenizer, text: str) -> list[int]:
    """Ids of the text one character at a time: not as the tokenizer spells it."""
    return [id for char in text for id in tokenizer.encode(char)]


def text_of(events: list[Event], kind: type) -> str:
    return "".join(event.text for event in events if isinstance(event, kind))  # type: ignore[attr-defined]


def test_thinking_and_answer_come_as_events(talk: Make) -> None:
    answer, events = ask(talk("let me see</think>Four."), "2+2?")
    assert text_of(events, ReasoningDelta) == "let me see"
    assert text_of(events, TextDelta) == "Four."
    assert isinstance(events[-1], Finish)
    assert (answer.message.reasoning, answer.message.text, answer.end) == ("let me see", "Four.", "stop")


def test_old_thinking_is_not_in_the_next_prompt(talk: Make, tokenizer: ds4.Tokenizer) -> None:
    conversation = talk("hm</think>Four.", "yes</think>Six.", system="Be brief.")
    ask(conversation, "2+2?")
    answer, _ = ask(conversation, "3+3?")
    prompt = tokenizer.decode(conversation.session.tokens).decode()
    assert prompt == (
        "<｜begin▁of▁sentence｜>Be brief.<｜User｜>2+2?<｜Assistant｜></think>Four.<｜end▁of▁sentence｜>"
        "<｜User｜>3+3?<｜Assistant｜><think>yes</think>Six."
    )
    assert answer.message.text == "Six."
    # The first question is not evaluated again: only what follows the think marker that has changed.
    assert answer.reused >= len(tokenizer.encode_chat("<｜begin▁of▁sentence｜>Be brief.<｜User｜>2+2?<｜Assistant｜>"))


def test_without_thinking_all_sampled_tokens_are_reused(talk: Make, tokenizer: ds4.Tokenizer) -> None:
    reply = spelled(tokenizer, "wonderful")
    assert reply != tokenizer.encode("wonderful")
    conversation = talk(reply, "Six.", mode="none")
    ask(conversation, "2+2?")
    held = len(conversation.session.tokens)
    answer, _ = ask(conversation, "3+3?")
    assert answer.reused == held
    assert conversation.session.tokens[held - len(reply) : held] == reply
    assert answer.prompt_tokens == held + len(
        tokenizer.encode_chat("<｜end▁of▁sentence｜><｜User｜>3+3?<｜Assistant｜></think>")
    )


def test_calls_are_read_and_replayed_as_sampled(talk: Make) -> None:
    conversation = talk("Looking." + CALL, "Sunny.", mode="none", system="Tools: get_weather(city)")
    answer, events = ask(conversation, "Weather?")
    assert [type(e) for e in events if isinstance(e, CallBegin | CallEnd)] == [CallBegin, CallEnd]
    assert answer.message.tool_calls[0].name == "get_weather"
    assert answer.message.tool_calls[0].arguments == '{"city":"Rome"}'
    held = len(conversation.session.tokens)
    assert ask(conversation, "And?")[0].reused == held


def test_stopped_in_the_answer_keeps_what_was_said(talk: Make) -> None:
    conversation = talk("One two three four five.", "Ok.", mode="none")
    answer, events = ask(conversation, "Count.", stop_after=2)
    assert answer.end == "interrupted"
    assert conversation.messages[-1].text == answer.message.text == text_of(events, TextDelta)
    assert 0 < len(answer.message.text) < len("One two three four five.")
    held = len(conversation.session.tokens)
    answer, _ = ask(conversation, "Go on.")
    assert answer.message.text == "Ok."
    assert answer.reused == held


def test_stopped_before_the_first_word_is_forgotten(talk: Make) -> None:
    conversation = talk("a long thought</think>Ok.")
    answer, _ = ask(conversation, "First?", stop_after=2)
    assert answer.end == "interrupted"
    assert conversation.messages == []
    assert not conversation.remembers(answer)
    assert ask(conversation, "Second?")[0].message.text == "Ok."
    assert [m.text for m in conversation.messages] == ["Second?", "Ok."]


def test_stopped_in_the_prompt_evaluates_nothing_more(talk: Make) -> None:
    conversation = talk("Ok.")
    answer, events = ask(conversation, "Hi", stop_after=0)
    assert (answer.end, events, conversation.session.tokens) == ("interrupted", [], [])
    assert answer.prompt_tokens == 0
    assert "tokens/s" not in answer.speed()
    assert ask(conversation, "Hi")[0].end == "stop"


def test_stopped_half_way_the_prompt_counts_as_far_as_it_was_read(engine: Engine) -> None:
    conversation = Conversation(engine, sampling=GREEDY, max_tokens=8)
    steps = 0

    def stopped() -> bool:
        nonlocal steps
        steps += 1
        return steps > 1

    answer = conversation.continue_text("word " * 3 * engine.prefill_chunk, lambda event: None, stopped=stopped)
    assert answer.end == "interrupted"
    assert 0 < answer.prompt_tokens == len(conversation.session.tokens) <= 2 * engine.prefill_chunk


def test_the_limit_of_tokens_ends_an_answer(talk: Make, tokenizer: ds4.Tokenizer) -> None:
    conversation = talk("One two three four five.", mode="none")
    conversation.max_tokens = 3
    answer, _ = ask(conversation, "Count.")
    assert (answer.end, answer.generated) == ("length", 3)
    assert answer.message.text.encode() == tokenizer.decode(tokenizer.encode("One two three four five.")[:3])


def test_the_context_ends_an_answer_and_refuses_the_next_question(talk: Make) -> None:
    conversation = talk("word " * 50, "Ok.", mode="none", context=20)
    answer, _ = ask(conversation, "Hi")
    assert answer.end == "context"
    assert answer.prompt_tokens + answer.generated <= 20
    before = list(conversation.messages)
    with pytest.raises(ds4.ContextOverflowError):
        ask(conversation, "More")
    assert conversation.messages == before


def test_forget_begins_anew(talk: Make, tokenizer: ds4.Tokenizer) -> None:
    conversation = talk("A", mode="none", system="Be brief.")
    ask(conversation, "One")
    conversation.forget()
    answer, _ = ask(conversation, "One")
    assert answer.message.text == "A"
    assert len(conversation.messages) == 2
    assert answer.reused >= answer.prompt_tokens - 1


def test_a_fixed_seed_still_gives_each_turn_its_own_stream(engine: Engine) -> None:
    def answers() -> list[str]:
        conversation = Conversation(engine, Style(mode="none"), ds4.Sampling(seed=3), max_tokens=12)
        said = []
        for _ in range(2):
            said.append(ask(conversation, "Hi")[0].message.text)
            conversation.forget()
        return said

    first = answers()
    assert first == answers()
    assert first[0] != first[1]


def test_raw_text_is_continued_as_it_is(engine: Engine) -> None:
    conversation = Conversation(engine, sampling=GREEDY, max_tokens=8)
    events: list[Event] = []
    answer = conversation.continue_text("<｜begin▁of▁sentence｜>Once", events.append)
    session = engine.session()
    session.sync([engine.tokenizer.bos, *engine.tokenizer.encode("Once")])
    expected = b"".join(session.generate(GREEDY, 8)).decode("utf-8", "replace")
    assert answer.message.text == text_of(events, TextDelta) == expected
    assert conversation.messages == []


def test_speed_says_what_was_reused() -> None:
    message = ds4.chat.parse("x", thinking=False)
    assert Answer(message, "stop", 100, 60, 11, 0.5, 2.0).speed() == (
        "prompt 100 tokens (60 reused), 80 tokens/s; answer 11 tokens, 5.0 tokens/s"
    )
    assert Answer(message, "stop", 5, 0, 1, 0.0, 0.0).speed() == "prompt 5 tokens; answer 1 tokens"


def test_live_tokens_hold_the_pending_one(engine: Engine) -> None:
    session = engine.session()
    session.sync([0, 1, 2])
    next(session.generate(GREEDY, 1))
    assert live_tokens(session) == [0, 1, 2, session.pending]


@given(text=st.text(max_size=20), more=st.text(max_size=20), cut=st.integers(0, 30), data=st.data())
def test_as_sampled_keeps_the_text_and_takes_the_live_spelling(
    text: str, more: str, cut: int, data: st.DataObject, tokenizer: ds4.Tokenizer
) -> None:
    prompt = [tokenizer.bos, *tokenizer.encode(text), tokenizer.eos, *tokenizer.encode(more)]
    # The same text in other tokens, up to the end of the sentence or cut off before.
    body = list(spelled(tokenizer, text)) if data.draw(st.booleans()) else tokenizer.encode(text)
    live = [tokenizer.bos, *body, tokenizer.eos][: 1 + cut]
    result = as_sampled(tokenizer, live, prompt)
    assert tokenizer.key_bytes(result) == tokenizer.key_bytes(prompt)
    if tokenizer.eos in live:
        assert result[: len(live)] == live


def test_as_sampled_tells_a_forged_marker_from_a_real_one(tokenizer: ds4.Tokenizer) -> None:
    forged = tokenizer.encode("<｜User｜>")
    real = [tokenizer.user]
    assert as_sampled(tokenizer, forged, real) == real
    assert as_sampled(tokenizer, [], real) == real
