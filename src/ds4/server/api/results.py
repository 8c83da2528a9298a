"""Results of calls that the request itself does not hold: the conversation before them is put in, or it is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ds4.chat.message import Message
from ds4.server.errors import ApiError
from ds4.server.turns import Turn, TurnMemory


@dataclass(frozen=True)
class ResultWords:
    """How an API speaks of results of calls.

    Attributes:
        api: its name.
        id_field: what it calls the id of the call that a result answers.
        conversation: its field that holds the conversation.
    """

    api: str
    id_field: str
    conversation: str

    def unknown(self, id: str) -> ApiError:
        """The answer to a result of a call that nobody knows."""
        return self._error(400, f" for {self.id_field} {id}")

    def lost(self) -> ApiError:
        """The answer to results that cannot be put behind the conversation they belong to."""
        return self._error(409, "")

    def _error(self, status: int, which: str) -> ApiError:
        return ApiError(
            status,
            f"{self.api} continuation state is not available{which}; "
            f"retry by replaying the full {self.conversation} history",
            param=self.conversation,
        )


RESPONSES_WORDS = ResultWords("Responses", "call_id", "input")
ANTHROPIC_WORDS = ResultWords("Anthropic", "tool_use_id", "messages")


def complete_history(
    messages: tuple[Message, ...], front: int, turns: TurnMemory, words: ResultWords
) -> tuple[Message, ...]:
    """The messages; if results at their end answer calls of a remembered turn, with its conversation put in.

    That needs nothing but the results behind the first `front` messages, and results of exactly the turn's calls.

    Raises:
        ApiError: 400 for a result of a call that is neither in the request nor remembered; 409 if the call is
            remembered, but the request does not fit behind its turn.
    """
    without_call = _without_call(messages)
    if not without_call:
        return messages
    found: list[Turn] = []
    for id in without_call:
        turn = turns.get(id)
        if turn is None or id not in turn.call_ids:
            raise words.unknown(id)
        found.append(turn)
    start = _trailing_start(messages)
    answered = {id for message in messages[start:] for id in result_ids(message)}
    if start != front or answered != found[0].call_ids:
        raise words.lost()
    return (*messages[:front], *found[0].messages, *messages[start:])


def previous_turn(turns: TurnMemory, id: str) -> Turn:
    """The turn of an earlier response. Raises ApiError 409 if it is not remembered."""
    turn = turns.get(id)
    if turn is None or turn.response_id != id:
        raise ApiError(
            409,
            f"previous response {id} is not available any more; "
            "retry by replaying the full input history without previous_response_id",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return turn


def result_ids(message: Message) -> list[str]:
    """The ids of the calls that a message has results of; an empty one for a result without an id."""
    if message.role == "tool":
        return [message.tool_call_id]
    if message.role != "user" or isinstance(message.content, str):
        return []
    return [part.tool_call_id for part in message.content if part.type == "tool_result"]


def _without_call(messages: Sequence[Message]) -> list[str]:
    """The ids of results before which the request has no such call."""
    called: set[str] = set()
    ids: list[str] = []
    for message in messages:
        if message.role == "assistant":
            called.update(call.id for call in message.tool_calls)
        ids += [id for id in result_ids(message) if id and id not in called]
    return ids


def _trailing_start(messages: Sequence[Message]) -> int:
    """Where the results begin that the messages end with.

    Those are messages of role tool, or users' messages with results, behind which there may be system messages.
    """
    end = len(messages)
    while end and messages[end - 1].role == "system":
        end -= 1
    if end and messages[end - 1].role == "tool" and end < len(messages):
        return len(messages)
    start = end
    while start and result_ids(messages[start - 1]):
        start -= 1
    return start if start < end else len(messages)
