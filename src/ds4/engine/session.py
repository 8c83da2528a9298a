"""One conversation: its tokens, its state, and the ways back in its history."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ds4.engine.checkpoints import CheckpointList
from ds4.engine.sample_rows import SampleRow
from ds4.engine.sampling import Sampler, Sampling
from ds4.errors import ContextOverflowError, Ds4Error
from ds4.model.cache import FREE_TRUNCATION

if TYPE_CHECKING:
    from ds4.engine.engine import Engine, State

MAX_TURN_CUTS = 8
"""Turn boundaries at which one prefill stops for a checkpoint: the last ones are those that clients come back to."""


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix of two token lists."""
    n, step = min(len(a), len(b)), 4096
    for start in range(0, n, step):
        end = min(start + step, n)
        if a[start:end] != b[start:end]:
            return next(i for i in range(start, end) if a[i] != b[i])
    return n


class Prefill:
    """A prompt that a session takes chunk by chunk; `Session.begin` makes it.

    Between two steps the session may be used otherwise: if its tokens have changed, or another step of it broke off,
    the next step starts over, from what the session still shares with the prompt.

    Attributes:
        session: the session.
        ids: the whole prompt; do not change the list.
        reused: tokens of the prompt that none of its steps had to evaluate.
    """

    def __init__(self, session: Session, ids: list[int], chunk: int, boundaries: Sequence[int] | None) -> None:
        self.session, self.ids, self.reused = session, ids, len(ids)
        self._chunk, self._boundaries = chunk, boundaries
        self._cuts: list[int] = []
        self._note_start()

    def _note_start(self) -> None:
        """Go on from what the session holds, which begins the prompt."""
        held = len(self.session.tokens)
        self.reused = min(self.reused, held)
        cuts = self.session._turn_boundaries(self.ids) if self._boundaries is None else sorted(self._boundaries)
        self._cuts = [c for c in cuts if held < c < len(self.ids)][-MAX_TURN_CUTS:]
        self._seen = self.session._version

    @property
    def done(self) -> bool:
        """Whether the session holds the prompt."""
        return self._seen == self.session._version and len(self.session.tokens) == len(self.ids)

    def step(self, chunk: int | None = None) -> bool:
        """Evaluate the prompt up to the next multiple of `chunk` (by default that of `begin`); True once it is done.

        If the step breaks off, the next one starts over. Raises Ds4Error if the session was closed.
        """
        session = self.session
        chunk = self._chunk if chunk is None else session._check_chunk(chunk)
        if self.done:
            session.pending = None
            return True
        if self._seen != session._version or not session.whole:
            session._go_back_for(self.ids)
            self._note_start()
            if self.done:
                return True
        start = len(session.tokens)
        end = min(start - start % chunk + chunk, len(self.ids))
        # A state still reaches a few tokens back, so only a boundary further from the end costs a step of its own.
        end = next((c for c in self._cuts if c < end - FREE_TRUNCATION), end)
        session.engine.step([(session, self.ids[start:end])], "keep" if end == len(self.ids) else "none")
        session.recomputed += end - start
        interval = session.engine.config.checkpoint_interval
        kept = end == len(self.ids) or end in self._cuts[:1]
        if interval and end % interval and end // interval > start // interval and not kept:
            # Chunks of such a size end at few multiples of the interval, or at none.
            session._keep_checkpoint(wanted=False)
        while self._cuts and self._cuts[0] <= end:
            session._keep_checkpoint(wanted=True, length=self._cuts.pop(0))
        self._seen = session._version
        return self.done


@dataclass(frozen=True)
class Snapshot:
    """A state of a session that stays as it is while the session goes on (see `Session.snapshot`).

    Attributes:
        tokens: all of its tokens.
        checkpoint: window, frontiers and logits at its end.
        rows: what reads its compressed rows (`ds4.model.cache.HeldRows`).
    """

    tokens: tuple[int, ...]
    checkpoint: Any
    rows: Any

    def release(self) -> None:
        """Give the rows back; only the thread that owns the session may call it."""
        self.rows.release()


class Session:
    """Tokens and state of one conversation.

    Attributes:
        tokens: the evaluated tokens; do not change the list.
        pending: the token that was sampled last and is not evaluated yet, or None.
        reused, recomputed: tokens that the last `sync`, `begin` or `rewind` took over from the state, and that it (or
            the steps since `begin`) evaluated.
    """

    def __init__(self, engine: Engine, state: State | None = None) -> None:
        self.engine = engine
        self.state: State = engine.runner.new_state() if state is None else state
        self.tokens: list[int] = []
        self.pending: int | None = None
        self.reused = 0
        self.recomputed = 0
        self.closed = False
        self._version = 0  # another number after each change of the tokens
        self.checkpoints = CheckpointList()
        self._logits: Tensor | None = None
        engine.checkpoint_budget.register(self.checkpoints)

    # -- going forward -----------------------------------------------------------------------------------------------

    def sync(
        self,
        ids: Sequence[int],
        *,
        chunk: int | None = None,
        progress: Callable[[int, int], None] | None = None,
        cancelled: Callable[[], bool] | None = None,
        boundaries: Sequence[int] | None = None,
    ) -> bool:
        """Make the session hold exactly `ids`, evaluating only what differs from what it holds.

        Args:
            ids: the whole prompt.
            chunk: tokens per step; chunks end at multiples of it. Default: the engine's `prefill_chunk`.
            progress: called with (tokens in the state, tokens of the prompt) after each chunk.
            cancelled: asked before each chunk; if it returns True the session stops there, as a shorter valid one.
            boundaries: positions that get a checkpoint; by default those behind the last `<｜Assistant｜>` tokens, as
                a later prompt may go on with the other think marker there.

        Returns:
            True, or False if cancelled.

        Raises:
            ContextOverflowError: the prompt does not fit the context. Ds4Error: no tokens, or unknown ids.
        """
        prefill = self.begin(ids, chunk=chunk, boundaries=boundaries)
        while not prefill.done:
            if cancelled is not None and cancelled():
                return False
            prefill.step()
            if progress is not None:
                progress(len(self.tokens), len(prefill.ids))
        return True

    def begin(
        self, ids: Sequence[int], *, chunk: int | None = None, boundaries: Sequence[int] | None = None
    ) -> Prefill:
        """Like `sync`, but evaluates nothing yet: the steps of what is returned do, each one chunk.

        Only here is the whole prompt looked at, so that short steps cost a long prompt no more than long ones.
        """
        ids = self.token_ids(ids)
        self._check_open()
        if not ids:
            raise Ds4Error("a prompt needs at least one token")
        if len(ids) >= self.engine.context:
            raise ContextOverflowError(len(ids), self.engine.context)
        chunk = self._check_chunk(self.engine.prefill_chunk if chunk is None else chunk)
        self._go_back_for(ids)
        return Prefill(self, ids, chunk, boundaries)

    def _turn_boundaries(self, ids: list[int]) -> list[int]:
        if not self.engine.has_tokenizer:
            return []
        assistant = self.engine.tokenizer.assistant
        return [i + 1 for i in range(len(self.tokens), len(ids)) if ids[i] == assistant]

    def _extend(self, ids: list[int]) -> None:
        """Evaluate what is missing of `ids`, which begin with the tokens held."""
        prefill = Prefill(self, ids, self.engine.prefill_chunk, ())
        while not prefill.done:
            prefill.step()

    def step(self, token: int) -> Tensor:
        """Evaluate one token, after the pending one if there is one; the logits behind it, float32 [vocab]."""
        self.engine.step([(self, [token] if self.pending is None else [self.pending, token])], "keep")
        return self.logits

    def generate(self, sampling: Sampling, max_tokens: int) -> Iterator[bytes]:
        """Sample up to `max_tokens` tokens, yielding the bytes of each; ends after the end-of-sequence token.

        The last sampled token stays `pending`: the next `sync` or `generate` evaluates it.
        """
        if not isinstance(sampling, Sampling):
            raise Ds4Error(f"generate takes a ds4.Sampling, not {type(sampling).__name__}")
        sampler, tokenizer = Sampler(sampling), self.engine.tokenizer
        for _ in range(max_tokens):
            if self.pending is not None:
                self.engine.step([(self, [self.pending])], "keep")
            (choice,) = self.engine.sample([SampleRow(self, sampler)])
            if isinstance(choice, Ds4Error):
                raise choice
            self.pending = token = choice.token
            if token == tokenizer.eos:
                return
            yield tokenizer.token_bytes(token)
            if len(self.tokens) + 1 >= self.engine.context:
                return

    # -- going back --------------------------------------------------------------------------------------------------

    @property
    def logits(self) -> Tensor:
        """Logits of the next token, float32 [vocab], on the host; after a cut the last token is evaluated for them."""
        self._logits = self.device_logits.cpu()
        return self._logits

    @property
    def device_logits(self) -> Tensor:
        """As `logits`, where they are: after steps on a CUDA device there."""
        if self._logits is None:
            if not self.tokens:
                raise Ds4Error("an empty session has no logits: sync a prompt first")
            pending, tokens = self.pending, list(self.tokens)
            self._go_back(len(tokens), needs_logits=True)
            self._extend(tokens)
            self.pending = pending
        assert self._logits is not None
        return self._logits

    def rewind(self, length: int) -> None:
        """Cut the session to its first `length` tokens, from the nearest checkpoint before them.

        What lies between the checkpoint and `length` is evaluated again; `recomputed` counts it.
        """
        self._check_length(length)
        tokens = self.tokens[:length]
        self.pending = None
        self._go_back(length, needs_logits=False)
        self.reused, self.recomputed = len(self.tokens), 0
        self._extend(tokens)

    def truncate(self, length: int) -> None:
        """Cut off up to 16 tokens (`ds4.model.cache.FREE_TRUNCATION`) at no cost.

        Raises:
            Ds4Error: the state does not reach that far back; `rewind` does.
        """
        self._check_length(length)
        self.pending = None
        if length == len(self.tokens):
            return
        if not self.state.can_truncate(length) or len(self.tokens) - length > FREE_TRUNCATION:
            raise Ds4Error(
                f"cannot truncate a session of {len(self.tokens)} tokens to {length}: only the last 16 tokens since the"
                " last rewind can be cut off; use rewind"
            )
        self._cut(length)

    def checkpoint(self) -> None:
        """Keep a way back to the present position."""
        self.repair()
        self._keep_checkpoint(wanted=True)

    def fork(self) -> Session:
        """An equal session of its own; what both hold is shared."""
        other = Session(self.engine, self.state.fork())
        other.tokens, other.pending, other._logits = list(self.tokens), self.pending, self._logits
        other.checkpoints = self.checkpoints.copy()
        self.engine.checkpoint_budget.register(other.checkpoints)
        self.engine.checkpoint_budget.enforce()
        return other

    def close(self) -> None:
        """Give the memory back; the session must not be used again."""
        self.state.release()
        self.checkpoints.clear()
        self.tokens, self.pending, self._logits = [], None, None
        self.closed = True
        self._version += 1

    def _go_back_for(self, ids: list[int]) -> None:
        """Cut the session to what it shares with `ids`, as long as it can be without evaluating."""
        self._check_open()
        self.pending = None
        shared = common_prefix(self.tokens, ids)
        if not (shared == len(self.tokens) == len(ids) and self._logits is not None):
            self._go_back(shared, needs_logits=shared == len(ids))
        self.reused, self.recomputed = len(self.tokens), 0

    def _go_back(self, length: int, needs_logits: bool) -> None:
        """Go to the longest state of at most `length` tokens that can be had without evaluating.

        With `needs_logits`, a state of exactly `length` tokens must come with its logits.
        """
        exact = self.checkpoints.at(length) if length < len(self.tokens) else None
        if not needs_logits or (exact is not None and exact.logits is not None):
            target = length
        elif length == len(self.tokens) and self._logits is not None:
            return
        else:
            target, exact = length - 1, None
        if target == len(self.tokens) == self.state.length and self.state.can_truncate(target):
            return
        if self.state.can_truncate(target) and exact is None:
            self._cut(target)
            return
        checkpoint = self.checkpoints.best(target)
        if checkpoint is None:
            self.state.reset()
            self._forget(0)
        else:
            self.state.restore(checkpoint)
            self._forget(checkpoint.length)
            self._logits = checkpoint.logits

    def _cut(self, length: int) -> None:
        self.state.truncate(length)
        self._forget(length)

    def _forget(self, length: int) -> None:
        del self.tokens[length:]
        self.checkpoints.drop_above(length)
        self._logits = None
        self._version += 1

    # -- moving a session --------------------------------------------------------------------------------------------

    def export(self, start: int = 0) -> Any:
        """The state from token `start` on as data (`ds4.model.cache.ExportedState`), without the token ids."""
        self.repair()
        exported = self.state.export(start)
        logits = None if self._logits is None else self._logits.cpu()
        return replace(exported, checkpoint=replace(exported.checkpoint, logits=logits))

    def snapshot(self, length: int | None = None) -> Snapshot:
        """The state now, or at an earlier length that has a checkpoint, to be packed later, maybe by another thread.

        Costs a copy of the tokens and, for the present length, of the live part of window and frontiers. The thread
        that owns the session must release it.

        Raises:
            Ds4Error: there is no checkpoint of exactly that length.
        """
        self.repair()
        n = len(self.tokens) if length is None else length
        if n == len(self.tokens):
            checkpoint: Any = self.state.checkpoint(self._logits)
        else:
            checkpoint = self.checkpoints.at(n)
            if checkpoint is None:
                raise Ds4Error(f"the session has no checkpoint at {n} tokens")
        return Snapshot(tuple(self.tokens[:n]), checkpoint, self.state.hold(n))

    def import_state(self, tokens: Sequence[int], exported: Any) -> None:
        """Continue with an exported state of `tokens`; this session must hold those before its start.

        Raises:
            Ds4Error: `tokens` are not as many as the state's, or this session holds others before the state's start.
        """
        tokens, length = list(tokens), exported.checkpoint.length
        if len(tokens) != length:
            raise Ds4Error(f"the state is one of {length} tokens, but {len(tokens)} came with it")
        shared = common_prefix(self.tokens, tokens)
        if shared < exported.start:
            raise Ds4Error(f"the state starts at token {exported.start}, but only {shared} of those before are here")
        self.repair()
        self._go_back(exported.start, needs_logits=False)
        if len(self.tokens) < exported.start:
            self._extend(tokens[: exported.start])
        self._forget(exported.start)
        self.state.import_state(exported)
        self.tokens, self.pending, self._logits = tokens, None, exported.checkpoint.logits
        self._version += 1
        self.checkpoints.add(exported.checkpoint, wanted=True)
        self.engine.checkpoint_budget.enforce()

    # -- called by the engine ----------------------------------------------------------------------------------------

    def check(self, ids: Sequence[int]) -> list[int]:
        """The ids as plain integers; raises `Ds4Error` if these cannot be the session's next tokens."""
        self._check_open()
        ids = self.token_ids(ids)
        if not ids:
            raise Ds4Error("a step needs at least one token of each session")
        if len(self.tokens) + len(ids) > self.engine.context:
            raise ContextOverflowError(len(self.tokens) + len(ids), self.engine.context)
        return ids

    @property
    def whole(self) -> bool:
        """Whether the state holds exactly `tokens`: no step has just broken off."""
        return self.state.length == len(self.tokens) and self.state.can_truncate(len(self.tokens))

    def repair(self) -> None:
        """Make the state hold exactly `tokens` again if a step broke off half way."""
        if self.whole:
            return
        length = len(self.tokens)
        if self.state.can_truncate(length):
            self.state.truncate(length)
        else:
            self.rewind(length)

    def evaluated(self, ids: Sequence[int], logits: Tensor | None) -> None:
        """The state has taken these tokens."""
        self.tokens += ids
        self._version += 1
        self.pending = None
        self._logits = logits
        interval = self.engine.config.checkpoint_interval
        if interval and len(self.tokens) % interval == 0:
            self._keep_checkpoint(wanted=False)

    def _keep_checkpoint(self, wanted: bool, length: int | None = None) -> None:
        here = length is None or length == len(self.tokens)
        self.checkpoints.add(self.state.checkpoint(self._logits if here else None, length), wanted)
        self.engine.checkpoint_budget.enforce()

    def token_ids(self, ids: Iterable[int]) -> list[int]:
        """The ids as plain integers; raises `Ds4Error` for anything that is no token id of this model."""
        try:
            ids = [operator.index(i) for i in ids]
        except TypeError:
            raise Ds4Error("token ids are integers, one after another: encode text with the tokenizer first") from None
        low, high = min(ids, default=0), max(ids, default=0)
        if low < 0 or high >= self.engine.shape.vocab:
            wrong = low if low < 0 else high
            raise Ds4Error(f"token id {wrong} is not in the vocabulary (0 to {self.engine.shape.vocab - 1})")
        return ids

    def _check_open(self) -> None:
        if self.closed:
            raise Ds4Error("this session is closed; take a new one from the engine")

    def _check_chunk(self, chunk: int) -> int:
        """`chunk`; raises `Ds4Error` if it is no size of a chunk."""
        if chunk < 1:
            raise Ds4Error(f"the prefill chunk must be at least 1 token, not {chunk}")
        return chunk

    def _check_length(self, length: int) -> None:
        if not isinstance(length, int) or not 0 <= length <= len(self.tokens):
            raise Ds4Error(f"cannot go back to {length} tokens: the session holds {len(self.tokens)}")
