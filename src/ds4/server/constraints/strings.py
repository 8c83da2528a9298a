"""The two ways to write a value: strings as raw text, everything else as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from llguidance import regex_to_lark

from ds4.chat.tags import ESCAPED_PARAMETER_END, PARAMETER_END
from ds4.server.constraints.patterns import whole
from ds4.server.constraints.rules import Schema, SchemaError
from ds4.server.constraints.schema import Document, merged
from ds4.server.constraints.wellformed import TYPES, check_counts, types_of, values_of

_MAX_DEPTH = 32
_STRING = frozenset({"pattern", "minLength", "maxLength", "format"})
_OTHERS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "object": frozenset(
            {"properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties"}
        ),
        "array": frozenset({"items", "prefixItems", "minItems", "maxItems", "additionalItems"}),
        "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
    }
)
# Keywords that could forbid a string in a way that is not handled here.
_UNSUPPORTED = frozenset(
    {"not", "if", "then", "else", "$dynamicRef", "$recursiveRef", "dependentSchemas", "unevaluatedProperties"}
)

# Of the years that 4 divides, those that 100 divides only if 400 does.
_LEAP_YEAR = r"([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26]|00)00)"
_DATE = (
    r"([0-9]{4}-((0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])|(0[13-9]|1[0-2])-(29|30)|(0[13578]|1[02])-31)"
    rf"|{_LEAP_YEAR}-02-29)"
)
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_OCTET = r"(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_GROUP = r"[0-9A-Fa-f]{1,4}"
_URI_TEXT = r"([A-Za-z0-9._~!$&'()*+,;=:@/-]|%[0-9A-Fa-f]{2})*"
# What a string of a format looks like. Every match is valid; a few rare valid strings do not match (addresses in
# unusual spellings).
FORMATS: Mapping[str, str] = MappingProxyType(
    {
        "date": _DATE,
        "time": _TIME,
        "date-time": f"{_DATE}T{_TIME}",
        "duration": r"P([0-9]+W|[0-9]+D(T[0-9]+[HMS])?|[0-9]+Y([0-9]+M([0-9]+D)?)?|[0-9]+M([0-9]+D)?"
        r"|T([0-9]+H([0-9]+M([0-9]+S)?)?|[0-9]+M([0-9]+S)?|[0-9]+S))",
        "email": rf"[A-Za-z0-9_+-]{{1,20}}(\.[A-Za-z0-9_+-]{{1,20}}){{0,2}}@{_LABEL}(\.{_LABEL}){{1,2}}",
        "hostname": rf"{_LABEL}(\.{_LABEL}){{0,2}}",
        "ipv4": rf"{_OCTET}(\.{_OCTET}){{3}}",
        "ipv6": "|".join(
            [
                rf"({_GROUP}:){{7}}{_GROUP}|({_GROUP}:){{1,7}}:|:(:{_GROUP}){{1,7}}|::",
                *(rf"({_GROUP}:){{1,{7 - i}}}(:{_GROUP}){{1,{i}}}" for i in range(1, 7)),
            ]
        ),
        "uuid": r"[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
        "uri": rf"[A-Za-z][A-Za-z0-9+.-]{{0,20}}:(//{_LABEL}(\.{_LABEL}){{0,4}}(:[0-9]{{1,4}})?(/{_URI_TEXT})?"
        rf"(\?{_URI_TEXT})?(#{_URI_TEXT})?|[A-Za-z0-9]{_URI_TEXT})",
    }
)


@dataclass
class Forms:
    """The ways in which a value may be written.

    Attributes:
        strings: schemas of the strings among the values; a string has to follow one of them.
        others: schemas of everything else.
        exclusive: a value may follow only one of them.
    """

    strings: list[Mapping[str, Any]] = field(default_factory=list)
    others: list[Schema] = field(default_factory=list)
    exclusive: bool = False

    @property
    def json(self) -> Schema | None:
        """The schema of the values that are not strings, or None if there are none."""
        if not self.others:
            return None
        return self.others[0] if len(self.others) == 1 else {"oneOf" if self.exclusive else "anyOf": self.others}


def forms(schema: Schema, document: Document, where: str, depth: int = 0) -> Forms:
    """Tells apart the strings and the other values of a schema, which is part of a document.

    Raises SchemaError that begins with `where`.
    """
    if schema is False:
        return Forms()
    if schema is True or not schema:
        return Forms([{}], [{"type": ["number", "boolean", "null", "object", "array"]}])
    if isinstance(schema, bool):
        raise TypeError("a schema is an object, True or False")
    types = types_of(schema, where)
    if types is None and _STRING.isdisjoint(schema) and (meant := _meant(schema)):
        schema, types = {**schema, "type": meant}, tuple(meant)
    if types is not None and "string" not in types:
        return Forms([], [schema])
    if "$ref" in schema:
        if depth >= _MAX_DEPTH:
            raise SchemaError(f"{where}: its $ref leads in a circle")
        rest = {key: value for key, value in schema.items() if key not in ("$ref", "$defs", "definitions")}
        found = document.target(schema["$ref"], where)
        if rest:
            found = merged(rest, found if isinstance(found, Mapping) else {}, where)
        return forms(found, document, where, depth + 1)
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            return _combined(schema, key, document, where, depth + 1)
    for key in ("enum", "const"):
        if key in schema:
            return _listed(schema, key, types, where)
    return _typed(schema, types, where)


def _meant(schema: Mapping[str, Any]) -> list[str]:
    """The types whose keywords a schema has: one that names no type means those."""
    return [kind for kind, keywords in _OTHERS.items() if not keywords.isdisjoint(schema)]


def _excludes_strings(part: Any, document: Document, where: str) -> bool:
    """Whether no string can follow a part, as far as its own keywords say."""
    for _ in range(_MAX_DEPTH):
        if not isinstance(part, Mapping) or "$ref" not in part:
            break
        part = document.target(part["$ref"], where)
    if not isinstance(part, Mapping):
        return part is False
    types = types_of(part, where)
    if types is None and _STRING.isdisjoint(part):
        types = tuple(_meant(part)) or None
    return types is not None and "string" not in types


def _combined(schema: Mapping[str, Any], key: str, document: Document, where: str, depth: int) -> Forms:
    if depth >= _MAX_DEPTH:
        raise SchemaError(f"{where}: {key} is nested too deeply")
    beside = {name: value for name, value in schema.items() if name not in (key, "$defs", "definitions")}
    if key == "allOf":
        if any(_excludes_strings(part, document, where) for part in (beside, *schema[key])):
            return Forms([], [schema])  # JSON, whose grammar combines more than is combined here
        whole = beside
        for part in schema[key]:
            if isinstance(part, Mapping) and "$ref" in part and len(part) == 1:
                part = document.target(part["$ref"], where)
            whole = merged(whole, part if isinstance(part, Mapping) else {}, where)
        return forms(whole, document, where, depth)
    found = Forms(exclusive=key == "oneOf")
    for part in schema[key]:
        if part is False:
            continue
        one = forms(merged(beside, part, where) if isinstance(part, Mapping) else beside, document, where, depth)
        found.strings += one.strings
        if one.json is not None:
            found.others.append(one.json)
    if key == "oneOf" and len(found.strings) > 1:
        words = [word for part in found.strings for word in part.get("enum", [None, None])]
        if len(set(words)) < len(words):
            raise SchemaError(f"{where}: oneOf has alternatives that may hold for the same string; use anyOf")
    return found


def _listed(schema: Mapping[str, Any], key: str, types: tuple[str, ...] | None, where: str) -> Forms:
    values = values_of(schema, where) if key == "enum" else [schema[key]]
    values = values or []
    words = [value for value in values if isinstance(value, str)]
    others = [value for value in values if not isinstance(value, str)]
    found = Forms()
    if words:
        beside = {name: value for name, value in schema.items() if name in _STRING or name in _UNSUPPORTED}
        found.strings.append({**beside, "enum": words})
    if others and (types is None or set(types) != {"string"}):
        rest = {name: value for name, value in schema.items() if name not in ("enum", "const")}
        if types is not None:
            rest["type"] = [kind for kind in types if kind != "string"]
        found.others.append({**rest, "enum": others})
    return found


def _typed(schema: Mapping[str, Any], types: tuple[str, ...] | None, where: str) -> Forms:
    found = Forms()
    if types is None:
        strings = [] if _STRING.isdisjoint(schema) else ["string"]
        types = tuple(_meant(schema) + strings) or TYPES
    if "string" in types:
        found.strings.append({key: value for key, value in schema.items() if key in _STRING or key in _UNSUPPORTED})
    others = [kind for kind in types if kind != "string"]
    if others:
        rest = {key: value for key, value in schema.items() if key not in _STRING}
        found.others.append({**rest, "type": others[0] if len(others) == 1 else others})
    return found


# ---- strings as terminals of a grammar ------------------------------------------------------------------------------


def string_terminal(schema: Mapping[str, Any], where: str, profile: str) -> str:
    """A Lark expression for a string of this schema and the `</` behind it.

    The `</` belongs to it because a terminal is as long as it can be: a free string would take the `</` itself.
    Raises SchemaError.
    """
    unsupported = sorted(_UNSUPPORTED & schema.keys())
    if unsupported:
        raise SchemaError(f"{where}: {unsupported[0]!r} is not supported for strings")
    parts = []
    if "enum" in schema:
        parts.append("(" + " | ".join(literal(_word(word, where, profile)) for word in schema["enum"]) + ")")
    if "pattern" in schema:
        parts.append(f"/(?:{whole(schema['pattern'], where)})/")
    if "minLength" in schema or "maxLength" in schema:
        parts.append(_length(schema, where))
    if "format" in schema:
        parts.append(f"/{regex_to_lark(FORMATS[schema['format']])}/")
    if not parts:
        return r"/(?s:.*)<\//"
    if profile == "ds4" and "enum" not in schema:
        # What it is read as would not be what was matched.
        escape = ESCAPED_PARAMETER_END.replace("/", r"\/")
        parts.append(f"~/(?s:.*){escape}(?s:.*)/")
    return f'({" & ".join(parts)}) "</"'


def literal(text: str) -> str:
    """A text as a Lark string."""
    return json.dumps(text, ensure_ascii=False)


def _word(word: str, where: str, profile: str) -> str:
    if PARAMETER_END in word and profile != "ds4":
        raise SchemaError(f"{where}: no value can have the text {PARAMETER_END!r}, which ends a parameter")
    return word.replace(PARAMETER_END, ESCAPED_PARAMETER_END)


def _length(schema: Mapping[str, Any], where: str) -> str:
    shortest, longest = schema.get("minLength", 0), schema.get("maxLength")
    check_counts(schema, "minLength", "maxLength", where)
    return f"/(?s:.){{{int(shortest)},{'' if longest is None else int(longest)}}}/"
