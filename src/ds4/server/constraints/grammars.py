"""Compiles grammars: in threads of its own, once for all who ask at a time, and no more at a time than is soon done."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from llguidance import LLMatcher

from ds4.server.constraints.constraint import Enforcement
from ds4.server.constraints.grammar import OF_CONTENT, Part, answer_grammar, grammar_of
from ds4.server.constraints.rules import AnswerRules, GrammarsBusyError, SchemaError, schema_text
from ds4.server.constraints.vocabulary import Vocabulary
from ds4.tokenizer import Tokenizer

MAX_SCHEMAS = 1_000_000
"""Characters of the schemas that one request may have enforced."""

MAX_BACKLOG = 64 << 10
"""Characters of the schemas that are compiled or wait for it, if more than one request's: about a second of work."""

_CACHED = 32
"""Grammars that are kept, and as many errors: an agent sends the same tools with every turn."""

_THREADS = 2
_LEAST = 256
"""Characters that even the smallest schema counts for in the backlog."""


@dataclass(eq=False)
class _Work:
    """A grammar that is being compiled, or waits for it.

    Attributes:
        asked: those who wait for it, each with its rules, which have the same grammar.
    """

    size: int
    asked: list[tuple[Future[Enforcement], AnswerRules]] = field(default_factory=list)

    @property
    def wanted(self) -> bool:
        """Whether anybody still waits."""
        return not all(future.cancelled() for future, _ in self.asked)


class Grammars:
    """Makes constraints for one vocabulary; may be used from several threads.

    Args:
        tokenizer: the model's.
        size: number of logits, if that is more than the tokenizer has ids.
    """

    def __init__(self, tokenizer: Tokenizer, size: int | None = None) -> None:
        self._tokenizer = tokenizer
        self._size = max(size or 0, tokenizer.vocab_size)
        self._vocabulary: Vocabulary | None = None
        self._reading = threading.Lock()
        self._pool = ThreadPoolExecutor(_THREADS, "ds4-grammar")
        self._lock = threading.Lock()  # of what follows; nothing is compiled under it
        self._works: dict[Hashable, _Work] = {}
        self._compiled: OrderedDict[Hashable, LLMatcher] = OrderedDict()
        self._failed: OrderedDict[Hashable, str] = OrderedDict()

    def prepare(self) -> Vocabulary:
        """Read the vocabulary, if that is not done: for a second the process does nothing else."""
        with self._reading:
            if self._vocabulary is None:
                self._vocabulary = Vocabulary(self._tokenizer, self._size)
            return self._vocabulary

    def submit(self, rules: AnswerRules) -> Future[Enforcement] | None:
        """What enforces rules, once their grammar is compiled; None if everything is allowed.

        Compiling takes some milliseconds, and for the largest schemas about a second; rules that were seen before
        take nothing. The future fails with a SchemaError, which says which part, if the rules cannot be
        enforced. Who does not want the answer any more cancels it.

        Raises:
            SchemaError: as the future; it is known at once.
            GrammarsBusyError: too many others are being compiled.
        """
        if not rules.restrictive:
            return None
        future: Future[Enforcement] = Future()
        if not rules.demanding and not rules.callable:
            future.set_result(Enforcement(self.prepare(), None, rules))
            return future
        if rules.size > MAX_SCHEMAS:
            raise _too_large(rules)
        key = rules.key()
        with self._lock:
            found = self._recall(key)
            if found is None:
                self._ask(key, rules, future)
        if found is not None:
            self._answer([(future, rules)], found)
        return future

    def check(self, rules: AnswerRules) -> None:
        """Raises SchemaError for rules that cannot be enforced, as far as that is known without compiling anything."""
        if not rules.restrictive or not (rules.demanding or rules.callable):
            return
        if rules.size > MAX_SCHEMAS:
            raise _too_large(rules)
        with self._lock:
            found = self._recall(rules.key())
        if isinstance(found, SchemaError):
            raise found
        if found is None:
            answer_grammar(rules, self._tokenizer.dsml, self._tokenizer.end_think)

    def _recall(self, key: Hashable) -> LLMatcher | SchemaError | None:
        if key in self._compiled:
            self._compiled.move_to_end(key)
            return self._compiled[key]
        return SchemaError(self._failed[key]) if key in self._failed else None

    def _ask(self, key: Hashable, rules: AnswerRules, future: Future[Enforcement]) -> None:
        work = self._works.get(key)
        if work is None:
            size = max(_LEAST, rules.size)
            others = sum(other.size for other in self._works.values() if other.wanted)
            if others and others + size > MAX_BACKLOG:
                raise GrammarsBusyError("the schemas of other requests are being prepared; try again later")
            self._works[key] = work = _Work(size)
            self._pool.submit(self._work, key, work)
        work.asked.append((future, rules))

    def _work(self, key: Hashable, work: _Work) -> None:
        """What a thread does."""
        with self._lock:
            if not work.wanted:
                del self._works[key]
                return
            rules = work.asked[0][1]
        found: LLMatcher | BaseException
        try:
            found = self._compile(rules)
        except BaseException as error:
            found = error
        with self._lock:
            del self._works[key]
            if isinstance(found, SchemaError):
                _keep(self._failed, key, str(found))
            elif isinstance(found, LLMatcher):
                _keep(self._compiled, key, found)
        self._answer(work.asked, found)

    def _answer(
        self, asked: Sequence[tuple[Future[Enforcement], AnswerRules]], found: LLMatcher | BaseException
    ) -> None:
        for future, rules in asked:
            if not future.set_running_or_notify_cancel():
                continue
            if isinstance(found, SchemaError):
                future.set_exception(SchemaError(str(found)))
            elif isinstance(found, BaseException):
                future.set_exception(found)
            else:
                future.set_result(Enforcement(self.prepare(), found, rules))

    def _compile(self, rules: AnswerRules) -> LLMatcher:
        vocabulary = self.prepare()
        grammar, parts = answer_grammar(rules, self._tokenizer.dsml, self._tokenizer.end_think)
        matcher, problem = vocabulary.matcher(grammar)
        if problem:
            raise _explained(parts, problem, vocabulary)
        return matcher


def _keep(kept: OrderedDict[Hashable, Any], key: Hashable, value: Any) -> None:
    kept[key] = value
    if len(kept) > _CACHED:
        kept.popitem(last=False)


def _too_large(rules: AnswerRules) -> SchemaError:
    sizes = {f"the schema of the tool {tool.name!r}": len(tool.schema) for tool in rules.callable}
    if rules.content is not None:
        sizes[OF_CONTENT] = len(schema_text(rules.content))
    largest = max(sizes, key=lambda where: sizes[where])
    return SchemaError(
        f"{largest} cannot be enforced: the schemas of this request have {rules.size} characters,"
        f" and at most {MAX_SCHEMAS} are supported"
    )


def _explained(parts: Sequence[Part], problem: str, vocabulary: Vocabulary) -> SchemaError:
    """The error that says which of the parts is to blame; it costs about as much as compiling all of them once more."""
    while len(parts) > 1:
        half = parts[: len(parts) // 2]
        parts = half if vocabulary.matcher(grammar_of(half))[1] else parts[len(half) :]
    found = vocabulary.matcher(grammar_of(parts))[1] if parts else ""
    if found:
        return SchemaError(f"{parts[0].where} cannot be enforced: {found}")
    return SchemaError(f"the schemas of this request cannot be enforced together: {problem}")
