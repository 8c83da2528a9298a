"""The live conversations for those who watch: what each holds, and what it does. Nothing of what is said in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from ds4.server.metrics import Metrics
from ds4.server.running import Running
from ds4.server.slots import Slot, SlotTable


@dataclass(frozen=True)
class LiveSession:
    """One live conversation.

    Attributes:
        request: the number of the last request that used it, as in `chatcmpl-N` and the log.
        state: `idle`; `reading` while a prompt is evaluated; `writing` while an answer is.
        tokens, kv_bytes: the evaluated tokens, and the size of their state; what forks share counts for each.
        prompt_tokens, cached_tokens, completion_tokens: of the running request; 0 if it is idle.
    """

    request: int
    state: str
    tokens: int
    kv_bytes: int
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    def wire(self) -> dict[str, int | str]:
        """As JSON has it."""
        return asdict(self)


def look_at(table: SlotTable, running: Sequence[Running], metrics: Metrics) -> list[LiveSession]:
    """What is live now, the conversation that was used last first; `metrics` are told of it.

    Only the thread that owns the slots may call it.
    """
    metrics.look_at(table.engine, [slot.session for slot in table.slots])
    users = {user.slot: user for user in running}
    return [_session(slot, users.get(slot)) for slot in sorted(table.slots, key=lambda slot: slot.used, reverse=True)]


def _session(slot: Slot, user: Running | None) -> LiveSession:
    tokens, size = len(slot.session.tokens), slot.session.state.nbytes
    if user is None:
        return LiveSession(slot.request, "idle", tokens, size)
    usage = user.usage
    state = "reading" if user.generation is None else "writing"
    return LiveSession(slot.request, state, tokens, size, usage.prompt, usage.reused, usage.completion)
