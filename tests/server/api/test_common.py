"""What the parsers of all APIs share."""

from __future__ import annotations

from typing import Any

import pytest

from ds4.chat.tools import ToolSchema
from ds4.server.api import chat, completions, messages
from ds4.server.api.base import Api, ApiContext
from ds4.server.api.common import MAX_STOP_LENGTH, MAX_STOPS
from ds4.server.api.demands import check_names
from ds4.server.config import ServerConfig
from ds4.server.errors import ApiError
from ds4.server.turns import TurnMemory

CONTEXT = ApiContext(ServerConfig(), "m", TurnMemory(), 1000)
ASK = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("api", "body", "field"),
    [
        (chat.API, {"messages": ASK}, "stop"),
        (completions.API, {"prompt": "hi"}, "stop"),
        (messages.API, {"messages": ASK}, "stop_sequences"),
    ],
    ids=["chat", "completions", "messages"],
)
def test_stop_strings_have_a_limit(api: Api, body: dict[str, Any], field: str) -> None:
    most = [f"{i:0{MAX_STOP_LENGTH}}" for i in range(MAX_STOPS)]
    # Empty ones and repetitions cost nothing, so they do not count.
    assert api.parse({**body, field: ["", *most, *most]}, CONTEXT).request.stop == tuple(most)
    for wrong, words in (([*most, "x"], f"{MAX_STOPS + 1} strings"), ("x" * (MAX_STOP_LENGTH + 1), "characters")):
        with pytest.raises(ApiError, match=f"{field} has .*{words}") as caught:
            api.parse({**body, field: wrong}, CONTEXT)
        assert (caught.value.status, caught.value.param) == (400, field)


class CountedName(str):
    """A name that counts how often names are compared."""

    __slots__ = ()
    compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        CountedName.compared += 1
        return str.__eq__(self, other)


def test_names_of_many_tools_are_not_compared_with_each_other() -> None:
    names = [CountedName(f"f{i}") for i in range(1000)]
    check_names([ToolSchema(name, "{}") for name in names])
    # Only those whose hashes collide.
    assert CountedName.compared < len(names)
    with pytest.raises(ApiError, match="there are 3 of the name 'f7'"):
        check_names([ToolSchema(name, "{}") for name in [*names, "f7", "f7"]])
