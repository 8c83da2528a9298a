"""Where a prompt continues: which live conversation shares its beginning, and what is left to evaluate.

Four ways to recognise a state, of which the one that leaves fewest tokens to evaluate is taken:

- its tokens are the prompt's tokens;
- its text is the prompt's text, though the model cut it into other tokens (key bytes are compared, so a special token
  and its spelling stay apart); what follows is tokenised alone;
- the prompt shows an answer as clients show it: without its reasoning, or with it, and its text as it was, maybe
  without the white space around it;
- the prompt has the calls of an answer under the ids they were given: then it may show the rest of the answer as it
  likes. Clients drop, trim and join what the model said besides its calls.

The last two need an anchor (see `ds4.server.slots.Anchor`) whose prompt this one begins with; reasoning of turns
before that may be left out. The state is the truth. It is selected, never rewritten to look like the prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ds4.chat.dsml_text import BLOCK_END, BLOCK_START
from ds4.chat.message import Message
from ds4.chat.rendered import Rendered
from ds4.chat.template import render_reply
from ds4.engine.session import common_prefix
from ds4.server.outline import OpenedTurn, Outline, outline, same_reasoning
from ds4.server.replay import same_calls
from ds4.server.request import ChatRequest, Prompt
from ds4.server.slots import Anchor, Prefix, Slot, digest, digests
from ds4.tokenizer import Tokenizer

Encode = Callable[[Rendered], list[int]]


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
    """

    slot: Slot | None
    ids: list[int]
    kept: int = 0
    reused: int = 0
    detail: str = ""
    miss: str = ""
    sampled: bool = False

    @property
    def whole(self) -> bool:
        """Whether everything the slot holds is kept."""
        return self.slot is not None and self.kept == len(self.slot.session.tokens)

    @property
    def source(self) -> str:
        """`live`, `checkpoint` or `none`."""
        return "none" if not self.reused else "live" if self.whole else "checkpoint"


def plan(prompt: Prompt, slots: Sequence[Slot], tokenizer: Tokenizer, encode: Encode, context: int) -> Plan:
    """The cheapest way to evaluate a prompt, given the live conversations."""
    best = Plan(None, prompt.ids)
    view = _View(prompt)
    for slot in slots:
        for candidate in _candidates(view, slot, tokenizer, encode):
            fits = len(candidate.ids) < context or candidate.ids is prompt.ids
            if candidate.reused and fits and _value(candidate) > _value(best):
                best = candidate
    if best.whole or not slots:
        return best
    # What is reused is left where the tokens differ that are evaluated, not where hidden reasoning is.
    key = prompt.key if best.ids is prompt.ids else tokenizer.key_bytes(best.ids)
    slot = best.slot or max(slots, key=lambda slot: slot.used)
    return replace(best, miss=_miss(key, best.ids, slot))


def loses_reasoning(request: ChatRequest, chosen: Plan) -> bool:
    """Whether nobody has the reasoning behind the last answer's calls any more.

    Clients of the Responses API send none and count on the server's.
    """
    if not (request.response_id and request.thinking) or chosen.sampled or chosen.whole:
        return False
    answer = next((message for message in reversed(request.messages) if message.role == "assistant"), None)
    return answer is not None and bool(answer.tool_calls) and not answer.reasoning


def _value(candidate: Plan) -> tuple[int, bool, bool, int]:
    """What is left to evaluate decides; hidden reasoning that is reused has no value of its own."""
    slot = candidate.slot
    left = len(candidate.ids) - candidate.reused
    return (-left, False, False, 0) if slot is None else (-left, candidate.whole, not slot.busy, slot.used)


class _View:
    """A prompt, with what is needed of it again for each slot."""

    def __init__(self, prompt: Prompt) -> None:
        self.prompt = prompt
        self.text = prompt.text.encode()
        self._outline: Outline | None = None

    @property
    def outline(self) -> Outline:
        """The turns of its key."""
        if self._outline is None:
            self._outline = outline(self.prompt.key, self.prompt.messages)
        return self._outline

    def rest(self, key_length: int) -> Rendered | None:
        """The prompt behind its first key bytes; None if that is nothing or inside a character."""
        prompt = self.prompt
        offset = key_length - prompt.key.count(b"\xff", 0, key_length)
        try:
            start = len(self.text[:offset].decode())
        except UnicodeDecodeError:
            return None
        rest = prompt.text[start:]
        return rest if len(rest) else None


def _candidates(view: _View, slot: Slot, tokenizer: Tokenizer, encode: Encode) -> list[Plan]:
    prompt, tokens = view.prompt, slot.session.tokens
    shared = common_prefix(tokens, prompt.ids)
    found = [_candidate(slot, prompt.ids, "memory-token")]
    if shared == len(tokens):
        return found
    anchored = _anchored(view, slot, shared)
    if anchored is not None:
        anchor, turn, end, detail = anchored
        rest = view.rest(end)
        if rest is not None:
            candidate = _candidate(slot, [*tokens[: anchor.tokens], *anchor.extra, *encode(rest)], detail)
            found.append(replace(candidate, sampled=turn in view.outline.turns[-2:]))
    key = slot.key()
    start = len(tokenizer.key_bytes(tokens[:shared]))
    same = common_bytes(key, prompt.key)
    if same > start:
        kept, length = _token_boundary(tokens, shared, start, same, tokenizer)
        rest = view.rest(length) if kept > shared else None
        if rest is not None:
            found.append(_candidate(slot, [*tokens[:kept], *encode(rest)], "memory-text"))
    return found


def _anchored(view: _View, slot: Slot, shared: int) -> tuple[Anchor, OpenedTurn, int, str] | None:
    """The furthest answer of a slot that a prompt shows: its turn, where that ends, and how it is recognised."""
    # A prompt that was cancelled half way leaves anchors beyond what is evaluated.
    tokens = slot.session.tokens
    anchors = [anchor for anchor in slot.anchors if shared < anchor.tokens <= len(tokens)]
    if not anchors:
        return None
    key, turns = view.prompt.key, view.outline
    exact = digests(key, (anchor.front.length for anchor in anchors))
    bare = digests(turns.bare, (anchor.bare.length for anchor in anchors))
    truth: Outline | None = None
    for anchor in sorted(anchors, key=lambda anchor: anchor.tokens, reverse=True):
        if exact.get(anchor.front.length) == anchor.front.digest:
            turn = turns.by_front.get(anchor.front.length)
        elif bare.get(anchor.bare.length) == anchor.bare.digest:
            turn = turns.by_bare.get(anchor.bare.length)
            truth = truth or outline(slot.key())
            opened = tokens[: anchor.tokens].count(slot.session.engine.tokenizer.assistant)
            if not same_reasoning(turns.turns[: anchor.opened - 1], truth.turns[: opened - 1]):
                continue
        else:
            continue
        # Of answers that look alike, ids of calls tell which one was the client's.
        if turn is None or turn.ids != anchor.ids:
            continue
        reasoned = not turn.reasoning or digest(turn.reasoning) == anchor.reasoning
        if turn.message is not None and _same_answer(anchor, turn.message, reasoned):
            return anchor, turn, turn.end, "calls" if anchor.calls else "visible"
        if anchor.shown is None or not reasoned or (turn.message is not None and turn.message.raw_dsml):
            continue
        if anchor.shown.begins(key, turn.text):
            return anchor, turn, turn.text + anchor.shown.length, "visible"
    return None


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


def _candidate(slot: Slot, ids: list[int], detail: str) -> Plan:
    kept = common_prefix(slot.session.tokens, ids)
    # A prompt that ends inside the state needs the logits of its last token, so that one is evaluated again.
    reused = slot.reachable(kept if kept < len(ids) or kept == len(slot.session.tokens) else kept - 1)
    return Plan(slot, ids, kept, reused, detail)


def _token_boundary(tokens: list[int], shared: int, start: int, same: int, tokenizer: Tokenizer) -> tuple[int, int]:
    """(tokens, their key bytes): as far as text agrees, but not ending inside words: at the end, or at a special token.

    tokens[:shared] have `start` key bytes; the first `same` key bytes agree.
    """
    special = frozenset(tokenizer.special.values())
    best, at = (shared, start), start
    for i in range(shared, len(tokens)):
        if tokens[i] in special and at <= same:
            best = i, at
        at += len(tokenizer.key_bytes([tokens[i]]))
        if at > same:
            return best
        if tokens[i] in special:
            best = i + 1, at
    return len(tokens), at


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
    key, tokens = slot.key(), slot.session.tokens
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
