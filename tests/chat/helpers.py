"""Generations made up for the tests of the chat room."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, TypeVar

from hypothesis import strategies as st

from ds4.chat.events import ArgumentsDelta, CallBegin, CallEnd, Event, Finish, Problem, ReasoningDelta, TextDelta

MARK = "｜DSML｜"
TOOLS = frozenset({"get_weather", "sh", "größe", "a.b"})
# How each dialect spells the marker.
DIALECTS = {"full": MARK, "short": "DSML｜", "plain": "", "ascii": "|DSML|", "doubled": "｜｜DSML｜｜"}

T = TypeVar("T", str, bytes)

# Pieces that look like the format without being it, and characters of every UTF-8 length.
FRAGMENTS = (
    "<", "</", "<｜", "</｜DSML｜", "</｜DSML｜param", "<|", ">", "&", "&lt;", "&lt;/｜DSML｜", "&amp;&amp;",
    "\n", "\n\n", " ", "\t", '"', "'", "\\", "\\n", "{", "}", "a", "é", "字", "😀", "\u2028", "<div>", "</div>",
    "</parameterize>", "“", "DSML", "tool_calls", "<tool", "0", "-1.50", "true", "null", "<invoke",
)  # fmt: skip
noise = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=5), max_size=12).map("".join)


def pieces_of(data: st.DataObject, whole: T) -> list[T]:
    """Cut a text anywhere, into up to 12 pieces or into single characters."""
    if data.draw(st.integers(0, 5)) == 0:
        return [whole[i : i + 1] for i in range(len(whole))]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=12)))
    return [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]


@dataclass(frozen=True)
class Generation:
    """A valid generation and what it says."""

    text: str
    thinking: bool
    reasoning: str
    content: str
    calls: list[tuple[str, dict[str, Any]]]
    raw: str


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | noise,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(noise, inner, max_size=3),
    max_leaves=6,
)
names = st.sampled_from(["city", "path", "größe", "x y", "a.b", "n"])


def _no_surrogates(text: str) -> str:
    return text.encode("utf-8", "ignore").decode()


def _clean(text: str) -> str:
    """Take out what would end a text or a value early, and half surrogates, which no generation holds."""
    text = _no_surrogates(text)
    for word in ("tool_calls>", "parameter>", "think>"):
        text = text.replace(word, "")
    return text


@st.composite
def generations(draw: st.DrawFn, dialect: str | None = None) -> Generation:
    """A generation that follows the grammar, in one of the dialects."""
    mark = DIALECTS[dialect or draw(st.sampled_from(sorted(DIALECTS)))]
    quotes = draw(st.sampled_from(['""', '""', "“”"]))
    space = st.sampled_from(["\n", "\n", "", " ", "\n\n  "])
    thinking = draw(st.booleans())
    reasoning = _clean(draw(noise)) if thinking else ""
    content = _clean(draw(noise))
    if not thinking and content.startswith("<"):
        content = "-" + content
    solid = content.rstrip(" \t\r\n\v\f")
    head = f"{reasoning}</think>" if thinking else ""
    if draw(st.integers(0, 4)) == 0:
        # Without a block a cut tag at the end is dropped, so let the text end in something else.
        return Generation(head + content + ".", thinking, reasoning, content + ".", [], "")
    calls: list[tuple[str, dict[str, Any]]] = []
    out = [content[len(solid) :], f"<{mark}tool_calls>", draw(space)]
    for _ in range(draw(st.integers(1, 3))):
        name = draw(st.sampled_from(sorted(TOOLS)))
        arguments: dict[str, Any] = {}
        out.append(f"<{mark}invoke name={quotes[0]}{name}{quotes[1]}>{draw(space)}")
        for _ in range(draw(st.integers(0, 3))):
            key = draw(names)
            string = draw(st.booleans())
            if string:
                value: Any = _clean(draw(noise))
                body = value
            else:
                value = draw(json_values)
                body = _clean(
                    json.dumps(value, ensure_ascii=draw(st.booleans()), indent=draw(st.sampled_from([None, 1])))
                )
                try:
                    value = json.loads(body)
                except ValueError:
                    value, body = 7, "7"
            flag = f" string={quotes[0]}{'true' if string else 'false'}{quotes[1]}"
            out.append(f"<{mark}parameter name={quotes[0]}{key}{quotes[1]}{flag}>{body}</{mark}parameter>{draw(space)}")
            arguments[key] = value
        out.append(f"</{mark}invoke>{draw(space)}")
        calls.append((name, arguments))
    out.append(f"</{mark}tool_calls>")
    raw = "".join(out)
    return Generation(head + solid + raw, thinking, reasoning, solid, calls, raw)


@st.composite
def broken_texts(draw: st.DrawFn) -> tuple[str, bool]:
    """A generation that was cut, or damaged by taking out, putting in, or repeating a piece."""
    generation = draw(generations())
    text = generation.text
    kind = draw(st.sampled_from(["cut", "remove", "insert", "repeat"]))
    a, b = sorted(draw(st.tuples(st.integers(0, len(text)), st.integers(0, len(text)))))
    if kind == "cut":
        text = text[:a]
    elif kind == "remove":
        text = text[:a] + text[b:]
    elif kind == "insert":
        text = text[:a] + draw(noise | st.sampled_from(tag_soup)) + text[a:]
    else:
        text = text[:b] + text[a:]
    return _no_surrogates(text), generation.thinking


tag_soup = (
    f"<{MARK}tool_calls>", f"</{MARK}tool_calls>", f'<{MARK}invoke name="sh">', f"<{MARK}invoke>", f"</{MARK}invoke>",
    f'<{MARK}parameter name="n" string="true">', f'<{MARK}parameter name="n" string="false">', f"</{MARK}parameter>",
    f'<{MARK}parameter name="n">', f'<{MARK}parameter string=false name="n">', "</invoke>", "</parameter>",
    "<tool_calls>", "</tool_calls>", '<invoke name="sh">', "<|DSML|tool_calls>", "</think>", "<think>",
    "[1, 2", '{"a": "b', "hello", "12",
)  # fmt: skip
soups = st.tuples(
    st.lists(st.sampled_from(tag_soup) | noise, max_size=14).map(lambda parts: _no_surrogates("".join(parts))),
    st.booleans(),
)


@dataclass(frozen=True)
class Summary:
    """What a list of events adds up to."""

    reasoning: str
    content: str
    calls: list[tuple[str, str]]
    problems: list[Problem]
    finish: Finish | None


def add_up(events: list[Event]) -> Summary:
    """Add events up, and check that they come in an order that every API can send."""
    reasoning: list[str] = []
    content: list[str] = []
    calls: list[tuple[str, list[str]]] = []
    problems: list[Problem] = []
    finish: Finish | None = None
    is_open = False
    for event in events:
        assert finish is None, "an event behind the last one"
        if isinstance(event, ReasoningDelta):
            assert event.text
            assert not content
            assert not calls
            reasoning.append(event.text)
        elif isinstance(event, TextDelta):
            assert event.text
            assert not calls
            content.append(event.text)
        elif isinstance(event, CallBegin):
            assert not is_open
            assert event.index == len(calls)
            calls.append((event.name, []))
            is_open = True
        elif isinstance(event, ArgumentsDelta):
            assert event.text
            assert is_open
            assert event.index == len(calls) - 1
            calls[-1][1].append(event.text)
        elif isinstance(event, CallEnd):
            assert is_open
            assert event.index == len(calls) - 1
            is_open = False
        elif isinstance(event, Problem):
            problems.append(event)
        else:
            finish = event
    assert not is_open
    return Summary(
        "".join(reasoning), "".join(content), [(name, "".join(parts)) for name, parts in calls], problems, finish
    )
