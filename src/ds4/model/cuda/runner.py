"""What evaluates tokens on a CUDA device: the engine's `Runner` over `DeviceModel`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from ds4 import ops
from ds4.errors import Ds4Error
from ds4.model.cuda.exact import ExactModel
from ds4.model.cuda.forward import MAX_ROWS, Buffers, ByteModel, DeviceModel
from ds4.model.cuda.plan import BUCKETS, bucket
from ds4.model.cuda.pool import DeviceCache, DeviceState
from ds4.model.cuda.prefill import compile_selection, prefill
from ds4.model.cuda.sampling import TokenSampler
from ds4.model.cuda.transfer import ReceivedPages
from ds4.model.cuda.weights import DeviceWeights, RawSource
from ds4.model.deepseek_v4 import Taps
from ds4.model.draw import Draw
from ds4.ops.kernels.planes import Iq2Layout

if TYPE_CHECKING:
    from ds4.model.deepseek_v4 import Edits

Wanted = Literal["last", "all", "none", "keep"]
EnergyTap = Callable[[int, ops.ExpertEnergy], None]

_LENGTHS = (1, 2, 4, 8, 16, 32, 64, 72, 128, 256, 512, 1024, 2048, 4096, 8192)
"""Lengths of pieces, one for each way in which some kernel is cut by it; the shortest and the longest come to them."""


@dataclass(frozen=True)
class RunnerConfig:
    """How a runner uses the device.

    Attributes:
        context: most tokens of a sequence; None: what the shape says.
        slots: sequences that can exist at once.
        chunk: most tokens of a long piece.
        short: pieces of up to so many tokens go through the kernels of decode, at most 64.
        experts_at_once: experts that a long piece decodes at once with `quality`.
        layout: of IQ2_XXS experts.
        graphs: capture decode steps; None: where the device is a CUDA one.
        limits: ratio -> pages of its pool, taken at the start; all that the slots can fill where one is missing.
        quality: every step in float32, as far as the weights allow: what an item of a batch gives does not depend on
            the others then.
    """

    context: int | None = None
    slots: int = 8
    chunk: int = 4096
    short: int = MAX_ROWS
    experts_at_once: int = 64
    layout: Iq2Layout = "b"
    graphs: bool | None = None
    limits: Mapping[int, int] | None = None
    quality: bool = False


class CudaRunner:
    """A `Runner` on one device, which may be the CPU where the kernels are interpreted.

    Attributes:
        shape: the model's, its context what the device has room for.
    """

    shared_chunk = 2048
    """Half of it takes more than half the time, as all experts are decoded for a few hundred tokens already."""

    def __init__(self, weights: DeviceWeights, config: RunnerConfig | None = None) -> None:
        self.config = config = config or RunnerConfig()
        shape, device = weights.shape, weights.device
        context = min(config.context or shape.context, shape.context)
        self.shape = replace(shape, context=context)
        cache = DeviceCache(shape, device, config.slots, context, config.limits)
        self.model: DeviceModel = (ExactModel if config.quality else ByteModel)(weights, cache)
        if not config.quality:
            _ = self.model.expert_scales, self.model.attention_fits  # refuses what is damaged now, not amid a prompt
        self._capture = device.type == "cuda" if config.graphs is None else config.graphs
        self._tokens = TokenSampler(bucket(config.slots), shape.vocab, device, self._capture)
        self._ahead: _Ahead | None = None
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    @property
    def expert_layout(self) -> Iq2Layout | None:
        """The layout of IQ2_XXS experts; None where there are none."""
        return self.model.weights.expert_layout

    @property
    def quality(self) -> bool:
        """See `RunnerConfig.quality`."""
        return self.config.quality

    def renew(self) -> CudaRunner:
        """See `ds4.engine.engine.Runner`: the weights are shared; cache, buffers and graphs are new.

        Raises:
            Ds4Error: the device has no room for them beside those of this runner.
        """
        with _on(self.model.device):
            return CudaRunner(self.model.weights, self.config)

    @classmethod
    def load(
        cls,
        source: RawSource,
        device: torch.device | str = "cuda",
        config: RunnerConfig | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> CudaRunner:
        """Read the weights onto the device; `progress` is called with (bytes read, bytes in all).

        Raises:
            Ds4Error: the model is one that there are no kernels for, or the device has no room for it.
        """
        config = config or RunnerConfig()
        with _on(torch.device(device)):
            return cls(DeviceWeights.load(source, device, config.layout, progress), config)

    def new_state(self) -> DeviceState:
        """The state of an empty sequence."""
        return self.model.cache.new_state()

    def prepare_packing(self) -> tuple[str, ...]:
        """See `ds4.engine.packing.PackedRunner`. Raises Ds4Error if the device has no room for the buffers."""
        with _on(self.model.device):
            _ = self.model.cache.lanes
        return ("topk", "kernels", *(["quality"] if self.config.quality else []))

    def receive(self, length: int) -> ReceivedPages:
        """See `ds4.engine.packing.PackedRunner`."""
        return self.model.cache.receive(length)

    @torch.no_grad()
    def evaluate(
        self, batch: Sequence[tuple[Any, list[int]]], wanted: Sequence[Wanted], taps: Taps | None, edits: Edits | None
    ) -> list[Tensor | None]:
        """See `ds4.engine.Runner`; logits are on the host, those of "keep" on the device.

        Items of one token are decoded together, the others go piece by piece. With a tap every piece, short ones too,
        takes the way of long ones. If the step breaks off, its states can only go back to a checkpoint.

        Raises:
            Ds4Error: the KV pools have no room, in which case nothing is lost; edits, or other taps than
                `expert_energy`, which are for the CPU.
        """
        energy = None if taps is None else taps.expert_energy
        if edits is not None or (taps is not None and replace(taps, expert_energy=None) != Taps()):
            raise Ds4Error("taps and edits work on the CPU only; load the model with device='cpu'")
        with _on(self.model.device):
            for state, ids in batch:
                state.prepare(len(ids))
        results: list[Tensor | None] = [None] * len(batch)
        ahead, self._ahead = self._ahead, None
        decodes = energy is None
        single = [i for i, (_, ids) in enumerate(batch) if len(ids) == 1 and decodes]
        try:
            with _on(self.model.device):
                if ahead is not None:
                    single = self._take(ahead, batch, wanted, single, results)
                for first in range(0, len(single), MAX_ROWS):
                    self._decode(batch, wanted, single[first : first + MAX_ROWS], results)
                for i, (state, ids) in enumerate(batch):
                    if len(ids) > 1 or (ids and not decodes):
                        results[i] = self._prefill(state, ids, wanted[i], energy)
        except BaseException:
            for state, _ in batch:
                state.spoil()
            raise
        return results

    # -- decode ------------------------------------------------------------------------------------------------------

    def _decode(
        self,
        batch: Sequence[tuple[DeviceState, list[int]]],
        wanted: Sequence[Wanted],
        items: Sequence[int],
        results: list[Tensor | None],
    ) -> None:
        buffers = self.model.buffers(len(items))
        _fill(buffers, [(batch[i][0].length, batch[i][0].slot, batch[i][1][0]) for i in items])
        self._step(buffers)
        _hand_out(buffers, dict(enumerate(items)), batch, wanted, results)

    def _step(self, buffers: Buffers) -> None:
        if not self._capture:
            self.model.decode(buffers)
            return
        inputs = buffers.inputs.clone() if buffers.rows not in self._graphs else None
        graph = self._graph(buffers)
        if inputs is not None:
            buffers.inputs.copy_(inputs)
        graph.replay()

    # -- ahead of the host -------------------------------------------------------------------------------------------

    @property
    def sampler(self) -> CudaRunner:
        """What chooses tokens where the logits are."""
        return self

    def sample(self, draws: Sequence[Draw], best: bool) -> list[tuple[int, int]]:
        """See `ds4.engine.sample_rows.DeviceSampler`.

        Where the draws say whose tokens these are, their evaluation begins before the host knows them: while it deals
        with them, the device goes on. `evaluate` takes what fits; the rest has no effect.
        """
        self._ahead = begun = None
        states = [draw.state for draw in draws]
        alone = len(draws) <= self._tokens.rows and None not in states

        def go_on(tokens: Tensor) -> None:
            nonlocal begun
            begun = self._run_ahead(states, tokens)

        with _on(self.model.device):
            chosen = self._tokens.sample(draws, best, go_on if alone else None)
        if begun is not None:
            self._ahead = _Ahead(begun, [(state, state.version) for state in states], [token for token, _ in chosen])
        return chosen

    def _run_ahead(self, states: list[DeviceState], tokens: Tensor) -> Buffers | None:
        if len({state.slot for state in states}) < len(states):
            return None
        try:
            with _on(self.model.device):  # of buffers that are taken now, if nothing was warmed up
                for state in states:
                    state.prepare(1)
                buffers = self.model.buffers(len(states))
        except Ds4Error:
            return None  # no room: whoever evaluates the tokens will be told
        _fill(buffers, [(state.length, state.slot, 0) for state in states])
        torch.clamp(tokens, min=0, out=buffers.ids[: len(states)])  # -1 where there was none
        for state in states:
            state.begin_ahead()
        self._step(buffers)
        return buffers

    def _take(
        self,
        ahead: _Ahead,
        batch: Sequence[tuple[DeviceState, list[int]]],
        wanted: Sequence[Wanted],
        single: list[int],
        results: list[Tensor | None],
    ) -> list[int]:
        """Of items with one token, take those that were evaluated ahead; the others are returned."""
        rows = {}
        for i in single:
            state, ids = batch[i]
            for row, ((other, version), token) in enumerate(zip(ahead.states, ahead.tokens, strict=True)):
                if other is state and version == state.version and token == ids[0]:
                    rows[row] = i
        _hand_out(ahead.buffers, rows, batch, wanted, results)
        return [i for i in single if i not in rows.values()]

    def _graph(self, buffers: Buffers) -> torch.cuda.CUDAGraph:
        """The captured step of a bucket; the first time it is compiled and captured over rows of padding."""
        graph = self._graphs.get(buffers.rows)
        if graph is None:
            _fill(buffers, [])
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self.model.decode(buffers)
            torch.cuda.current_stream().wait_stream(stream)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            # Other threads may use the device meanwhile: states come from files and go to them.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self.model.decode(buffers)
            self._graphs[buffers.rows] = graph
        return graph

    # -- before the first request ------------------------------------------------------------------------------------

    def warm_up(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Compile and capture all that serving needs now, not when it is first used; see `ds4.engine.engine.Runner`.

        Pieces are evaluated whose lengths between them need every kernel, and the scratch of the longest is taken
        once. Needs a free slot; what it stores there means nothing to later sequences.
        """
        work = self._warm_up()
        for done, run in enumerate(work):
            if progress is not None:
                progress(done, len(work))
            with _on(self.model.device):
                run()
        if progress is not None:
            progress(len(work), len(work))

    def _warm_up(self) -> list[Callable[[], object]]:
        c, context = self.config, self.shape.context
        work: list[Callable[[], object]] = []
        work += [partial(self._warm_step, rows) for rows in BUCKETS if rows <= bucket(c.slots)]
        if not c.quality:
            work += [partial(self._warm_short, rows) for rows in BUCKETS if rows <= bucket(c.short)]
        work += self._tokens.warm_up()
        s, least, most = self.shape, 1 if c.quality else c.short + 1, min(c.chunk, context)
        lengths = {length for length in (least, *_LENGTHS, most) if least <= length <= most}
        chosen_from = (s.index_top_k + 1) * s.sparse_ratio if s.sparse_ratio in s.ratios else 0
        # The longest first, so that the scratch of the others is cut out of what it leaves.
        for length in sorted(lengths, reverse=True):
            work.append(partial(self._warm_piece, max(0, min(chosen_from, context - length)), length))
        if lengths:  # without a choice of rows
            work.append(partial(self._warm_piece, 0, min(lengths)))
        return [*work, partial(compile_selection, self.model)]

    @torch.no_grad()
    def _warm_step(self, rows: int) -> None:
        buffers = self.model.buffers(rows)
        if self._capture:
            self._graph(buffers)
        else:
            _fill(buffers, [])
            self.model.decode(buffers)

    @torch.no_grad()
    def _warm_short(self, rows: int) -> None:
        buffers = self.model.buffers(rows)
        _fill(buffers, [])
        self._short_step(buffers)

    @torch.no_grad()
    def _warm_piece(self, start: int, tokens: int) -> None:
        state = self.new_state()
        try:
            state.prepare(start + tokens)
            state.advance(start)
            self._long(state, [0] * tokens, [tokens - 1])
        finally:
            state.release()

    # -- prefill -----------------------------------------------------------------------------------------------------

    def _prefill(
        self, state: DeviceState, ids: list[int], want: Wanted, energy: EnergyTap | None = None
    ) -> Tensor | None:
        parts = []
        for first in range(0, len(ids), self.config.chunk):
            part = ids[first : first + self.config.chunk]
            last = first + len(part) == len(ids)
            rows: list[int] = []
            if want == "all":
                rows = list(range(len(part)))
            elif want != "none" and last:
                rows = [len(part) - 1]
            short = len(part) <= self.config.short and not self.config.quality and energy is None
            piece = self._short(state, part, rows) if short else self._long(state, part, rows, energy)
            state.advance(len(part))
            if piece is not None:
                parts.append(piece.clone() if want == "keep" else piece.to("cpu", copy=True))
        if not parts:
            return None
        logits = torch.cat(parts) if len(parts) > 1 else parts[0]
        return logits if want == "all" else logits[0]

    def _short(self, state: DeviceState, ids: list[int], rows: list[int]) -> Tensor | None:
        buffers = self.model.buffers(len(ids))
        _fill(buffers, [(state.length + i, state.slot, token) for i, token in enumerate(ids)])
        self._short_step(buffers)
        return buffers.token_logits[rows[0] : rows[-1] + 1] if rows else None

    def _short_step(self, buffers: Buffers) -> None:
        assert isinstance(self.model, ByteModel)  # where steps are exact, every piece is a long one
        self.model.short_chunk(buffers)

    def _long(
        self, state: DeviceState, ids: list[int], rows: list[int], energy: EnergyTap | None = None
    ) -> Tensor | None:
        device = self.model.device
        wanted = torch.tensor(rows, dtype=torch.int64, device=device) if rows else None
        tokens = torch.tensor(ids, dtype=torch.int32, device=device)
        c = self.config
        logits = prefill(self.model, state.slot, state.length, tokens, wanted, c.experts_at_once, c.quality, energy)
        if device.type == "cuda":
            # Whoever asks for piece after piece must not run ahead of the device: he could not stop in time.
            torch.cuda.current_stream().synchronize()
        return logits


@contextlib.contextmanager
def _on(device: torch.device) -> Iterator[None]:
    """The current device of this thread, which is the one that kernels are launched on; names what ran out."""
    try:
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            yield
    except torch.OutOfMemoryError as error:
        raise Ds4Error(
            f"the memory of {device} is not enough: take a smaller context, fewer sessions or a smaller prefill chunk"
            f" ({str(error).splitlines()[0]})"
        ) from error


@dataclass(frozen=True)
class _Ahead:
    """A step that nobody has asked for yet.

    Attributes:
        states: of its rows, and their versions then.
        tokens: of its rows.
    """

    buffers: Buffers
    states: list[tuple[DeviceState, int]]
    tokens: list[int]


def _hand_out(
    buffers: Buffers,
    rows: Mapping[int, int],
    batch: Sequence[tuple[DeviceState, list[int]]],
    wanted: Sequence[Wanted],
    results: list[Tensor | None],
) -> None:
    """A step is done: its rows belong to these items of the batch, whose states move on."""
    logits = host = buffers.token_logits
    if any(wanted[i] in ("last", "all") for i in rows.values()):
        host = logits[: max(rows) + 1].to("cpu", copy=True)
    for row, i in rows.items():
        batch[i][0].advance(1)
        if wanted[i] == "keep":
            results[i] = logits[row].clone()  # the next step writes to the same buffer
        elif wanted[i] != "none":
            results[i] = host[row] if wanted[i] == "last" else host[row : row + 1]


def _fill(buffers: Buffers, rows: Sequence[tuple[int, int, int]]) -> None:
    """Position, slot and token of each row; the others are padding."""
    padding = (-1, 0, 0)
    columns = [*rows, *[padding] * (buffers.rows - len(rows))]
    # From other memory than pinned one, the copy would wait for all that the device still has to do.
    numbers = torch.tensor(list(zip(*columns, strict=True)), dtype=torch.int32, pin_memory=buffers.inputs.is_cuda)
    buffers.inputs.copy_(numbers, non_blocking=True)
