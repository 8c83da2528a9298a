"""JSON schemas of clients: reduced to what restricts values, with references that work from anywhere."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from ds4.chat.tags import PARAMETER_END
from ds4.server.constraints.rules import Schema, SchemaError

MAX_DEPTH = 64
"""Levels of schemas inside schemas."""

MAX_REFERENCES = 1000
"""References that are followed in one schema: one may lead to two, these to four, and so on."""

FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)  # fmt: skip
"""Formats that are enforced. Any other one is a remark to the reader, as the standard has it."""

MAX_COUNTED = 5000
"""Limits of a string's length beyond this are not enforced: a place in a grammar that counts costs memory."""

_REMARKS = frozenset(
    {
        "title", "description", "default", "example", "examples", "deprecated", "readOnly", "writeOnly", "nullable",
        "discriminator", "$comment", "$id", "id", "$anchor", "contentMediaType", "contentEncoding", "x-guidance",
    }
)  # fmt: skip
_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_LISTS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_SINGLE = frozenset(
    {
        "items", "additionalItems", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames",
        "unevaluatedItems", "unevaluatedProperties",
    }
)  # fmt: skip
_INERT = _REMARKS | {"$defs", "definitions", "$schema"}
_COMBINERS = frozenset({"anyOf", "oneOf", "allOf", "$ref", "if", "patternProperties", "unevaluatedProperties"})


def cleaned(schema: Any, where: str = "", *, close: bool = True, depth: int = 0) -> Schema:
    """The schema without remarks and without keywords that restrict nothing.

    An object that lists its properties and says nothing about others is closed, where that cannot contradict another
    part of the schema: a model that invents a key is never what was wanted. With `close=False` none is.
    Raises SchemaError that says where.
    """
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, Mapping):
        raise SchemaError(f"{where or 'the schema'} must be an object or a boolean")
    if depth > MAX_DEPTH:
        raise SchemaError(f"{where} is nested deeper than {MAX_DEPTH} levels")
    if not depth:
        close = close and not _intersects(schema)

    # Parts that are combined with restrictions beside them must stay as open as they are.
    combined = not _COMBINERS.isdisjoint(schema)
    inner = close and not (combined and not schema.keys() <= _COMBINERS | _INERT)

    def part(value: Any, key: str, close: bool = close) -> Schema:
        return cleaned(value, f"{where}.{key}".lstrip("."), close=close, depth=depth + 1)

    result: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _REMARKS or _says_nothing(key, value):
            continue
        if key in _MAPS:
            result[key] = {name: part(item, f"{key}.{name}") for name, item in _mapping(value, where, key).items()}
        elif key in _LISTS or (key == "items" and isinstance(value, list)):
            if not isinstance(value, list):
                raise SchemaError(f"{where or 'the schema'}: {key} must be a list")
            result[key] = [part(item, f"{key}[{i}]", inner) for i, item in enumerate(value)]
        elif key in _SINGLE:
            result[key] = part(value, key)
        else:
            result[key] = _shallow(value, where)
    properties = result.get("properties")
    if properties and close and not combined and "additionalProperties" not in result:
        required = result.get("required", ())
        if isinstance(required, list) and all(name in properties for name in required):
            result["additionalProperties"] = False
    return result


def _shallow(value: Any, where: str, depth: int = 0) -> Any:
    """A value that a schema lists. Raises SchemaError if it is nested too deeply."""
    if depth > MAX_DEPTH:
        raise SchemaError(f"{where or 'the schema'} lists a value nested deeper than {MAX_DEPTH} levels")
    for item in value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ():
        _shallow(item, where, depth + 1)
    return value


def _mapping(value: Any, where: str, key: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise SchemaError(f"{where or 'the schema'}: {key} must be an object")
    return value


def _says_nothing(key: str, value: Any) -> bool:
    if key == "format":
        return not isinstance(value, str) or value not in FORMATS
    if key == "$schema":
        # Only the older drafts read some keywords differently.
        return not (isinstance(value, str) and re.search(r"draft-0[467]|2019-09", value))
    if key in ("minLength", "maxLength"):
        return isinstance(value, int | float) and value > MAX_COUNTED
    if key == "propertyNames":
        return value is True or value in ({}, {"type": "string"})
    return (key == "uniqueItems" and value is False) or (key == "additionalItems" and value is True)


def _closes(value: Any) -> bool:
    """Whether a value holds, as a string or a name, what ends a parameter."""
    if isinstance(value, str):
        return PARAMETER_END in value
    if isinstance(value, Mapping):
        return any(_closes(item) for pair in value.items() for item in pair)
    return isinstance(value, list) and any(map(_closes, value))


def _anywhere(value: Any, test: Callable[[Mapping[str, Any]], bool], depth: int = 0) -> bool:
    """Whether an object with this quality occurs anywhere. (Objects that are no schemas count too; it does no harm.)"""
    if depth > 2 * MAX_DEPTH:
        return False
    if isinstance(value, Mapping):
        return test(value) or any(_anywhere(item, test, depth + 1) for item in value.values())
    return isinstance(value, list) and any(_anywhere(item, test, depth + 1) for item in value)


def _intersects(schema: Schema) -> bool:
    """Whether one value has to follow two parts of the schema at once."""
    return _anywhere(schema, lambda part: "allOf" in part or ("$ref" in part and not part.keys() <= _INERT | {"$ref"}))


class Document:
    """A whole schema, cleaned, whose parts may refer to one another.

    Attributes:
        root: the schema.
    """

    def __init__(self, schema: Any) -> None:
        """Raises SchemaError as `cleaned`."""
        self._followed = 0
        self.root = cleaned(schema)
        self.root = self._told_apart(self.root)

    def target(self, reference: Any, where: str) -> Schema:
        """What a `$ref` means. Raises SchemaError if that is not in the document, or too many were followed."""
        self._followed += 1
        if self._followed > MAX_REFERENCES:
            raise SchemaError(f"{where}: more than {MAX_REFERENCES} references have to be followed")
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            raise SchemaError(f"{where}: $ref {reference!r} does not point into the same schema; use $defs for it")
        found: Any = self.root
        for step in reference.split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, Mapping) and step in found:
                found = found[step]
            elif isinstance(found, list) and step.isdecimal() and int(step) < len(found):
                found = found[int(step)]
            else:
                raise SchemaError(f"{where}: $ref {reference!r} points to nothing")
        if not isinstance(found, Mapping | bool):
            raise SchemaError(f"{where}: $ref {reference!r} does not point to a schema")
        return found

    def _told_apart(self, value: Any) -> Any:
        """The schema with `anyOf` for each `oneOf` whose alternatives differ in a property that says which they are."""
        if isinstance(value, list):
            return [self._told_apart(item) for item in value]
        if not isinstance(value, Mapping):
            return value
        same = {key: self._told_apart(item) for key, item in value.items()}
        if "anyOf" not in same and isinstance(same.get("oneOf"), list) and self._discriminated(same["oneOf"]):
            same["anyOf"] = same.pop("oneOf")
        return same

    def _discriminated(self, alternatives: list[Any]) -> bool:
        found: list[dict[str, list[str]]] = []
        for part in alternatives:
            if isinstance(part, Mapping) and set(part) == {"$ref"}:
                part = self.target(part["$ref"], "oneOf")
            properties = part.get("properties") if isinstance(part, Mapping) else None
            required = part.get("required") if isinstance(part, Mapping) else None
            if not isinstance(properties, Mapping) or not isinstance(required, list):
                return False
            words = {name: _words(properties[name]) for name in required if name in properties}
            found.append({name: values for name, values in words.items() if values})
        shared = set.intersection(*map(set, found)) if found else set()
        for name in shared:
            values = [value for words in found for value in words[name]]
            if len(set(values)) == len(values):
                return True
        return False

    def standalone(self, schema: Schema, where: str) -> Schema:
        """A part of the document as the schema of a JSON parameter: what it refers to is put under its `$defs`.

        Raises SchemaError if a value or a name that is spelled out cannot stand in a parameter.
        """
        if isinstance(schema, bool):
            return schema
        refers = _anywhere(schema, lambda part: "$ref" in part)
        spelled = ("const", "enum", "properties", "required")
        parts = [schema, self.root] if refers else [schema]
        if any(_anywhere(part, lambda part: any(_closes(part.get(key)) for key in spelled)) for part in parts):
            raise SchemaError(f"{where}: no value can hold the text {PARAMETER_END!r}, which ends a parameter")
        draft = self.root["$schema"] if isinstance(self.root, Mapping) and "$schema" in self.root else None
        own: Mapping[str, Any] = schema if draft is None else {"$schema": draft, **schema}
        if not refers:
            return own
        return {**_moved(own), "$defs": {"root": _moved(self.root)}}


def _words(schema: Any) -> list[str]:
    """The strings that a schema lists, if it has no other values."""
    listed = schema.get("enum", [schema.get("const")]) if isinstance(schema, Mapping) else []
    return listed if isinstance(listed, list) and all(isinstance(value, str) for value in listed) else []


def _moved(value: Any) -> Any:
    """A schema whose root became `#/$defs/root`."""
    if isinstance(value, list):
        return [_moved(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    return {
        key: "#/$defs/root" + item[1:] if key == "$ref" and isinstance(item, str) and item[:1] == "#" else _moved(item)
        for key, item in value.items()
    }


def merged(first: Mapping[str, Any], second: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Both restrictions at once. Raises SchemaError if they meet in a keyword."""
    for key in first.keys() & second.keys():
        if first[key] != second[key]:
            raise SchemaError(f"{where}: two different {key!r} have to hold at once, which is not supported")
    return {**first, **second}
