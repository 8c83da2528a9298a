"""The vocabulary of a model file: the rules by which it is inspected, and by which a tokenizer is made of it.

DeepSeek V4 uses byte-level BPE over the GPT-2 byte alphabet: each byte is written as one printable character.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ds4.gguf.header import shown
from ds4.gguf.keys import DAMAGED, TOKENIZER_PREFIX

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

# GGUF token types (tokenizer.ggml.token_type) whose token is its literal text, outside BPE: unknown, control,
# user-defined, unused. The others, normal and byte, are written in the byte alphabet.
_LITERAL_TYPES = frozenset({2, 3, 4, 5})

_TOKENS, _MERGES, _TYPES = (TOKENIZER_PREFIX + name for name in ("tokens", "merges", "token_type"))


def _byte_alphabet() -> str:
    """The 256 characters that stand for the bytes: printable Latin-1 stands for itself, others begin at U+0100."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in kept]
    chars = {byte: chr(byte) for byte in kept} | {byte: chr(0x100 + i) for i, byte in enumerate(moved)}
    return "".join(chars[byte] for byte in range(256))


BYTE_ALPHABET = _byte_alphabet()
"""The character of each byte."""


def ordinary_tokens(tokens: Sequence[str], merges: Iterable[str], types: Sequence[int] | None) -> set[str]:
    """What BPE can yield: single bytes and products of merges. All other tokens are special, marked as such or not."""
    products = {merge.replace(" ", "") for merge in merges}
    ordinary = products.union(BYTE_ALPHABET).intersection(tokens)
    if types is not None:
        ordinary -= {token for token, kind in zip(tokens, types, strict=True) if kind in _LITERAL_TYPES}
    return ordinary


def vocabulary_problems(metadata: Mapping[str, Any], size: int | None = None) -> list[str]:
    """Everything for which no tokenizer can be made from the keys `tokenizer.ggml.*`; empty if one can be.

    Each sentence names the key, what was found and what was expected; what is wrong many times is told once, with its
    first place. Entries are only looked at where the lists themselves are right.

    Args:
        size: rows of the embedding, one for each token; None: not known.
    """
    problems = list(_wrong_kind_of_tokenizer(metadata))
    unreadable = dict(_wrong_lists(metadata))
    problems += unreadable.values()
    if _TOKENS in unreadable or _MERGES in unreadable:
        return problems
    tokens, merges = metadata[_TOKENS], metadata[_MERGES]
    types = None if _TYPES in unreadable else metadata.get(_TYPES)
    problems += _wrong_lengths(metadata, types, len(tokens) if size is None else size)
    if types is not None and len(types) != len(tokens):
        types = None
    problems += _wrong_tokens(tokens, ordinary_tokens(tokens, merges, types))
    problems += _wrong_merges(merges, frozenset(tokens))
    problems += _wrong_ids(metadata, tokens)
    return problems


def _is_list(value: Any, kind: type) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(item, kind) for item in value)


def _wrong_kind_of_tokenizer(metadata: Mapping[str, Any]) -> Iterator[str]:
    for name, expected in (("model", "gpt2"), ("pre", "joyai-llm")):
        key = TOKENIZER_PREFIX + name
        found = metadata.get(key)
        if found != expected:
            what = "missing" if found is None else shown(found)
            yield f"key {key!r} is {what}, expected {expected!r}, as DeepSeek V4 has it; {DAMAGED}"


def _wrong_lists(metadata: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Key and sentence."""
    for key, kind, optional in ((_TOKENS, str, False), (_MERGES, str, False), (_TYPES, int, True)):
        value = metadata.get(key)
        if (value is None and optional) or (value and _is_list(value, kind)):
            continue
        found = "missing" if value is None else shown(value)
        expected = "a list of strings" if kind is str else "a list of whole numbers"
        yield key, f"key {key!r} is {found}, expected {expected}; {DAMAGED}"


def _wrong_lengths(metadata: Mapping[str, Any], types: Sequence[int] | None, size: int) -> Iterator[str]:
    scores = TOKENIZER_PREFIX + "scores"
    for key, values in ((_TOKENS, metadata[_TOKENS]), (_TYPES, types), (scores, metadata.get(scores))):
        if values is not None and (not isinstance(values, list | tuple) or len(values) != size):
            found = f"{len(values)} entries" if isinstance(values, list | tuple) else shown(values)
            yield f"key {key!r} has {found}, expected {size}, one for each token; {DAMAGED}"


def _wrong_tokens(tokens: Sequence[str], ordinary: set[str]) -> Iterator[str]:
    counts = Counter(tokens)
    protocol = PROTOCOL_TOKENS.values()
    for token in protocol:
        if counts[token] != 1:
            yield (
                f"key {_TOKENS!r} holds the special token {token!r} {counts[token]} times, expected once, for the chat "
                f"template; {DAMAGED}"
            )
        elif token in ordinary:
            yield (
                f"key {_MERGES!r} makes the special token {token!r}, expected no merge that does, since text could "
                f"become it; {DAMAGED}"
            )
    twice = [token for token, count in counts.items() if count > 1 and token not in protocol]
    if twice:
        first = tokens.index(twice[0])
        yield (
            f"key {_TOKENS!r} holds {shown(twice[0])} twice, as ids {first} and {tokens.index(twice[0], first + 1)}"
            f"{_more(twice)}, expected each token once; {DAMAGED}"
        )
    missing = [byte for byte, char in enumerate(BYTE_ALPHABET) if char not in ordinary]
    if missing:
        count = f"the token of {len(missing)} of the 256 bytes, first of byte 0x{missing[0]:02X}, expected"
        if BYTE_ALPHABET[missing[0]] in counts:
            yield f"key {_TYPES!r} takes as literal text {count} none, since text is encoded with them; {DAMAGED}"
        else:
            yield f"key {_TOKENS!r} lacks {count} all, without which text cannot be encoded; {DAMAGED}"


def _wrong_merges(merges: Sequence[str], tokens: frozenset[str]) -> Iterator[str]:
    malformed, unknown = [], []
    for index, merge in enumerate(merges):
        left, _, right = merge.partition(" ")
        if not left or not right or " " in right:
            malformed.append(index)
        elif left not in tokens or right not in tokens or left + right not in tokens:
            unknown.append(index)
    if malformed:
        index = malformed[0]
        yield (
            f"key {_MERGES!r} has {shown(merges[index])} at place {index}{_more(malformed)}, expected two tokens and a "
            f"space between; {DAMAGED}"
        )
    if unknown:
        index = unknown[0]
        left, _, right = merges[index].partition(" ")
        lost = next(token for token in (left, right, left + right) if token not in tokens)
        yield (
            f"key {_MERGES!r} has {shown(merges[index])} at place {index}{_more(unknown)}, expected tokens of the "
            f"file, which has no {shown(lost)}; {DAMAGED}"
        )


def _wrong_ids(metadata: Mapping[str, Any], tokens: Sequence[str]) -> Iterator[str]:
    for role in ("bos", "eos"):
        key, token = f"{TOKENIZER_PREFIX}{role}_token_id", PROTOCOL_TOKENS[role]
        if key in metadata and token in tokens and metadata[key] != tokens.index(token):
            yield (
                f"key {key!r} is {shown(metadata[key])}, expected {tokens.index(token)}, the place of {token!r}; "
                f"{DAMAGED}"
            )


def _more(places: Sequence[Any]) -> str:
    return f" (and {len(places) - 1} more such)" if len(places) > 1 else ""
