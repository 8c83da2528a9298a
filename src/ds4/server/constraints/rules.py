"""What an answer has to be, in the terms of a request."""

from __future__ import annotations

import json
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal

from ds4.chat.tools import ToolSchema
from ds4.errors import RequestError

Schema = Mapping[str, Any] | bool
"""A JSON schema as the standard library reads it."""

ANY_OBJECT: Schema = MappingProxyType({"type": "object"})
"""What `response_format: json_object` asks for."""


_TOOL_SIZE = 100
"""Bytes that a tool without a schema counts for."""


class SchemaError(RequestError):
    """A schema that cannot be enforced."""


class GrammarsBusyError(RequestError):
    """As many schemas are being prepared as may be at a time; the request may succeed later."""


@dataclass(frozen=True)
class AnswerRules:
    """What may stand behind the reasoning of an answer.

    Attributes:
        calls: whether the answer has tool calls: `none`, `allowed` (it may), `required` (it is nothing else).
        tools: the tools of the request.
        names: those of them that may be called; None: all.
        several: whether one answer may have more than one call.
        strict: names of the tools whose arguments must follow their schemas.
        content: the schema that an answer without calls must follow as JSON; None: it is free text.
        profile: the template profile, in which names and values are written.
    """

    calls: Literal["none", "allowed", "required"] = "none"
    tools: Sequence[ToolSchema] = ()
    names: frozenset[str] | None = None
    several: bool = True
    strict: frozenset[str] = frozenset()
    content: Schema | None = None
    profile: str = "official"

    @property
    def callable(self) -> tuple[ToolSchema, ...]:
        """The tools that may be called."""
        if self.calls == "none":
            return ()
        return tuple(tool for tool in self.tools if self.names is None or tool.name in self.names)

    @property
    def demanding(self) -> bool:
        """Whether something has to come behind the reasoning."""
        return self.calls == "required" or self.content is not None

    @property
    def either(self) -> bool:
        """Whether the answer may be calls or a text with a form."""
        return self.calls == "allowed" and self.content is not None

    @property
    def restrictive(self) -> bool:
        """Whether anything is forbidden at all; if not, no constraint is needed."""
        tools = self.callable
        return self.demanding or bool(
            self.calls == "allowed" and self.tools and (len(tools) < len(self.tools) or self.strict_tools)
        )

    def key(self) -> Hashable:
        """Equal for rules that have the same grammar. Raises SchemaError if the content's schema is not JSON."""
        # The order of properties counts. Of tools that are not strict only the name is in the grammar.
        tools = tuple((tool.name, tool.kind, tool.schema if tool.name in self.strict else "") for tool in self.callable)
        return self.calls, tools, self.strict_tools, self.several, self._content_text, self.profile

    @property
    def size(self) -> int:
        """Bytes of what the grammar is made from, roughly. Raises SchemaError if the content's schema is not JSON."""
        tools = self.callable
        strict = sum(len(tool.schema) for tool in tools if tool.name in self.strict)
        return len(self._content_text) + strict + sum(_TOOL_SIZE + len(tool.name) for tool in tools)

    @cached_property
    def _content_text(self) -> str:
        return "" if self.content is None else schema_text(self.content)

    @property
    def strict_tools(self) -> frozenset[str]:
        """The strict ones of the tools that may be called."""
        return self.strict & {tool.name for tool in self.callable}


def schema_text(schema: Schema) -> str:
    """A schema as JSON. Raises SchemaError if it cannot be written so."""
    try:
        return json.dumps(schema if isinstance(schema, bool) else dict(schema), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise SchemaError(f"a schema cannot be written as JSON: {error}") from None


def strict_names(tools: Collection[ToolSchema], all_of_them: bool = False) -> frozenset[str]:
    """Names of the tools that ask for strictness in their definition (`"strict": true`), or of all."""
    return frozenset(tool.name for tool in tools if all_of_them or tool.strict)


def definition(tool: ToolSchema) -> Mapping[str, Any]:
    """The object that describes a tool to the model."""
    value = json.loads(tool.schema)
    return value if isinstance(value, Mapping) else {}


def parameters(tool: ToolSchema) -> Schema | None:
    """The schema of a tool's arguments; None if they are free, as those of hosted tools are."""
    described = definition(tool)
    for key in ("parameters", "input_schema"):
        schema = described.get(key)
        if isinstance(schema, Mapping | bool):
            return schema
    # A function that names no parameters has none.
    return {"type": "object", "properties": {}} if tool.kind == "function" else None
