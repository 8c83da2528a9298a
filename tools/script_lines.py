"""Lines of a script for `ds4-server --scripted`, from what the model is to say and to call."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Call = tuple[str, Mapping[str, Any]]
"""A tool's name and the values of its parameters."""

_MARK = "｜DSML｜"


def answer(text: str, reasoning: str = "Now I know.") -> list[str]:
    """The pieces of an answer in text; a reasoning of no characters: thinking is off."""
    head, blank, rest = text.partition(" ")
    return [*_thought(reasoning), *filter(None, (head, blank + rest))]


def calls(*wanted: Call, reasoning: str = "I need a tool.") -> list[str]:
    """The pieces of an answer that calls tools."""
    pieces = [*_thought(reasoning), "\n\n<", _MARK, "tool_calls>\n"]
    for name, values in wanted:
        pieces += ["<", _MARK, f'invoke name="{name}">\n']
        for key, value in values.items():
            text = isinstance(value, str)
            pieces += ["<", _MARK, f'parameter name="{key}" string="{"true" if text else "false"}">']
            pieces += [value if text else json.dumps(value, ensure_ascii=False), "</", _MARK, "parameter>\n"]
        pieces += ["</", _MARK, "invoke>\n"]
    return [*pieces, "</", _MARK, "tool_calls>"]


def script(lines: Sequence[Sequence[str]]) -> str:
    """The script of these answers."""
    return "".join(json.dumps({"pieces": list(pieces)}, ensure_ascii=False) + "\n" for pieces in lines)


def _thought(reasoning: str) -> list[str]:
    return [reasoning, "</think>"] if reasoning else []
