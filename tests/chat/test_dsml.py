import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4.chat import DecodeState, Message, State, ToolCall, parse, render
from ds4.chat.dsml import END_THINK_INJECTION, calls_text, tool_names
from tests.chat.helpers import (
    DIALECTS,
    MARK,
    TOOLS,
    Generation,
    broken_texts,
    generations,
    json_values,
    names,
    noise,
    pieces_of,
    soups,
)

START, END = f"<{MARK}tool_calls>", f"</{MARK}tool_calls>"
P_END, I_END = f"</{MARK}parameter>", f"</{MARK}invoke>"


def invoke(name: str = "sh") -> str:
    return f'<{MARK}invoke name="{name}">'


def parameter(name: str, string: bool | None = None) -> str:
    flag = "" if string is None else f' string="{str(string).lower()}"'
    return f'<{MARK}parameter name="{name}"{flag}>'


def block(*bodies: str) -> str:
    """A block with one call, whose inside is given."""
    return f"\n\n{START}\n{invoke()}\n{''.join(bodies)}{I_END}\n{END}"


def arguments(*bodies: str, **options: Any) -> Any:
    (call,) = parse(block(*bodies), False, TOOLS, **options).tool_calls
    return json.loads(call.arguments)


# ---- whole, valid generations ----------------------------------------------------------------------------------------


@given(generations())
def test_valid_generations_are_read_exactly(generation: Generation) -> None:
    message = parse(generation.text, generation.thinking, TOOLS)
    assert message.reasoning == generation.reasoning
    assert message.content == generation.content
    assert [(call.name, json.loads(call.arguments)) for call in message.tool_calls] == generation.calls
    assert message.raw_dsml == generation.raw
    assert message.complete
    assert not message.problems


@given(generations())
def test_without_tools_everything_behind_the_reasoning_is_text(generation: Generation) -> None:
    for tools in (None, [], frozenset[str]()):
        message = parse(generation.text, generation.thinking, tools)
        text = generation.text.split("</think>", 1)[1] if generation.thinking else generation.text
        assert (message.content, message.tool_calls, message.raw_dsml) == (text, (), "")


@given(generations(), st.sampled_from(["official", "ds4"]))
def test_replayed_blocks_keep_every_byte(generation: Generation, profile: str) -> None:
    message = parse(generation.text, generation.thinking, TOOLS)
    user = Message(role="user", content="x")
    text = render([user, message], [{"name": name} for name in sorted(TOOLS)], generation.thinking, profile=profile)
    sampled = generation.text if generation.thinking else "</think>" + generation.text
    assert str(text).endswith(sampled + "<｜end▁of▁sentence｜>")


calls = st.lists(
    st.builds(
        lambda name, args: ToolCall(name, json.dumps(args, ensure_ascii=False, separators=(",", ":"))),
        st.sampled_from(sorted(TOOLS)),
        st.dictionaries(names, noise | json_values, max_size=4),
    ),
    min_size=1,
    max_size=3,
).map(tuple)


@given(calls)
def test_official_calls_written_and_read_are_the_same(written: tuple[ToolCall, ...]) -> None:
    text = calls_text(written)
    if text.count(P_END) != text.count(f"<{MARK}parameter name="):
        return  # a value that holds the closing tag cannot be written without escapes
    read = parse(text, False, TOOLS)
    assert [(c.name, c.arguments) for c in read.tool_calls] == [(c.name, c.arguments) for c in written]
    assert read.raw_dsml == text
    assert calls_text(read.tool_calls) == text


ds4_names = st.text(st.sampled_from("a&<>\"';é ltampqu") | st.characters(codec="utf-8"), min_size=1, max_size=12)


@given(
    st.dictionaries(ds4_names, noise | json_values | st.sampled_from([P_END, f"x{P_END}{P_END}y", [P_END]]), max_size=4)
)
def test_ds4_escapes_are_undone(args: dict[str, Any]) -> None:
    text = calls_text((ToolCall("sh", json.dumps(args)),), "ds4")
    read = parse(text, False, TOOLS, profile="ds4")
    meant = json.loads(json.dumps(args).replace("&lt;/\\uff5cDSML\\uff5cparameter>", "</\\uff5cDSML\\uff5cparameter>"))
    assert [json.loads(call.arguments) for call in read.tool_calls] == [meant]


def test_every_prefix_and_every_byte_of_html_survives() -> None:
    body = '<div class="a">1 &lt; 2 &amp;&amp; &quot;x&quot;</div> </parameter>\n<|DSML|tool_calls></|DSML|parameter>\n'
    assert arguments(parameter("x", True), body, P_END) == {"x": body}


def test_the_escape_of_the_closing_tag_belongs_to_profile_ds4() -> None:
    body = f"a&lt;/{MARK}parameter>b &lt; &amp;"
    assert arguments(parameter("x", True), body, P_END) == {"x": body}
    assert arguments(parameter("x", True), body, P_END, profile="ds4") == {"x": f"a{P_END}b &lt; &amp;"}


# ---- finding the block -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("separator", ["", "\n", "\n\n", " \n\n\t", "\n\n\n"])
def test_the_raw_block_starts_behind_the_content(separator: str) -> None:
    raw = separator + block().strip()
    message = parse(f"why</think>Text.{raw}\n dropped", True, TOOLS)
    assert (message.reasoning, message.content, message.raw_dsml) == ("why", "Text.", raw)
    assert message.tool_calls == (ToolCall("sh", "{}"),)


def test_the_earliest_start_counts() -> None:
    plain = '<tool_calls><invoke name="sh"></invoke></tool_calls>'
    message = parse(f"a {plain} {block()}", False, TOOLS)
    assert (message.content, message.raw_dsml) == ("a", " " + plain)


def test_open_reasoning_holds_no_call_and_no_content() -> None:
    message = parse(f"why{block()}", True, TOOLS)
    assert (message.reasoning, message.content, message.tool_calls) == (f"why{block()}", "", ())
    assert not message.reasoning_closed


def test_a_call_in_the_reasoning_is_only_reasoning() -> None:
    message = parse(f"why{block()}</think>Done.", True, TOOLS)
    assert (message.reasoning, message.content, message.tool_calls) == (f"why{block()}", "Done.", ())


def test_the_end_of_thinking_may_be_an_argument() -> None:
    message = parse(f"why</think>{block(parameter('x', True), 'a</think>b', P_END)}", True, TOOLS)
    assert message.reasoning == "why"
    assert [json.loads(c.arguments) for c in message.tool_calls] == [{"x": "a</think>b"}]
    second = parse(f"why</think>a</think>b{block()}", True, TOOLS)
    assert (second.reasoning, second.content, len(second.tool_calls)) == ("why", "a</think>b", 1)


@pytest.mark.parametrize("thinking", [True, False])
def test_a_leading_think_marker_is_skipped(thinking: bool) -> None:
    message = parse("<think>why</think>text", thinking, TOOLS)
    assert (message.reasoning, message.content) == ("why", "text")
    assert parse("<think", thinking).reasoning == ("<think" if thinking else "")
    assert parse("<thin<think>", False).content == "<thin<think>"


def test_an_end_without_a_start_is_text() -> None:
    assert parse(f"a{END}b", False, TOOLS).content == f"a{END}b"


# ---- calls and parameters --------------------------------------------------------------------------------------------


def test_a_missing_string_attribute_means_a_string() -> None:
    assert arguments(parameter("x"), " 5 ", P_END, parameter("y"), "", P_END) == {"x": " 5 ", "y": ""}
    assert arguments(parameter("x"), "\n<b>", P_END) == {"x": "\n<b>"}


def test_nested_parameters_make_an_object() -> None:
    inner = [parameter("a"), "1", P_END, "\n", parameter("b", False), "[2]", P_END]
    deep = [parameter("o"), "\n ", *inner, "\n", P_END]
    assert arguments(*deep, parameter("x", False), "3", P_END) == {"o": {"a": "1", "b": [2]}, "x": 3}
    assert arguments(parameter("o"), *deep, P_END) == {"o": {"o": {"a": "1", "b": [2]}}}


def test_parameters_nest_up_to_a_limit() -> None:
    """A client that parses the arguments must not run out of stack, nor the server of memory."""

    def nested(depth: int) -> Message:
        names = [parameter(f"p{i}") for i in range(depth)]
        return parse(block(*names, "1", *[P_END] * depth), False, TOOLS)

    deepest = nested(32)
    assert not deepest.problems
    value = json.loads(deepest.tool_calls[0].arguments)
    for i in range(32):
        value = value[f"p{i}"]
    assert value == "1"
    deeper = nested(33)
    assert (deeper.tool_calls, deeper.problems) == ((), ("parameters nested too deeply",))


@pytest.mark.parametrize(
    ("body", "value"), [("hello", "hello"), ("12 apples", "12 apples"), (" /a/b ", " /a/b "), ("1.", "1.")]
)
def test_a_string_in_the_place_of_json_is_taken_and_told(body: str, value: str) -> None:
    message = parse(block(parameter("x", False), body, P_END), False, TOOLS)
    assert json.loads(message.tool_calls[0].arguments) == {"x": value}
    assert message.problems == ("the parameter 'x' of 'sh' is not JSON: taken as a string",)
    assert message.complete


def test_the_end_of_gathered_parameters_is_optional() -> None:
    assert arguments(parameter("o"), parameter("a", True), "1", P_END, "\n") == {"o": {"a": "1"}}


def test_of_equal_names_the_last_value_counts() -> None:
    message = parse(block(parameter("x", True), "1", P_END, parameter("y", False), "2.50", P_END, parameter("x", False), "[3]", P_END), False, TOOLS)  # fmt: skip  # noqa: E501
    assert message.tool_calls[0].arguments == '{"x":[3],"y":2.50}'
    nested = arguments(parameter("o"), parameter("a"), "1", P_END, parameter("a"), "2", P_END, P_END)
    assert nested == {"o": {"a": "2"}}


@pytest.mark.parametrize(
    ("body", "value"),
    [
        ("", "null"), (" \n", "null"), (" 1.50 ", "1.50"), ('{"a" : [ 1 , 2 ]}', '{"a":[1,2]}'), ('"a  b"', '"a  b"'),
        ("True", "true"), ("hello", '"hello"'), ("12 apples", '"12 apples"'), (" /a/b ", '" /a/b "'), ("1.", '"1."'),
        (f'"\\u003c/{MARK}parameter>"', f'"\\u003c/{MARK}parameter>"'),
    ],
)  # fmt: skip
def test_json_values(body: str, value: str) -> None:
    message = parse(block(parameter("x", False), body, P_END), False, TOOLS)
    assert message.tool_calls[0].arguments == f'{{"x":{value}}}'
    json.loads(message.tool_calls[0].arguments)


def test_json_ends_at_the_first_closing_tag() -> None:
    message = parse(block(parameter("x", False), f'["{P_END}"]', P_END), False, TOOLS)
    assert message.tool_calls == ()
    assert message.problems


@pytest.mark.parametrize("dialect", DIALECTS)
def test_dialects_with_typographic_quotes(dialect: str) -> None:
    text = block(parameter("x", True), "a｜b|c", P_END)
    text = text.replace(MARK, DIALECTS[dialect]).replace('"sh"', "“sh”").replace('"true"', "„true“")
    message = parse(text, False, TOOLS)
    assert message.tool_calls == (ToolCall("sh", '{"x":"a｜b|c"}'),)
    assert message.raw_dsml == text


def test_a_misspelt_parameter_may_be_closed_by_the_right_tag() -> None:
    assert arguments('<|DSML|parameter name="x" string="true">a', P_END) == {"x": "a"}


# ---- what is cut or malformed ----------------------------------------------------------------------------------------

WHOLE = f'Text.\n\n{START}\n{invoke()}\n{parameter("x", True)}a<b{P_END}\n{parameter("y", False)}[1, {{"k": "v"}}]{P_END}\n{I_END}\n{END}'  # noqa: E501


def test_every_cut_is_repaired() -> None:
    seen = set()
    for cut in range(len("Text."), len(WHOLE)):
        message = parse(WHOLE[:cut], False, TOOLS)
        assert message.content.removesuffix("<").rstrip() == "Text."
        assert message.raw_dsml == ""
        if cut >= WHOLE.index(START) + len(START):
            assert not message.complete
            assert message.problems
        for call in message.tool_calls:
            seen.add(json.dumps(json.loads(call.arguments)))
    assert seen == {
        "{}", '{"x": ""}', '{"x": "a"}', '{"x": "a<"}', '{"x": "a<b"}', '{"x": "a<b<"}',
        '{"x": "a<b", "y": null}', '{"x": "a<b", "y": []}', '{"x": "a<b", "y": [1]}',
        '{"x": "a<b", "y": [1, {}]}', '{"x": "a<b", "y": [1, {"": null}]}', '{"x": "a<b", "y": [1, {"k": null}]}',
        '{"x": "a<b", "y": [1, {"k": ""}]}', '{"x": "a<b", "y": [1, {"k": "v"}]}',
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (f"{START}\nhello\n{END}", "text between"),
        (f"{START}<{MARK}invoke>{I_END}{END}", "without the name"),
        (f"{START}{invoke()}<{MARK}parameter string=\"true\">x{P_END}{I_END}{END}", "without a name"),
        (f"{START}{invoke()}hello{I_END}{END}", "text between"),
        (f"{START}{invoke()}{invoke()}{I_END}{END}", "a call began inside"),
        (f"{START}{invoke()}{P_END}{I_END}{END}", "end of a parameter"),
        (f"{START}{parameter('x')}1{P_END}{END}", "outside a call"),
        (f"{START}{I_END}{END}", "end of a call"),
        (f"{START}{START}{END}", "inside another"),
        (f"{START}{invoke()}{END}", "ended or began inside"),
        (f'{START}<invoke name="sh"></invoke>{END}', "text between"),
        (f"{START}{invoke()}{parameter('x', False)}[1 2]{P_END}{I_END}{END}", "not JSON"),
        (f"{START}{invoke()}{parameter('x', False)}[1{P_END}{I_END}{END}", "not complete JSON"),
    ],
)  # fmt: skip
def test_a_block_that_breaks_the_grammar_is_text(text: str, problem: str) -> None:
    message = parse(f"Hi. \n{text}", False, TOOLS)
    assert (message.content, message.tool_calls, message.raw_dsml) == (f"Hi. \n{text}", (), "")
    assert problem in message.problems[-1]
    # Nothing is missing from plain text; calls were begun that cannot be run.
    assert message.complete == (invoke() not in text)


def test_an_empty_block() -> None:
    message = parse(f"Hi.\n\n{START}\n{END}", False, TOOLS)
    assert (message.content, message.tool_calls, message.raw_dsml) == ("Hi.", (), "")
    assert message.problems == ("a tool call block without a call",)


def test_a_cut_start_tag_is_dropped() -> None:
    assert parse(f"2 < 3\n\n{START[:-3]}", False, TOOLS).content == "2 < 3\n\n"
    assert parse("2 <", False, TOOLS).content == "2 <"
    assert parse(f"why {START[:-3]}", True, TOOLS).reasoning == "why "


# ---- reasoning closed for the model ----------------------------------------------------------------------------------


def test_bare_calls_count_behind_the_recovery() -> None:
    bare = f"{invoke()}\n{parameter('x', True)}1{P_END}\n{I_END}"
    text = f"why\n\n{START}{END_THINK_INJECTION}{bare}"
    message = parse(text, True, TOOLS, recovered=True)
    assert (message.reasoning, message.content) == (f"why\n\n{START}", "")
    assert message.tool_calls == (ToolCall("sh", '{"x":"1"}'),)
    assert message.raw_dsml == f"\n\n{bare}"
    two = parse(f"{text}\n{bare}\n{END} x", True, TOOLS, recovered=True)
    assert len(two.tool_calls) == 2
    assert two.raw_dsml == f"\n\n{bare}\n{bare}\n{END}"
    prose = parse(f"{text}\n{bare}\nDone.", True, TOOLS, recovered=True)
    assert len(prose.tool_calls) == 2
    assert prose.raw_dsml == f"\n\n{bare}\n{bare}"


def test_bare_calls_of_unknown_tools_and_without_recovery_are_text() -> None:
    text = f"why{START}{END_THINK_INJECTION}{invoke('other')}\n{I_END}"
    assert parse(text, True, TOOLS, recovered=True).content == f"\n\n{invoke('other')}\n{I_END}"
    known = f"why{START}{END_THINK_INJECTION}{invoke()}\n{I_END}"
    assert parse(known, True, TOOLS).content == f"\n\n{invoke()}\n{I_END}"
    cut = parse(f"why{START}{END_THINK_INJECTION}{invoke()}{parameter('x')}1", True, TOOLS, recovered=True)
    assert cut.tool_calls == (ToolCall("sh", '{"x":"1"}'),)
    assert not cut.complete


def test_the_state_sees_a_start_inside_open_reasoning() -> None:
    state = DecodeState(True, TOOLS)
    for piece in ("why <", MARK, "tool", "_calls"):
        state.push(piece)
        assert not state.dangling_start
    state.push(">")
    assert state.dangling_start
    assert (state.state, state.saw_start) == (State.OUTSIDE, False)
    state.inject()
    assert not state.dangling_start
    assert state.push(invoke()) is State.STRUCTURAL
    assert state.open_block
    state.push(I_END)
    assert not state.open_block


# ---- the decode state ------------------------------------------------------------------------------------------------


def states(pieces: list[str], tools: Any = TOOLS, thinking: bool = False) -> list[State]:
    state = DecodeState(thinking, tools)
    return [state.push(piece) for piece in pieces]


O, S, B, J, Q = State.OUTSIDE, State.STRUCTURAL, State.STRING_BODY, State.JSON_STRUCTURAL, State.JSON_STRING  # noqa: E741


def test_states_of_a_call() -> None:
    steps = [
        ("Hi", O), ("\n\n<", O), (MARK, O), ("tool_calls", O), (">", S), ("\n<", S), (MARK, S), ('invoke name="sh"', S),
        (">\n", S), (parameter("x", True), B), ("a <", B), ("b> </", S), ("div", B), ("> <", B), ("/", S), (MARK, S),
        ("param", S), ("eter>", S), ("\n", S), (parameter("y", False), J), ('{"', Q), ("k\\", Q), ('"', Q), ('"', J),
        (": 1", J), ("}", J), ("</", S), (f"{MARK}parameter>", S), (parameter("z"), B), ("  ", B), ("w", B), (P_END, S),
        (I_END, S), (END, O), ("more <", O),
    ]  # fmt: skip
    assert states([piece for piece, _ in steps]) == [state for _, state in steps]


def test_flags_of_a_call() -> None:
    state = DecodeState(False, TOOLS)
    flags = []
    for piece in ("a", END, START, invoke(), I_END, END, START):
        state.push(piece.encode())
        flags.append((state.saw_start, state.open_block, state.saw_end, state.greedy, state.orphan_closers))
    assert flags == [
        (False, False, False, False, 0),
        (False, False, False, False, 1),
        (True, True, False, True, 1),
        (True, True, False, True, 1),
        (True, True, False, True, 1),
        (True, False, True, False, 1),
        (True, False, True, False, 1),
    ]


def test_the_state_starts_behind_the_reasoning_and_needs_tools() -> None:
    pieces = [START, invoke(), "</think>", START, invoke()]
    assert states(pieces, thinking=True) == [O, O, O, S, S]
    assert states(pieces, tools=None) == [O] * 5


def test_a_call_that_cannot_be_read_is_followed_to_its_end_but_not_sampled_greedily() -> None:
    state = DecodeState(False, TOOLS)
    state.push(f"{START}{invoke()}")
    assert state.greedy
    seen = []
    for piece in ("oops", "\n<", parameter("x", True)[1:], "a", P_END, parameter("y", False), "[", "1]", P_END, I_END):
        seen.append(state.push(piece))
        assert (state.failed, state.greedy) == (True, False)
    assert seen == [S, S, B, B, S, J, J, J, S, S]
    state.push(f"<b {END}")
    assert (state.state, state.saw_end, state.greedy) == (State.OUTSIDE, True, False)


def test_an_unreadable_block_without_a_call_is_over_at_once() -> None:
    state = DecodeState(False, TOOLS)
    state.push(f"{START}\n")
    assert (state.state, state.open_block, state.greedy) == (S, True, True)
    state.push("oops")
    assert (state.state, state.open_block, state.greedy, state.failed) == (O, False, False, False)
    assert state.push(f" and then {START}") is S
    assert [state.push(piece) for piece in (invoke(), I_END, END)] == [S, S, O]
    assert (state.saw_end, state.orphan_closers) == (True, 0)


@pytest.mark.parametrize(
    "bad", [f"{START}\nhello\n{END}", f"{START}{parameter('x')}", f"{START}<{MARK}invoke>{I_END}", f"{START}{START} -"]
)
def test_calls_behind_an_unreadable_block_count(bad: str) -> None:
    message = parse(f"Hi. {bad} so{block(parameter('x', True), '1', P_END)}", False, TOOLS)
    assert message.content == f"Hi. {bad} so"
    assert message.tool_calls == (ToolCall("sh", '{"x":"1"}'),)
    assert message.raw_dsml == block(parameter("x", True), "1", P_END)
    assert message.problems
    assert message.complete


@given(generations().map(lambda g: (g.text, g.thinking)) | broken_texts() | soups, st.data())
def test_the_state_does_not_depend_on_the_pieces(source: tuple[str, bool], data: st.DataObject) -> None:
    text, thinking = source
    fine = DecodeState(thinking, TOOLS)
    by_length = {0: (State.OUTSIDE, False)}
    for i, char in enumerate(text):
        by_length[i + 1] = (fine.push(char), fine.open_block)
    coarse = DecodeState(thinking, TOOLS)
    length = 0
    for piece in pieces_of(data, text):
        coarse.push(piece)
        length += len(piece)
        assert (coarse.state, coarse.open_block) == by_length[length]
    assert coarse.saw_end == fine.saw_end


@given(st.binary(max_size=40))
def test_any_bytes_do(noise_bytes: bytes) -> None:
    state = DecodeState(False, TOOLS)
    state.push(f"{START}{invoke()}{parameter('x', True)}".encode())
    for i in range(len(noise_bytes)):
        state.push(noise_bytes[i : i + 1])
    assert state.saw_start


HEADS = [
    "",
    START,
    START + invoke(),
    START + invoke() + parameter("x", True),
    START + invoke() + parameter("x", False),
    START + invoke() + parameter("x") + " ",
]
UNITS = [
    "a",
    "\n",
    "<",
    "</",
    "&lt;/",
    '"',
    "\\",
    "{",
    f"</{MARK}param",
    f"<{MARK}",
    f"{invoke()}\n",
    P_END,
    END,
    START,
]


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("head", HEADS)
def test_what_is_held_back_stays_small(head: str, unit: str) -> None:
    """Each push costs no more than its piece and a bounded rest, so the time is linear."""
    state = DecodeState(False, TOOLS)
    state.push(head)
    scanner = state._scanner
    for _ in range(300):
        state.push(unit * 40)
        assert len(scanner._buffer) <= 1100


# ---- names of tools --------------------------------------------------------------------------------------------------


def test_tool_names() -> None:
    tools = [
        {"type": "function", "function": {"name": "a"}},
        {"type": "namespace", "name": "n.", "tools": [{"name": "b"}]},
    ]
    assert tool_names(tools) == {"a", "n.b"}
    assert tool_names(["x", "y"]) == tool_names({"x", "y"}) == {"x", "y"}
    assert tool_names(['{"name": "j"}']) == {"j"}
    assert tool_names(None) == frozenset()
    assert parse(block(), False, [{"name": "sh", "input_schema": {}}]).tool_calls == (ToolCall("sh", "{}"),)
