"""Tool calls written as DSML, the markup in which the model writes them: the canonical form.

Profile `official` writes names and values as they are, like the published encoder. Profile `ds4` escapes what would
otherwise end an attribute or a value too early.
"""

from __future__ import annotations

from collections.abc import Sequence

from ds4.chat import json_text
from ds4.chat.message import ToolCall
from ds4.chat.rendered import Writer
from ds4.chat.tags import ESCAPED_PARAMETER_END, MARK, PARAMETER_END, markers

BLOCK_START = f"<{MARK}tool_calls>"
BLOCK_END = f"</{MARK}tool_calls>"

_ATTRIBUTE = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;"})


def write_calls(writer: Writer, calls: Sequence[ToolCall], profile: str = "official") -> None:
    """Write the block of a message's calls, the line breaks before it included. The values are the client's text."""
    writer.control(f"\n\n{BLOCK_START}\n")
    for call in calls:
        writer.control(f'<{MARK}invoke name="')
        writer.client(_attribute(call.name, profile))
        writer.control('">\n')
        _write_parameters(writer, call, profile)
        writer.control(f"</{MARK}invoke>\n")
    writer.control(BLOCK_END)


def write_block(writer: Writer, block: str) -> None:
    """Write a block as it was sampled. Only the markers of its tags are control text.

    Its values are what the model wrote, often words of others: `<｜User｜>` in them was sampled as characters, and must
    not come back as a token.
    """
    at = 0
    for start, end in markers(block):
        writer.client(block[at:start])
        writer.control(block[start:end])
        at = end
    writer.client(block[at:])


def calls_text(calls: Sequence[ToolCall], profile: str = "official") -> str:
    """Return the block of a message's calls in canonical form, the line breaks before it included."""
    writer = Writer()
    write_calls(writer, calls, profile)
    return str(writer.finish())


def _write_parameters(writer: Writer, call: ToolCall, profile: str) -> None:
    items = json_text.argument_items(call.arguments, compact=profile == "ds4")
    if items is None:
        # Not an object: the model sees the text as it came, under a name of its own.
        items = [("arguments", True, call.arguments)]
    if not items and profile == "official":
        writer.control("\n")
    for name, string, text in items:
        writer.control(f'<{MARK}parameter name="')
        writer.client(_attribute(name, profile))
        writer.control(f'" string="{"true" if string else "false"}">')
        if profile == "ds4":
            text = text.replace(PARAMETER_END, ESCAPED_PARAMETER_END if string else "\\u003c" + PARAMETER_END[1:])
        writer.client(text)
        writer.control(f"{PARAMETER_END}\n")


def _attribute(text: str, profile: str) -> str:
    return text.translate(_ATTRIBUTE) if profile == "ds4" else text
