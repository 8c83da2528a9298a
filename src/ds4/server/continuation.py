"""Where a prompt continues: which live conversation shares its beginning, and what is left to evaluate.

Four ways to recognise a state, of which the one that leaves fewest tokens to evaluate is taken:

- its tokens are the prompt's tokens;
- its text is the prompt's text, though the model cut it into other tokens (key bytes are compared, so a special token
  and its spelling stay apart); it is left only where the prompt's own tokens have a boundary, and they follow;
- the prompt shows an answer as clients show it: without its reasoning, or with it, and its text as it was, maybe
  without the white space around it;
- the prompt has the calls of an answer under the ids they were given: then it may show the rest of the answer as it
  likes. Clients drop, trim and join what the model said besides its calls.

The last two need an anchor (see `ds4.server.slots.Anchor`) whose prompt this one begins with; reasoning of turns
before that may be left out. The state is the truth. It is selected, never rewritten to look like the prompt.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ds4.chat.dsml_text import BLOCK_END, BLOCK_START
from ds4.chat.message import Message
from ds4.chat.rendered import Rendered
from ds4.chat.template import render_reply
from ds4.engine.session import common_prefix
from ds4.server.outline import OpenedTurn, Outline, SharedReasoning, outline
from ds4.server.replay import same_calls
from ds4.server.request import ChatRequest, Prompt
from ds4.server.slots import Anchor, Prefix, Slot, TokenKey, digest, digests
from ds4.tokenizer import Tokenizer

Encode = Callable[[Rendered], list[int]]

_ROOM, _ROOM_PART = 1024, 4
"""Tokens, and part of the context, that hidden reasoning leaves for an answer if the request wants as many."""


@dataclass(frozen=True)
class Plan:
    """How a prompt is evaluated.

    Attributes:
        slot: the conversation that it continues, or None.
        ids: the tokens to evaluate or take over, all of them.
        kept: how many of the slot's tokens they begin with.
        reused: how many of those need not be evaluated again.
        detail: how the slot was recognised: `memory-token`, `memory-text`, `visible`, `calls`, or empty.
        miss: why the best slot's state ends before the prompt does not follow it; empty if nothing was lost.
        sampled: the last answer in the tokens is one as it was sampled, whatever the prompt shows of it.
        disk: the name of the stored state that was loaded for it; empty: none.
    """

    slot: Slot | None
    ids: list[int]
    kept: int = 0
    reused: int = 0
    detail: str = ""
    miss: str = ""
    sampled: bool = False
    disk: str = ""

    @property
    def whole(self) -> bool:
        """Whether everything the slot holds is kept."""
        return self.slot is not None and self.kept == len(self.slot.session.tokens)

    @property
    def source(self) -> str:
        """`live`, `checkpoint`, `disk` or `none`."""
        return "none" if not self.reused else "disk" if self.disk else "live" if self.whole else "checkpoint"


def plan(prompt: Prompt, slots: Sequence[Slot], tokenizer: Tokenizer, context: int, limit: int) -> Plan:
    """The cheapest way to evaluate a prompt, given the live conversations, that leaves room for an answer.

    Args:
        prompt, slots: what is wanted, and what there is.
        tokenizer: how tokens are read.
        context: tokens of the context.
        limit: most tokens that the answer may have.
    """
    view = _View(prompt, slots, tokenizer)
    room = min(limit, context // _ROOM_PART, _ROOM)

    def fits(way: _Way) -> bool:
        free = context - way.size
        return free > 0 and (free >= room or way.size <= len(prompt.ids) or not _hides(view, way))

    best, value = None, (-len(prompt.ids), False, False, 0)
    for slot in slots:
        for way in _ways(view, slot, fits):
            if way.reused and _value(way) > value:
                best, value = way, _value(way)
    if best is None:
        chosen = Plan(None, prompt.ids)
    else:
        chosen = Plan(best.slot, _ids(view, best), best.kept, best.reused, best.detail, sampled=best.sampled)
    if chosen.whole or not slots:
        return chosen
    # What is reused is left where the tokens differ that are evaluated, not where hidden reasoning is.
    key = prompt.key if best is None else _key(view, best)
    return replace(chosen, miss=_miss(key, chosen.ids, chosen.slot or max(slots, key=lambda slot: slot.used)))


def loses_reasoning(request: ChatRequest, chosen: Plan) -> bool:
    """Whether nobody has the reasoning behind the last answer's calls any more.

    Clients of the Responses API send none and count on the server's.
    """
    if not (request.response_id and request.thinking) or chosen.sampled or chosen.whole:
        return False
    answer = next((message for message in reversed(request.messages) if message.role == "assistant"), None)
    return answer is not None and bool(answer.tool_calls) and not answer.reasoning


@dataclass(frozen=True)
class _Way:
    """A way to evaluate a prompt: the first tokens of a slot, some between, and the prompt's from some place on.

    Attributes:
        slot: the conversation that it continues.
        head: how many of the slot's tokens come first.
        between: what comes behind them.
        start: the index of the first of the prompt's tokens that come then.
        mark: where these begin in the prompt's key bytes.
        detail, kept, reused, sampled: as in a plan.
        size: tokens in all.
    """

    slot: Slot
    head: int
    between: tuple[int, ...]
    start: int
    mark: int
    detail: str
    size: int
    kept: int = 0
    reused: int = 0
    sampled: bool = False

    @property
    def is_prompt(self) -> bool:
        """Whether it is the prompt's tokens, all of them."""
        return not (self.head or self.start)


def _value(way: _Way) -> tuple[int, bool, bool, int]:
    """What is left to evaluate decides; hidden reasoning that is reused has no value of its own."""
    slot = way.slot
    return way.reused - way.size, way.kept == len(slot.session.tokens), not slot.busy, slot.used


def _ids(view: _View, way: _Way) -> list[int]:
    ids = view.prompt.ids
    return ids if way.is_prompt else [*way.slot.session.tokens[: way.head], *way.between, *ids[way.start :]]


def _key(view: _View, way: _Way) -> bytes:
    """The key bytes of a way's tokens."""
    key = view.key(way.slot)
    return key.data[: key.length(way.head)] + view.tokenizer.key_bytes(way.between) + view.prompt.key[way.mark :]


def _hides(view: _View, way: _Way) -> bool:
    """Whether a way has more in it than the prompt shows."""
    return view.key(way.slot).length(way.head) + len(view.tokenizer.key_bytes(way.between)) > way.mark


class _View:
    """A prompt, with what is needed of it again for each slot."""

    def __init__(self, prompt: Prompt, slots: Sequence[Slot], tokenizer: Tokenizer) -> None:
        self.prompt, self.tokenizer = prompt, tokenizer
        self._slots = slots
        self.special = frozenset(tokenizer.special.values())
        self._keys: dict[Slot, TokenKey] = {}

    def key(self, slot: Slot) -> TokenKey:
        """A slot's key."""
        if slot not in self._keys:
            self._keys[slot] = slot.key()
        return self._keys[slot]

    @cached_property
    def outline(self) -> Outline:
        """The turns of its key."""
        return outline(self.prompt.key, self.prompt.messages)

    @cached_property
    def fronts(self) -> dict[int, bytes]:
        """The hashes of its key's beginnings that are as long as the fronts of anchors."""
        return digests(self.prompt.key, (anchor.front.length for slot in self._slots for anchor in slot.anchors))

    @cached_property
    def bare_fronts(self) -> dict[int, bytes]:
        """The same without reasoning."""
        return digests(self.outline.bare, (anchor.bare.length for slot in self._slots for anchor in slot.anchors))

    @cached_property
    def specials(self) -> list[int]:
        """The indices of its special tokens, and its length."""
        special, ids = self.special, self.prompt.ids
        return [*(i for i, id in enumerate(ids) if id in special), len(ids)]

    @cached_property
    def marks(self) -> list[int]:
        """Where these are in its key."""
        return [*(match.start() for match in re.finditer(b"\xff", self.prompt.key)), len(self.prompt.key)]

    def token_at(self, end: int, known: tuple[int, int] = (0, 0)) -> int | None:
        """The index of its token that begins at key byte `end`; None if none does: that is inside one, or the end.

        `known`: the index of a token, and where that begins, from which to look; special tokens are known anyway.
        """
        nth = bisect_left(self.marks, end)
        if end >= len(self.prompt.key):
            return None
        if self.marks[nth] == end:
            return self.specials[nth]
        if nth:
            known = max(known, (self.specials[nth - 1], self.marks[nth - 1]))
        index, at = known
        while at < end:
            at += len(self.tokenizer.key_bytes(self.prompt.ids[index : index + 1]))
            index += 1
        return index if at == end else None


def _ways(view: _View, slot: Slot, fits: Callable[[_Way], bool]) -> Iterator[_Way]:
    """The ways to continue a slot that may be the best: with the prompt's tokens, with an answer, with its text."""
    prompt, tokens = view.prompt, slot.session.tokens
    shared = common_prefix(tokens, prompt.ids)
    yield _measured(view, _Way(slot, 0, (), 0, 0, "memory-token", len(prompt.ids)), shared)
    if shared == len(tokens):
        return
    for anchor, turn, end, detail in _anchored(view, slot, shared):
        start = view.token_at(end)
        if start is None:
            continue
        way = _way(view, slot, anchor.tokens, anchor.extra, end, start, detail)
        if fits(way):
            yield replace(_measured(view, way), sampled=turn in view.outline.turns[-2:])
            if anchor.tokens == len(tokens):
                return
            break
    head, end, start = _shared_text(view, slot, shared)
    if head > shared and start is not None:
        way = _way(view, slot, head, (), end, start, "memory-text")
        if fits(way):
            yield _measured(view, way)


def _way(view: _View, slot: Slot, head: int, extra: tuple[int, ...], end: int, start: int, detail: str) -> _Way:
    """The first `head` tokens of a slot, and `extra`, stand for the prompt's first `start`, of `end` key bytes."""
    return _Way(slot, head, extra, start, end, detail, head + len(extra) + len(view.prompt.ids) - start)


def _measured(view: _View, way: _Way, kept: int | None = None) -> _Way:
    """A way with what is kept of the slot, and reused."""
    tokens = way.slot.session.tokens
    if kept is None:
        behind = [*way.between, *view.prompt.ids[way.start :]]
        kept = way.head + common_prefix(tokens[way.head :], behind)
    # A prompt that ends inside the state needs the logits of its last token, so that one is evaluated again.
    reused = way.slot.reachable(kept if kept < way.size or kept == len(tokens) else kept - 1)
    return replace(way, kept=kept, reused=reused)


def _anchored(view: _View, slot: Slot, shared: int) -> Iterator[tuple[Anchor, OpenedTurn, int, str]]:
    """The answers of a slot that a prompt shows, from the last one: its turn, where that ends, how it is recognised."""
    # A prompt that was cancelled half way leaves anchors beyond what is evaluated.
    anchors = [anchor for anchor in slot.anchors if shared < anchor.tokens <= len(slot.session.tokens)]
    if not anchors:
        return
    turns = view.outline
    reasoning: SharedReasoning | None = None
    for anchor in sorted(anchors, key=lambda anchor: anchor.tokens, reverse=True):
        if view.fronts.get(anchor.front.length) == anchor.front.digest:
            turn = turns.by_front.get(anchor.front.length)
        elif view.bare_fronts.get(anchor.bare.length) == anchor.bare.digest:
            turn = turns.by_bare.get(anchor.bare.length)
            reasoning = reasoning or SharedReasoning(turns.turns, outline(view.key(slot).data).turns)
            if not reasoning.holds(anchor.opened - 1, anchor.held - 1):
                continue
        else:
            continue
        # Of answers that look alike, ids of calls tell which one was the client's.
        if turn is None or turn.ids != anchor.ids:
            continue
        reasoned = not turn.reasoning or digest(turn.reasoning) == anchor.reasoning
        if turn.message is not None and _same_answer(anchor, turn.message, reasoned):
            yield anchor, turn, turn.end, "calls" if anchor.calls else "visible"
            continue
        if anchor.shown is None or not reasoned or (turn.message is not None and turn.message.raw_dsml):
            continue
        if anchor.shown.begins(view.prompt.key, turn.text):
            yield anchor, turn, turn.text + anchor.shown.length, "visible"


def _same_answer(anchor: Anchor, message: Message, reasoned: bool) -> bool:
    """Whether a message is an answer, but for white space around its text.

    With the answer's calls, unedited, it may be without the text, and its reasoning says nothing.
    """
    if not same_calls(anchor.calls, message.tool_calls):
        return False
    text = message.text.strip()
    return (not text or _content(message) == anchor.content) and (bool(anchor.calls) or (reasoned and bool(text)))


def _content(message: Message) -> bytes:
    return digest(message.text.strip().encode("utf-8", "replace"))


def _shared_text(view: _View, slot: Slot, shared: int) -> tuple[int, int, int | None]:
    """How far a slot says what the prompt says, as (its tokens, their key bytes, the prompt's token that follows).

    That ends where the tokens of both do; elsewhere the prompt's next word would be cut into tokens that no tokenizer
    makes. So it ends behind what the model wrote last, if the prompt agrees, or else at a special token of both, as
    those cut a text whatever stands around. The first `shared` tokens are equal; if there is no more, it is these.
    """
    key, tokens = view.key(slot), slot.session.tokens
    start = key.length(shared)
    same = common_bytes(key.data, view.prompt.key)
    # What was read from another prompt has that one's tokens: its last word may go on otherwise.
    if same == len(key.data) and slot.sampled:
        index = view.token_at(same, (shared, start))
        if index is not None:
            return len(tokens), same, index
    head, end = _last_special(key, tokens, view.special, start, same) or (shared, start)
    return head, end, view.token_at(end)


def _last_special(
    key: TokenKey, tokens: Sequence[int], special: frozenset[int], start: int, same: int
) -> tuple[int, int] | None:
    """The last boundary at a special token in key bytes `start` to `same`, as (tokens before it, their key bytes).

    Up to `same` the prompt has the same bytes, and there a byte 0xFF is always a special token.
    """
    at = key.data.rfind(b"\xff", start, same)
    while at >= 0:
        i, first = key.token_at(at)
        # The model may write such a byte.
        if first == at and tokens[i] in special:
            end = key.length(i + 1)
            # The prompt may have another special token there.
            return (i + 1, end) if end <= same else (i, at)
        at = key.data.rfind(b"\xff", start, at)
    return None


def common_bytes(a: bytes, b: bytes) -> int:
    """Length of the longest common prefix."""
    n = min(len(a), len(b))
    low, high = 0, n
    if a[:n] == b[:n]:
        return n
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low


def _miss(wanted: bytes, ids: list[int], slot: Slot) -> str:
    """Where a prompt of these key bytes and tokens left a state: the byte, the token, and the text around it."""
    key, tokens = slot.key().data, slot.session.tokens
    at = common_bytes(key, wanted)
    if at == len(key):
        return ""
    before = _readable(key[max(0, at - 24) : at])
    return (
        f"live={len(tokens)} prompt={len(ids)} common={common_prefix(tokens, ids)} reason="
        f"{'prompt-shorter' if at == len(wanted) else 'text-mismatch'} byte={at} after {before!r}: "
        f"live {_readable(key[at : at + 24])!r}, prompt {_readable(wanted[at : at + 24])!r}"
    )


def _readable(key: bytes) -> str:
    return key.replace(b"\xff", b"").decode(errors="replace")


# ---- what a client may come back with -------------------------------------------------------------------------------


def bind_reply(
    slot: Slot, prompt: Prompt, message: Message, tokenizer: Tokenizer, encode: Encode, profile: str
) -> None:
    """After an answer that ended well: let prompts that show it continue the state behind its end of sentence.

    Clients send neither the reasoning nor always the same bytes; the template leaves old reasoning out, or keeps its
    empty markers where tools are offered. Calls that were not written to their end are known by their ids only.
    """
    session = slot.session
    # Here nobody waits for it, and a plan finds most of it done.
    slot.key()
    if session.pending is None or prompt.ids[-1] not in (tokenizer.think, tokenizer.end_think):
        return
    front = prompt.key[: len(prompt.key) - len(tokenizer.key_bytes(prompt.ids[-1:]))]
    turns = outline(front, prompt.messages)
    if not message.reasoning_closed or len(front) not in turns.by_front:
        return
    shown = None
    if message.raw_dsml or not message.tool_calls:
        view = render_reply(replace(message, reasoning=""), False, profile)
        shown = Prefix.of(tokenizer.key_bytes(encode(view)))
    calls = message.tool_calls if all(call.id for call in message.tool_calls) else ()
    extra = [] if session.pending == tokenizer.eos else [session.pending]
    if message.complete and message.tool_calls and not message.raw_dsml:
        # The answer was ended behind its first call, before the model could end the block.
        extra += _block_end(session.tokens, extra, tokenizer, encode)
    slot.bind(
        Anchor(
            front=Prefix.of(front),
            bare=Prefix.of(turns.bare),
            ids=turns.turns[-1].ids,
            opened=len(turns.turns),
            held=session.tokens.count(tokenizer.assistant),
            reasoning=digest(message.reasoning.strip().encode("utf-8", "replace")),
            shown=shown,
            content=_content(message),
            calls=calls,
            tokens=len(session.tokens),
            extra=(*extra, tokenizer.eos),
        )
    )


def _block_end(tokens: list[int], extra: list[int], tokenizer: Tokenizer, encode: Encode) -> list[int]:
    """The tokens that end the block of calls in the last turn; none if it is not open."""
    start = len(tokens) - tokens[::-1].index(tokenizer.assistant)
    text = tokenizer.decode([*tokens[start:], *extra]).decode(errors="replace")
    _, begun, block = text.rpartition(BLOCK_START)
    if not begun or BLOCK_END in block:
        return []
    return encode(Rendered(("" if block.endswith("\n") else "\n") + BLOCK_END))
