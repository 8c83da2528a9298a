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
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokenizers import Regex
from tokenizers import Tokenizer as BpeTokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Split
from tokenizers.pre_tokenizers import Sequence as PreTokenizers

from ds4.errors import FileFormatError, RequestError

PROTOCOL_TOKENS: Mapping[str, str] = {
    "bos": "<｜begin▁of▁sentence｜>",
    "eos": "<｜end▁of▁sentence｜>",
    "user": "<｜User｜>",
    "assistant": "<｜Assistant｜>",
    "think": "<think>",
    "end_think": "</think>",
    "dsml": "｜DSML｜",
}
"""The tokens that the chat template and the tool syntax are made of; a model file must have all of them."""

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

# GGUF token types (tokenizer.ggml.token_type) whose token is its literal text, outside BPE: unknown, control,
# user-defined, unused. The others, normal and byte, are written in the byte alphabet.
_LITERAL_TYPES = frozenset({2, 3, 4, 5})


def _byte_alphabet() -> str:
    """The 256 characters that stand for the bytes: printable Latin-1 stands for itself, others begin at U+0100."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in kept]
    chars = {byte: chr(byte) for byte in kept} | {byte: chr(0x100 + i) for i, byte in enumerate(moved)}
    return "".join(chars[byte] for byte in range(256))


_ALPHABET = _byte_alphabet()
_CHAR_TO_BYTE = {ord(char): byte for byte, char in enumerate(_ALPHABET)}


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
    def from_metadata(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Builds the tokenizer from the keys `tokenizer.ggml.*` of a GGUF file.

        `model`, `pre`, `tokens` and `merges` are required, `token_type` is used if present. The ids of special tokens
        are looked up by their text; the `*_token_id` keys are not needed.

        Raises:
            FileFormatError: a key is missing or wrong, tokens and merges do not fit, or a protocol token is missing.
        """
        tokenizer = cls(
            _strings(metadata, "tokens"),
            _merge_pairs(_strings(metadata, "merges")),
            _token_types(metadata),
            model=(metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")),
        )
        tokenizer.metadata = {key: value for key, value in metadata.items() if key.startswith("tokenizer.")}
        return tokenizer

    def __init__(
        self, tokens: list[str], merges: list[tuple[str, str]], types: Sequence[int] | None, model: tuple[Any, Any]
    ) -> None:
        if model != ("gpt2", "joyai-llm"):
            raise FileFormatError(
                f"tokenizer.ggml.model and .pre are {model[0]!r} and {model[1]!r}; expected 'gpt2' and 'joyai-llm', "
                "the tokenizer of DeepSeek V4. Use a file converted for this model."
            )
        if types is not None and len(types) != len(tokens):
            raise FileFormatError(
                f"tokenizer.ggml.token_type has {len(types)} entries, but tokenizer.ggml.tokens has {len(tokens)}"
            )
        ids = {token: id for id, token in enumerate(tokens)}
        if len(ids) != len(tokens):
            first = next(id for id, token in enumerate(tokens) if ids[token] != id)
            raise FileFormatError(
                f"tokenizer.ggml.tokens has {tokens[first]!r} twice, as ids {first} and {ids[tokens[first]]}"
            )
        _check_merges(merges, ids)

        # What BPE can yield: single bytes and products of merges. All other tokens are special, also where a converter
        # did not mark them.
        ordinary = {a + b for a, b in merges}.union(_ALPHABET).intersection(ids)
        if types is not None:
            ordinary -= {token for token, kind in zip(tokens, types, strict=True) if kind in _LITERAL_TYPES}
        missing = [char for char in _ALPHABET if char not in ordinary]
        if missing:
            raise FileFormatError(
                f"tokenizer.ggml.tokens lacks the token of {len(missing)} of the 256 bytes, first of byte "
                f"0x{_ALPHABET.index(missing[0]):02X}; text with it could not be encoded"
            )
        self.vocab_size = len(tokens)
        self.special = {token: id for token, id in ids.items() if token not in ordinary}
        for role, text in PROTOCOL_TOKENS.items():
            if text not in self.special:
                raise FileFormatError(
                    f"tokenizer.ggml.tokens has no special token {text!r} ({role}); the chat template cannot be "
                    "written without it. Use a file converted for DeepSeek V4."
                )
            setattr(self, role, self.special[text])
        self._tokens = tokens
        self._special_ids = frozenset(self.special.values())
        self._protocol = re.compile("|".join(re.escape(text) for text in PROTOCOL_TOKENS.values()))
        try:
            self._bpe = BpeTokenizer(BPE(vocab=ids, merges=merges))
        except Exception as error:  # the library raises no type of its own
            raise FileFormatError(f"tokenizer.ggml.merges cannot be used: {error}") from error
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


def _strings(metadata: Mapping[str, Any], name: str) -> list[str]:
    key = f"tokenizer.ggml.{name}"
    value = metadata.get(key)
    if not isinstance(value, list | tuple) or not value:
        raise FileFormatError(f"{key} is missing or no array of strings; without it text cannot be encoded")
    for index, item in enumerate(value):
        if not isinstance(item, str):
            raise FileFormatError(f"{key}[{index}] is {item!r}; expected a string")
    return list(value)


def _token_types(metadata: Mapping[str, Any]) -> Sequence[int] | None:
    value = metadata.get("tokenizer.ggml.token_type")
    if value is not None and not (isinstance(value, list | tuple) and all(isinstance(item, int) for item in value)):
        raise FileFormatError("tokenizer.ggml.token_type is no array of integers")
    return value


def _merge_pairs(merges: list[str]) -> list[tuple[str, str]]:
    """Each merge "left right" as a pair; the byte alphabet has no space, so there is exactly one."""
    pairs = []
    for index, merge in enumerate(merges):
        left, _, right = merge.partition(" ")
        if not left or not right or " " in right:
            raise FileFormatError(
                f"tokenizer.ggml.merges[{index}] is {merge!r}; expected two tokens and a space between"
            )
        pairs.append((left, right))
    return pairs


def _check_merges(merges: list[tuple[str, str]], ids: Mapping[str, int]) -> None:
    for index, (left, right) in enumerate(merges):
        for token in (left, right, left + right):
            if token not in ids:
                raise FileFormatError(
                    f"tokenizer.ggml.merges[{index}] is {left + ' ' + right!r}, "
                    f"but tokenizer.ggml.tokens has no {token!r}"
                )
