"""Where a prompt continues: which live conversation shares its beginning, and what is left to evaluate.

Three ways to recognise a state, best first by the tokens they save:

- its tokens are the prompt's tokens;
- its text is the prompt's text, though the model cut it into other tokens (key bytes are compared, so a special token
  and its spelling stay apart); what follows is tokenised alone;
- the prompt begins with a text bound to the state: what a client shows of a turn whose reasoning it does not send.

The state is the truth. It is selected, never rewritten to look like the prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ds4.chat.message import Message
from ds4.chat.rendered import Rendered
from ds4.chat.template import render_reply
from ds4.engine.session import common_prefix
from ds4.server.request import Prompt
from ds4.server.slots import Slot, digests
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
        detail: how the slot was recognised: `memory-token`, `memory-text`, `visible`, or empty.
        miss: why the best slot's state ends before the prompt does not follow it; empty if nothing was lost.
    """

    slot: Slot | None
    ids: list[int]
    kept: int = 0
    reused: int = 0
    detail: str = ""
    miss: str = ""

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
    text = prompt.text.encode()
    for slot in slots:
        for candidate in _candidates(prompt, text, slot, tokenizer, encode):
            if (len(candidate.ids) < context or candidate.ids is prompt.ids) and _value(candidate) > _value(best):
                best = candidate
    if best.whole or not slots:
        return best
    return replace(best, miss=_miss(prompt, max(slots, key=lambda slot: slot.used) if best.slot is None else best.slot))


def _value(candidate: Plan) -> tuple[int, bool, bool, int]:
    slot = candidate.slot
    if slot is None:
        return 0, False, False, 0
    return candidate.reused, candidate.whole, not slot.busy, slot.used


def _candidates(prompt: Prompt, text: bytes, slot: Slot, tokenizer: Tokenizer, encode: Encode) -> list[Plan]:
    tokens = slot.session.tokens
    shared = common_prefix(tokens, prompt.ids)
    found = [_candidate(slot, prompt.ids, "memory-token")]
    if shared == len(tokens):
        return found
    hashes = digests(prompt.key, (anchor.length for anchor in slot.anchors))
    # A prompt that was cancelled half way leaves anchors beyond what is evaluated.
    bound = [
        anchor
        for anchor in slot.anchors
        if hashes.get(anchor.length) == anchor.digest and shared < anchor.tokens <= len(tokens)
    ]
    if bound:
        anchor = max(bound, key=lambda anchor: (anchor.tokens, anchor.length))
        rest = _rest(prompt, text, anchor.length)
        if rest is not None:
            found.append(_candidate(slot, [*tokens[: anchor.tokens], *anchor.extra, *encode(rest)], "visible"))
    key = slot.key()
    start = len(tokenizer.key_bytes(tokens[:shared]))
    same = common_bytes(key, prompt.key)
    if same > start:
        kept, length = _token_boundary(tokens, shared, start, same, tokenizer)
        rest = _rest(prompt, text, length) if kept > shared else None
        if rest is not None:
            found.append(_candidate(slot, [*tokens[:kept], *encode(rest)], "memory-text"))
    return found


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


def _rest(prompt: Prompt, text: bytes, key_length: int) -> Rendered | None:
    """The prompt behind its first key bytes; None if that is nothing or inside a character."""
    offset = key_length - prompt.key.count(b"\xff", 0, key_length)
    try:
        start = len(text[:offset].decode())
    except UnicodeDecodeError:
        return None
    rest = prompt.text[start:]
    return rest if len(rest) else None


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


def _miss(prompt: Prompt, slot: Slot) -> str:
    """Where a prompt left a state: the byte, the token, and the text around it."""
    key, tokens = slot.key(), slot.session.tokens
    at = common_bytes(key, prompt.key)
    if at == len(key):
        return ""
    token = common_prefix(tokens, prompt.ids)
    before = _readable(key[max(0, at - 24) : at])
    return (
        f"live={len(tokens)} prompt={len(prompt.ids)} common={token} reason="
        f"{'prompt-shorter' if at == len(prompt.key) else 'text-mismatch'} byte={at} after {before!r}: "
        f"live {_readable(key[at : at + 24])!r}, prompt {_readable(prompt.key[at : at + 24])!r}"
    )


def _readable(key: bytes) -> str:
    return key.replace(b"\xff", b"").decode(errors="replace")


# ---- what a client may come back with -------------------------------------------------------------------------------


def bind_reply(
    slot: Slot, prompt: Prompt, message: Message, tokenizer: Tokenizer, encode: Encode, profile: str
) -> None:
    """After an answer that ended well: bind what clients show of it, with the end of sentence, to the state.

    Clients send neither the reasoning nor always the same bytes; the template leaves old reasoning out, or keeps its
    empty markers where tools are offered. Both texts are bound.
    """
    session = slot.session
    if session.pending is None or prompt.ids[-1] not in (tokenizer.think, tokenizer.end_think):
        return
    if not message.reasoning_closed or (message.tool_calls and not message.raw_dsml):
        return
    extra = (session.pending,) if session.pending == tokenizer.eos else (session.pending, tokenizer.eos)
    before = prompt.key[: len(prompt.key) - len(tokenizer.key_bytes(prompt.ids[-1:]))]
    thinking = prompt.ids[-1] == tokenizer.think
    for keep_reasoning in (False, True) if thinking else (False,):
        shown = render_reply(replace(message, reasoning=""), thinking, profile, keep_reasoning=keep_reasoning)
        slot.bind(before + tokenizer.key_bytes(encode(shown)), len(session.tokens), extra)
