"""Where a schema has other schemas inside it, and which of its keywords restrict nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ds4.server.constraints.rules import Schema

MAX_DEPTH = 64
"""Levels of schemas inside schemas."""

CLOSED = "x-closed"
"""A mark of ours at objects that are closed although their schema does not say so."""

REMARKS = frozenset(
    {
        CLOSED,
        "title", "description", "default", "example", "examples", "deprecated", "readOnly", "writeOnly", "nullable",
        "discriminator", "$comment", "$id", "id", "$anchor", "contentMediaType", "contentEncoding", "x-guidance",
    }
)  # fmt: skip
"""Keywords for readers."""

INERT = REMARKS | {"$defs", "definitions", "$schema"}
"""Keywords that restrict no value."""

COMBINERS = frozenset({"anyOf", "oneOf", "allOf", "$ref", "if", "patternProperties", "unevaluatedProperties"})
"""Keywords whose schemas have to hold beside the others."""

MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords with schemas by name."""

LISTS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
"""Keywords with a list of schemas; `items` may have one too."""

SINGLE = frozenset(
    {
        "items", "additionalItems", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames",
        "unevaluatedItems", "unevaluatedProperties",
    }
)  # fmt: skip
"""Keywords with one schema."""


def inner(schema: Schema) -> Iterator[tuple[str, Schema]]:
    """The schemas right inside a cleaned one, each with the steps of a JSON pointer to it."""
    for key, value in schema.items() if isinstance(schema, Mapping) else ():
        if key in MAPS:
            yield from ((f"/{key}/{step(name)}", part) for name, part in value.items())
        elif key in LISTS or (key == "items" and isinstance(value, list)):
            yield from ((f"/{key}/{i}", part) for i, part in enumerate(value))
        elif key in SINGLE:
            yield f"/{key}", value


def inside(schema: Mapping[str, Any], change: Callable[[Schema], Schema]) -> dict[str, Any]:
    """A cleaned schema with the schemas right inside it changed."""
    result: dict[str, Any] = {}
    for key, value in schema.items():
        if key in MAPS:
            result[key] = {name: change(part) for name, part in value.items()}
        elif key in LISTS or (key == "items" and isinstance(value, list)):
            result[key] = [change(part) for part in value]
        else:
            result[key] = change(value) if key in SINGLE else value
    return result


def step(name: str) -> str:
    """A name as a step of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def anywhere(value: Any, test: Callable[[Mapping[str, Any]], bool], depth: int = 0) -> bool:
    """Whether an object with this quality occurs anywhere. (Objects that are no schemas count too; it does no harm.)"""
    if depth > 2 * MAX_DEPTH:
        return False
    if isinstance(value, Mapping):
        return test(value) or any(anywhere(item, test, depth + 1) for item in value.values())
    return isinstance(value, list) and any(anywhere(item, test, depth + 1) for item in value)


def intersects(schema: Schema) -> bool:
    """Whether one value has to follow two parts of the schema at once."""
    return anywhere(schema, lambda part: "allOf" in part or ("$ref" in part and not part.keys() <= INERT | {"$ref"}))
