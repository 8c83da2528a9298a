"""Constrained answers: tool calls that have to come, arguments and content that follow a JSON schema."""

from ds4.server.constraints.constraint import Constraint, Grammars
from ds4.server.constraints.rules import ANY_OBJECT, AnswerRules, Schema, SchemaError, strict_names

__all__ = ["ANY_OBJECT", "AnswerRules", "Constraint", "Grammars", "Schema", "SchemaError", "strict_names"]
