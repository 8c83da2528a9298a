"""What a request demands of its answer: which calls may or have to come, and the form of its text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ds4.chat.tools import ToolSchema
from ds4.server.constraints import ANY_OBJECT, Schema
from ds4.server.errors import ApiError


@dataclass(frozen=True)
class Calls:
    """What a request says about calls.

    Attributes:
        allowed: whether there may be any.
        forced: whether the answer has to be calls.
        names: the tools that may be called; None: all.
    """

    allowed: bool = True
    forced: bool = False
    names: frozenset[str] | None = None


def calls_of(choice: str | Mapping[str, Any] | None, tools: Sequence[ToolSchema]) -> Calls:
    """OpenAI's `tool_choice`, in the shapes of chat and of Responses. Raises ApiError 400."""
    if choice is None or choice == "auto":
        return Calls()
    if choice == "none":
        return Calls(allowed=False)
    if choice == "required":
        return forced_calls(None, tools, "tool_choice is 'required'")
    if isinstance(choice, str):
        raise _wrong(f"tool_choice is {choice!r}; use none, auto, required, or an object that names a tool")
    if choice.get("type") == "allowed_tools":
        return _allowed_tools(choice, tools)
    return forced_calls([_name(choice, "tool_choice")], tools, "tool_choice")


def forced_calls(names: Collection[str] | None, tools: Sequence[ToolSchema], where: str) -> Calls:
    """Calls that have to come; `names`: of which tools, None: of any. Raises ApiError 400 that begins with `where`."""
    if names is None:
        if not tools:
            raise _wrong(f"{where}, but the request has no tools")
        return Calls(forced=True)
    return Calls(forced=True, names=_known(names, tools, where))


def _allowed_tools(choice: Mapping[str, Any], tools: Sequence[ToolSchema]) -> Calls:
    inner = choice.get("allowed_tools")
    # Chat has them in an object of their own, Responses beside the type.
    flat = inner is None and not choice.keys().isdisjoint(("mode", "tools"))
    where = "tool_choice" if flat else "tool_choice.allowed_tools"
    inner = choice if flat else inner
    if not isinstance(inner, Mapping):
        raise _wrong(f"{where}: expected an object")
    mode, listed = inner.get("mode"), inner.get("tools")
    if mode not in ("auto", "required"):
        raise _wrong(f"{where}.mode is {mode!r}; use auto or required")
    if not isinstance(listed, list) or not listed:
        raise _wrong(f"{where}.tools: expected a list of at least one tool")
    names = [_name(tool, f"{where}.tools[{i}]") for i, tool in enumerate(listed)]
    return Calls(forced=mode == "required", names=_known(names, tools, f"{where}.tools"))


def _name(value: object, where: str) -> str:
    """The tool that an object names: a function in the shape of either API, or a hosted tool by its type."""
    if not isinstance(value, Mapping):
        raise _wrong(f"{where}: expected an object that names a tool")
    inner = value.get(str(value.get("type")))
    inner = inner if isinstance(inner, Mapping) else value
    name, namespace = inner.get("name"), inner.get("namespace") or ""
    if name is None and value.get("type") not in ("function", "custom"):
        name = value.get("type")
    if not isinstance(name, str) or not name or not isinstance(namespace, str):
        raise _wrong(f"{where}: expected an object that names a tool")
    return namespace + name


def _known(names: Collection[str], tools: Sequence[ToolSchema], where: str) -> frozenset[str]:
    known = {tool.name for tool in tools}
    for name in names:
        if name not in known:
            have = f"it has {', '.join(sorted(known))}" if known else "it has none"
            raise _wrong(f"{where}: the request has no tool {name!r}; {have}")
    return frozenset(names)


def check_names(tools: Sequence[ToolSchema]) -> None:
    """Raises ApiError 400 for two functions of the same name: nobody would know which of them is called."""
    names = Counter(tool.name for tool in tools if tool.kind in ("function", "custom"))
    for name, count in names.items():
        if count > 1:
            raise ApiError(400, f"tools: there are {count} of the name {name!r}", param="tools")


def _wrong(message: str) -> ApiError:
    return ApiError(400, message, param="tool_choice")


def format_of(
    value: Mapping[str, Any] | None, field: str, param: str | None = None, nested: bool = False
) -> Schema | None:
    """The schema that the text of an answer has to follow, from the field that gives its format; None: free text.

    `nested`: it should have its schema in an object of its own, as in chat. Raises ApiError 400.
    """
    param = param or field
    if value is None:
        return None
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return ANY_OBJECT
    if kind != "json_schema":
        said = f"is {kind!r}" if "type" in value else "is missing"
        raise ApiError(400, f"{field}.type {said}; use text, json_object or json_schema", param=param)
    inner = value.get("json_schema")
    if inner is not None or (nested and "schema" not in value):
        field += ".json_schema"
        if not isinstance(inner, Mapping):
            raise ApiError(400, f"{field}: expected an object", param=param)
    else:
        inner = value
    if not isinstance(inner.get("strict"), bool | None):
        raise ApiError(400, f"{field}.strict: expected a boolean", param=param)
    schema = inner.get("schema")
    if not isinstance(schema, Mapping):
        raise ApiError(400, f"{field}.schema: expected an object", param=param)
    return schema
