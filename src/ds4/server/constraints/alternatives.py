"""Whether alternatives of a `oneOf` exclude one another: then `anyOf` says the same, which a grammar can do."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ds4.server.constraints.rules import Schema
from ds4.server.constraints.structure import CLOSED, inside
from ds4.server.constraints.wellformed import TYPES, limits

Resolve = Callable[[Mapping[str, Any]], "Schema | None"]
"""What a schema's `$ref` points to; None if it has none, or none that can be followed."""

_MAX_STEPS = 20_000
_MAX_DEPTH = 24
_KINDS = frozenset(TYPES) - {"integer"}
_COUNTS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "string": ("minLength", "maxLength"),
        "array": ("minItems", "maxItems"),
        "object": ("minProperties", "maxProperties"),
    }
)


def not_apart(schema: Mapping[str, Any], resolve: Resolve) -> tuple[int, int] | None:
    """The first two alternatives of a `oneOf` that may hold for the same value, as far as anybody can tell, or None."""
    types = {"type": schema["type"]} if "type" in schema else {}
    # What stands beside the alternatives holds for all of them.
    ways = [{**types, **way} if isinstance(way, Mapping) else way for way in schema["oneOf"]]
    if _all_listed(ways) or _told_by_a_property(ways, resolve):
        return None
    judge = _Judge(resolve)
    for (i, first), (j, second) in itertools.combinations(enumerate(ways), 2):
        if not judge.apart(first, second):
            return i, j
    return None


def told_apart(schema: Schema, resolve: Resolve) -> Schema:
    """A cleaned schema with `anyOf` for each `oneOf` whose alternatives exclude one another."""
    if not isinstance(schema, Mapping):
        return schema
    same = inside(schema, lambda part: told_apart(part, resolve))
    if isinstance(schema.get("oneOf"), list) and not not_apart(schema, resolve):
        ways = same.pop("oneOf")
        same |= {"allOf": [*same.get("allOf", ()), {"anyOf": ways}]} if "anyOf" in same else {"anyOf": ways}
    return same


def _all_listed(ways: Sequence[Any]) -> bool:
    """Whether all alternatives list their values, each another one."""
    values: list[Any] = []
    for way in ways:
        listed = _listed(way) if isinstance(way, Mapping) else None
        if listed is None:
            return False
        values += listed
    return len({*map(_key, values)}) == len(values)


def _told_by_a_property(ways: Sequence[Any], resolve: Resolve) -> bool:
    """Whether all alternatives are objects and list other values of a property that all of them require."""
    found: list[dict[str, Sequence[Any]]] = []
    for way in ways:
        target = resolve(way) if isinstance(way, Mapping) else None
        way = way if target is None else target
        properties = way.get("properties") if isinstance(way, Mapping) else None
        if not isinstance(way, Mapping) or way.get("type") != "object" or not isinstance(properties, Mapping):
            return False
        parts = {name: properties[name] for name in _names(way.get("required")) if name in properties}
        words = {name: _listed(part) for name, part in parts.items() if isinstance(part, Mapping)}
        found.append({name: values for name, values in words.items() if values is not None})
    shared = set.intersection(*map(set, found)) if found else set()
    return any(
        len({_key(v) for words in found for v in words[name]}) == sum(len(words[name]) for words in found)
        for name in shared
    )


@dataclass(frozen=True)
class _Part:
    """A schema on one of the two sides.

    Attributes:
        as_written: objects are open where the schema does not say that they are closed. What is written for one
            alternative has no undeclared properties; whether it satisfies another one as well does not depend on that.
    """

    schema: Any
    as_written: bool

    def of(self, schema: Any) -> _Part:
        """A schema that this one holds."""
        return _Part(schema, self.as_written)

    def property(self, name: str) -> _Part:
        """What is demanded of a property."""
        properties = self.schema.get("properties")
        if isinstance(properties, Mapping) and name in properties:
            return self.of(properties[name])
        unknown = "patternProperties" in self.schema or (self.as_written and CLOSED in self.schema)
        return self.of(True if unknown else self.schema.get("additionalProperties", True))


class _Judge:
    """Tells whether two schemas exclude one another, at a limited cost."""

    def __init__(self, resolve: Resolve) -> None:
        self._resolve = resolve
        self._steps = 0

    def apart(self, first: Any, second: Any) -> bool:
        """Whether no value that is written for one of the schemas satisfies the other; False also if nobody knows."""
        return all(self._disjoint(_Part(first, open_), _Part(second, not open_), 0) for open_ in (False, True))

    def _disjoint(self, first: _Part, second: _Part, depth: int) -> bool:
        if first.schema is False or second.schema is False:
            return True
        self._steps += 1
        if not isinstance(first.schema, Mapping) or not isinstance(second.schema, Mapping):
            return False
        if depth > _MAX_DEPTH or self._steps > _MAX_STEPS:
            return False
        for one, other in ((first, second), (second, first)):
            for ways in self._demands(one.schema):
                if all(self._disjoint(one.of(way), other, depth + 1) for way in ways):
                    return True
        return self._plainly(first, second, depth)

    def _demands(self, schema: Mapping[str, Any]) -> list[Sequence[Any]]:
        """What a value has to satisfy besides the keywords of a schema itself: of each list one."""
        target = self._resolve(schema)
        found: list[Sequence[Any]] = [] if target is None else [[target]]
        found += [[part] for part in schema.get("allOf", ())]
        return found + [schema[key] for key in ("anyOf", "oneOf") if schema.get(key)]

    def _plainly(self, first: _Part, second: _Part, depth: int) -> bool:
        values, others = _listed(first.schema), _listed(second.schema)
        if values is not None and others is not None:
            return {*map(_key, values)}.isdisjoint(map(_key, others))
        if values is not None or others is not None:
            bare = second.schema if values is not None else first.schema
            return all(not _kind(value) & _kinds(bare) or _outside(value, bare) for value in values or others or ())
        kinds = _kinds(first.schema) & _kinds(second.schema)
        return all(self._apart(kind, first, second, depth) for kind in kinds)

    def _apart(self, kind: str, first: _Part, second: _Part, depth: int) -> bool:
        if kind == "number":
            return _beyond(limits(first.schema), limits(second.schema))
        if kind in _COUNTS and _beyond(_counts(first.schema, *_COUNTS[kind]), _counts(second.schema, *_COUNTS[kind])):
            return True
        if kind != "object":
            return False
        needed = {name for part in (first, second) for name in _names(part.schema.get("required"))}
        return any(self._disjoint(first.property(name), second.property(name), depth + 1) for name in sorted(needed))


def _listed(schema: Mapping[str, Any]) -> Sequence[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _key(value: Any) -> str:
    """The same for equal JSON values: 1 and 1.0 are, 1 and true are not."""

    def plain(item: Any) -> Any:
        if isinstance(item, float) and item.is_integer():
            return int(item)
        if isinstance(item, Mapping):
            return {key: plain(inner) for key, inner in item.items()}
        return [plain(inner) for inner in item] if isinstance(item, list) else item

    return json.dumps(plain(value), sort_keys=True)


def _kind(value: Any) -> frozenset[str]:
    for types, name in (
        (bool, "boolean"), (int | float, "number"), (str, "string"), (list, "array"), (Mapping, "object"),
    ):  # fmt: skip
        if isinstance(value, types):
            return frozenset({name})
    return frozenset({"null"})


def _kinds(schema: Mapping[str, Any]) -> frozenset[str]:
    types = schema.get("type")
    names = [types] if isinstance(types, str) else types
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return _KINDS
    return frozenset("number" if name == "integer" else name for name in names)


def _outside(value: Any, schema: Mapping[str, Any]) -> bool:
    """Whether a value breaks the limits of a schema of its kind."""
    if isinstance(value, str):
        return _beyond(((len(value), False), (len(value), False)), _counts(schema, "minLength", "maxLength"))
    if isinstance(value, int | float) and not isinstance(value, bool):
        whole = schema.get("type") in ("integer", ["integer"]) and value % 1 != 0
        return whole or _beyond(((value, False), (value, False)), limits(schema))
    return False


Limits = tuple[tuple[float, bool], tuple[float, bool]]
"""The least and the greatest value, each with whether it is itself excluded."""


def _beyond(first: Limits, second: Limits) -> bool:
    """Whether one range ends before the other one begins."""
    for (_, (high, high_open)), ((low, low_open), _) in ((first, second), (second, first)):
        if high < low or (high == low and (high_open or low_open)):
            return True
    return False


def _counts(schema: Mapping[str, Any], least: str, most: str) -> Limits:
    low, high = schema.get(least, 0), schema.get(most, math.inf)
    known = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (low, high))
    return ((low, False), (high, False)) if known else ((0, False), (math.inf, False))


def _names(value: Any) -> list[str]:
    return value if isinstance(value, list) and all(isinstance(name, str) for name in value) else []
