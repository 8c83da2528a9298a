"""A schema as llguidance takes it, where that would accept what the schema forbids.

- Patterns are rewritten (see `patterns`), and without U+0000: of a class that holds all control characters it would
  let the escapes of quote and backslash through as well.
- Dates have days that exist, and mail addresses no more characters than they may.
- Where a name may be free beside declared ones, characters are not written by their number: a declared name in such
  a spelling would count as a free one.
- Numbers that have limits have at most 64 bits.
- A whole number that is excluded is moved away from the numbers that have its digits before the point.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ds4.server.constraints.patterns import whole
from ds4.server.constraints.rules import Schema, schema_text
from ds4.server.constraints.strings import FORMATS
from ds4.server.constraints.structure import CLOSED, COMBINERS, INERT, anywhere, inside
from ds4.server.constraints.wellformed import MOST, limits

# At most one blank, or a line break with indentation, where JSON has white space: a model that has begun to write
# white space may not find an end.
_STYLE = {"whitespace_pattern": r"\x20|\r?\n[\x20\t]{0,80}"}
_SHORT_ESCAPES = {"json_allowed_escapes": 'nrbtf\\"'}
_LABEL = r"[^@.\x00\[]{1,62}"
_NARROWED: Mapping[str, str] = MappingProxyType(
    {
        "date": FORMATS["date"],
        "date-time": FORMATS["date-time"],
        "email": rf'[^@"\x00]{{1,64}}@{_LABEL}(\.{_LABEL}){{0,3}}',
    }
)
_EXACT = 2**53
_GREATEST = float(MOST - 1024)
"""The greatest number of 64 bits that has no gap to 2**63 in floating point."""
_NO_LIMIT_BEYOND = 1e17
"""Of numbers beyond this a range has to have two ends."""
_NEAR = 1e-6


def json_rule(schema: Schema) -> str:
    """The rule of a grammar for JSON that follows a checked schema."""
    if not isinstance(schema, Mapping):
        return "%json " + schema_text({"x-guidance": _STYLE})
    style = {**_STYLE, **(_SHORT_ESCAPES if anywhere(schema, _names_are_free) else {})}
    return "%json " + schema_text({"x-guidance": style, **_rendered(schema, anywhere(schema, _is_combined))})


def _names_are_free(part: Mapping[str, Any]) -> bool:
    declared = not part.keys().isdisjoint(("properties", "patternProperties"))
    return declared and ("patternProperties" in part or part.get("additionalProperties", True) is not False)


def _is_combined(part: Mapping[str, Any]) -> bool:
    """Whether limits of a number may stand in more than one place."""
    return (not COMBINERS.isdisjoint(part) and not part.keys() <= COMBINERS | INERT) or "allOf" in part


def _rendered(schema: Schema, combined: bool) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    result = inside(schema, lambda part: _rendered(part, combined))
    result.pop(CLOSED, None)
    if "pattern" in result:
        result["pattern"] = _anchored(result["pattern"])
    if "patternProperties" in result:
        result["patternProperties"] = {_anchored(key): part for key, part in result["patternProperties"].items()}
    if result.get("format") in _NARROWED:
        pattern = f"^(?:{_NARROWED[result['format']]})$"
        more = {"allOf": [*result.get("allOf", ()), {"pattern": pattern}]}
        result |= more if "pattern" in result else {"pattern": pattern}
    return _with_limits(result, combined)


def _anchored(pattern: str) -> str:
    return f"^(?:{whole(pattern, '', nul=False)})$"


# ---- limits of numbers ----------------------------------------------------------------------------------------------


def _with_limits(schema: dict[str, Any], combined: bool) -> dict[str, Any]:
    types = schema.get("type")
    whole_only = types == "integer" or (isinstance(types, list) and "integer" in types and "number" not in types)
    (low, low_open), (high, high_open) = limits(schema)
    before = low, low_open, high, high_open
    if -_GREATEST > low > -math.inf or high < -_NO_LIMIT_BEYOND:
        low, low_open = max(low, -_GREATEST), low_open and low >= -_GREATEST
    if _GREATEST < high < math.inf or low > _NO_LIMIT_BEYOND:
        high, high_open = min(high, _GREATEST), high_open and high <= _GREATEST
    if whole_only:
        low, low_open = _large(low, low_open, 1)
        high, high_open = _large(high, high_open, -1)
    else:
        low, low_open = _representable(low, low_open, 1)
        high, high_open = _representable(high, high_open, -1)
        # Elsewhere there may be a limit close to this one.
        span = math.inf if not combined else _NEAR
        if low_open and low >= 0:
            low, low_open = _moved(low, min(span, high - low), 1)
        if high_open and high <= 0:
            high, high_open = _moved(high, min(span, high - low), -1)
    if before == (low, low_open, high, high_open):
        return schema
    keys = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
    rest = {key: value for key, value in schema.items() if key not in keys}
    for names, value, is_open in ((keys[:2], low, low_open), (keys[2:], high, high_open)):
        if value not in (math.inf, -math.inf):
            # In digits, since llguidance reads exponents with an error in the last place.
            rest[names[is_open]] = int(value) if value % 1 == 0 else value
    return rest


def _moved(limit: float, span: float, sign: int) -> tuple[float, bool]:
    """An excluded limit, or one that is not, by a millionth of the span inside it, if all of that has its digits."""
    if span >= 1 or span <= 0 or limit % 1 or abs(limit) >= _EXACT:
        return limit, True
    near = limit + sign * 10.0 ** math.floor(math.log10(span * _NEAR))
    return near if near != limit else math.nextafter(limit, sign * math.inf), False


def _large(limit: float, is_open: bool, sign: int) -> tuple[float, bool]:
    """A limit of whole numbers, inside it where numbers in floating point have gaps."""
    if abs(limit) < _EXACT or limit in (math.inf, -math.inf):
        return limit, is_open
    exact = math.floor(limit) + (sign if is_open else 0)
    near = float(exact)
    if sign * near < sign * exact:
        near = math.nextafter(near, sign * math.inf)
    return near, False


def _representable(limit: float, is_open: bool, sign: int) -> tuple[float, bool]:
    """A limit as a number in floating point that excludes at least as much."""
    near, _ = _large(limit, False, sign)
    return near, is_open and near == limit
