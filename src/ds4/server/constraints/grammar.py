"""Grammars of answers, as text in llguidance's dialect of Lark.

The tags are those of the canonical form (see `ds4.chat.dsml_text`): the marker is the special token, everything around
it is ordinary text with one line break behind each tag. Parameters may come in any order, each at most once: models
choose their own, and what they were trained on beats the order in which somebody wrote a schema down. Only beyond
`MAX_ANY_ORDER` parameters the schema's order holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ds4.chat.dsml import parse
from ds4.chat.dsml_text import BLOCK_START, calls_text
from ds4.chat.json_text import dump_string
from ds4.chat.message import ToolCall
from ds4.chat.tags import MARK
from ds4.chat.tools import ToolSchema
from ds4.server.constraints.rendering import json_rule as rendered
from ds4.server.constraints.rules import AnswerRules, Schema, SchemaError, parameters
from ds4.server.constraints.schema import Document, merged
from ds4.server.constraints.strings import forms, literal, string_terminal

MAX_GRAMMAR = 1_000_000
"""Characters of a grammar: some hundred tools with long schemas need a tenth of it."""

OF_CONTENT = "the schema of the answer"
"""How errors call it."""

MAX_ANY_ORDER = 60
"""Parameters of a tool that may come in any order; the grammar remembers them in 64 bits."""

_OPEN = "parameters_any"
_ANY_NAME = r'/[^"<>&\r\n]{1,200}/'
_MAX_DEPTH = 32
_REFUSED = (
    "patternProperties", "propertyNames", "minProperties", "maxProperties", "dependentRequired", "dependentSchemas",
    "dependencies", "not", "if", "anyOf", "oneOf",
)  # fmt: skip


@dataclass(frozen=True)
class Part:
    """What one place of the schemas became.

    Attributes:
        where: the place, for errors.
        rule: the name of its rule.
        lines: the rule and what it needs.
    """

    where: str
    rule: str
    lines: Sequence[str]


class Parts:
    """The parts of a grammar, in their order."""

    def __init__(self) -> None:
        self.all: list[Part] = []
        self._size = 0

    def add(self, where: str, rule: str, lines: Sequence[str]) -> Sequence[str]:
        """Add a part; returns its lines. Raises SchemaError if that is too much."""
        self._size += sum(map(len, lines))
        if self._size > MAX_GRAMMAR:
            raise SchemaError("the schema is too large")
        self.all.append(Part(where, rule, lines))
        return lines


def grammar_of(parts: Sequence[Part]) -> str:
    """A grammar that is correct if each of these is."""
    lines = [line for part in parts for line in part.lines]
    return "\n".join([f"start: {' | '.join(part.rule for part in parts)}", *lines, ""])


def answer_grammar(rules: AnswerRules, dsml: int, end_think: int) -> tuple[str, Sequence[Part]]:
    """The grammar of the text behind the reasoning (of an optional block of calls: of the block alone).

    With it come its parts, to find out which of the schemas is to blame if the grammar does not work.

    Args:
        rules: what the answer has to be; they must be restrictive.
        dsml: the id of the marker token.
        end_think: the id of the token that ends the reasoning. It is a part of what follows where the server has closed
            the reasoning with white space behind it, and only there: a text has none before it.

    Raises:
        SchemaError: a schema cannot be enforced, or a name cannot be written.
    """
    starts, lines = [], list[str]()
    parts = Parts()
    tools = rules.callable
    if rules.calls == "required" and not tools:
        raise SchemaError("a tool call is required, but no tool may be called")
    if tools:
        starts.append("block")
        lines += _block(rules, tools, f"<[{dsml}]>", parts)
    if rules.content is not None and rules.calls != "required":
        if rules.either:
            starts = [*starts, *(f"<[{end_think}]> {start}" for start in starts), rf'<[{end_think}]> "\n\n" content']
        starts.append("content")
        try:
            document = Document(rules.content)
            document.check(document.root)
            document.check_ends()
            lines += parts.add(OF_CONTENT, "content", [f"content: {_json(document.root)}"])
        except SchemaError as error:
            raise SchemaError(f"{OF_CONTENT} cannot be enforced: {error}") from None
    return "\n".join([f"start: {' | '.join(starts)}", *lines, ""]), parts.all


def _json(schema: Schema) -> str:
    if schema is False:
        raise SchemaError("the schema allows no value at all")
    return rendered(schema)


# ---- calls ----------------------------------------------------------------------------------------------------------


def _block(rules: AnswerRules, tools: Sequence[ToolSchema], mark: str, parts: Parts) -> list[str]:
    calls = "call+" if rules.several else "call"
    lines = [
        rf'block: "\n\n<" {mark} "tool_calls>\n" {calls} "</" {mark} "tool_calls>"',
        "call: " + " | ".join(f"call_{i}" for i in range(len(tools))),
    ]
    free = False
    for i, tool in enumerate(tools):
        arguments, more = _OPEN, list[str]()
        if tool.name in rules.strict:
            arguments, more = strict_arguments(tool, mark, f"t{i}", rules.profile, parts)
        free = free or arguments == _OPEN
        head = literal(f'invoke name="{_written(tool.name, "tool", rules.profile)}">\n')
        lines += [rf'call_{i}: "<" {mark} {head} {arguments} "</" {mark} "invoke>\n"', *more]
    return lines + (_open_parameters(mark) if free else [])


def _open_parameters(mark: str) -> list[str]:
    """The parameters of a call whose arguments are free."""
    return [
        rf'{_OPEN}: "\n" | parameter_any*',
        "parameter_any: " + _parameter("NAME_ANY", "TEXT_ANY", "json_any", mark),
        f"NAME_ANY: {_ANY_NAME}",
        r"TEXT_ANY: /(?s:.*)<\//",
        f"json_any: {_json(True)}",
    ]


def _parameter(name: str, text: str | None, json_rule: str | None, mark: str) -> str:
    """A parameter: `name` is a Lark expression, `text` a terminal with the `</` behind it, `json_rule` a rule."""
    ways = []
    for flag, value in (("true", text), ("false", json_rule and rf'{json_rule} "</"')):
        if value is not None:
            string = literal(f'" string="{flag}">')
            ways.append(rf'"<" {mark} "parameter name=\"" {name} {string} {value} {mark} "parameter>\n"')
    return " | ".join(ways)


def _written(name: str, what: str, profile: str) -> str:
    """A name as it stands in a tag. Raises SchemaError if it would not be read back as it is."""
    if what == "tool":
        call = ToolCall(name, "{}")
        before, behind = f'\n\n{BLOCK_START}\n<{MARK}invoke name="', '">\n'
    else:
        call = ToolCall("f", "{" + dump_string(name) + ':""}')
        before, behind = f'\n\n{BLOCK_START}\n<{MARK}invoke name="f">\n<{MARK}parameter name="', '" string="true">'
    text = calls_text([call], profile)
    read = parse(text, thinking=False, tools=[call.name], profile=profile).tool_calls
    if [(one.name, one.arguments) for one in read] != [(call.name, call.arguments)] or not _is_utf8(name):
        raise SchemaError(f"the {what} name {name!r} cannot be written in a tool call; use letters, digits, _ and -")
    return text[len(before) : text.rindex(behind)]


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# ---- arguments by their schema --------------------------------------------------------------------------------------


def strict_arguments(tool: ToolSchema, mark: str, prefix: str, profile: str, parts: Parts) -> tuple[str, list[str]]:
    """The rule for the parameters of a strict tool, and the lines that define it; names begin with `prefix`.

    Its parts are added to `parts`. Raises SchemaError that names the tool and the property.
    """
    given = parameters(tool)
    if given is None:
        return _OPEN, []
    try:
        return _strict(given, mark, prefix, profile, parts, f"of the tool {tool.name!r}")
    except SchemaError as error:
        raise SchemaError(f"the arguments of the tool {tool.name!r} cannot be enforced: {error}") from None


def _strict(given: Schema, mark: str, prefix: str, profile: str, parts: Parts, of_tool: str) -> tuple[str, list[str]]:
    document = Document(given)
    schema = _object(document)
    properties: Mapping[str, Any] = schema.get("properties", {})
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise SchemaError("required must be a list of names")
    needed = frozenset(required)
    extra = schema.get("additionalProperties", False)
    described = {**dict.fromkeys(required, extra), **properties}

    lines: list[str] = []
    rules: list[tuple[str, bool]] = []
    for i, (name, part) in enumerate(described.items()):
        made = _property(f"property {name!r}", part, document, f"{prefix}_{i}", profile)
        if made is not None:
            text, json_rule, more = made
            rule = f"{prefix}_{i}"
            literal_name = literal(_written(name, "parameter", profile))
            more = [f"{rule}: {_parameter(literal_name, text, json_rule, mark)}", *more]
            lines += parts.add(f"the property {name!r} {of_tool}", rule, more)
            rules.append((rule, name in needed))
        elif name in needed:
            raise SchemaError(f"the required property {name!r} can have no value")
    others = None
    if extra is not False:
        made = _property("additionalProperties", extra, document, f"{prefix}_x", profile)
        if made is not None:
            text, json_rule, more = made
            others = f"{prefix}_x"
            more = [f"{others}: {_parameter(f'{prefix.upper()}_NAME', text, json_rule, mark)}", *more]
            more.append(f"{prefix.upper()}_NAME: {_other_names(described)}")
            lines += parts.add(f"additionalProperties {of_tool}", others, more)
    document.check_ends()
    return f"{prefix}_args", _parameters(rules, others, prefix) + lines


def _object(document: Document) -> Mapping[str, Any]:
    """The schema of the arguments as a whole: an object with properties."""
    schema = _flat(document.root, document)
    if schema.get("type", "object") not in ("object", ["object"]):
        raise SchemaError("they must be an object")
    for key in _REFUSED:
        if key in schema:
            raise SchemaError(f"{key!r} is not supported for the arguments as a whole")
    return schema


def _flat(schema: Schema, document: Document, depth: int = 0) -> Mapping[str, Any]:
    """The schema with what it refers to, and what all of its parts ask for, in one."""
    if depth > _MAX_DEPTH:
        raise SchemaError("its $ref leads in a circle")
    if not isinstance(schema, Mapping):
        raise SchemaError("they must be an object")
    parts = [document.target(schema["$ref"], "the arguments")] if "$ref" in schema else []
    parts += schema.get("allOf", [])
    flat = {key: value for key, value in schema.items() if key not in ("$ref", "allOf", "$defs", "definitions")}
    for part in parts:
        flat = merged(flat, _flat(part, document, depth + 1), "the arguments")
    return flat


def _property(
    where: str, schema: Schema, document: Document, name: str, profile: str
) -> tuple[str | None, str | None, list[str]] | None:
    """Terminal of the value as text, rule of the value as JSON, and their definitions; None: there is no value."""
    ways = forms(schema, document, where)
    text = json_rule = None
    lines = []
    if ways.strings:
        text = f"{name.upper()}_TEXT"
        terminals = dict.fromkeys(string_terminal(part, where, profile) for part in ways.strings)
        lines.append(f"{text}: {' | '.join(terminals)}")
    if ways.json is not None:
        json_rule = f"{name}_json"
        lines.append(f"{json_rule}: {_json(document.standalone(ways.json, where))}")
    return (text, json_rule, lines) if lines else None


def _other_names(names: Mapping[str, Any]) -> str:
    known = " | ".join(map(literal, names))
    return f"{_ANY_NAME} & ~({known})" if known else _ANY_NAME


def _parameters(rules: Sequence[tuple[str, bool]], others: str | None, prefix: str) -> list[str]:
    """The rule `<prefix>_args`: each parameter at most once, the required ones at least once."""
    needed = [i for i, (_, required) in enumerate(rules) if required]
    # A call without parameters has an empty line in the official form.
    empty = "" if needed else r' | "\n"'
    if not rules or len(rules) > MAX_ANY_ORDER:
        sequence = [rule if required else f"{rule}?" for rule, required in rules] + ([f"{others}*"] if others else [])
        sequence = sequence or ['""']
        return [f"{prefix}_args: {' '.join(sequence)}{empty}"]
    condition = ""
    for i in reversed(needed):
        condition = f"and(bit_set({i}), {condition})" if condition else f"bit_set({i})"
    ways = ['""' + (f" %if {condition}" if condition else "")]
    ways += [f"{rule} {prefix}_set::set_bit({i}) %if bit_clear({i})" for i, (rule, _) in enumerate(rules)]
    if others:
        ways.append(f"{others} {prefix}_set::_")
    return [f"{prefix}_args: {prefix}_set::0{empty}", f"{prefix}_set::_: {' | '.join(ways)}"]
