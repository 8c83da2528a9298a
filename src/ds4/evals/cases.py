"""Continuations to score: what a reference (mostly the official service) said to a prompt, and how probable it was.

Three places are read:

* a `.jsonl` file, one case a line;
* a `manifest.tsv` with columns id, prompt file, continuation file and maybe response file, as the C engine's published
  sets have it;
* a folder with such a manifest.

A line has the prompt as `prompt` (what one user says), as `messages` (with `tools`, if any) or as `rendered` (the
model's whole input), and the continuation as `tokens` (ids), `logprobs` (the list of OpenAI's format: token, bytes,
logprob, top_logprobs), `response` (a whole answer of chat completions) or `continuation` (text).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ds4.chat import render
from ds4.errors import Ds4Error, RequestError
from ds4.files import json_lines, read_text
from ds4.tokenizer import Tokenizer


@dataclass(frozen=True)
class Reference:
    """What the reference says of one token: its logprob, and those of the most probable tokens (id, logprob)."""

    logprob: float | None
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Case:
    """One continuation.

    Attributes:
        id: unique in its set.
        prompt: ids of the model's whole input before it.
        tokens: ids of the continuation.
        references: one for each token; empty if the reference's logprobs are not known.
    """

    id: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    references: tuple[Reference, ...] = ()


def read_cases(path: str | os.PathLike[str], tokenizer: Tokenizer, profile: str = "official") -> list[Case]:
    """All cases, in the order of the file.

    Args:
        profile: of the chat template.

    Raises:
        Ds4Error: a file cannot be read, a case is incomplete or its id not unique; the text names file and line.
    """
    place = Path(path)
    if place.is_dir():
        place /= "manifest.tsv"
    reader = _Reader(tokenizer, profile)
    if place.suffix.lower() == ".tsv":
        cases = [reader.case(value, where, where) for where, value in _manifest(place)]
    else:
        text, name = read_text(place), place.name
        cases = [
            reader.case(value, f"{name}, line {number}", f"line {number}") for number, value in json_lines(text, name)
        ]
    if not cases:
        raise Ds4Error(f"{place}: there are no cases in this file")
    seen: set[str] = set()
    for case in cases:
        if case.id in seen:
            raise Ds4Error(f"{place}: the id {case.id!r} is there twice; give each case its own")
        seen.add(case.id)
    return cases


def _manifest(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """(where, line as in a `.jsonl`) of each row."""
    found = []
    for number, row in enumerate(read_text(path).splitlines(), 1):
        if not row.strip() or row.startswith("#"):
            continue
        where, fields = f"{path.name}, line {number}", row.split("\t")
        if len(fields) not in (3, 4):
            raise Ds4Error(f"{where}: {len(fields)} columns; id, prompt, continuation and maybe response are needed")
        files = [_beside(path, name, where) for name in fields[1:]]
        value: dict[str, Any] = {"id": fields[0], "prompt": read_text(files[0]), "continuation": read_text(files[1])}
        if len(files) > 2:
            value["response"] = _json_object(files[2])
        found.append((where, value))
    return found


def _json_object(path: Path) -> dict[str, Any]:
    # A line break inside a string would be no JSON, so the whole text can be one line.
    found = list(json_lines(read_text(path).replace("\n", " "), path.name))
    if not found:
        raise Ds4Error(f"{path}: the file is empty; an answer of chat completions is needed")
    return found[0][1]


def _beside(manifest: Path, name: str, where: str) -> Path:
    """A file that a manifest names, which may be relative to its own folder or to where it was collected."""
    for file in (manifest.parent / name, Path(name), manifest.parent.joinpath(*Path(name).parts[-2:])):
        if file.is_file():
            return file
    raise Ds4Error(f"{where}: {name} is not there, neither beside {manifest} nor in its folders")


class _Reader:
    def __init__(self, tokenizer: Tokenizer, profile: str) -> None:
        self.tokenizer, self.profile = tokenizer, profile
        self._by_bytes = cache(self._table)

    def _table(self) -> dict[bytes, int]:
        special = set(self.tokenizer.special.values())
        ids = sorted(range(self.tokenizer.vocab_size), key=lambda id: id not in special)
        return {self.tokenizer.token_bytes(id): id for id in ids}

    def case(self, value: Mapping[str, Any], where: str, default: str) -> Case:
        name = value.get("id", default)
        if not isinstance(name, str | int) or isinstance(name, bool) or name == "":
            raise Ds4Error(f"{where}: id must be a string")
        tokens, references = self.continuation(value, where)
        if not tokens:
            raise Ds4Error(f"{where}: the continuation is empty")
        return Case(str(name), tuple(self.prompt(value, where)), tokens, references)

    def prompt(self, value: Mapping[str, Any], where: str) -> list[int]:
        given = [key for key in ("prompt", "messages", "rendered") if value.get(key) is not None]
        if len(given) != 1:
            raise Ds4Error(f"{where}: one of prompt, messages and rendered is needed, found {given or 'none'}")
        content = value[given[0]]
        if given[0] == "rendered":
            if not isinstance(content, str) or not content:
                raise Ds4Error(f"{where}: rendered must be the model's whole input as text")
            return self.tokenizer.encode_chat(content)
        if given[0] == "prompt" and not isinstance(content, str):
            raise Ds4Error(f"{where}: prompt must be a string; use messages for a conversation")
        messages = [{"role": "user", "content": content}] if given[0] == "prompt" else content
        thinking, effort = value.get("thinking", False), value.get("effort")
        if not isinstance(thinking, bool) or not (effort is None or isinstance(effort, str)):
            raise Ds4Error(f"{where}: thinking must be true or false, and effort a string")
        try:
            return self.tokenizer.encode_chat(
                render(messages, value.get("tools"), thinking, effort, profile=self.profile)
            )
        except RequestError as error:
            raise Ds4Error(f"{where}: {error}") from error

    def continuation(self, value: Mapping[str, Any], where: str) -> tuple[tuple[int, ...], tuple[Reference, ...]]:
        logprobs = value.get("logprobs")
        text = value.get("continuation")
        if (response := value.get("response")) is not None:
            try:
                choice = response["choices"][0]
                logprobs = choice.get("logprobs") if logprobs is None else logprobs
                text = choice["message"]["content"] if text is None else text
            except (KeyError, IndexError, TypeError, AttributeError):
                raise Ds4Error(f"{where}: response is no answer of chat completions") from None
        if isinstance(logprobs, Mapping):
            logprobs = logprobs.get("content")
        if logprobs is not None and not _is_list_of_objects(logprobs):
            raise Ds4Error(f"{where}: logprobs must be a list of objects with token, logprob and top_logprobs")
        aligned = None if logprobs is None else self.ids_of(logprobs, where)
        tokens = value.get("tokens")
        if tokens is not None:
            ids = self.checked(tokens, where)
        elif aligned is not None:
            ids = aligned
        elif isinstance(text, str):
            ids = tuple(self.tokenizer.encode(text))
        else:
            raise Ds4Error(f"{where}: one of tokens, logprobs, response and continuation is needed")
        # Logprobs count only where they are of these very tokens.
        if logprobs is None or aligned != ids:
            return ids, ()
        return ids, tuple(self.reference(item, where) for item in logprobs)

    def checked(self, tokens: object, where: str) -> tuple[int, ...]:
        vocab = self.tokenizer.vocab_size
        if not isinstance(tokens, list) or not all(type(id) is int and 0 <= id < vocab for id in tokens):
            raise Ds4Error(f"{where}: tokens must be a list of ids from 0 to {vocab - 1}")
        return tuple(tokens)

    def ids_of(self, items: Sequence[Mapping[str, Any]], where: str) -> tuple[int, ...] | None:
        """The tokens of logprobs; None if one is none of this vocabulary."""
        ids = [self.id_of(item, where) for item in items]
        return None if None in ids else tuple(id for id in ids if id is not None)

    def id_of(self, item: Mapping[str, Any], where: str) -> int | None:
        raw, text = item.get("bytes"), item.get("token")
        if raw is None and isinstance(text, str):
            return self._by_bytes().get(text.encode("utf-8", "replace"))
        if not isinstance(raw, list) or not all(type(byte) is int and 0 <= byte < 256 for byte in raw):
            raise Ds4Error(f"{where}: a token of logprobs has neither bytes (numbers up to 255) nor text")
        return self._by_bytes().get(bytes(raw))

    def reference(self, item: Mapping[str, Any], where: str) -> Reference:
        top = item.get("top_logprobs") or []
        if not _is_list_of_objects(top):
            raise Ds4Error(f"{where}: top_logprobs must be a list of objects with token and logprob")
        pairs = [(self.id_of(other, where), _number(other, where)) for other in top]
        return Reference(_number(item, where), tuple((id, p) for id, p in pairs if id is not None and p is not None))


def _is_list_of_objects(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, Mapping) for item in value)


def _number(item: Mapping[str, Any], where: str) -> float | None:
    """The logprob; None for one that is missing or stands for zero probability."""
    value = item.get("logprob")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Ds4Error(f"{where}: logprob must be a number")
    return float(value) if -1000 < value <= 0 else None
