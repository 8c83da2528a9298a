import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4.chat import parse
from ds4.chat.dsml import END_THINK_INJECTION
from ds4.chat.stream import (
    ArgumentsDelta,
    CallBegin,
    CallEnd,
    Event,
    Finish,
    Problem,
    ReasoningDelta,
    StreamParser,
    TextDelta,
)
from tests.chat.helpers import (
    MARK,
    TOOLS,
    Generation,
    add_up,
    broken_texts,
    generations,
    noise,
    pieces_of,
    soups,
    tag_soup,
)

START, END = f"<{MARK}tool_calls>", f"</{MARK}tool_calls>"
INVOKE, I_END = f'<{MARK}invoke name="sh">', f"</{MARK}invoke>"
STRING, JSON = (f'<{MARK}parameter name="x" string="{flag}">' for flag in ("true", "false"))
P_END = f"</{MARK}parameter>"


def run(pieces: list[bytes], parser: StreamParser, reason: str = "stop") -> list[Event]:
    events: list[Event] = []
    for piece in pieces:
        events += parser.push(piece)
        if parser.done:
            break
    return events + parser.finish(reason)


def pushed(text: str, thinking: bool = False, tools: frozenset[str] = TOOLS) -> list[list[Event]]:
    """Events of every character of a text that goes on."""
    parser = StreamParser(thinking, tools)
    return [parser.push(char.encode()) for char in text]


# ---- the stream and the final parse agree, however the bytes are cut -------------------------------------------------


@given(generations(), st.data())
def test_valid_generations(generation: Generation, data: st.DataObject) -> None:
    pieces = pieces_of(data, generation.text.encode())
    events = run(pieces, StreamParser(generation.thinking, TOOLS))
    total = add_up(events)
    assert total.reasoning == generation.reasoning
    assert total.content == generation.content
    assert [(name, json.loads(text)) for name, text in total.calls] == generation.calls
    assert total.finish is not None
    assert total.finish.message == parse(generation.text, generation.thinking, TOOLS)
    assert total.finish.reason == ("tool_calls" if generation.calls else "stop")


@given(broken_texts() | soups, st.booleans(), st.sampled_from(["stop", "length"]), st.data())
def test_broken_generations(source: tuple[str, bool], with_tools: bool, reason: str, data: st.DataObject) -> None:
    text, thinking = source
    tools = TOOLS if with_tools else frozenset[str]()
    total = add_up(run(pieces_of(data, text.encode()), StreamParser(thinking, tools), reason))
    assert total == add_up(run([text.encode()], StreamParser(thinking, tools), reason))
    for _, arguments in total.calls:
        assert isinstance(json.loads(arguments), dict)
    message = parse(text, thinking, tools)
    assert total.finish is not None
    assert total.reasoning == message.reasoning == total.finish.message.reasoning
    if any(problem.streamed for problem in total.problems):
        assert not message.tool_calls
        assert message.text.startswith(total.content)
        assert total.finish.reason == ("length" if reason == "length" else "error")
        return
    assert total.finish.message == message
    assert total.content == message.content
    assert [(name, json.loads(text)) for name, text in total.calls] == [
        (call.name, json.loads(call.arguments)) for call in message.tool_calls
    ]


@given(st.lists(st.binary(max_size=6) | noise.map(lambda text: text.encode("utf-8", "ignore")), max_size=8), st.data())
def test_any_bytes_come_out_as_valid_text(parts: list[bytes], data: st.DataObject) -> None:
    whole = b"".join([f"why</think>{START}{INVOKE}{STRING}".encode(), *parts])
    total = add_up(run(pieces_of(data, whole), StreamParser(True, TOOLS)))
    assert total.finish is not None
    assert total.finish.message == parse(whole.decode("utf-8", "replace"), True, TOOLS)
    plain = add_up(run(pieces_of(data, b"".join(parts)), StreamParser(False, None)))
    assert plain.content == b"".join(parts).decode("utf-8", "replace").removeprefix("<think>")


@given(generations(), st.data())
def test_no_event_holds_half_a_character_or_a_piece_of_a_block(generation: Generation, data: st.DataObject) -> None:
    parser = StreamParser(generation.thinking, TOOLS)
    events: list[Event] = []
    said = repr((generation.reasoning, generation.content, generation.calls))
    for piece in pieces_of(data, generation.text.encode()):
        events += parser.push(piece)
        total = add_up([e for e in events if isinstance(e, ReasoningDelta | TextDelta)])
        assert generation.reasoning.startswith(total.reasoning)
        assert generation.content.startswith(total.content)
        assert "\ufffd" not in total.reasoning + total.content or "\ufffd" in said


@given(st.lists(st.sampled_from(tag_soup) | noise, max_size=8), st.data())
def test_a_marked_tag_in_the_reasoning_leaves_whole(parts: list[str], data: st.DataObject) -> None:
    text = "".join(part for part in parts if "think>" not in part).encode("utf-8", "ignore").decode()
    parser = StreamParser(True, TOOLS)
    cuts = {0}
    at = 0
    for piece in pieces_of(data, text.encode()):
        for event in parser.push(piece):
            assert isinstance(event, ReasoningDelta)
            at += len(event.text)
            cuts.add(at)
    for tag in re.finditer(f'</?{MARK}(?:tool_calls|invoke(?: name="sh")?|parameter(?: name="n")?)>', text):
        assert not any(tag.start() < cut < tag.end() for cut in cuts)


# ---- what leaves when ------------------------------------------------------------------------------------------------


def test_text_leaves_as_soon_as_it_can() -> None:
    steps = ["".join(e.text for e in step if isinstance(e, TextDelta)) for step in pushed("2 < 3 </b> <tool> \n.")]
    assert steps == [
        "2",
        "",
        "",
        " <",
        " 3",
        "",
        "",
        "",
        " </b",
        ">",
        "",
        "",
        "",
        "",
        "",
        "",
        " <tool>",
        "",
        "",
        " \n.",
    ]


def test_without_tools_everything_leaves_at_once() -> None:
    text = f"a <{MARK}tool_calls> \n"
    events = pushed(text, tools=frozenset())
    assert [[event.text for event in step] for step in events] == [[char] for char in text]  # type: ignore[union-attr]


def test_reasoning_waits_only_for_its_end_marker() -> None:
    parser = StreamParser(True, None)
    assert parser.push(b"a </th") == [ReasoningDelta("a ")]
    assert parser.push(b"at </thi") == [ReasoningDelta("</that ")]
    assert parser.push(b"nk>b") == [TextDelta("b")]
    assert parser.finish() == [Finish("stop", parse("a </that </think>b"))]


def test_a_character_waits_for_its_last_byte() -> None:
    parser = StreamParser(False, None)
    a, b = "😀".encode()[:3], "😀".encode()[3:]
    assert parser.push(b"x" + a) == [TextDelta("x")]
    assert parser.push(b) == [TextDelta("😀")]
    assert parser.push(a) == []
    assert parser.finish()[0] == TextDelta("\ufffd")


def test_the_events_of_a_call() -> None:
    text = (
        f'Hi.\n\n{START}\n{INVOKE}\n{STRING}a "b"\n{P_END}\n{JSON}[ 1, "é"]{P_END}\n{I_END}\n{INVOKE}\n{I_END}\n{END}'
    )
    events = run([text.encode()], StreamParser(False, TOOLS))
    assert events[:-1] == [
        TextDelta("Hi."),
        CallBegin(0, "sh"), ArgumentsDelta(0, '{"x":"a \\"b\\"\\n","x":[1,"é"]}'), CallEnd(0),
        CallBegin(1, "sh"), ArgumentsDelta(1, "{}"), CallEnd(1),
    ]  # fmt: skip
    assert isinstance(events[-1], Finish)
    assert [call.arguments for call in events[-1].message.tool_calls] == ['{"x":[1,"é"]}', "{}"]


def test_a_string_leaves_while_it_is_sampled() -> None:
    parser = StreamParser(False, TOOLS)
    parser.push(f"{START}{INVOKE}{STRING}".encode())
    assert parser.push(b"one ") == [ArgumentsDelta(0, '"one ')]
    assert parser.push("two</｜DSML｜par".encode()) == [ArgumentsDelta(0, "two")]
    assert parser.push(b"k>") == [ArgumentsDelta(0, "</｜DSML｜park>")]
    assert parser.push(b"</div>\n") == [ArgumentsDelta(0, "</div>\\n")]
    assert parser.push("</｜DSML｜parameter>".encode()) == [ArgumentsDelta(0, '"')]


def test_a_partial_escape_waits_in_profile_ds4() -> None:
    parser = StreamParser(False, TOOLS, profile="ds4")
    parser.push(f"{START}{INVOKE}{STRING}".encode())
    assert parser.push(b"a&lt;/") == [ArgumentsDelta(0, '"a')]
    assert parser.push(f"{MARK}parameter>b".encode()) == [ArgumentsDelta(0, f"{P_END}b")]
    assert parser.push(b"&amp;") == [ArgumentsDelta(0, "&amp;")]


# ---- the end ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reason", ["length", "stop", "cancelled"])
def test_a_cut_call_is_closed(reason: str) -> None:
    parser = StreamParser(False, TOOLS)
    parser.push(f'{START}{INVOKE}{STRING}a{P_END}{JSON}{{"k": [tr'.encode())
    *events, finish = parser.finish(reason)
    assert events == [ArgumentsDelta(0, "true]}}"), CallEnd(0)]
    assert isinstance(finish, Finish)
    assert finish.reason == ("tool_calls" if reason == "stop" else reason)
    assert (finish.message.complete, finish.message.raw_dsml) == (False, "")


def test_a_block_without_any_call_is_dropped() -> None:
    parser = StreamParser(False, TOOLS)
    assert parser.push(f"Hi.\n\n{START}\n<{MARK}inv".encode()) == [TextDelta("Hi.")]
    (finish,) = parser.finish()
    assert isinstance(finish, Finish)
    assert (finish.reason, finish.message.content) == ("error", "Hi.")


def test_an_unreadable_block_is_text_as_soon_as_that_shows() -> None:
    parser = StreamParser(False, TOOLS)
    assert parser.push(f"Hi.\n\n{START}\n".encode()) == [TextDelta("Hi.")]
    problem, begun = parser.push(b"oops")
    assert problem == Problem("text between the tags of a tool call", streamed=False)
    assert begun == TextDelta(f"\n\n{START}\noops")
    rest = f" {INVOKE}{I_END}\n{END} and more"
    assert parser.push(rest.encode()) == [TextDelta(rest)]
    assert (parser.calls_begun, parser.done) == (0, None)
    (finish,) = parser.finish()
    assert isinstance(finish, Finish)
    assert (finish.reason, finish.message.content) == ("stop", f"Hi.\n\n{START}\noops{rest}")
    assert (finish.message.complete, finish.message.problems) == (True, (problem.message,))


def test_an_unreadable_call_that_left_is_closed_and_ends_in_an_error() -> None:
    parser = StreamParser(False, TOOLS)
    events = parser.push(f"{START}{INVOKE}{JSON}[1, 2 3".encode())
    assert [type(event) for event in events] == [CallBegin, ArgumentsDelta, CallEnd, Problem]
    assert events[1] == ArgumentsDelta(0, '{"x":[1,2]}')
    assert parser.push(f"]{P_END}{I_END}{END}".encode()) == []
    assert parser.done == "tool_calls"
    (finish,) = parser.finish()
    assert isinstance(finish, Finish)
    assert (finish.reason, finish.message.tool_calls) == ("error", ())


def test_generation_can_stop_behind_the_block() -> None:
    parser = StreamParser(False, TOOLS)
    parser.push(f"{START}{INVOKE}{I_END}".encode())
    assert parser.done is None
    parser.push(f"{END} more".encode())
    assert parser.done == "tool_calls"
    assert parser.push(b"text") == []
    assert isinstance(parser.finish()[-1], Finish)
    assert parser.finish() == []


def test_one_call_only() -> None:
    parser = StreamParser(False, TOOLS, parallel=False)
    parser.push(f"{START}{INVOKE}{STRING}a{P_END}{I_END}\n{INVOKE}{I_END}".encode())
    assert parser.done == "tool_calls"
    finish = parser.finish()[-1]
    assert isinstance(finish, Finish)
    assert finish.reason == "tool_calls"
    assert [call.arguments for call in finish.message.tool_calls] == ['{"x":"a"}']
    # The block has no end, so it is written anew next time.
    assert (finish.message.raw_dsml, finish.message.complete) == ("", True)


def test_reasoning_closed_for_the_model() -> None:
    parser = StreamParser(True, TOOLS)
    parser.push(f"why {START}".encode())
    assert parser.inject() == []
    events = parser.push(f"{INVOKE}{STRING}1{P_END}{I_END}".encode())
    assert [type(event) for event in events] == [CallBegin, ArgumentsDelta, CallEnd]
    finish = parser.finish()[-1]
    assert isinstance(finish, Finish)
    assert finish.message == parse(
        f"why {START}{END_THINK_INJECTION}{INVOKE}{STRING}1{P_END}{I_END}", True, TOOLS, recovered=True
    )
    assert finish.message.reasoning == f"why {START}"


# ---- stop strings ----------------------------------------------------------------------------------------------------


@given(noise, st.lists(st.sampled_from(["\n\n", "<d", "😀a", "</div>", "é"]), min_size=1, max_size=3), st.data())
def test_stop_strings_at_any_split(text: str, stops: list[str], data: st.DataObject) -> None:
    text = "-" + text.encode("utf-8", "ignore").decode()
    total = add_up(run(pieces_of(data, text.encode()), StreamParser(False, None, stops=stops)))
    cut = min((text.find(stop) for stop in stops if stop in text), default=len(text))
    assert total.content == text[:cut]
    assert total.finish is not None
    assert (total.finish.stop_string is None) == (cut == len(text))
    assert total.finish.reason == "stop"


def test_stop_strings_do_not_count_in_reasoning() -> None:
    parser = StreamParser(True, None, stops=["END"])
    parser.push(b"the END is near</think>so EN")
    assert parser.done is None
    parser.push(b"D more")
    assert parser.done == "stop"
    total = add_up(parser.finish())
    assert total.finish is not None
    assert (total.finish.message.reasoning, total.finish.message.content) == ("the END is near", "so ")
    assert total.finish.stop_string == "END"


@pytest.mark.parametrize("text", ["a END b", "a EN|D b", "a END"])
def test_a_stop_string_inside_a_call_closes_it_and_the_call_does_not_count(text: str) -> None:
    parser = StreamParser(False, TOOLS, stops=["END"])
    events = [e for piece in f"{START}{INVOKE}{STRING}{text}".split("|") for e in parser.push(piece.encode())]
    total = add_up(events + parser.finish())
    assert total.calls == [("sh", '{"x":"a "}')]
    assert total.finish is not None
    assert (total.finish.reason, total.finish.stop_string) == ("stop", "END")
    assert (total.finish.message.tool_calls, total.finish.message.complete) == ((), False)


def test_calls_before_the_one_that_a_stop_string_cuts_count() -> None:
    parser = StreamParser(False, TOOLS, stops=["END"])
    total = add_up(parser.push(f"{START}{INVOKE}{I_END}{INVOKE}{STRING}a END".encode()) + parser.finish())
    assert len(total.calls) == 2
    assert total.finish is not None
    assert [call.arguments for call in total.finish.message.tool_calls] == ["{}"]
    assert total.finish.reason == "stop"


def test_a_call_that_ended_before_a_stop_string_counts() -> None:
    behind = StreamParser(False, TOOLS, stops=["END"])
    behind.push(f"{START}{INVOKE}{I_END}{END}END".encode())
    assert behind.done == "tool_calls"


def test_a_held_beginning_of_a_stop_string_is_text_in_the_end() -> None:
    parser = StreamParser(False, TOOLS, stops=["ENDE", "ND"])
    assert add_up(parser.push(b"THE EN") + parser.finish()).content == "THE EN"
    parser = StreamParser(False, None, stops=["ENDE", "ND"])
    assert parser.push(b"THE END") == [TextDelta("THE ")]
    total = add_up(parser.finish())
    assert total.content == "E"
    assert total.finish is not None
    assert total.finish.stop_string == "ND"


CALLED = f"Let me look.\n\n{START}\n{INVOKE}\n{STRING}Rome\nEND{P_END}\n{JSON}[1,\n 2]{P_END}\n{I_END}\n{END}"
HIDDEN = [
    "\n\n",
    "\n<",
    "<",
    ">",
    "invoke",
    "string",
    "true",
    "sh",
    "tool_calls",
    MARK,
    "[1,",
    '="',
    ".\n",
    "look.\n\n<",
]


@pytest.mark.parametrize("stop", HIDDEN)
@pytest.mark.parametrize("before", ["", "Let me look."])
def test_stop_strings_do_not_match_markup_at_any_split(stop: str, before: str) -> None:
    text = before + CALLED.removeprefix("Let me look.")
    for size in range(1, len(text) + 1):
        pieces = [text[i : i + size].encode() for i in range(0, len(text), size)]
        total = add_up(run(pieces, StreamParser(False, TOOLS, stops=[stop])))
        assert total.finish is not None
        assert (total.content, total.finish.reason, total.finish.stop_string) == (before, "tool_calls", None)
        assert total.calls == [("sh", '{"x":"Rome\\nEND","x":[1,2]}')]
        assert total.finish.message == parse(text, False, TOOLS)


@pytest.mark.parametrize(
    ("stop", "content", "call"),
    [
        ("look", "Let me ", None),
        ("k.", "Let me loo", None),
        ("Rome", "Let me look.", '{"x":""}'),
        ("\nEND", "Let me look.", '{"x":"Rome"}'),
        ("END", "Let me look.", '{"x":"Rome\\n"}'),
    ],
)
def test_stop_strings_match_what_is_seen_at_any_split(stop: str, content: str, call: str | None) -> None:
    for size in range(1, len(CALLED) + 1):
        pieces = [CALLED[i : i + size].encode() for i in range(0, len(CALLED), size)]
        for stops in ([stop], [stop, stop + "more", "absent"]):
            total = add_up(run(pieces, StreamParser(False, TOOLS, stops=stops)))
            assert total.finish is not None
            assert (total.content, total.finish.reason, total.finish.stop_string) == (content, "stop", stop)
            assert total.calls == ([] if call is None else [("sh", call)])
            assert (total.finish.message.content, total.finish.message.tool_calls) == (content, ())


STOPS = st.lists(st.sampled_from(["a", "\n\n", "<", "ool", "e <", "END"]), min_size=1)


@given((soups | broken_texts()).map(lambda pair: pair[0]), STOPS, st.data())
def test_stop_strings_cut_what_would_be_seen_without_them(text: str, stops: list[str], data: st.DataObject) -> None:
    raw = text.encode("utf-8", "ignore")
    total = add_up(run(pieces_of(data, raw), StreamParser(False, TOOLS, stops=stops)))
    seen = add_up(run([raw], StreamParser(False, TOOLS)))
    assert total.finish is not None
    if seen.calls:
        return
    cut = min((at for stop in stops if (at := seen.content.find(stop)) >= 0), default=len(seen.content))
    # What is held for a block with two tags that turns out to be none has left by then.
    assert seen.content.startswith(total.content)
    if not seen.problems:
        assert total.content == seen.content[:cut]
        assert (total.finish.stop_string is None) == (cut == len(seen.content))


def test_white_space_is_no_text_where_a_call_has_to_come() -> None:
    for text, content in (
        ("\n\n", ""),
        ("\n\n<", ""),
        (f"\n\n<{MARK}too", ""),
        ("\n\nNo.\n", "\n\nNo.\n"),
        ("<b", "<b"),
    ):
        for pieces in ([text.encode()], [char.encode() for char in text]):
            assert add_up(run(pieces, StreamParser(False, TOOLS, forced=True), "length")).content == content


# ---- size ------------------------------------------------------------------------------------------------------------


def test_huge_values() -> None:
    body = "0123456789<b>\n" * 40_000
    text = f"{START}{INVOKE}{STRING}{body}{P_END}{JSON}[{'[1, 2], ' * 30_000}0]{P_END}{I_END}{END}"
    whole = text.encode()
    pieces = [whole[i : i + 997] for i in range(0, len(whole), 997)]
    total = add_up(run(pieces, StreamParser(False, TOOLS)))
    assert total.finish is not None
    message = total.finish.message
    assert message == parse(text, False, TOOLS)
    assert message.raw_dsml == text
    assert json.loads(total.calls[0][1])["x"][-1] == 0
    assert len(total.calls[0][1]) > len(body)
