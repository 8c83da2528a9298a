"""What tests of constrained answers share: tools, texts, and a run of a text through a constraint."""

from __future__ import annotations

import functools
import json
from typing import Any

import torch

from ds4.chat.dsml_text import write_calls
from ds4.chat.message import ToolCall
from ds4.chat.rendered import Rendered, Writer
from ds4.chat.tools import ToolSchema, tool_schemas
from ds4.server.constraints import AnswerRules, Constraint, Grammars, SchemaError
from tests.server.server_harness import tokenizer

MARK = "｜DSML｜"
PARAMETER_END = f"</{MARK}parameter>"
TOKENS = tokenizer()


@functools.cache
def grammars() -> Grammars:
    return Grammars(TOKENS)


def tools_of(**tools: Any) -> tuple[ToolSchema, ...]:
    """Tools by name, each with the schema of its arguments."""
    functions = [{"name": name, "parameters": schema} for name, schema in tools.items()]
    return tool_schemas([{"type": "function", "function": function} for function in functions])


def schema_of(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}


def begin(rules: AnswerRules, thinking: bool = False, of: Grammars | None = None) -> Constraint | None:
    """The constraint of one answer, if there is one; waits for its grammar."""
    made = (of or grammars()).submit(rules)
    return None if made is None else made.result().begin(thinking)


def constraint_of(rules: AnswerRules, thinking: bool = False) -> Constraint:
    made = begin(rules, thinking)
    assert made is not None
    return made


def refusal_of(rules: AnswerRules) -> str:
    """Why the rules cannot be enforced; empty if they can."""
    try:
        constraint_of(rules)
    except SchemaError as error:
        return str(error)
    return ""


def in_mask(mask: torch.Tensor | None, token: int) -> bool:
    return mask is None or bool(int(mask[token // 32]) >> token % 32 & 1)


def follow(constraint: Constraint, text: str) -> str:
    """`complete` if the constraint takes the text as an answer, `open` if as the begin of one, `refused` if not.

    Text is control text, in which special tokens count, where it is not marked as a client's.
    """
    masked = False
    for token in TOKENS.encode_chat(text):
        allowed = in_mask(constraint.mask(), token)
        masked = masked or not allowed
        assert constraint.allows(token) >= allowed
        if not constraint.advance(token):
            assert not allowed
            return "refused"
    assert in_mask(constraint.mask(), TOKENS.eos) == constraint.allows(TOKENS.eos)
    if not constraint.allows(TOKENS.eos):
        return "open"
    # Where only one text can follow, the masks have its usual tokens only; those of a whole answer are usual ones.
    assert not masked
    return "complete"


def block(*calls: tuple[str, Any], profile: str = "official") -> Rendered:
    """Calls in canonical form; what their values hold is plain text."""
    writer = Writer()
    write_calls(writer, [ToolCall(name, json.dumps(arguments)) for name, arguments in calls], profile)
    return writer.finish()


def plain(text: str) -> Rendered:
    """Text in which no special token counts."""
    return Rendered(text, ((0, len(text)),))


def takes(rules: AnswerRules, text: str, thinking: bool = False) -> bool:
    """Whether a text is a whole answer; one that is only begun must not occur."""
    outcome = follow(constraint_of(rules, thinking), text)
    assert outcome != "open"
    return outcome == "complete"


def takes_arguments(schema: Any, arguments: Any) -> bool:
    """Whether a strict tool may be called so."""
    tools = tools_of(f=schema)
    return takes(AnswerRules("required", tools, strict=frozenset("f")), block(("f", arguments)))
