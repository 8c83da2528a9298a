"""The table of fields in docs/apis.md: a field that is read refuses a wrong value by name, an ignored one takes it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from ds4.server.api.base import ApiContext
from ds4.server.api.registry import APIS
from ds4.server.config import ServerConfig
from ds4.server.errors import ApiError
from ds4.server.turns import TurnMemory

TEXT = (Path(__file__).parents[2] / "docs" / "apis.md").read_text(encoding="utf-8")
TABLE = TEXT.partition("**Fields.**")[2].partition("\n\n")[2].partition("\n\n")[0].splitlines()
HEADS = {"chat": "chat/completions", "Responses": "responses", "completions": "completions", "Messages": "messages"}
BARE: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "input": "x", "prompt": "x"}
UNTYPED = ("include",)
WRONG: Any = [[]]


def names(cell: str) -> list[str]:
    return [name.partition(".")[0] for name in re.findall(r"`([^`]+)`", cell)]


def cells() -> list[tuple[str, str, list[str]]]:
    """API, `read`, `ignored` or something else, and the fields that this is said of."""
    first, _, *rows = ([cell.strip() for cell in row.strip("|").split("|")] for row in TABLE)
    found = []
    for label, *row in rows:
        every = sorted({name for cell in (label, *row) for name in names(cell)})
        for api, cell in zip(first[1:], row, strict=True):
            if cell == "ignored":
                found.append((api, cell, every))
            elif "refused" not in cell and cell != "always":
                found.append((api, "read", names(cell) or names(label)))
    return found


def refused(api: str, field: str) -> str | None:
    """The field that a wrong value is refused by; None: it is not."""
    (found,) = (one for one in APIS if one.path == f"/v1/{HEADS[api]}")
    body = {found.conversation: BARE[found.conversation], "max_tokens": 1, field: WRONG}
    try:
        found.parse(body, ApiContext(ServerConfig(), "ds4-tiny", TurnMemory(), 1024))
    except ApiError as error:
        return error.param
    return None


@pytest.mark.parametrize(("api", "what", "fields"), cells())
def test_the_table_of_fields_is_true(api: str, what: str, fields: list[str]) -> None:
    assert fields
    for field in fields:
        if field not in UNTYPED:
            assert refused(api, field) == (None if what == "ignored" else field), field


def test_the_table_is_read() -> None:
    assert len(cells()) > 30
    assert {what for _, what, _ in cells()} == {"read", "ignored"}
