"""Tokenising prompts of any length with bounded memory, and refusing those that are too long before it is spent.

The tokenizer needs some hundred bytes for each token of what it is given at once. So long texts are given to it in
pieces, cut where it would cut them itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ds4.errors import ContextOverflowError
from ds4.tokenizer import Tokenizer

PIECE = 1 << 16
"""Characters of a piece, or a few more."""

# Where the tokenizer begins anew whatever stands around: of its expressions none goes on there, looks back over it or
# ahead to it. Behind a line break, before a blank, at the end of a number or of Chinese characters. No special token
# has such a place inside.
_CUT = re.compile(
    r"(?<=\n)(?=[!-~\w])|(?<=[!-~\w])(?= )|(?<=[0-9])(?=[A-Za-z+/\"',])|(?<=[\u4e00-\u9fa5])(?=[\uff0c\u3002\u3001])"
)


class LongPromptError(ContextOverflowError):
    """A prompt that is so far beyond the context that it was not counted to its end."""

    def __init__(self, prompt_tokens: int, context: int) -> None:
        super().__init__(prompt_tokens, context)
        # Clients look for the words of the other error, so this one begins with them.
        self.args = (f"{self} (at least: it was not counted to its end)",)


class Encoder:
    """A tokenizer for prompts of one context size. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, context: int) -> None:
        self._tokenizer, self._context = tokenizer, context
        self._longest = 0

    def encode(self, text: str) -> list[int]:
        """As `Tokenizer.encode_chat`."""
        return [id for piece in _pieces(text) for id in self._tokenizer.encode_chat(piece)]

    def count(self, text: str) -> int:
        """The number of tokens of a text, however long."""
        return sum(len(self._tokenizer.encode_chat(piece)) for piece in _pieces(text))

    def encode_prompt(self, text: str) -> list[int]:
        """As `encode`. Raises ContextOverflowError; the number of tokens in it is exact if the text is short."""
        if len(text) > PIECE and self._least(text) >= self._context:
            raise LongPromptError(self._least(text), self._context)
        ids: list[int] = []
        seen = 0
        for piece in _pieces(text):
            ids += self._tokenizer.encode_chat(piece)
            seen += len(piece)
            if len(ids) >= self._context:
                if seen < len(text):
                    raise LongPromptError(len(ids) + self._least(text[seen:]), self._context)
                raise ContextOverflowError(len(ids), self._context)
        return ids

    def _least(self, text: str) -> int:
        """A number of tokens that the text has at least: each is a few bytes."""
        if not self._longest:
            tokenizer = self._tokenizer
            self._longest = max(len(tokenizer.token_bytes(id)) for id in range(tokenizer.vocab_size))
        return -(-len(text.encode("utf-8", "replace")) // self._longest)


def _pieces(text: str) -> Iterator[str]:
    """The text in pieces whose tokens are those of the text."""
    start = 0
    while len(text) - start > PIECE:
        cut = _CUT.search(text, start + PIECE)
        if cut is None:
            break
        yield text[start : cut.start()]
        start = cut.start()
    yield text[start:] if start else text
