"""JSON schemas of clients: reduced to what restricts values, with references that work from anywhere."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping
from typing import Any

from ds4.chat.tags import PARAMETER_END
from ds4.server.constraints.alternatives import not_apart, told_apart
from ds4.server.constraints.rules import Schema, SchemaError
from ds4.server.constraints.structure import (
    CLOSED,
    COMBINERS,
    INERT,
    LISTS,
    MAPS,
    MAX_DEPTH,
    REMARKS,
    SINGLE,
    anywhere,
    inner,
    intersects,
    step,
)
from ds4.server.constraints.wellformed import check_keywords, check_reference

MAX_PARTS = 2000
"""Schemas inside one schema (properties, elements, alternatives): what they cost grows faster than their number."""

MAX_REFERENCES = 1000
"""References that are followed in one schema: one may lead to two, these to four, and so on."""

FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)  # fmt: skip
"""Formats that are enforced. Any other one is a remark to the reader, as the standard has it."""

MAX_OPTIONAL = 1000
"""Properties of one object that need not come: at each place any of them may be the next."""

MAX_COUNTED = 5000
"""Limits of a string's length beyond this are not enforced: a place in a grammar that counts costs memory."""

_MOST_PASSES = 50
_UNSUPPORTED = frozenset(
    {
        "not", "if", "then", "else", "uniqueItems", "contains", "minContains", "maxContains", "propertyNames",
        "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedItems", "unevaluatedProperties",
        "$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor",
    }
)  # fmt: skip


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
        close = close and not intersects(schema)

    # Parts that are combined with restrictions beside them must stay as open as they are.
    combined = not COMBINERS.isdisjoint(schema)
    closed = close and not (combined and not schema.keys() <= COMBINERS | INERT)

    def part(value: Any, key: str, close: bool = close) -> Schema:
        return cleaned(value, f"{where}.{key}".lstrip("."), close=close, depth=depth + 1)

    result: dict[str, Any] = {}
    for key, value in schema.items():
        if key in REMARKS or _says_nothing(key, value):
            continue
        if key in MAPS:
            result[key] = {name: part(item, f"{key}.{name}") for name, item in _mapping(value, where, key).items()}
        elif key in LISTS or (key == "items" and isinstance(value, list)):
            if not isinstance(value, list):
                raise SchemaError(f"{where or 'the schema'}: {key} must be a list")
            result[key] = [part(item, f"{key}[{i}]", closed) for i, item in enumerate(value)]
        elif key in SINGLE:
            result[key] = part(value, key)
        else:
            result[key] = _shallow(value, where)
    properties = result.get("properties")
    if properties and close and not combined and "additionalProperties" not in result:
        required = result.get("required", [])
        if isinstance(required, list) and all(name in properties for name in required):
            result |= {"additionalProperties": False, CLOSED: True}
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


def _no_text(value: Any, at: str = "#") -> str | None:
    """Where a value has half a surrogate pair, which cannot be written in UTF-8."""
    if isinstance(value, str):
        return at if any("\ud800" <= char <= "\udfff" for char in value) else None
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        found = at if isinstance(key, str) and _no_text(key) else _no_text(item, f"{at}/{step(str(key))}")
        if found:
            return found
    return None


def _count(schema: Schema) -> int:
    """How many schemas a cleaned one is made of."""
    found, rest = 0, [schema]
    while rest:
        found += 1
        rest += [part for _, part in inner(rest.pop())]
    return found


class Document:
    """A whole schema, cleaned, whose parts may refer to one another.

    Attributes:
        root: the schema.
    """

    def __init__(self, schema: Any) -> None:
        """Raises SchemaError as `cleaned`."""
        self._followed = 0
        self._checked: set[str] = set()
        self.root = cleaned(schema)
        parts = _count(self.root)
        if parts > MAX_PARTS:
            raise SchemaError(
                f"it has {parts} parts (properties, elements, ...), and at most {MAX_PARTS} are supported"
            )
        if where := _no_text(self.root):
            raise SchemaError(f"{where} has half of a surrogate pair, which is no character: no text can hold it")
        self.root = told_apart(self.root, self._referred)

    def target(self, reference: Any, where: str) -> Schema:
        """What a `$ref` means. Raises SchemaError if that is not in the document, or too many were followed."""
        self._followed += 1
        if self._followed > MAX_REFERENCES:
            raise SchemaError(f"{where}: more than {MAX_REFERENCES} references have to be followed")
        check_reference(reference, where)
        return self._at(reference, where)

    def _at(self, reference: str, where: str) -> Schema:
        found: Any = self.root
        for name in reference.split("/")[1:]:
            name = name.replace("~1", "/").replace("~0", "~")
            if isinstance(found, Mapping) and name in found:
                found = found[name]
            elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
                found = found[int(name)]
            else:
                raise SchemaError(f"{where}: $ref {reference!r} points to nothing")
        if not isinstance(found, Mapping | bool):
            raise SchemaError(f"{where}: $ref {reference!r} does not point to a schema")
        return found

    def check(self, schema: Schema, where: str = "") -> None:
        """Raises SchemaError for what is wrong or not supported, in a part of the document or what it refers to.

        What was looked at once is not looked at again. It finds most of what a grammar cannot be made of, at a
        small part of what that costs.
        """
        rest = [("" if where else "#", schema)]
        while rest:
            at, part = rest.pop()
            if not isinstance(part, Mapping):
                continue
            place = ": ".join(filter(None, (where, at)))
            self._check_support(part, where, at)
            check_keywords(part, place)
            _check_optional(part, place)
            if isinstance(part.get("oneOf"), list) and (found := not_apart(part, self._referred)):
                raise SchemaError(
                    f"{place}: the alternatives {found[0]} and {found[1]} of oneOf cannot be told apart; use anyOf"
                )
            reference = part.get("$ref")
            if reference is not None and f"{at}/".startswith(f"{reference}/") and not part.keys() <= INERT | {"$ref"}:
                raise SchemaError(f"{place}: a $ref to what it stands in cannot have other keywords beside it")
            if reference is not None and reference not in self._checked:
                self._checked.add(reference)
                rest.append((reference, self._at(reference, place)))
            rest += [(at + steps, one) for steps, one in inner(_without_definitions(part))]

    def _check_support(self, part: Mapping[str, Any], where: str, at: str) -> None:
        if isinstance(self.root, Mapping) and "$schema" in self.root:
            return  # an older draft, which does not have all of the keywords
        unsupported = sorted(_UNSUPPORTED & part.keys())
        if unsupported:
            place = f" at {at}" if at else ""
            raise SchemaError(f"{where}: {unsupported[0]!r}{place} is not supported".removeprefix(": "))

    def check_ends(self) -> None:
        """Raises SchemaError for a part that every value of it would have to hold once more, without an end."""
        places: dict[int, str] = {}
        parts: list[Mapping[str, Any]] = []  # what a part refers to or holds comes before it, but for circles
        rest: list[tuple[str, Schema, bool]] = [("#", self.root, False)]
        while rest:
            at, part, seen = rest.pop()
            if not isinstance(part, Mapping):
                continue
            if seen:
                parts.append(part)
            elif id(part) not in places:
                places[id(part)] = at
                target = self._referred(part)
                rest.append((at, part, True))
                rest += [(at + steps, one, False) for steps, one in inner(_without_definitions(part))]
                rest += [] if target is None else [(str(part["$ref"]), target, False)]
        ending: set[int] = set()

        def ends(part: Any) -> bool:
            return not isinstance(part, Mapping) or id(part) in ending

        for _ in range(_MOST_PASSES):
            left = [part for part in parts if id(part) not in ending]
            for part in left:
                target = self._referred(part)
                if (target is None or ends(target)) and _may_end(part, ends):
                    ending.add(id(part))
            endless = [part for part in left if id(part) not in ending]
            if len(endless) == len(left):
                break
        else:
            return  # whoever knots so many circles finds out while the answer is written
        if endless:
            where = next((part for part in endless if "$ref" in part), endless[0])
            raise SchemaError(f"{places[id(where)]}: its $ref leads in a circle, so that no value would ever end")

    def _referred(self, part: Mapping[str, Any]) -> Schema | None:
        """What a part refers to; None: nothing, or nothing that is there."""
        reference = part.get("$ref")
        if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
            with contextlib.suppress(SchemaError):
                return self._at(reference, "")
        return None

    def standalone(self, schema: Schema, where: str) -> Schema:
        """A part of the document as the schema of a JSON parameter: what it refers to is put under its `$defs`.

        Raises SchemaError if a value or a name that is spelled out cannot stand in a parameter.
        """
        if isinstance(schema, bool):
            return schema
        self.check(schema, where)
        refers = anywhere(schema, lambda part: "$ref" in part)
        spelled = ("const", "enum", "properties", "required")
        parts = [schema, self.root] if refers else [schema]
        if any(anywhere(part, lambda part: any(_closes(part.get(key)) for key in spelled)) for part in parts):
            raise SchemaError(f"{where}: no value can hold the text {PARAMETER_END!r}, which ends a parameter")
        draft = self.root["$schema"] if isinstance(self.root, Mapping) and "$schema" in self.root else None
        own: Mapping[str, Any] = schema if draft is None else {"$schema": draft, **schema}
        if not refers:
            return own
        return {**_moved(own), "$defs": {"root": _moved(self.root)}}


def _without_definitions(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    return {key: value for key, value in schema.items() if key not in ("$defs", "definitions")}


def _may_end(part: Mapping[str, Any], ends: Callable[[Any], bool]) -> bool:
    """Whether some value of a part is finite, if the parts of which `ends` says so have finite values."""
    if "enum" in part or "const" in part:
        return True
    for key, enough in (("anyOf", any), ("oneOf", any), ("allOf", all)):
        if part.get(key) and not enough(map(ends, part[key])):
            return False
    if part.get("type") in ("object", ["object"]):
        properties, required = part.get("properties", {}), part.get("required", [])
        names = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
        return all(ends(properties.get(name)) for name in names)
    least = part.get("minItems", 0)
    if part.get("type") in ("array", ["array"]) and isinstance(least, int | float) and least > 0:
        first = part.get("prefixItems", part["items"] if isinstance(part.get("items"), list) else [])
        more = [part.get("items")] if least > len(first) and not isinstance(part.get("items"), list) else []
        return all(map(ends, [*first[: int(least)], *more]))
    return True


def _check_optional(part: Mapping[str, Any], where: str) -> None:
    properties, required = part.get("properties", {}), part.get("required", [])
    needed = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
    optional = len(properties.keys() - needed)
    if optional > MAX_OPTIONAL:
        raise SchemaError(
            f"{where} has {optional} properties that are not required, and at most {MAX_OPTIONAL} are supported"
        )


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
