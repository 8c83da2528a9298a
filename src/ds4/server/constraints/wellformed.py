"""Keywords of a schema whose values make no sense, named by their place before a grammar is made of them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from llguidance import LLMatcher

from ds4.server.constraints.patterns import whole
from ds4.server.constraints.rules import SchemaError

TYPES = ("string", "number", "integer", "boolean", "null", "object", "array")
"""`integer` is part of `number`."""

_COUNTS = (("minLength", "maxLength"), ("minItems", "maxItems"), ("minProperties", "maxProperties"))
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
MOST = 2**63
"""Numbers with a limit are below this, and above its negative."""

_LEAST = 1e-100


def types_of(schema: Mapping[str, Any], where: str) -> tuple[str, ...] | None:
    """The types that a schema names, or None. Raises SchemaError for one that there is not."""
    value = schema.get("type")
    if value is None:
        return None
    types = [value] if isinstance(value, str) else value
    if not isinstance(types, list) or any(kind not in TYPES for kind in types):
        raise SchemaError(f"{where}: type cannot be {value!r}; use {', '.join(TYPES)}, or a list of these")
    return tuple(types)


def values_of(schema: Mapping[str, Any], where: str) -> list[Any] | None:
    """The values that a schema lists by `enum`, or None. Raises SchemaError if these are none."""
    if "enum" not in schema:
        return None
    values = schema["enum"]
    if not isinstance(values, list):
        raise SchemaError(f"{where}: enum must be a list of values")
    if not values:
        raise SchemaError(f"{where}: enum lists no value, so that none is allowed")
    return values


def check_keywords(schema: Mapping[str, Any], where: str) -> None:
    """Raises SchemaError that begins with `where` for a keyword of a schema (not of those inside it) that is wrong."""
    types = types_of(schema, where)
    values_of(schema, where)
    for least, most in _COUNTS:
        check_counts(schema, least, most, where)
    for key in _NUMBERS:
        value = schema.get(key, 0)
        old = isinstance(value, bool) and key.startswith("exclusive")
        if not old and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise SchemaError(f"{where}: {key} is {value!r}; it must be a number")
    if types is None or "number" in types or "integer" in types:
        _check_limits(schema, where)
    if schema.get("multipleOf", 1) <= 0:
        raise SchemaError(f"{where}: multipleOf is {schema['multipleOf']}; it must be more than 0")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise SchemaError(f"{where}: required must be a list of names")
    _check_patterns(schema, where)
    if "$ref" in schema:
        check_reference(schema["$ref"], where)


def check_reference(reference: Any, where: str) -> None:
    """Raises SchemaError for a `$ref` to elsewhere."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        raise SchemaError(f"{where}: $ref {reference!r} does not point into the same schema; use $defs for it")


def check_counts(schema: Mapping[str, Any], least: str, most: str, where: str) -> None:
    """Raises SchemaError for numbers of something that are none, or that leave none."""
    for key in (least, most):
        value = schema.get(key, 0)
        if not isinstance(value, int | float) or isinstance(value, bool) or value < 0 or value % 1 != 0:
            raise SchemaError(f"{where}: {key} is {value!r}; it must be a whole number")
    if schema.get(most, math.inf) < schema.get(least, 0):
        raise SchemaError(f"{where}: {most} {schema[most]} is less than {least} {schema[least]}")


def limits(schema: Mapping[str, Any]) -> tuple[tuple[float, bool], tuple[float, bool]]:
    """The least and the greatest number of a schema, each with whether it is itself excluded; infinite: there is none.

    In the fourth draft `exclusiveMinimum` is a boolean about `minimum`.
    """
    found = []
    for key, exclusive, sign in (("minimum", "exclusiveMinimum", 1), ("maximum", "exclusiveMaximum", -1)):
        bound, is_open = -math.inf, False
        if _is_number(limit := schema.get(key)):
            bound, is_open = sign * limit, schema.get(exclusive) is True
        if _is_number(other := schema.get(exclusive)) and sign * other >= bound:
            bound, is_open = sign * other, True
        found.append((sign * bound, is_open))
    return found[0], found[1]


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_limits(schema: Mapping[str, Any], where: str) -> None:
    (low, _), (high, _) = limits(schema)
    if low >= MOST or high <= -MOST:
        value = low if low >= MOST else high
        raise SchemaError(f"{where}: no number of 64 bits is beyond the limit {value}; others are not supported")
    for value in (low, high):
        if 0 < abs(value) < _LEAST:
            raise SchemaError(f"{where}: the limit {value} is nearer to 0 than {_LEAST}, which is not supported")
    if low > high:
        raise SchemaError(f"{where}: the least number {low} is more than the greatest one {high}")


def _check_patterns(schema: Mapping[str, Any], where: str) -> None:
    if "pattern" in schema:
        whole(schema["pattern"], where, nul=False)
    written: dict[str, str] = {}
    for pattern in schema.get("patternProperties", ()):
        regex = f"^(?:{whole(pattern, f'{where}: patternProperties', nul=False)})$"
        if regex in written:
            raise _overlap(where, [written[regex], pattern])
        written[regex] = pattern
    if len(written) > 1:
        alone = json.dumps({"type": "object", "patternProperties": dict.fromkeys(written, True)})
        if "disjoint" in LLMatcher.validate_grammar(f"start: %json {alone}"):
            raise _overlap(where, list(written.values()))


def _overlap(where: str, patterns: Sequence[str]) -> SchemaError:
    shown = ", ".join(repr(pattern[:100]) for pattern in patterns[:5])
    return SchemaError(f"{where}: patternProperties that may hold for the same name are not supported: {shown}")
