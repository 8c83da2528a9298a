"""The scripts of the page that touch no page, run by Node where there is one: Markdown, streams, turns, tools."""

from __future__ import annotations

import json
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

NODE = shutil.which("node")
PAGE = Path(str(files("ds4.server") / "page"))

pytestmark = pytest.mark.skipif(NODE is None, reason="not run: no Node here (Debian's package nodejs)")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripts where Node takes them for modules."""
    made = tmp_path_factory.mktemp("page")
    for script in PAGE.glob("*.js"):
        shutil.copy(script, made)
    (made / "package.json").write_text('{"type": "module"}')
    return made


def node(folder: Path, module: str, names: str, code: str, value: object = None) -> Any:
    """What a piece of code that ends with `return` makes of a value, with some names of a module."""
    text = (
        f"import {{ {names} }} from './{module}';\n"
        "let input = ''; for await (const piece of process.stdin) input += piece;\n"
        f"const made = ((value) => {{ {code} }})(JSON.parse(input));\nconsole.log(JSON.stringify(made));"
    )
    command = [str(NODE), "--input-type=module", "-e", text]
    done = subprocess.run(
        command, cwd=folder, input=json.dumps(value), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def parse(folder: Path, *texts: str) -> Any:
    return node(folder, "markdown.js", "parse", "return value.map((text) => parse(text));", texts)


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


def paragraph(*inline: object) -> dict[str, object]:
    return {"type": "paragraph", "inline": list(inline)}


def link(address: str, label: str) -> dict[str, object]:
    return {"type": "link", "address": address, "inline": [text(label)]}


def test_every_script_is_one(folder: Path) -> None:
    for script in sorted(folder.glob("*.js")):
        done = subprocess.run([str(NODE), "--check", script], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr


def test_inline_markdown(folder: Path) -> None:
    strong = {"type": "strong", "inline": [text("b")]}
    emphasis = {"type": "emphasis", "inline": [text("e")]}
    code = {"type": "code", "text": "a*b*"}
    cases: dict[str, list[object]] = {
        "x **b** y": [text("x "), strong, text(" y")],
        "__b__ and _e_": [strong, text(" and "), emphasis],
        "*e*`a*b*`": [emphasis, code],
        "`` a`b ``": [{"type": "code", "text": "a`b"}],
        "2 * 3 * 4 and snake_case_name": [text("2 * 3 * 4 and snake_case_name")],
        "**open and *open and `open": [text("**open and *open and `open")],
        r"\*no\* \[no](http://e.org)": [text("*no* [no]("), link("http://e.org/", "http://e.org"), text(")")],
        "***": [text("***")],
        "": [],
        "`  `": [{"type": "code", "text": "  "}],
        "**a *e* b**": [{"type": "strong", "inline": [text("a "), emphasis, text(" b")]}],
    }
    found = node(folder, "markdown.js", "inline", "return value.map((text) => inline(text));", list(cases))
    for (given_text, expected), made in zip(cases.items(), found, strict=True):
        assert made == expected, given_text


def test_links_lead_only_where_they_may(folder: Path) -> None:
    cases: dict[str, list[object]] = {
        "[a](https://e.org/x_(y))": [link("https://e.org/x_(y)", "a")],
        "[a](mailto:a@e.org)": [link("mailto:a@e.org", "a")],
        "![a](https://e.org/i.png)": [link("https://e.org/i.png", "a")],
        "see https://e.org/a?b=1, or": [text("see "), link("https://e.org/a?b=1", "https://e.org/a?b=1"), text(", or")],
        "<https://e.org>": [link("https://e.org/", "https://e.org")],
        "[](https://e.org/)": [link("https://e.org/", "https://e.org/")],
        "see [1] and [a](https://e.org/)": [text("see [1] and "), link("https://e.org/", "a")],
        "[ ] [a [b] c](https://e.org/)": [text("[ ] "), link("https://e.org/", "a [b] c")],
        "[[a](https://e.org/)]": [text("["), link("https://e.org/", "a"), text("]")],
    }
    for target in (
        "javascript:alert(1)", "JaVaScRiPt:alert(1)", " javascript:alert(1)", "java\tscript:alert(1)",
        "data:text/html,x", "vbscript:x", "file:///etc/passwd", "/stats", "//evil.org", "#x", "blob:x", "x", "",
    ):  # fmt: skip
        cases[f"[a]({target})"] = [text(f"[a]({target})")]
    found = node(folder, "markdown.js", "inline", "return value.map((text) => inline(text));", list(cases))
    for (given_text, expected), made in zip(cases.items(), found, strict=True):
        assert made == expected, given_text


def test_blocks(folder: Path) -> None:
    cases: dict[str, list[object]] = {
        "a\nb\n\nc": [paragraph(text("a\nb")), paragraph(text("c"))],
        "# One\n### Three": [
            {"type": "heading", "level": 1, "inline": [text("One")]},
            {"type": "heading", "level": 3, "inline": [text("Three")]},
        ],
        "```py\n# no\n\n**no**\n```\nx": [
            {"type": "code", "language": "py", "text": "# no\n\n**no**"},
            paragraph(text("x")),
        ],
        "~~~\n```\n~~~": [{"type": "code", "language": "", "text": "```"}],
        "```\nnever closed": [{"type": "code", "language": "", "text": "never closed"}],
        "---": [{"type": "rule"}],
        "> a\n> b": [{"type": "quote", "blocks": [paragraph(text("a\nb"))]}],
        "3. a\n4. b": [
            {"type": "list", "ordered": True, "start": 3, "items": [[paragraph(text("a"))], [paragraph(text("b"))]]}
        ],
        "| a | b |\n|---|:-:|\n| 1 |\n\nx": [
            {"type": "table", "head": [[text("a")], [text("b")]], "rows": [[[text("1")], []]]},
            paragraph(text("x")),
        ],
        "| a\\|b | c |\n|---|---|\n| `1\\|2` | 3 \\|": [
            {
                "type": "table",
                "head": [[text("a|b")], [text("c")]],
                "rows": [[[{"type": "code", "text": "1|2"}], [text("3 |")]]],
            },
        ],
        "a | b\nno table": [paragraph(text("a | b\nno table"))],
        "<script>x</script>": [paragraph(text("<script>x</script>"))],
    }
    for (given_text, expected), made in zip(cases.items(), parse(folder, *cases), strict=True):
        assert made == expected, given_text


def test_lists_within_lists(folder: Path) -> None:
    ((found,),) = parse(folder, "- one\n  - inner\n\n    more\n- two\n\n  ```\n  code\n  ```\n\n- three")
    assert not found["ordered"]
    one, two, three = found["items"]
    assert one[0] == paragraph(text("one"))
    assert one[1]["items"] == [[paragraph(text("inner")), paragraph(text("more"))]]
    assert two == [paragraph(text("two")), {"type": "code", "language": "", "text": "code"}]
    assert three == [paragraph(text("three"))]


HOSTILE = [
    mark * 100_000
    for mark in ("*", "_", "`", "[", "](", "![", "**a", "*a ", "> ", "- ", "|", "|-", "\n", "h", "http://", "<a:",
                 "\\", "` ", "- a\n", "> a\n", "  - a\n", "a|b\n-|-\n", "1. ", "# ", "```\n", "(", "[a](")
]  # fmt: skip


def test_hostile_texts_cost_no_more_than_others(folder: Path) -> None:
    """Each takes milliseconds; where time grows with the square of the length, the limit of a minute ends this."""
    shapes = node(
        folder,
        "markdown.js",
        "parse",
        "return value.map((text) => parse(text).length);",
        [*HOSTILE, "[" * 100_000 + "](", "` " + "a" * 300_000 + "`"],
    )
    assert all(isinstance(count, int) for count in shapes)


def plain(value: Any) -> str:
    """All characters that parsed blocks show."""
    if isinstance(value, list):
        return "".join(map(plain, value))
    if isinstance(value, dict):
        return "".join(plain(item) for key, item in value.items() if key not in ("type", "address", "language"))
    return value if isinstance(value, str) else ""


def test_no_word_is_lost(folder: Path) -> None:
    parts = ["a1", "b2", "**", "*", "_", "`", "\n", "\n\n", "- ", "> ", "  ", "[", "](", ")", "|", "|-|\n", "1. ", "# "]
    texts: list[str] = []

    @settings(max_examples=300, database=None, derandomize=True)
    @given(st.lists(st.sampled_from(parts), max_size=25))
    def collect(chosen: list[str]) -> None:
        texts.append("".join(chosen))

    collect()
    for given_text, blocks in zip(texts, parse(folder, *texts), strict=True):
        shown = plain(blocks)
        for word in ("a1", "b2"):
            assert shown.count(word) == given_text.count(word), given_text


def test_events_are_cut_wherever_the_stream_is(folder: Path) -> None:
    stream = 'data: {"a": 1}\n\n: keep-alive\n\nevent: x\ndata: {"b":\ndata: 2}\n\ndata: [DONE]\n\ndata: rest'
    pieces = [[stream[:cut], stream[cut:]] for cut in range(len(stream))] + [list(stream)]
    code = "return value.map((pieces) => { const r = new EventReader(); return pieces.flatMap((p) => r.push(p)); });"
    found = node(folder, "api.js", "EventReader", code, pieces)
    assert all(events == ['{"a": 1}', '{"b":\n2}', "[DONE]"] for events in found)


def test_every_error_has_a_remedy(folder: Path) -> None:
    code = "return value.map(([status, options]) => new Problem('x', { status, ...options }).remedy);"
    cases: list[Any] = [[status, {}] for status in (0, 400, 401, 403, 404, 409, 413, 418, 429, 500, 502, 503)]
    cases += [[400, {"code": "context_length_exceeded"}], [429, {"retryAfter": "5"}]]
    found = node(folder, "api.js", "Problem", code, cases)
    assert all(len(remedy) > 20 for remedy in found)
    assert "--ctx" in found[-2]
    assert "in 5 s" in found[-1]


def test_an_answer_grows_by_its_deltas_and_goes_back_as_messages(folder: Path) -> None:
    deltas = [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "Hm"},
        {"reasoning_content": "."},
        {"content": "Look"},
        {"tool_calls": [{"index": 0, "id": "call_1", "function": {"name": "f", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"x":'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "1}"}}]},
        {"tool_calls": [{"index": 1, "id": "call_2", "function": {"name": "g", "arguments": "{}"}}]},
    ]
    code = """
      const answer = newAnswer();
      const grew = value.map((delta) => grow(answer, delta));
      answer.finish = "tool_calls";
      const open = openCalls(answer).map((call) => call.id);
      const turns = [{ role: "user", text: "Q" }, answer];
      const before = messages(turns, " ");
      answer.calls[0].result = "one";
      answer.calls[1].result = "";
      const after = messages(turns, "S");
      answer.finish = "length";
      return { grew, open, before, after, cut: messages(turns, ""), none: openCalls(answer) };"""
    found = node(folder, "conversation.js", "grow, messages, newAnswer, openCalls", code, deltas)
    assert found["grew"] == [False] + [True] * 7
    assert found["open"] == ["call_1", "call_2"]
    said = {"role": "assistant", "content": "Look", "reasoning_content": "Hm."}
    assert found["before"] == [{"role": "user", "content": "Q"}, said]
    calls = [
        {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, name, arguments in ((1, "f", '{"x":1}'), (2, "g", "{}"))
    ]
    assert found["after"] == [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "Q"},
        {**said, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_1", "content": "one"},
        {"role": "tool", "tool_call_id": "call_2", "content": ""},
    ]
    # A call that a limit cut off is not one that was made.
    assert found["cut"] == found["before"]
    assert found["none"] == []


def test_turns_of_another_tab_are_merged_from_the_front(folder: Path) -> None:
    code = "return value.map(([before, now]) => merge(before, now).map((turn, at) => turn === before[at]));"
    one, two, other = ({"role": "user", "text": name} for name in ("one", "two", "other"))
    cases = [[[one, two], [one, two, other]], [[one, two], [other, two]], [[one], []], [[], [one]]]
    same = node(folder, "conversation.js", "merge", code, cases)
    assert same == [[True, True, False], [False, False], [], [False]]


def test_only_our_own_turns_are_restored(folder: Path) -> None:
    good = {
        "role": "assistant",
        "reasoning": "",
        "text": "x",
        "calls": [],
        "finish": None,
        "error": None,
        "numbers": {},
    }
    call = {"id": "c", "name": "f", "arguments": "{}", "result": None}
    bad: list[Any] = [
        "{", "5", "null", '"x"', "{}", [None], [5], [{"role": "user"}], [{"role": "tool"}],
        [{**good, "calls": [{**call, "name": 3}]}], [{**good, "calls": None}], [{**good, "error": {}}],
        [{**good, "numbers": None}], [{**good, "numbers": {"speed": "x"}}], [{**good, "finish": 4}],
        [good, {"role": "user", "text": None}],
    ]  # fmt: skip
    texts = [value if isinstance(value, str) else json.dumps(value) for value in bad]
    kept = json.dumps([{"role": "user", "text": "q"}, {**good, "calls": [call]}])
    found = node(folder, "conversation.js", "restore", "return value.map(restore);", [*texts, kept])
    assert all(turns == [] for turns in found[:-1])
    assert found[-1] == [{"role": "user", "text": "q"}, {**good, "calls": [call], "finish": "cut"}]


def test_tools_are_checked_before_they_are_sent(folder: Path) -> None:
    fine = {"name": "f", "description": "", "parameters": "{}", "strict": False}
    cases = [
        (fine, ""),
        ({**fine, "name": ""}, "Give it a name."),
        ({**fine, "name": "a b"}, "A name has"),
        ({**fine, "name": "x" * 65}, "A name has"),
        ({**fine, "name": "taken"}, "Another tool"),
        ({**fine, "parameters": "{'a': 1}"}, "The parameters are no JSON"),
        ({**fine, "parameters": "null"}, "The parameters are a JSON schema"),
        ({**fine, "parameters": "[]"}, "The parameters are a JSON schema"),
    ]
    code = "return value.map((tool) => problemOf(tool, ['taken']));"
    found = node(folder, "toolbox.js", "problemOf", code, [tool for tool, _ in cases])
    for (tool, expected), problem in zip(cases, found, strict=True):
        assert problem.startswith(expected), tool
        assert bool(problem) == bool(expected), tool
    wired = node(folder, "toolbox.js", "wire", "return wire(value);", {**fine, "description": "d", "strict": True})
    function = {"name": "f", "parameters": {}, "description": "d", "strict": True}
    assert wired == {"type": "function", "function": function}
