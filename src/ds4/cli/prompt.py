"""From a question and the flags to the model's input; needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ds4.chat import Message, Rendered, render
from ds4.chat.effort import resolve
from ds4.cli.options import Mode
from ds4.errors import Ds4Error


@dataclass(frozen=True)
class Style:
    """How questions are put: system text, chat template (`official` or `ds4`), and whether the model thinks."""

    system: str = ""
    template: str = "official"
    mode: Mode = "high"

    @property
    def thinking(self) -> bool:
        """True if the answer begins with thinking."""
        return self.mode != "none"


def render_question(messages: Sequence[Message], style: Style, context: int | None = None) -> Rendered:
    """The prompt of a conversation whose last message asks something.

    With a context (tokens) that is too small for thinking as hard as possible, the model just thinks.
    """
    system = [Message(role="system", content=style.system)] if style.system else []
    effort = resolve("max", context=context) if style.mode == "max" else None
    return render([*system, *messages], thinking=style.thinking, effort=effort, profile=style.template)


def read_text(path: str) -> str:
    """A file's text; bytes that are not UTF-8 become U+FFFD. Raises Ds4Error if it cannot be read."""
    try:
        return Path(path).expanduser().read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise Ds4Error(f"{path}: cannot be read: {error.strerror}") from error
    except RuntimeError as error:
        raise Ds4Error(f"{path}: cannot be read: there is no such user") from error
    except ValueError as error:
        raise Ds4Error(f"{path!r}: cannot be read: this is not the name of a file") from error
