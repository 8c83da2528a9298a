"""From messages to the exact text of a prompt: the V4 chat template.

Two profiles. `official` is the format of the published encoder and the default. `ds4` is the order, the joins and the
escapes of the C engine of that name. In both, system messages before the first user turn go to the front and later
ones stay where they are, as if a user had said them: moving them would change the start of the prompt, and with it
everything that is already computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ds4.chat import dsml_text, json_text
from ds4.chat.effort import effort_text, resolve
from ds4.chat.message import Message, Part, read_message
from ds4.chat.rendered import Rendered, Writer
from ds4.chat.tools import ToolSchema, tool_schemas, write_tools
from ds4.errors import RequestError

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
THINK = "<think>"
END_THINK = "</think>"
REMINDER = "<｜latest_reminder｜>"

PROFILES = ("official", "ds4")
TASKS = ("action", "query", "authority", "domain", "title", "read_url")

_RESPONSE_FORMAT = "\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"
_USER_LIKE = frozenset({"user", "tool"})
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "latest_reminder"})


def render(
    messages: Sequence[Message | Mapping[str, Any]],
    tools: Sequence[Any] | None = None,
    thinking: bool = True,
    effort: str | None = None,
    profile: str = "official",
    *,
    effort_profile: str = "preview",
    response_format: Mapping[str, Any] | None = None,
) -> Rendered:
    """Return the prompt for a conversation, ending in an open turn for the model if a user or a tool spoke last.

    Args:
        messages: the conversation, as Message objects or OpenAI-style dicts (see `message.read_message`).
        tools: the offered tools in any API's shape (see `tools.tool_schemas`); None or empty: none.
        thinking: whether the open turn begins inside reasoning.
        effort: a client's effort name or None; `none` switches thinking off.
        profile: `official` or `ds4`.
        effort_profile: `preview` or `0731`, the generation of the checkpoint.
        response_format: a JSON schema that the answer has to follow.

    Raises RequestError for messages or tools that cannot be rendered.
    """
    schemas = tool_schemas(tools)
    front, rest = _split_front(read_messages(messages, profile), profile)
    level = resolve(effort, effort_profile)
    thinking = thinking and level != "none"
    writer = Writer()
    writer.control(BOS)
    if thinking:
        writer.control(effort_text(level, effort_profile))
    _write_system_region(writer, front, schemas, response_format, profile)
    writer.mark()
    _write_turns(writer, rest, thinking, bool(schemas), profile)
    return writer.finish()


def render_tail(
    messages: Sequence[Message | Mapping[str, Any]],
    thinking: bool = True,
    profile: str = "official",
    *,
    tools_active: bool = True,
) -> Rendered:
    """Return the text that continues a live turn: end of sentence, the messages, and the open turn behind them.

    `messages` are those behind the model's last turn (results, and what the user added); system messages among them
    are left out. Raises RequestError like `render`.
    """
    tail = [m for m in read_messages(messages, profile) if m.role not in ("system", "developer")]
    writer = Writer()
    writer.control(EOS)
    writer.mark()
    _write_turns(writer, tail, thinking, tools_active, profile)
    return writer.finish()


def render_reply(
    message: Message,
    thinking: bool = True,
    profile: str = "official",
    *,
    keep_reasoning: bool = True,
) -> Rendered:
    """Return what a later prompt holds for a reply, from its think marker up to its end of sentence."""
    writer = Writer()
    if thinking and keep_reasoning:
        writer.control(THINK)
        writer.client(message.reasoning)
    writer.control(END_THINK)
    _write_reply(writer, message, profile)
    return writer.finish()


def read_messages(messages: Sequence[Message | Mapping[str, Any]], profile: str = "official") -> list[Message]:
    """Return the messages that a profile renders, with the results of each turn in the order of their calls.

    Raises RequestError for unknown roles (`official`; `ds4` skips them) and malformed messages.
    """
    if profile not in PROFILES:
        raise RequestError(f"template profile {profile!r} is not known: use one of {', '.join(PROFILES)}")
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise RequestError("messages must be a list of messages")
    known: list[Message] = []
    for i, value in enumerate(messages):
        message = read_message(value, f"messages[{i}]")
        if message.role in _ROLES and not (message.role == "latest_reminder" and profile == "ds4"):
            known.append(message)
        elif profile == "official":
            raise RequestError(
                f"messages[{i}].role {message.role!r} is not known: use system, developer, user, assistant or tool"
            )
    return _sort_results(known)


# ---- the system region ----------------------------------------------------------------------------------------------


def _split_front(messages: list[Message], profile: str) -> tuple[list[Message], list[Message]]:
    """Part the messages that belong to the system region from the turns; late system messages become user text."""
    roles = ("system", "developer") if profile == "ds4" else ("system",)
    first_user = next((i for i, m in enumerate(messages) if m.role in _USER_LIKE), len(messages))
    front = [m for m in messages[:first_user] if m.role in roles]
    rest = [m for m in messages[:first_user] if m.role not in roles]
    for message in messages[first_user:]:
        late = message.role in roles
        rest.append(Message(role="user", content=message.text) if late else message)
    return front, rest


def _write_system_region(
    writer: Writer,
    front: list[Message],
    schemas: Sequence[ToolSchema],
    response_format: Mapping[str, Any] | None,
    profile: str,
) -> None:
    if profile == "ds4" and schemas:
        write_tools(writer, schemas)
    for i, message in enumerate(front):
        if i or (profile == "ds4" and schemas):
            writer.control("\n\n")
        writer.client(message.text)
    if profile == "official" and schemas:
        # Without a system message the official encoder is given an empty one, so the line breaks are there as well.
        writer.control("\n\n")
        write_tools(writer, schemas)
    if response_format is not None:
        writer.control(_RESPONSE_FORMAT)
        try:
            writer.client(json_text.dumps(response_format))
        except json_text.NotJsonError as error:
            raise RequestError(f"response_format cannot be written as JSON: {error}") from None


# ---- the turns ------------------------------------------------------------------------------------------------------


def _write_turns(writer: Writer, messages: list[Message], thinking: bool, tools_active: bool, profile: str) -> None:
    if profile == "official":
        _write_turns_official(writer, messages, thinking, tools_active)
    else:
        _write_turns_ds4(writer, messages, thinking, tools_active)


@dataclass(slots=True)
class _Turn:
    """Neighbouring user messages and results, which the official format puts into one user turn."""

    role: str
    messages: list[Message]
    task: str = ""


def _write_turns_official(writer: Writer, messages: list[Message], thinking: bool, keep_reasoning: bool) -> None:
    turns: list[_Turn] = []
    for message in messages:
        role = "user" if message.role in _USER_LIKE else message.role
        if role == "user" and turns and turns[-1].role == "user" and not turns[-1].task:
            turns[-1].messages.append(message)
        else:
            turns.append(_Turn(role, [message], message.task if role == "user" else ""))
    last = max((i for i, turn in enumerate(turns) if turn.role in ("user", "developer")), default=-1)
    if thinking and not keep_reasoning:
        # The format forgets a developer's words together with the reasoning they belong to.
        kept = [turn for i, turn in enumerate(turns) if turn.role != "developer" or i >= last]
        last -= len(turns) - len(kept)
        turns = kept
    for i, turn in enumerate(turns):
        reasons = thinking and (keep_reasoning or i >= last)
        if turn.role == "assistant":
            if reasons and not (i and turns[i - 1].task):
                writer.client(turn.messages[0].reasoning)
                writer.control(END_THINK)
            _write_reply(writer, turn.messages[0], "official")
            continue
        if i:
            writer.mark()
        if turn.role == "latest_reminder":
            writer.control(REMINDER)
            writer.client(turn.messages[0].text)
            continue
        writer.control(USER)
        if turn.role == "developer":
            writer.client(turn.messages[0].text)
        else:
            _write_user_blocks(writer, turn.messages)
        if i + 1 == len(turns) or turns[i + 1].role in ("assistant", "latest_reminder"):
            _open_turn(writer, turn.task, reasons, thinking, i + 1 == len(turns))


def _open_turn(writer: Writer, task: str, reasons: bool, thinking: bool, is_open: bool) -> None:
    if task:
        if task not in TASKS:
            raise RequestError(f"task {task!r} is not known: use one of {', '.join(TASKS)}")
        if task == "action":
            writer.control(ASSISTANT + (THINK if thinking else END_THINK))
        writer.control(f"<｜{task}｜>")
        return
    writer.control(ASSISTANT)
    if is_open:
        writer.mark()
    writer.control(THINK if reasons else END_THINK)


def _write_user_blocks(writer: Writer, messages: list[Message]) -> None:
    blocks: list[Part] = []
    for message in messages:
        if message.role == "tool":
            blocks.append(Part("tool_result", tool_call_id=message.tool_call_id, parts=message.parts()))
        else:
            blocks.extend(message.parts())
    for i, block in enumerate(blocks):
        if i:
            writer.control("\n\n")
        if block.type == "tool_result":
            writer.control("<tool_result>")
            writer.client("\n\n".join(_part_text(part) for part in block.parts))
            writer.control("</tool_result>")
        else:
            writer.client(_part_text(block))


def _part_text(part: Part) -> str:
    return part.text if part.type == "text" else f"[Unsupported {part.type}]"


def _write_turns_ds4(writer: Writer, messages: list[Message], thinking: bool, tools_active: bool) -> None:
    tool_context = tools_active or any(m.tool_calls or m.role == "tool" for m in messages)
    last = max((i for i, m in enumerate(messages) if m.role in _USER_LIKE), default=-1)
    pending_assistant = pending_result = False
    for i, message in enumerate(messages):
        if message.role == "assistant":
            if pending_assistant:
                writer.control(ASSISTANT)
                if thinking and (tool_context or i > last):
                    writer.control(THINK)
                    writer.client(message.reasoning)
                writer.control(END_THINK)
            _write_reply(writer, message, "ds4")
            pending_assistant = pending_result = False
            continue
        if i and not pending_result:
            writer.mark()
        if message.role == "user" or not pending_result:
            writer.control(USER)
        if message.role == "tool":
            _write_result_ds4(writer, message.parts())
        else:
            for part in message.parts():
                if part.type == "tool_result":
                    _write_result_ds4(writer, part.parts)
                else:
                    writer.client(part.text)
        pending_assistant = True
        pending_result = message.role == "tool"
    if pending_assistant:
        writer.control(ASSISTANT)
        writer.mark()
        writer.control(THINK if thinking else END_THINK)


def _write_result_ds4(writer: Writer, parts: tuple[Part, ...]) -> None:
    text = "".join(part.text for part in parts)
    writer.control("<tool_result>")
    writer.client(text.replace("</tool_result>", "&lt;/tool_result>"))
    writer.control("</tool_result>")


def _write_reply(writer: Writer, message: Message, profile: str) -> None:
    """Write content, calls and the end of sentence."""
    writer.client(message.text)
    if message.raw_dsml:
        dsml_text.write_block(writer, message.raw_dsml)
    elif message.tool_calls:
        dsml_text.write_calls(writer, message.tool_calls, profile)
    if not (message.open_end and profile == "official"):
        writer.control(EOS)


def _sort_results(messages: list[Message]) -> list[Message]:
    """Put the results of each turn into the order of the calls they answer; everything else stays in its place."""
    order: dict[str, int] = {}
    sorted_messages = list(messages)
    slots: list[int] = []

    def settle() -> None:
        if len(slots) > 1 and order:
            results = sorted((messages[i] for i in slots), key=lambda m: order.get(m.tool_call_id, 0))
            for slot, result in zip(slots, results, strict=True):
                sorted_messages[slot] = result
        slots.clear()

    for i, message in enumerate(messages):
        if message.role == "tool":
            slots.append(i)
        elif message.role == "user" and not isinstance(message.content, str):
            sorted_messages[i] = _sort_parts(message, order)
        elif message.role == "assistant":
            settle()
            if message.tool_calls:
                order = {call.id: at for at, call in enumerate(message.tool_calls) if call.id}
    settle()
    return sorted_messages


def _sort_parts(message: Message, order: Mapping[str, int]) -> Message:
    parts = list(message.parts())
    slots = [i for i, part in enumerate(parts) if part.type == "tool_result"]
    if len(slots) < 2 or not order:
        return message
    results = sorted((parts[i] for i in slots), key=lambda part: order.get(part.tool_call_id, 0))
    for slot, result in zip(slots, results, strict=True):
        parts[slot] = result
    return Message(role="user", content=tuple(parts), task=message.task)
