"""What runs outside suites, without them: scripts, the bench, and what the page about them says."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path

import pytest
import suite_scripts
import suites
from script_lines import answer, calls, script
from server_harness import WEATHER, scripted

from ds4.chat import parse
from ds4.errors import Ds4Error
from ds4.server.scripted import read_script

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/conformance.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("lines", [suite_scripts.TOOL_EVAL_SHORT, *(entry[1] for entry in suites.SCRIPTED_AREAS)])
def test_scripts_can_be_played(lines: tuple[list[str], ...]) -> None:
    assert [b"".join(line.pieces).decode() for line in read_script(script(lines))] == ["".join(line) for line in lines]


def test_calls_are_read_as_they_were_meant() -> None:
    values = {"text": 'a "b" < c', "number": 7, "list": ["x", {"y": None}], "truth": True}
    message = parse("".join(calls(("first", values), ("second", {}))), True, ["first", "second"])
    assert message.reasoning == "I need a tool."
    assert [(call.name, json.loads(call.arguments)) for call in message.tool_calls] == [
        ("first", values),
        ("second", {}),
    ]
    assert parse("".join(answer("One two")), thinking=True).content == "One two"
    assert answer("One", reasoning="") == ["One"]


def test_what_a_server_refuses_is_told() -> None:
    with scripted({"pieces": ["</think>", "x"]}) as server:
        assert server.post({"messages": [{"role": "user", "content": "a"}], "tools": [WEATHER]}).status_code == 200
        server.http.get("/props")
        assert suites.refused(server.url) == []
        server.post({"messages": []})
        assert suites.refused(server.url) == ["/v1/chat/completions answered 400"]


def test_a_program_that_is_missing_or_fails_is_named(tmp_path: Path) -> None:
    bench = suites.Bench(tmp_path, tmp_path)
    with pytest.raises(Ds4Error, match="`make test-suites` installs it"):
        bench.run("lucebench")
    program = tmp_path / "fails"
    program.write_text("#!/bin/sh\necho $HOME $1; echo no luck >&2; exit 3\n", encoding="ascii")
    program.chmod(0o755)
    with pytest.raises(Ds4Error, match="fails ended with status 3: no luck"):
        bench.run("fails", "now")
    assert f"{tmp_path}/home now" in (tmp_path / "output.txt").read_text(encoding="utf-8")


def test_a_folder_is_served(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("Once", encoding="ascii")
    with suites.folder_server(tmp_path) as url:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"{url}/book.txt", timeout=30) as response:
            assert response.read() == b"Once"


def test_suites_are_pinned_and_the_page_says_which_versions() -> None:
    pinned = "".join((ROOT / name).read_text(encoding="utf-8") for name in ("tools/suites.txt", "constraints.txt"))
    for name in suites.SUITES:
        version = re.search(rf"^{name}==(.*)$", pinned, re.MULTILINE)
        assert version is not None
        assert f"{name} {version[1]}" in PAGE
    assert not re.search(r"https?://|^-", (ROOT / "tools/suites.txt").read_text(encoding="utf-8"), re.MULTILINE)


def test_an_unknown_suite_is_a_mistake_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as status:
        suites.parse(["mmlu"])
    assert status.value.code == 2
    assert "mmlu: not among schemathesis, llama-benchy" in capsys.readouterr().err
