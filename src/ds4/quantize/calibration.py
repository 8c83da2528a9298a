"""Calibration text: conversations and plain text as the prompts that an importance matrix is collected over.

Two kinds of files are read:

* `.jsonl`: one JSON object a line, either a conversation, {"messages": [...], "tools": [...], "thinking": true,
  "effort": "high", "id": "..."}, of which only the messages are needed, or {"text": "..."}, plain text. Messages and
  tools are those of an OpenAI-style request; replies may carry `reasoning_content` and `tool_calls`. They are rendered
  through the chat template, and special tokens that stand in them as text stay text.
* any other name: rendered text. Lines that begin with `===== DS4_IMATRIX_PROMPT` part it into prompts (the format of
  the C engine); without such a line all of it is one prompt. Special tokens are written as their text.

Text that does not begin with `<｜begin▁of▁sentence｜>` gets it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds4.chat import Rendered, render
from ds4.chat.template import BOS
from ds4.errors import Ds4Error, RequestError
from ds4.files import json_lines, read_text, refuse_input, replacing
from ds4.gguf.vocabulary import PROTOCOL_TOKENS

MARKER = "===== DS4_IMATRIX_PROMPT"


@dataclass(frozen=True)
class Prompt:
    """Text for the model.

    Attributes:
        name: where it comes from, for messages: file and line, or its own id.
        text: a `Rendered` knows which parts a client wrote; in a plain string all special tokens count.
    """

    name: str
    text: str


def read_prompts(path: str | os.PathLike[str], profile: str = "official") -> list[Prompt]:
    """All prompts of a calibration file, in its order; see the module for the formats.

    Args:
        profile: of the chat template.

    Raises:
        Ds4Error: the file cannot be read, holds no prompt, or a line is none; the text names the line.
    """
    text = read_text(path)
    name = Path(path).name
    found = _conversations(text, name, profile) if is_jsonl(path) else _blocks(text, name)
    prompts = [prompt for prompt in found if prompt.text]
    if not prompts:
        raise Ds4Error(
            f"{path}: there is no text in this file; give one with prompts (ds4-imatrix-text makes such files)"
        )
    return prompts


def is_jsonl(path: str | os.PathLike[str]) -> bool:
    """True if the name says that each line is a JSON object."""
    return Path(path).suffix.lower() in (".jsonl", ".ndjson")


def with_bos(text: str) -> str:
    """The text, beginning with `<｜begin▁of▁sentence｜>`; what a client wrote does not count as that."""
    spans = getattr(text, "client_spans", ())
    starts = text.startswith(BOS) and not (spans and spans[0][0] < len(BOS))
    return text if starts else Rendered(BOS) + text if isinstance(text, Rendered) else BOS + text


def _blocks(text: str, name: str) -> Iterator[Prompt]:
    number, lines = 0, list[str]()

    def block() -> Iterator[Prompt]:
        nonlocal number
        body = "\n".join(lines).strip()
        if body:
            number += 1
            yield Prompt(f"{name}, prompt {number}", with_bos(body))
        lines.clear()

    for line in text.split("\n"):
        if line.startswith(MARKER):
            yield from block()
        else:
            lines.append(line)
    yield from block()


def _conversations(text: str, name: str, profile: str) -> Iterator[Prompt]:
    for number, value in json_lines(text, name):
        where = f"{name}, line {number}"
        yield Prompt(where, conversation_text(value, where, profile))


def conversation_text(
    value: Mapping[str, Any], where: str, profile: str = "official", thinking: bool | None = None
) -> str:
    """The text of one line of a `.jsonl` file.

    Args:
        thinking: None: as the line says, else True.

    Raises:
        Ds4Error: it is no conversation and no text, or cannot be rendered.
    """
    if "text" in value:
        if not isinstance(value["text"], str) or "messages" in value:
            raise Ds4Error(f"{where}: give either messages or text, and text as a string")
        body = value["text"]
        return with_bos(Rendered(body, ((0, len(body)),) if body else ())) if body.strip() else ""
    if not isinstance(value.get("messages"), list) or not value["messages"]:
        raise Ds4Error(f"{where}: it has neither messages (a list of at least one) nor text")
    own = value.get("thinking", True)
    effort = value.get("effort")
    if not isinstance(own, bool) or not (effort is None or isinstance(effort, str)):
        raise Ds4Error(f"{where}: thinking must be true or false, and effort a string")
    try:
        return render(
            value["messages"], value.get("tools"), own if thinking is None else thinking, effort, profile=profile
        )
    except RequestError as error:
        raise Ds4Error(f"{where}: {error}") from error


# --- making rendered text ---------------------------------------------------------------------------------------------

MODES = ("given", "think", "nothink", "both")


@dataclass
class Built:
    """What `build` wrote: prompts, characters, and why others were left out (reason -> how many)."""

    prompts: int
    characters: int
    left_out: dict[str, int]


def build(
    sources: Iterable[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    mode: str = "given",
    profile: str = "official",
    block: int = 8192,
) -> Built:
    """Render conversations and plain text into one file of rendered text, which the C engine reads too.

    Args:
        sources: `.jsonl` files as `read_prompts` takes them; any other file is plain text, cut at line ends into
            prompts of about `block` characters.
        mode: think and nothink render every conversation so, both does it twice, given goes by each line's `thinking`.

    Prompts that the format cannot hold are left out: those with special tokens in what a client wrote (rendered text
    has no way to say that they are none), or with a line like the marker's.

    Raises:
        Ds4Error: a source cannot be read, nothing is left, or `out` cannot be written.
    """
    if mode not in MODES:
        raise Ds4Error(f"mode {mode!r} is not known: use one of {', '.join(MODES)}")
    sources = list(sources)
    refuse_input(out, sources)
    result = Built(0, 0, {})
    seen: set[str] = set()
    with replacing(out) as new, new.open("w", encoding="utf-8", newline="\n") as file:
        for name, text in _texts(sources, mode, profile, block):
            reason = _unfit(text, seen)
            if reason:
                result.left_out[reason] = result.left_out.get(reason, 0) + 1
                continue
            seen.add(str(text))
            file.write(f"\n\n{MARKER} {name} =====\n{text.strip()}")
            result.prompts += 1
            result.characters += len(text)
        if not result.prompts:
            raise Ds4Error(f"{out}: not written, there is no text that it could hold; give other sources")
        file.write("\n")
    return result


def _texts(sources: Iterable[str | os.PathLike[str]], mode: str, profile: str, block: int) -> Iterator[tuple[str, str]]:
    thinking: tuple[bool | None, ...] = {"given": (None,), "think": (True,), "nothink": (False,)}.get(
        mode, (True, False)
    )
    for source in sources:
        text = read_text(source)
        name = Path(source).name.replace("\n", " ").encode("utf-8", "replace").decode()
        if is_jsonl(source):
            for number, value in json_lines(text, name):
                for each in thinking:
                    yield f"{name}:{number}", conversation_text(value, f"{name}, line {number}", profile, each)
        else:
            for number, body in enumerate(_pieces(text, block), 1):
                yield f"{name}:{number}", with_bos(Rendered(body, ((0, len(body)),)))


def _pieces(text: str, size: int) -> Iterator[str]:
    """Cut at line ends; a line that is longer is a piece of its own."""
    lines, length = list[str](), 0
    for line in text.splitlines(keepends=True):
        if lines and length + len(line) > size:
            yield "".join(lines).strip()
            lines, length = [], 0
        lines.append(line)
        length += len(line)
    if "".join(lines).strip():
        yield "".join(lines).strip()


def _unfit(text: str, seen: set[str]) -> str:
    """Why rendered text cannot hold a prompt; empty if it can."""
    if not text.strip():
        return "empty"
    if any("\ud800" <= char <= "\udfff" for char in text):
        return "half of a surrogate pair, which is no character"
    if str(text) in seen:
        return "the same as another"
    if any(line.startswith(MARKER) for line in str(text).split("\n")):
        return "a line like the marker between prompts"
    spans = getattr(text, "client_spans", ())
    if any(token in str(text)[a:b] for a, b in spans for token in PROTOCOL_TOKENS.values()):
        return "special tokens in what a client wrote"
    return ""
