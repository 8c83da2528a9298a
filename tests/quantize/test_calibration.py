"""Calibration files: both formats, the template in them, what is refused; and rendering one into the other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ds4.chat import Rendered, render
from ds4.chat.template import BOS
from ds4.errors import Ds4Error
from ds4.quantize.calibration import MARKER, build, read_prompts

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
THINKING: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "reasoning_content": "Easy.", "content": "4."},
    ]
}
TOOLS: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Rome?"},
        {"role": "assistant", "reasoning_content": "I look.", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
        {"role": "assistant", "reasoning_content": "Good.", "content": "Sunny."},
    ],
    "tools": [WEATHER],
}
QUICK: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "thinking": False, "id": "q"}


def write(path: Path, *lines: Any) -> Path:
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines) + "\n", encoding="utf-8")
    return path


def test_conversations_are_rendered_through_the_template(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", THINKING, "", TOOLS, QUICK, {"text": "Plain."}, {"text": BOS + "x"})
    prompts = read_prompts(path)
    assert [p.name for p in prompts] == [f"a.jsonl, line {n}" for n in (1, 3, 4, 5, 6)]
    expected = [
        render(THINKING["messages"]),
        render(TOOLS["messages"], [WEATHER]),
        render(QUICK["messages"], thinking=False),
        BOS + "Plain.",
        BOS + BOS + "x",  # what stands in a text is no token
    ]
    assert [str(p.text) for p in prompts] == [str(text) for text in expected]
    assert "<think>Easy.</think>4." in prompts[0].text
    assert "I look.</think>" in prompts[1].text
    assert "｜DSML｜tool_calls" in prompts[1].text
    assert "<tool_result>sunny</tool_result>" in prompts[1].text
    assert prompts[2].text.endswith("</think>")
    assert all(isinstance(p.text, Rendered) and p.text.client_spans for p in prompts)
    ds4 = read_prompts(path, "ds4")
    assert str(ds4[1].text) == str(render(TOOLS["messages"], [WEATHER], profile="ds4"))


def test_rendered_text_is_parted_at_markers(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.txt",
        "",
        f"{MARKER} 1 x =====",
        BOS + "One ===== DS4_IMATRIX_PROMPT",
        "more",
        "",
        f"{MARKER}",
        "Two",
    )
    assert [(p.name, p.text) for p in read_prompts(path)] == [
        ("a.txt, prompt 1", BOS + "One ===== DS4_IMATRIX_PROMPT\nmore"),
        ("a.txt, prompt 2", BOS + "Two"),
    ]
    assert [p.text for p in read_prompts(write(tmp_path / "b.txt", "Only", "one"))] == [BOS + "Only\none"]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line 2: not JSON"),
        ("[" * 100_000, "line 2: not JSON"),
        ("[1]", "line 2: a JSON object is needed"),
        ({}, "line 2: it has neither messages"),
        ({"messages": []}, "line 2: it has neither messages"),
        ({"messages": "Hi"}, "line 2: it has neither messages"),
        ({"messages": [{"role": "king", "content": "Hi"}]}, "line 2: .*role 'king' is not known"),
        ({"messages": [{"role": "user", "content": 1}]}, "line 2: .*content must be a string"),
        ({"text": 1}, "line 2: give either messages or text"),
        ({"text": "a", "messages": []}, "line 2: give either messages or text"),
        ({**QUICK, "thinking": "yes"}, "line 2: thinking must be true or false"),
        ({**QUICK, "tools": [{"x": 1}]}, "line 2: "),
    ],
    ids=str,
)
def test_lines_that_are_no_prompts_are_named(tmp_path: Path, line: Any, says: str) -> None:
    path = write(tmp_path / "a.jsonl", QUICK, line)
    with pytest.raises(Ds4Error, match=f"a.jsonl, {says}"):
        read_prompts(path)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for content in ("", " \n\n", f"{MARKER} x\n \n"):
        (tmp_path / "empty.txt").write_text(content, encoding="utf-8")
        with pytest.raises(Ds4Error, match=r"empty\.txt: there is no text"):
            read_prompts(tmp_path / "empty.txt")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(Ds4Error, match=r"latin\.txt: not UTF-8 text: byte 3 is 0xE9"):
        read_prompts(tmp_path / "latin.txt")
    with pytest.raises(Ds4Error, match=r"none\.txt: cannot be read: No such file"):
        read_prompts(tmp_path / "none.txt")


@pytest.mark.parametrize(("mode", "open_thinking"), [("given", [True, False]), ("think", [True, True]),
                                                     ("nothink", [False, False])])  # fmt: skip
def test_built_files_say_the_same_as_the_conversations(tmp_path: Path, mode: str, open_thinking: list[bool]) -> None:
    source, out = write(tmp_path / "a.jsonl", TOOLS, QUICK), tmp_path / "out.txt"
    built = build([source], out, mode=mode)
    prompts = read_prompts(out)
    expected = [
        render(TOOLS["messages"], [WEATHER], thinking=open_thinking[0]),
        render(QUICK["messages"], thinking=open_thinking[1]),
    ]
    assert [p.text for p in prompts] == [str(text) for text in expected]
    assert (built.prompts, built.left_out) == (2, {})
    assert built.characters == sum(map(len, expected))


def test_both_modes_and_plain_text(tmp_path: Path) -> None:
    text = write(tmp_path / "b.txt", "x" * 30, "y" * 30, "z" * 100)
    built = build([write(tmp_path / "a.jsonl", THINKING), text], tmp_path / "o", mode="both", block=70)
    texts = [p.text for p in read_prompts(tmp_path / "o")]
    assert built.prompts == 4
    assert texts[0].endswith("<think>Easy.</think>4.<｜end▁of▁sentence｜>")
    assert texts[1].endswith("</think>4.<｜end▁of▁sentence｜>")
    assert "<think>" not in texts[1]
    assert texts[2:] == [f"{BOS}{'x' * 30}\n{'y' * 30}", BOS + "z" * 100]


def test_what_rendered_text_cannot_hold_is_left_out(tmp_path: Path) -> None:
    def says(text: str) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": text}]}

    out = tmp_path / "o.txt"
    built = build([write(tmp_path / "a.jsonl", says("a"), says("a <think> b"), says(f"c\n{MARKER} d"), says("a"))], out)
    assert built.left_out == {
        "special tokens in what a client wrote": 1,
        "a line like the marker between prompts": 1,
        "the same as another": 1,
    }
    assert len(read_prompts(out)) == built.prompts == 1
    before = out.read_bytes()
    with pytest.raises(Ds4Error, match="not written, there is no text"):
        build([write(tmp_path / "b.jsonl", says("</think>"))], out)
    with pytest.raises(Ds4Error, match=r"c\.jsonl, line 1"):
        build([write(tmp_path / "c.jsonl", {"x": 1})], out)
    with pytest.raises(Ds4Error, match="mode 'x' is not known"):
        build([], out, mode="x")
    assert out.read_bytes() == before
    assert not list(tmp_path.glob(".*"))


def test_halves_of_surrogate_pairs_are_left_out(tmp_path: Path) -> None:
    """JSON can write them, UTF-8 cannot; the template has none in what it renders."""
    source = tmp_path / "a.jsonl"
    source.write_text('{"text": "\\ud800 a"}\n{"messages": [{"role": "user", "content": "\\udfff"}]}\n{"text": "b"}\n')
    named = tmp_path / "\udcff.txt"
    named.write_text("c\n")
    built = build([source, named], tmp_path / "out.txt")
    assert (built.prompts, built.left_out) == (3, {"half of a surrogate pair, which is no character": 1})


def test_a_source_is_not_replaced(tmp_path: Path) -> None:
    source = tmp_path / "a.txt"
    source.write_text("text\n")
    with pytest.raises(Ds4Error, match="which would be replaced"):
        build([source], tmp_path / "." / "a.txt")
    assert source.read_text() == "text\n"
