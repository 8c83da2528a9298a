"""The engine: one model, many sessions, one batch a step. It sees token ids only."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor

from ds4.engine.checkpoints import CheckpointBudget, CheckpointLike
from ds4.engine.sample_rows import DeviceSampler, SampleRow, sample_rows
from ds4.engine.sampling import Choice
from ds4.errors import Ds4Error
from ds4.gguf.file import Identity
from ds4.gguf.shape import Shape, expected_tensors
from ds4.model.cache import ReceivedRows
from ds4.model.deepseek_v4 import DeepseekV4, Edits, Slice, Taps
from ds4.tokenizer import Tokenizer

if TYPE_CHECKING:
    from ds4.engine.session import Session

MAX_THREADS = 1024

PREFILL_CHUNK = 512
"""Tokens of a prompt that one step takes, where the configuration and the device say nothing else."""

Wanted = Literal["last", "all", "none", "keep"]
"""The positions of each item whose logits a step returns; "keep" leaves those of the last one with the session only."""


@dataclass(frozen=True)
class EngineConfig:
    """How an engine runs.

    Attributes:
        context: most tokens of a session; None: what the model file says, on a CUDA device as much of it as fits.
        prefill_chunk: most tokens of one session evaluated in one step of a prefill; None: 512, on a CUDA device 4,096
            (2,048 with `quality`) or what fits.
        sessions: how many can be live at once on a CUDA device, forks included, each of `context` tokens: memory is
            set aside for them. None: 8, or as many as fit. On the CPU memory is taken as it is needed, without a limit.
        checkpoint_bytes: what the checkpoints of all sessions may hold together (architecture of state: history).
        checkpoint_interval: a checkpoint is taken whenever a session's length is a multiple of this, and where a chunk
            of a prompt ends behind one; 0: never.
        threads: CPU threads, for the whole process. None: one for a model whose matrices are too small to share (a
            second thread then mostly waits, and for long where the machine is busy), else as PyTorch is set.
        quality: on a CUDA device, compute in float32 throughout, where else bytes and 16 bits are multiplied: the
            results are nearly those of the CPU, and slow but for small models. None: where the weights take up to
            32 MiB. The CPU always computes so. Of an engine that was loaded on a CUDA device: what is done.
        expert_layout: how a CUDA device holds experts of type IQ2_XXS: "b" (2.19 bits a weight), "a" (3.19 bits, a
            little faster for many sessions) or "auto": A where everything fits with it, else B. The results are the
            same. Other types, and the CPU, have one layout only. Of an engine that was loaded: the one that was taken.
    """

    context: int | None = None
    prefill_chunk: int | None = None
    checkpoint_bytes: int = 1 << 30
    checkpoint_interval: int = 128
    threads: int | None = None
    sessions: int | None = None
    quality: bool | None = None
    expert_layout: Literal["auto", "a", "b"] = "b"

    def __post_init__(self) -> None:
        if self.quality is not None and type(self.quality) is not bool:
            raise Ds4Error(f"quality is {self.quality!r}; it must be True, False or None")
        if self.expert_layout not in ("auto", "a", "b"):
            raise Ds4Error(f"expert_layout is {self.expert_layout!r}; use 'auto', 'a' or 'b'")
        limits: dict[str, tuple[int, int | None]] = {
            "checkpoint_bytes": (0, None),
            "checkpoint_interval": (0, None),
        }
        if self.context is not None:
            limits["context"] = (1, None)
        if self.prefill_chunk is not None:
            limits["prefill_chunk"] = (1, None)
        if self.threads is not None:
            limits["threads"] = (1, MAX_THREADS)
        if self.sessions is not None:
            limits["sessions"] = (1, None)
        for name, (low, high) in limits.items():
            value = getattr(self, name)
            if type(value) is not int or value < low or (high is not None and value > high):
                until = "" if high is None else f" to {high}"
                raise Ds4Error(f"{name} is {value!r}; it must be a whole number from {low}{until}")


class State(Protocol):
    """The state of one sequence as a session uses it (see `ds4.model.cache.SequenceState`)."""

    length: int

    def can_truncate(self, length: int) -> bool: ...

    def truncate(self, length: int) -> None: ...

    def fork(self) -> Any: ...

    def checkpoint(self, logits: Tensor | None = None, length: int | None = None) -> CheckpointLike: ...

    def restore(self, checkpoint: Any) -> None: ...

    def reset(self) -> None: ...

    def release(self) -> None: ...

    def spoil(self) -> None: ...

    def hold(self, length: int) -> Any: ...

    def export(self, start: int = 0) -> Any: ...

    def import_state(self, exported: Any) -> None: ...

    @property
    def nbytes(self) -> int: ...


class Runner(Protocol):
    """What evaluates tokens: the real model, or a scripted one in tests of clients.

    Attributes:
        shape: the model's.
        sampler: what chooses tokens where the logits are; None: the host does.
        shared_chunk: most tokens of a prompt to evaluate at once while other sequences wait for their next token.
    """

    shape: Shape
    sampler: DeviceSampler | None
    shared_chunk: int

    def new_state(self) -> State:
        """The state of an empty sequence."""
        ...

    def renew(self) -> Runner:
        """A runner of the same model that shares nothing with this one that a step writes to."""
        ...

    def warm_up(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Do once what the first steps would else wait for; `progress` is called with (done, in all), if at all."""
        ...

    def evaluate(
        self, batch: Sequence[tuple[Any, list[int]]], wanted: Sequence[Wanted], taps: Taps | None, edits: Edits | None
    ) -> list[Tensor | None]:
        """Evaluate the next tokens of each state and move it on; logits per item, [vocab] or [tokens, vocab].

        Those of "keep" are [vocab], in memory of their own wherever the runner has them, and need not be there before
        somebody looks.
        """
        ...


class ModelRunner:
    """A `Runner` over the V4 graph."""

    sampler: DeviceSampler | None = None
    shared_chunk = 128

    def __init__(self, model: DeepseekV4) -> None:
        self.model = model
        self.shape = model.shape

    def new_state(self) -> State:
        """The state of an empty sequence."""
        return self.model.new_state()

    def renew(self) -> ModelRunner:
        """See `Runner`: the weights are shared, the pages of the rows are not."""
        return ModelRunner(DeepseekV4(self.model.weights, self.model.qat_sim, self.model.index_selection))

    def prepare_packing(self) -> tuple[str, ...] | None:
        """See `ds4.engine.packing.PackedRunner`."""
        return (self.model.index_selection,) if self.model.qat_sim else None

    def receive(self, length: int) -> ReceivedRows:
        """See `ds4.engine.packing.PackedRunner`."""
        return self.model.cache.receive(length)

    def warm_up(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Nothing: the first step is as fast as the others."""

    def evaluate(
        self, batch: Sequence[tuple[Any, list[int]]], wanted: Sequence[Wanted], taps: Taps | None, edits: Edits | None
    ) -> list[Tensor | None]:
        """See `Runner`. If the step breaks off, its states can only go back to a checkpoint."""
        rows: list[int] = []
        counts, start = [], 0
        for (_, ids), want in zip(batch, wanted, strict=True):
            end = start + len(ids)
            chosen = [] if want == "none" else list(range(start, end)) if want == "all" else [end - 1]
            rows += chosen
            counts.append(len(chosen))
            start = end
        try:
            output = self.model.forward(
                [Slice(state, torch.tensor(ids, dtype=torch.int64)) for state, ids in batch],
                wanted=torch.tensor(rows) if rows else None,
                taps=taps,
                edits=edits,
            )
        except BaseException:
            for state, _ in batch:
                state.spoil()
            raise
        for state, ids in batch:
            state.advance(len(ids))
        if output.logits is None:
            return [None] * len(batch)
        parts = output.logits.split(counts)
        return [
            None if want == "none" else part if want == "all" else part[0].clone() if want == "keep" else part[0]
            for part, want in zip(parts, wanted, strict=True)
        ]


class Engine:
    """Sessions over one model.

    Attributes:
        shape: the model's sizes.
        tokenizer: None for a model made from tensors without one.
        context: most tokens of a session.
        prefill_chunk: most tokens of one session evaluated in one step of a prefill, if a call says nothing else.
    """

    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer | None,
        config: EngineConfig | None = None,
        tensors: Mapping[str, Tensor] | None = None,
        identity: Identity | None = None,
    ) -> None:
        """`identity`: tells this model's weights from others of the same shape; None: a hash of `tensors`."""
        self.runner = runner
        self._tensors = tensors
        self._identity = identity
        self.shape = runner.shape
        self.config = config or EngineConfig()
        self._tokenizer = tokenizer
        self.context = min(self.config.context or self.shape.context, self.shape.context)
        self.prefill_chunk = self.config.prefill_chunk or PREFILL_CHUNK
        self.checkpoint_budget = CheckpointBudget(self.config.checkpoint_bytes)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; raises `Ds4Error` if the model came without one."""
        if self._tokenizer is None:
            raise Ds4Error("this model has no tokenizer: give one to from_tensors, or work with token ids")
        return self._tokenizer

    @property
    def has_tokenizer(self) -> bool:
        """True if `tokenizer` can be used."""
        return self._tokenizer is not None

    @property
    def shared_chunk(self) -> int:
        """Most tokens of a prompt to evaluate in one step while other sessions wait for their next token."""
        return min(self.prefill_chunk, self.runner.shared_chunk)

    @property
    def expert_layout(self) -> Literal["a", "b"] | None:
        """The layout of IQ2_XXS experts on a CUDA device; None where there are none, and on the CPU."""
        found: Literal["a", "b"] | None = getattr(self.runner, "expert_layout", None)
        return found

    @property
    def quality(self) -> bool:
        """Whether all is computed in float32: on the CPU always, on a CUDA device as `EngineConfig.quality` says."""
        return bool(getattr(self.runner, "quality", True))

    @property
    def identity(self) -> Identity:
        """What tells states of this model's weights from those of other weights of the same shape."""
        if self._identity is None:
            if not self._tensors:
                raise Ds4Error("nothing tells what this engine's weights are, so that its states cannot be stored")
            running = hashlib.blake2b(digest_size=16)
            for name, tensor in sorted(self._tensors.items()):
                running.update(name.encode())
                running.update(tensor.detach().contiguous().cpu().flatten().view(torch.uint8).numpy().data)
            self._identity = Identity(running.hexdigest(), 32)
        return self._identity

    def save_gguf(self, path: str | os.PathLike[str]) -> None:
        """Write what `from_tensors` or `from_transformers` built as a GGUF file of profile custom, unquantised.

        `load` takes it again; it records whether the round trips were on (`qat_sim`).

        Raises:
            Ds4Error: this engine was loaded from a file, or the file cannot be written.
        """
        if self._tensors is None or not isinstance(self.runner, ModelRunner):
            raise Ds4Error("only an engine made from tensors can be saved: this one already has its file")
        from ds4.gguf.writer import save

        tokenizer = None if self._tokenizer is None else self._tokenizer.metadata
        shape = replace(self.shape, name="custom")
        tensors = {name: self._tensors[name] for name in expected_tensors(shape)}
        save(path, shape, tensors, tokenizer=tokenizer, qat_sim=self.runner.model.qat_sim)

    def renew(self) -> Engine:
        """An engine over the same weights for when a step of this one is stuck: nothing it writes to is shared."""
        return Engine(self.runner.renew(), self._tokenizer, self.config, self._tensors, self._identity)

    def warm_up(self, progress: Callable[[int, int], None] | None = None) -> None:
        """On a CUDA device, compile the kernels that serving needs and capture decode steps; on the CPU nothing.

        Without it the first prompts and tokens wait for that: half a minute, or seconds where triton's cache
        (`~/.triton/cache`) has the compiled kernels of an earlier start. Call it before the first session.

        Args:
            progress: called with (steps done, steps in all).
        """
        self.runner.warm_up(progress)

    def session(self) -> Session:
        """A new, empty session."""
        from ds4.engine.session import Session

        return Session(self)

    def step(
        self,
        batch: Sequence[tuple[Session, Sequence[int]]],
        logits: Wanted | Sequence[Wanted] = "last",
        *,
        taps: Taps | None = None,
        edits: Edits | None = None,
    ) -> list[Tensor | None]:
        """Evaluate the next 1..n tokens of each session in one batch.

        Args:
            batch: (session, ids) pairs, each session once.
            logits: positions whose logits come back, for all items or one by one; the last one's also become
                `session.logits`.

        Returns:
            per item float32 [vocab] ("last"), [tokens, vocab] ("all") or None ("none" and "keep").

        With "keep", a CUDA device may still be at work when this returns; `sample` waits for what it needs.

        Raises:
            Ds4Error: an id outside the vocabulary, no ids, a session twice, closed or of another engine, or more tokens
                than the context.
        """
        wanted = [logits] * len(batch) if isinstance(logits, str) else list(logits)
        if len(wanted) != len(batch):
            raise Ds4Error(f"logits names {len(wanted)} items, but the batch has {len(batch)}")
        for want in wanted:
            if want not in ("last", "all", "none", "keep"):
                raise Ds4Error(f"logits is {want!r}; use last, all, none or keep")
        if not batch:
            return []
        items = []
        for session, ids in batch:
            if session.engine is not self:
                raise Ds4Error("a session can only be stepped by the engine that it came from")
            items.append((session.state, session.check(ids)))
        if len({id(session) for session, _ in batch}) != len(batch):
            raise Ds4Error("a session can stand in a batch only once")
        for session, _ in batch:
            session.repair()
        results = self.runner.evaluate(items, wanted, taps, edits)
        for (session, _), (_, ids), want, result in zip(batch, items, wanted, results, strict=True):
            last = None if result is None else result if result.dim() == 1 else result[-1]
            if last is not None and want != "keep":
                # A copy: a view would hold the logits of the whole step, and change with what the caller does to them.
                last = last.clone()
            session.evaluated(ids, last)
        return [None if want == "keep" else result for want, result in zip(wanted, results, strict=True)]

    def sample(self, rows: Sequence[SampleRow]) -> list[Choice | Ds4Error]:
        """Choose the next token of many sessions, on the device where it has the logits and can.

        The same tokens as with `Sampler.choose`, one by one. A CUDA device goes on evaluating them at once, so the next
        `step` should bring just these tokens; if it does not, nothing but that time is lost.

        Returns:
            per row its choice, or what `Sampler.choose` would raise; the others do not suffer.
        """
        return sample_rows(self.runner.sampler, rows)
