"""The tools a client offers: reading every shape the APIs have, and the block that describes them to the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ds4.chat import json_text
from ds4.chat.rendered import Writer
from ds4.errors import RequestError

# Protocol data: the text the model was trained on, around the schemas.
TOOLS_HEAD = """## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a "<｜DSML｜tool_calls>" block like the following:

<｜DSML｜tool_calls>
<｜DSML｜invoke name="$TOOL_NAME">
<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜parameter>
...
</｜DSML｜invoke>
<｜DSML｜invoke name="$TOOL_NAME2">
...
</｜DSML｜invoke>
</｜DSML｜tool_calls>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside <think>...</think> BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

"""  # noqa: E501
TOOLS_TAIL = """

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""

_SEARCH_DESCRIPTION = "Searches for further tools by words that describe what is needed."


@dataclass(frozen=True, slots=True)
class ToolSchema:
    """One tool as the model sees it.

    Attributes:
        name: the name in calls; for a tool of a namespace the namespace directly followed by the inner name.
        schema: the schema's line in the prompt.
        namespace: the namespace, if any (the wire shows it apart from the inner name).
        kind: the `type` the client gave, for instance `function`, `custom`, `tool_search`.
        strict: the client wants arguments that follow the schema.
    """

    name: str
    schema: str
    namespace: str = ""
    kind: str = "function"
    strict: bool = False


def tool_schemas(tools: Sequence[Any] | None) -> tuple[ToolSchema, ...]:
    """Return the tools of a request, namespaces flattened, in the client's order.

    Takes OpenAI tools (`{"type": "function", "function": {...}}`), flat tools (Anthropic, Responses), namespaces,
    `tool_search`; any other object is passed on to the model as it is. A string is taken as JSON.
    Raises RequestError that names the tool.
    """
    if tools is None:
        return ()
    if isinstance(tools, str | bytes | Mapping) or not isinstance(tools, Sequence):
        raise RequestError("tools must be a list of objects")
    schemas: list[ToolSchema] = []
    for i, tool in enumerate(tools):
        _read_tool(tool, f"tools[{i}]", schemas)
    return tuple(schemas)


def write_tools(writer: Writer, schemas: Sequence[ToolSchema]) -> None:
    """Write the tools block; its schemas are the client's text."""
    writer.control(TOOLS_HEAD)
    for i, schema in enumerate(schemas):
        if i:
            writer.control("\n")
        writer.client(schema.schema)
    writer.control(TOOLS_TAIL)


def tools_block(tools: Sequence[Any]) -> str:
    """Return the text that describes the tools to the model (`{TOOLS}` in descriptions of the format)."""
    writer = Writer()
    write_tools(writer, tool_schemas(tools))
    return str(writer.finish())


def _read_tool(value: Any, where: str, schemas: list[ToolSchema]) -> None:
    if isinstance(value, ToolSchema):
        schemas.append(value)
        return
    if isinstance(value, str):
        try:
            value = json_text.loads(value)
        except json_text.NotJsonError as error:
            raise RequestError(f"{where} is not JSON: {error}") from None
    if not isinstance(value, Mapping):
        raise RequestError(f"{where} must be an object")
    kind = value.get("type", "function")
    kind = str(kind)
    function = value.get("function")
    if isinstance(function, Mapping):
        name, line = _name(function, f"{where}.function"), _line(function, where)
        _check_parameters(function, f"{where}.function")
        schemas.append(ToolSchema(name, line, kind=kind, strict=_strict(function, f"{where}.function")))
    elif function is not None:
        raise RequestError(f"{where}.function must be an object")
    elif kind == "namespace":
        _read_namespace(value, where, schemas)
    elif kind == "tool_search":
        search = {
            "name": "tool_search",
            "description": value.get("description") or _SEARCH_DESCRIPTION,
            "parameters": value.get("parameters") or _empty_parameters(),
        }
        schemas.append(ToolSchema("tool_search", _line(search, where), kind=kind))
    else:
        # Cache marks move from tool to tool between turns; they tell the model nothing and would break every prefix.
        rest = {key: item for key, item in value.items() if key != "cache_control"}
        if kind == "function":
            _check_parameters(value, where)
        strict = _strict(value, where)
        schemas.append(ToolSchema(_name(value, where), _line(rest, where), kind=kind, strict=strict))


def _read_namespace(value: Mapping[str, Any], where: str, schemas: list[ToolSchema]) -> None:
    namespace = _name(value, where)
    inner = value.get("tools")
    if isinstance(inner, str) or not isinstance(inner, Sequence):
        raise RequestError(f"{where}.tools must be a list of objects")
    for i, tool in enumerate(inner):
        place = f"{where}.tools[{i}]"
        if not isinstance(tool, Mapping):
            raise RequestError(f"{place} must be an object")
        function = tool.get("function")
        tool = function if isinstance(function, Mapping) else tool
        name = namespace + _name(tool, place)
        _check_parameters(tool, place)
        parameters = tool.get("parameters", tool.get("input_schema"))
        line = {
            "name": name,
            "description": tool.get("description") or "",
            "parameters": _empty_parameters() if parameters is None else parameters,
        }
        schemas.append(ToolSchema(name, _line(line, place), namespace, strict=_strict(tool, place)))


def _empty_parameters() -> dict[str, Any]:
    return {"type": "object", "properties": {}}


def _strict(value: Mapping[str, Any], where: str) -> bool:
    strict = value.get("strict")
    if not isinstance(strict, bool | None):
        raise RequestError(f"{where}.strict must be a boolean")
    return strict is True


def _check_parameters(value: Mapping[str, Any], where: str) -> None:
    for key in ("parameters", "input_schema"):
        if not isinstance(value.get(key), Mapping | bool | None):
            raise RequestError(f"{where}.{key} must be an object: the schema of the arguments")


def _name(value: Mapping[str, Any], where: str) -> str:
    # Hosted tools of some clients have no name; their type is the best one.
    kind = value.get("type")
    name = value.get("name", None if kind in ("function", "custom", "namespace") else kind)
    if not isinstance(name, str) or not name:
        raise RequestError(f"{where}.name must be a non-empty string")
    return name


def _line(value: Mapping[str, Any], where: str) -> str:
    try:
        return json_text.dumps(value)
    except json_text.NotJsonError as error:
        raise RequestError(f"{where} cannot be written as JSON: {error}") from None
