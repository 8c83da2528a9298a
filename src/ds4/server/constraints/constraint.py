"""Constraints while an answer is sampled: which tokens may come next.

A constraint reads tokens, not text: reasoning up to `</think>`, then either free text up to `<｜DSML｜` or the grammar
at once. Only inside the grammar a mask is computed; everywhere else at most a handful of tokens is forbidden.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from enum import Enum

import numpy as np
import torch
from llguidance import LLMatcher
from torch import Tensor

from ds4.server.constraints.rules import AnswerRules, SchemaError
from ds4.server.constraints.spelling import Spelling
from ds4.server.constraints.vocabulary import Vocabulary, plain_error

_THINK = b"<think>"
# Behind this the marker token would make a tag that is not spelled as it should be.
_MISSPELT = re.compile(b"<(?:\\||%s){1,2}\\Z" % "｜".encode())
_TAIL = 8


class Enforcement:
    """Rules with their compiled grammar. Each answer gets a constraint of its own from it."""

    def __init__(self, vocabulary: Vocabulary, template: LLMatcher | None, rules: AnswerRules) -> None:
        """`template`: at the start of the rules' grammar, and staying there; None: no tool may be called."""
        self._vocabulary, self._template, self._rules = vocabulary, template, rules

    def begin(self, thinking: bool) -> Constraint:
        """The constraint of an answer; `thinking`: it begins inside the reasoning. Takes 0.1 to 5 ms."""
        return Constraint(self._vocabulary, self._template, self._rules, thinking)


class _Phase(Enum):
    REASONING = 0
    FREE = 1  # text that may become a block
    GRAMMAR = 2
    OFF = 3


class Constraint:
    """Says of one answer, token by token, what may come next."""

    def __init__(self, vocabulary: Vocabulary, template: LLMatcher | None, rules: AnswerRules, thinking: bool) -> None:
        """`template`: at the start of the rules' grammar, and staying there; None: no tool may be called."""
        self._vocabulary, self._template, self._rules = vocabulary, template, rules
        self._matcher = None if template is None else template.deep_copy()
        self._words = np.zeros(vocabulary.words, np.int32)
        self._masked = False  # the words are the mask of the grammar's present place
        self._recovered = False
        self._start: bytes | None = None if thinking else b""  # all of the text, as long as it may be `<think>`
        self._tail = b""  # the end of the text since the last special token
        if thinking:
            self._enter(_Phase.REASONING)
        else:
            self._behind_reasoning()

    def mask(self, forbidden: Collection[int] = ()) -> Tensor | None:
        """The tokens that may come next, or None if all may.

        Args:
            forbidden: tokens that must not come for reasons of the caller's.

        Returns:
            int32 [ceil(vocab / 32)]: bit i of word w stands for token 32 w + i. It is valid until the next call.

        Raises:
            SchemaError: the schema leads to a place where nothing can follow, or costs too much there.
        """
        if self._phase is _Phase.GRAMMAR and self._matcher is not None:
            self._matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
            if self._matcher.is_error():
                raise _stuck(plain_error(self._matcher))
            self._masked = True
        elif self._forbidden or forbidden:
            self._words.fill(-1)
        else:
            return None
        bits = self._words.view(np.uint8)
        for token in self._forbidden.union(forbidden):
            bits[token >> 3] &= 0xFF ^ (1 << (token & 7))
        if not self._words.any():
            raise _stuck("nothing is allowed here")
        return torch.from_numpy(self._words)

    def allows(self, token: int) -> bool:
        """Whether a token may come next, by its text: for answers that are not sampled.

        The mask is stricter where only one text can follow: there it has the usual tokens of that text only.
        """
        if token in self._forbidden:
            return False
        if self._phase is not _Phase.GRAMMAR or self._matcher is None:
            return True
        if token == self._vocabulary.tokenizer.eos:
            return bool(self._matcher.is_accepting())
        return bool(self._matcher.validate_tokens([token]) == 1)

    def advance(self, token: int) -> bool:
        """Take the next token. Returns False if it was not allowed; that ends the constraint.

        Raises SchemaError if it was allowed and there is no way on: going on without the constraint would be worse.
        """
        tokenizer = self._vocabulary.tokenizer
        if token == tokenizer.eos:
            return self.allows(token)
        if self._phase is _Phase.OFF or token in self._forbidden:
            return self._consume(None)
        if self._phase is _Phase.REASONING:
            self._follow(token)
            if token == tokenizer.end_think:
                self._behind_reasoning()
        elif self._phase is _Phase.FREE:
            if token == tokenizer.dsml and self._tail.endswith(b"<"):
                self._enter(_Phase.GRAMMAR, self._vocabulary.parameter_end)
                return self._consume([*tokenizer.encode("\n\n<"), token])
            self._follow(token)
            self._look_for_think(token)
        else:
            if token == tokenizer.dsml and self._vocabulary.parameter_end not in self._spellings:
                self._enter(_Phase.GRAMMAR, self._vocabulary.parameter_end)
            self._follow(token)
            return self._consume([token])
        return True

    def injected(self, tokens: Iterable[int]) -> bool:
        """Take tokens that the server put into the answer to close its reasoning. Returns and raises as `advance`."""
        self._recovered = True
        for token in tokens:
            if not self.advance(token):
                return False
            if token == self._vocabulary.tokenizer.end_think and self._phase is _Phase.GRAMMAR and self._rules.either:
                # Only behind this mark the grammar has the white space that the server writes itself.
                self._consume([token])
        return True

    @property
    def done(self) -> bool:
        """Whether the answer is complete, so that only its end may follow."""
        matcher = self._matcher
        return self._phase is _Phase.GRAMMAR and matcher is not None and matcher.is_stopped() and not matcher.is_error()

    @property
    def broken(self) -> bool:
        """Whether the answer has left the constraint; nothing is forbidden any more."""
        return self._phase is _Phase.OFF

    # ---- phases -----------------------------------------------------------------------------------------------------

    def _behind_reasoning(self) -> None:
        if self._rules.calls == "required":
            self._enter(_Phase.GRAMMAR, self._vocabulary.parameter_end)
        elif self._rules.content is not None:
            # JSON beside calls could spell one out.
            calls = self._rules.calls != "none" and self._rules.tools
            self._enter(_Phase.GRAMMAR, *([self._vocabulary.block] if calls else []))
        else:
            # Once the server has closed the reasoning, calls without a block count as well.
            self._enter(_Phase.FREE, self._vocabulary.block, *(self._vocabulary.calls if self._recovered else ()))

    def _enter(self, phase: _Phase, *spellings: Spelling) -> None:
        if phase is _Phase.REASONING:
            spellings = (self._vocabulary.end_think,)
        self._phase = phase
        self._spellings = spellings
        self._begun = [b""] * len(spellings)
        self._forbid()

    def _follow(self, token: int) -> None:
        """Remember the end of the text, as far as tokens may be forbidden for its sake."""
        if token in self._vocabulary.special:
            self._begun = [b""] * len(self._spellings)
            self._tail = b""
        else:
            piece = self._vocabulary.tokens[token]
            self._begun = [s.follow(begun, piece) for s, begun in zip(self._spellings, self._begun, strict=True)]
            self._tail = (self._tail + piece)[-_TAIL:]
        self._forbid()

    def _look_for_think(self, token: int) -> None:
        """A model may open its reasoning by itself, as its very first word."""
        if self._start is None:
            return
        self._start += self._vocabulary.tokens[token]
        if self._start.startswith(_THINK):
            self._enter(_Phase.REASONING)
        if not _THINK.startswith(self._start):
            self._start = None

    def _forbid(self) -> None:
        forbidden: set[int] = set()
        for spelling, begun in zip(self._spellings, self._begun, strict=True):
            forbidden.update(spelling.completing(begun))
        if self._phase is _Phase.REASONING and self._rules.demanding:
            forbidden.add(self._vocabulary.tokenizer.eos)
        if self._phase is _Phase.GRAMMAR:
            forbidden.add(self._vocabulary.tokenizer.end_think)  # see `injected`
        if self._phase is _Phase.FREE and (
            _MISSPELT.search(self._tail) or (self._matcher is None and self._tail.endswith(b"<"))
        ):
            forbidden.add(self._vocabulary.tokenizer.dsml)
        self._forbidden = forbidden

    def _consume(self, tokens: Sequence[int] | None) -> bool:
        """Go on in the grammar; None: with something that it does not allow."""
        masked, self._masked = self._masked, False
        if tokens is not None and self._matcher is not None:
            if masked:
                allowed = all(int(self._words[token // 32]) >> token % 32 & 1 for token in tokens)
            else:
                allowed = self._matcher.is_error() or self._matcher.validate_tokens(list(tokens)) == len(tokens)
            if self._matcher.consume_tokens(list(tokens)):
                return True
            if allowed:
                raise _stuck(plain_error(self._matcher))
        self._phase, self._spellings, self._begun, self._forbidden = _Phase.OFF, (), [], set()
        return False


def _stuck(why: str) -> SchemaError:
    return SchemaError(f"the answer cannot follow its schema any further: {why}; a simpler schema may help")
