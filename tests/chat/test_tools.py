import hashlib
from typing import Any

import pytest

from ds4.chat.tools import TOOLS_HEAD, TOOLS_TAIL, tool_schemas, tools_block
from ds4.errors import RequestError

PARAMETERS = {
    "type": "object",
    "properties": {"z": {"type": "string", "description": "größe <b>"}, "a": {"type": "number"}},
}


def test_the_text_is_the_known_one() -> None:
    digest = hashlib.sha256(f"{TOOLS_HEAD}{{SCHEMAS}}{TOOLS_TAIL}".encode()).hexdigest()
    assert digest == "12896537df70074c76828db9f4bc0f9be768ce5379ce71b15c07a7150bd90020"


def test_block_has_one_schema_a_line() -> None:
    tools = [
        {"type": "function", "function": {"name": "a", "parameters": PARAMETERS}},
        {"name": "b", "input_schema": {}},
    ]
    block = tools_block(tools)
    line = (
        '{"name": "a", "parameters": {"type": "object", "properties": {"z": {"type": "string", "description":'
        ' "größe <b>"}, "a": {"type": "number"}}}}'
    )
    assert block == f'{TOOLS_HEAD}{line}\n{{"name": "b", "input_schema": {{}}}}{TOOLS_TAIL}'


def test_white_space_of_the_client_does_not_matter() -> None:
    assert tools_block(['{"name":"a",\n "x": [1,2.50]}']) == tools_block(['{ "name" : "a","x":[1 , 2.50]}'])
    assert '"x": [1, 2.50]' in tools_block(['{"name":"a","x":[1,2.50]}'])


@pytest.mark.parametrize(
    ("tool", "name", "schema", "kind"),
    [
        (
            {"type": "function", "name": "f", "strict": True, "parameters": {}},
            "f",
            '{"type": "function", "name": "f", "strict": true, "parameters": {}}',
            "function",
        ),
        (
            {"name": "f", "description": "d", "input_schema": {}, "cache_control": {"type": "ephemeral"}},
            "f",
            '{"name": "f", "description": "d", "input_schema": {}}',
            "function",
        ),
        (
            {"type": "tool_search", "execution": "client", "description": "find", "parameters": {"type": "object"}},
            "tool_search",
            '{"name": "tool_search", "description": "find", "parameters": {"type": "object"}}',
            "tool_search",
        ),
        ({"type": "custom", "name": "raw"}, "raw", '{"type": "custom", "name": "raw"}', "custom"),
        ({"type": "web_search"}, "web_search", '{"type": "web_search"}', "web_search"),
    ],
)
def test_shapes(tool: dict[str, Any], name: str, schema: str, kind: str) -> None:
    (found,) = tool_schemas([tool])
    assert (found.name, found.schema, found.kind, found.namespace) == (name, schema, kind, "")


def test_namespaces_are_flattened() -> None:
    inner = [
        {"type": "function", "name": "read", "description": "d", "parameters": {"type": "object"}},
        {"name": "write", "input_schema": {"x": 1}},
        {"function": {"name": "list"}},
    ]
    found = tool_schemas([{"type": "namespace", "name": "fs_", "tools": inner}])
    assert [(tool.name, tool.namespace) for tool in found] == [
        ("fs_read", "fs_"),
        ("fs_write", "fs_"),
        ("fs_list", "fs_"),
    ]
    assert [tool.schema for tool in found] == [
        '{"name": "fs_read", "description": "d", "parameters": {"type": "object"}}',
        '{"name": "fs_write", "description": "", "parameters": {"x": 1}}',
        '{"name": "fs_list", "description": "", "parameters": {"type": "object", "properties": {}}}',
    ]


def test_tool_search_has_defaults() -> None:
    (found,) = tool_schemas([{"type": "tool_search"}])
    assert '"description": "' in found.schema
    assert '"parameters": {"type": "object", "properties": {}}' in found.schema


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ({"name": "a"}, "tools must be a list"),
        ("a", "tools must be a list"),
        ([1], r"tools\[0\] must be an object"),
        ([{"name": "a"}, {"name": ""}], r"tools\[1\].name"),
        ([{"type": "function"}], r"tools\[0\].name"),
        ([{"type": "custom"}], r"tools\[0\].name"),
        ([{"type": "function", "name": "a", "parameters": [1]}], r"tools\[0\].parameters must be an object"),
        ([{"name": "a", "input_schema": "x"}], r"tools\[0\].input_schema must be an object"),
        ([{"function": {"name": "a", "parameters": 5}}], r"tools\[0\].function.parameters must be an object"),
        ([{"type": "namespace", "name": "n", "tools": [{"name": "a", "parameters": 5}]}], r"\[0\].parameters must be"),
        ([{"type": "function", "function": "x"}], r"tools\[0\].function must be an object"),
        ([{"type": "namespace", "name": "n"}], r"tools\[0\].tools must be a list"),
        ([{"type": "namespace", "name": "n", "tools": [3]}], r"tools\[0\].tools\[0\] must be an object"),
        (["{"], r"tools\[0\] is not JSON"),
        ([{"name": "a", "x": float("nan")}], r"tools\[0\] cannot be written"),
    ],
)
def test_bad_tools_are_named(tools: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        tool_schemas(tools)


def test_no_tools() -> None:
    assert tool_schemas(None) == tool_schemas([]) == ()
