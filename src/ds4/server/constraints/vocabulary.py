"""A model's tokens as constraints see them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from ds4.chat.tags import PARAMETER_END
from ds4.errors import RequestError
from ds4.gguf.vocabulary import PROTOCOL_TOKENS
from ds4.server.constraints.grammar import MAX_GRAMMAR
from ds4.server.constraints.spelling import Spelling
from ds4.tokenizer import Tokenizer

# Tokens that are allowed or forbidden together, found out once instead of at every place: those of names in tags.
_NAMES = (r'[^"<>&\\\x00-\x1F\x7F]{1,10}', r'[^"<>&\\\x00-\x1F\x7F]{1,30}')
_MAX_ERROR = 300
# llguidance ends the process at some longer ones. Those of scripts may be of any length; grammars do not allow them.
_MAX_TOKEN = 200
_PLAIN = (
    ("NoExtension", "no value follows it"),
    ("oneOf constraints are not supported", "alternatives of oneOf cannot be told apart; use anyOf"),
    ("circular references with sibling keys", "a $ref to what it stands in cannot have other keywords beside it"),
    ("Unsatisfiable schema: Regex is empty", "no string has its pattern, its format and its length at once"),
    ("Failed to generate regex", "limits of numbers that are not supported"),
    ("regex parse error", "an expression that cannot be read"),
    (
        "min/maxProperties only supported",
        "minProperties and maxProperties are not supported where some of the listed properties are not required",
    ),
)


class Vocabulary:
    """The tokens and what ordinary ones must not spell out.

    Attributes:
        tokens: the bytes of each token.
        special: ids of the special ones.
        words: number of 32 bit words of a mask.
        end_think, parameter_end, block: the end of the reasoning, the end of a value, the begin of a block.
        calls: the begins of a call outside any block.
    """

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        self.tokenizer = tokenizer
        self.tokens = [_bytes(tokenizer, id) for id in range(size)]
        table = _Table(tokenizer, self.tokens)
        self.special = frozenset(table.special_token_ids)
        self.words = (size + 31) // 32
        self._llguidance = LLTokenizer(table, slices=[*_NAMES, *LLTokenizer.general_slices()])
        ordinary = [(id, piece) for id, piece in enumerate(self.tokens) if id not in self.special]
        self.end_think = Spelling(ordinary, PROTOCOL_TOKENS["end_think"].encode())
        self.parameter_end = Spelling(ordinary, PARAMETER_END.encode())
        # The tag that begins a block is text unless another tag follows it.
        self.block = Spelling(ordinary, b"tool_calls><", spaced=True)
        self.calls = tuple(Spelling(ordinary, text.encode()) for text in ("<invoke", "｜invoke", "|invoke"))

    def matcher(self, grammar: str) -> tuple[LLMatcher, str]:
        """A matcher at the start of a grammar, and why it cannot be used, if it cannot."""
        if len(grammar) > MAX_GRAMMAR:
            problem = f"{len(grammar)} characters of grammar, at most {MAX_GRAMMAR} are supported"
            return LLMatcher(self._llguidance, "", log_level=0), problem
        matcher = LLMatcher(self._llguidance, grammar, log_level=0, limits=_limits())
        if not matcher.is_error():
            # Some problems show only here.
            matcher.compute_bitmask()
        return matcher, plain_error(matcher)


def plain_error(matcher: LLMatcher) -> str:
    """The error of a matcher in one line; empty if there is none."""
    text = " ".join(matcher.get_error().split("<state>")[0].replace("<non-verbose/>", "").split())
    # Without the place in a grammar that nobody but us has seen.
    text = re.sub(r"^at \d+\(\d+\): |failed to compile JSON schema: | \d+ \| .*", "", text)
    for begin, plain in _PLAIN:
        if text.startswith(begin):
            return plain
    text = text.replace("Unsatisfiable schema: ", "no value satisfies it: ")
    return text if len(text) <= _MAX_ERROR else text[:_MAX_ERROR] + " ..."


def _limits() -> LLParserLimits:
    """What a grammar may cost: some 20 ms to read its expressions, at worst some 15 ms a token and 200 MB."""
    return LLParserLimits(
        # Four for each property of an object that need not come (see `MAX_OPTIONAL`).
        max_items_in_row=5_000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=50_000,
        step_max_items=50_000,
        max_lexer_states=100_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


class _Table:
    """What llguidance asks for; its names are llguidance's."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, tokens: Sequence[bytes]) -> None:
        self.eos_token_id, self.bos_token_id = tokenizer.eos, tokenizer.bos
        self.special_token_ids = sorted(tokenizer.special.values())
        self.tokens = [piece if len(piece) <= _MAX_TOKEN else b"" for piece in tokens]
        self._tokenizer = tokenizer

    def __call__(self, text: bytes | str) -> list[int]:
        """Tokens of plain text."""
        return self._tokenizer.encode(text if isinstance(text, str) else text.decode(errors="replace"))


def _bytes(tokenizer: Tokenizer, id: int) -> bytes:
    try:
        return tokenizer.token_bytes(id)
    except RequestError:
        return b""  # a logit that belongs to no token
