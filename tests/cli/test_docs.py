"""The examples of the documentation, run as they stand there."""

from __future__ import annotations

import io
import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from ds4.cli import imatrix_text, score
from ds4.cli.main import main
from ds4.cli.options import COMMANDS, build_parser
from ds4.evals.score import Results, Score
from ds4.gguf.file import embedded_model_path
from tests.cli.conftest import Screen

_FLAGS_OF_TOOLS = {"--file", "--reference", "--out", "--experts", "--expert-sets", "--sparse"}

DOCS = Path(__file__).parents[2] / "docs"


def blocks(name: str, language: str) -> list[str]:
    """The code blocks of a page, in order."""
    text = (DOCS / name).read_text(encoding="utf-8")
    found = re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert found
    return found


def test_python_examples_run_in_order(
    embedded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for number, block in enumerate(blocks("python-api.md", "python")):
        exec(compile(block, f"python-api.md, block {number}", "exec"), names)
    printed = capsys.readouterr().out
    assert "no-such-file.gguf" in printed
    assert "torch.Size([4096])" in printed


PROGRAMS = {"ds4": main, "ds4-imatrix-text": imatrix_text.main, "ds4-score": score.main}
TALK = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]}
FILES = {
    "question.txt": "What is 2 + 2?\n",
    "text.txt": "Once upon a time there was a king. " * 40,
    "talks.jsonl": json.dumps(TALK),
    "cases.jsonl": json.dumps({"id": "a", "prompt": "Hi", "continuation": "Hello!"}),
}

COMMAND_LINES = [line for block in blocks("cli.md", "sh") for line in block.splitlines() if line]


@pytest.mark.parametrize("line", COMMAND_LINES)
def test_command_line_examples_succeed(
    line: str, embedded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    for name in ("old.json", "new.json"):
        Results("model", "cases.jsonl", [Score("a", 1, 1.0, [1.0], True, 1)]).save(tmp_path / name)
    echoed, _, command = line.rpartition(" | ")
    monkeypatch.setattr(sys, "stdin", io.StringIO(shlex.split(echoed)[1] + "\n") if echoed else Screen())
    program, *argv = shlex.split(command)
    ours = program == "ds4"
    # The random model would talk until its context is full.
    limit = [] if "-n" in argv or not ours else ["-n", "4"]
    if "--plan" in argv:  # there are no kernels for the random model's sizes
        argv += ["-m", str(embedded_model_path())]
    assert PROGRAMS[program]([*argv, *limit]) == 0
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    # Thinking that the limit cuts off goes to stderr.
    assert captured.out or captured.err or list(tmp_path.glob("log*"))


def test_every_flag_of_the_page_exists_and_every_command_is_on_it() -> None:
    page = (DOCS / "cli.md").read_text(encoding="utf-8")
    parsers = (build_parser(), imatrix_text.build_parser(), score.build_parser())
    known = {flag for parser in parsers for action in parser._actions for flag in action.option_strings}
    used = set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", page)) - _FLAGS_OF_TOOLS
    assert used <= known, used - known
    for name in " ".join(COMMANDS).replace(",", "").split():
        if name.startswith("/"):
            assert name in page


def test_every_visible_flag_is_on_the_page() -> None:
    page = (DOCS / "cli.md").read_text(encoding="utf-8")
    for parser in (build_parser(), imatrix_text.build_parser(), score.build_parser()):
        for action in parser._actions:
            if action.help != "==SUPPRESS==" and action.option_strings and action.option_strings[-1] != "--version":
                assert action.option_strings[-1] in page, action.option_strings
