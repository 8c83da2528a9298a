"""Constrained answers: tool calls that have to come, arguments and content that follow a JSON schema."""

from ds4.server.constraints.constraint import Constraint, Enforcement
from ds4.server.constraints.grammars import Grammars
from ds4.server.constraints.rules import (
    ANY_OBJECT,
    AnswerRules,
    GrammarsBusyError,
    Schema,
    SchemaError,
    strict_names,
)

__all__ = [
    "ANY_OBJECT",
    "AnswerRules",
    "Constraint",
    "Enforcement",
    "Grammars",
    "GrammarsBusyError",
    "Schema",
    "SchemaError",
    "strict_names",
]
