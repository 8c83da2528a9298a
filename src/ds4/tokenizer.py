"""Text to token ids and back, from the metadata of a GGUF file.

DeepSeek V4 uses byte-level BPE (the GPT-2 byte alphabet: each byte is written as one printable character), no
normaliser and no prefix space. In GGUF that is `tokenizer.ggml.model = "gpt2"`, `tokenizer.ggml.pre = "joyai-llm"`.

Three rules that callers can rely on:

- `encode` never yields a special token, whatever the text says. Only `encode_chat` does, and only outside the parts of
  the text that a client supplied.
- The text between two recognised special tokens is one span for BPE, no matter where client text begins and ends in it.
  Text without special strings therefore has the same ids whoever wrote it.
- ids -> bytes is exact for every id; text -> ids -> bytes gives the UTF-8 of the text, except that each lone surrogate
  (not encodable) becomes U+FFFD.
"""

from __future__ import annotations

import codecs
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from tokenizers import Regex
from tokenizers import Tokenizer as BpeTokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Split
from tokenizers.pre_tokenizers import Sequence as PreTokenizers

from ds4.errors import FileFormatError, RequestError
from ds4.gguf.keys import DAMAGED, TOKENIZER_PREFIX
from ds4.gguf.vocabulary import BYTE_ALPHABET, PROTOCOL_TOKENS, ordinary_tokens, vocabulary_problems

SPLITS = (
    r"\p{N}{1,3}",
    r"[\x{4e00}-\x{9fa5}\x{3040}-\x{309f}\x{30a0}-\x{30ff}]+",
    r"[!-/:-@\[-`{-~][A-Za-z]+"
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+",
)
"""The joyai-llm pre-tokenizer: each expression in turn cuts out its matches from what the ones before left whole."""

_MAX_BLANKS = 8_000_000
"""Blanks in a row that one text may have: the regex engine gives up a match after 10 million backtracks."""

_CHAR_TO_BYTE = {ord(char): byte for byte, char in enumerate(BYTE_ALPHABET)}


class Tokenizer:
    """The tokenizer of one model file. Immutable; safe to share between threads.

    Attributes:
        vocab_size: number of ids; they run from 0.
        bos, eos, user, assistant, think, end_think, dsml: ids of the seven protocol tokens.
        special: text -> id of every special token (all tokens that BPE cannot yield).
        metadata: the keys it was made from, for writing it to a file again.
    """

    vocab_size: int
    metadata: Mapping[str, Any]
    special: Mapping[str, int]
    bos: int
    eos: int
    user: int
    assistant: int
    think: int
    end_think: int
    dsml: int

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any], path: str | os.PathLike[str] | None = None) -> Tokenizer:
        """Builds the tokenizer from the keys `tokenizer.ggml.*` of a GGUF file.

        `model`, `pre`, `tokens` and `merges` are required, `token_type` is used if present. The ids of special tokens
        are looked up by their text; the `*_token_id` keys are not needed.

        Args:
            path: of the file, for messages.

        Raises:
            FileFormatError: for the first of `ds4.gguf.vocabulary.vocabulary_problems`.
        """
        where = "" if path is None else f"{os.fspath(path)}: "
        problems = vocabulary_problems(metadata)
        if problems:
            raise FileFormatError(where + problems[0])
        try:
            return cls(metadata)
        except FileFormatError as error:
            raise FileFormatError(f"{where}{error}") from error

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        """From keys without problems (`ds4.gguf.vocabulary`)."""
        tokens: list[str] = list(metadata[f"{TOKENIZER_PREFIX}tokens"])
        merges: list[str] = metadata[f"{TOKENIZER_PREFIX}merges"]
        ordinary = ordinary_tokens(tokens, merges, metadata.get(f"{TOKENIZER_PREFIX}token_type"))
        ids = {token: id for id, token in enumerate(tokens)}
        self.metadata = {key: value for key, value in metadata.items() if key.startswith("tokenizer.")}
        self.vocab_size = len(tokens)
        self.special = {token: id for token, id in ids.items() if token not in ordinary}
        for role, text in PROTOCOL_TOKENS.items():
            setattr(self, role, self.special[text])
        self._tokens = tokens
        self._special_ids = frozenset(self.special.values())
        self._protocol = re.compile("|".join(re.escape(text) for text in PROTOCOL_TOKENS.values()))
        try:
            self._bpe = BpeTokenizer(BPE(vocab=ids, merges=[_pair(merge) for merge in merges]))
        except Exception as error:  # the library raises no type of its own
            raise FileFormatError(f"key '{TOKENIZER_PREFIX}merges' cannot be used: {error}; {DAMAGED}") from error
        splits = [Split(Regex(pattern), "isolated") for pattern in SPLITS]
        self._bpe.pre_tokenizer = PreTokenizers([*splits, ByteLevel(add_prefix_space=False, use_regex=False)])

    def encode(self, text: str) -> list[int]:
        """Ids of plain text. Special strings in it are ordinary text. A lone surrogate is encoded as U+FFFD.

        Takes time linear in the length of the text, hostile or not: about 0.5 s per million characters on one core.

        Raises:
            RequestError: more than 8 million blanks follow one another.
        """
        return self._encode_spans([text])[0]

    def encode_chat(self, rendered: str) -> list[int]:
        """Ids of a rendered chat: at every position the seven protocol tokens are recognised, the rest is plain text.

        If `rendered` has an attribute `client_spans` (pairs of character positions, as `ds4.chat.Rendered` has), no
        protocol token is recognised that would use a character of such a span.
        """
        text = str(rendered)
        pieces: list[str | int] = []
        begin = 0
        for start, end in _complement(getattr(rendered, "client_spans", ()), len(text)):
            for match in self._protocol.finditer(text, start, end):
                pieces += [text[begin : match.start()], self.special[match.group()]]
                begin = match.end()
        pieces.append(text[begin:])

        encoded = iter(self._encode_spans([piece for piece in pieces if isinstance(piece, str)]))
        return [id for piece in pieces for id in ([piece] if isinstance(piece, int) else next(encoded))]

    def decode(self, ids: Iterable[int]) -> bytes:
        """The bytes of the tokens, one after the other; not always valid UTF-8. Raises as `token_bytes`."""
        return b"".join(map(self.token_bytes, ids))

    def token_bytes(self, id: int) -> bytes:
        """The bytes of one token; for a special token its text in UTF-8.

        Raises:
            RequestError: the vocabulary has no such id.
        """
        if not 0 <= id < self.vocab_size:
            raise RequestError(f"Token id {id} is not in the vocabulary, which has the ids 0 to {self.vocab_size - 1}")
        token = self._tokens[id]
        return token.encode() if id in self._special_ids else token.translate(_CHAR_TO_BYTE).encode("latin-1")

    def key_bytes(self, ids: Iterable[int]) -> bytes:
        """`decode` with a byte 0xFF, which no UTF-8 text has, before each special token.

        Texts that look alike get different keys if one has a special token where the other spells it out.
        """
        return b"".join(
            b"\xff" + self.token_bytes(id) if id in self._special_ids else self.token_bytes(id) for id in ids
        )

    def _encode_spans(self, spans: list[str]) -> list[list[int]]:
        """Ids of each span, encoded independently."""
        for span in spans:
            if len(span) > _MAX_BLANKS and re.search(rf"[^\S\r\n]{{{_MAX_BLANKS}}}", span):
                raise RequestError(f"The text has more than {_MAX_BLANKS} blanks in a row; shorten it")
        # The variant without offsets, twice as fast, exists for batches only.
        encodings = self._bpe.encode_batch_fast([_without_surrogates(span) for span in spans], add_special_tokens=False)
        return [encoding.ids for encoding in encodings]


class Detokenizer:
    """Ids to text, one at a time: what `push` and `flush` return is never half a character.

    The strings joined equal `tokenizer.decode(ids).decode("utf-8", errors="replace")`.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, id: int) -> str:
        """The text that this token completes; empty while a character is incomplete. Invalid bytes become U+FFFD."""
        return self._decoder.decode(self._tokenizer.token_bytes(id))

    def flush(self) -> str:
        """Ends the text: an incomplete character becomes U+FFFD. After it a new text may begin."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest


def _complement(spans: Iterable[tuple[int, int]], length: int) -> list[tuple[int, int]]:
    """The parts of range(length) outside all spans, in order; empty spans do not divide."""
    parts = []
    begin = 0
    for start, end in sorted(span for span in spans if span[0] < span[1]):
        if start > begin:
            parts.append((begin, start))
        begin = max(begin, end)
    if begin < length:
        parts.append((begin, length))
    return parts


def _without_surrogates(text: str) -> str:
    """The text with each lone surrogate as U+FFFD, and two that form a pair as the character they mean."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right
