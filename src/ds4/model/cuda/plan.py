"""What a model takes on a card, reckoned from the file's header before anything is loaded.

Weights, KV and scratch are exact for the layouts of `ds4.ops.kernels`; what the CUDA context and the graphs take is an
estimate. Nothing here needs a device.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from gguf import GGMLQuantizationType

from ds4.errors import Ds4Error
from ds4.gguf.file import open_model
from ds4.gguf.header import TensorInfo
from ds4.gguf.shape import Shape
from ds4.model.cuda.plan_text import plan_table, size
from ds4.model.cuda.transfer import LANE_BYTES, MOST_LANES
from ds4.ops.kernels.planes import Iq2Layout, planes_nbytes

GIB = 1 << 30
CARDS = (141, 96, 80, 24)
"""Sizes of cards in GB, as they are sold, for which the table says what fits."""
BUCKETS = (1, 2, 4, 8, 16, 32, 64)
"""Rows of a decode step: the sessions are filled up to one of these."""
PAGE_ROWS = 64
MAX_SESSIONS = 1024
DEFAULT_SESSIONS = 8
VOCABULARY_ROWS = 8192
"""Rows of the vocabulary matrix that are decoded at once with `quality`."""
EXACT_SPLITS = 16
"""Programs that share the rows of a token in an exact step, however many tokens there are."""
SMALL_MODEL = 32 << 20
"""Bytes of weights up to which steps are exact unless it is said otherwise: so few stay in the L2 of a card (50 MB),
and to read them takes less time than to launch what reads them, so that rounding wins little."""
PIECE_RING = 8192
"""Rows of the window ring of a long piece, if they are enough. Kernels are compiled for this number, so it is not the
piece's."""

# A card of 80 GB has nearly 80 GiB, of which the driver keeps some.
_USABLE = 0.985
_SLACK = 17  # rows and tokens that rings hold beyond window and block, for cutting without a checkpoint
_CONTEXT = 700 << 20  # the CUDA context, code of kernels, workspaces of libraries: an estimate
_NODE = 16 << 10  # a kernel in a graph, an estimate
_NODES, _EXACT_NODES = 21, 27  # kernels of a layer in a graph, at most
SCORE_BYTES = 512 << 20
"""Index scores that a long piece holds at once, in bytes."""
SCORE_QUERIES = 32
"""Tokens of a long piece whose index scores a program computes: it unpacks its keys once for all of them."""
_CHUNKS = (8192, 4096, 2048, 1024, 512)  # what advice may propose
_LEAST_EXPERTS = 8  # that `quality` decodes at once
_STAGE = 32 << 20  # weights are on their way in two pieces of so many bytes, on the host and on the card
_SELECT_BLOCK = 8192  # keys of which the best are chosen at once
_SPARE = 2 << 30  # what a default context and layout leave: PyTorch's allocator may keep so much between its blocks
_SMALL_CONTEXT = 32_768  # a default context is not made smaller than this as long as fewer sessions help

Place = Literal["card", "host"]

ExpertLayout = Literal["auto", "a", "b"]
"""The layout of IQ2_XXS experts that is asked for; "auto": as `MemoryPlan.fastest` says."""


@dataclass(frozen=True)
class Options:
    """What a plan is made for.

    Attributes:
        context: tokens of each session.
        sessions: how many are live at once.
        layout: of IQ2_XXS experts; "a" is larger, and a little faster for many sessions.
        chunk: tokens of a prefill step.
        experts_at_once: with `quality`, experts whose matrices are decoded at once in prefill.
        checkpoint_bytes: what the ways back into earlier positions may hold, in host memory.
        quality: matrices and activations are float32.
    """

    context: int
    sessions: int = 1
    layout: Iq2Layout = "b"
    chunk: int = 4096
    experts_at_once: int = 64
    checkpoint_bytes: int = GIB
    quality: bool = False

    def __post_init__(self) -> None:
        for name in ("context", "sessions", "chunk", "experts_at_once"):
            if getattr(self, name) < 1:
                raise Ds4Error(f"{name} is {getattr(self, name)}, expected at least 1")
        if self.sessions > MAX_SESSIONS:
            raise Ds4Error(f"{self.sessions} sessions cannot be live at once, at most {MAX_SESSIONS} can")


@dataclass(frozen=True)
class Item:
    """One line of a plan: `part` is what it belongs to, `detail` explains the number."""

    part: str
    name: str
    nbytes: int
    detail: str = ""
    place: Place = "card"


@dataclass(frozen=True)
class Verdict:
    """Whether a plan fits on a card.

    Attributes:
        free: bytes that are left; negative if they are missing.
        advice: what would make it fit, or what else would fit.
    """

    card_gb: float
    fits: bool
    free: int
    advice: tuple[str, ...]


@dataclass(frozen=True)
class MemoryPlan:
    """The items of a plan, and the same for other options."""

    shape: Shape
    options: Options
    tensors: Mapping[str, TensorInfo]
    items: tuple[Item, ...]

    @property
    def card_bytes(self) -> int:
        """All that has to be on the card."""
        return sum(item.nbytes for item in self.items if item.place == "card")

    def bytes_of(self, part: str) -> int:
        return sum(item.nbytes for item in self.items if item.part == part)

    def session_bytes(self) -> int:
        """What each session takes on the card."""
        return self.bytes_of("sessions") // self.options.sessions

    def page_limits(self) -> dict[int, int]:
        """Ratio -> pages of its compressed rows that all sessions together can fill."""
        o = self.options
        return {ratio: o.sessions * _paged(o.context, ratio) // PAGE_ROWS for ratio in _ratios(self.shape)}

    def change(self, **options: int | str) -> MemoryPlan:
        """The plan with other options."""
        return plan_memory(self.shape, self.tensors, replace(self.options, **options))  # type: ignore[arg-type]

    def verdict(self, card_gb: float) -> Verdict:
        """Does it fit on a card of that size, as it is sold, and what could be changed?"""
        room = _room(card_gb)
        free = room - self.card_bytes
        advice = _more(self, room) if free >= 0 else _less(self, room)
        return Verdict(card_gb, free >= 0, free, tuple(advice))

    @property
    def has_layouts(self) -> bool:
        """Whether there are IQ2_XXS experts: nothing else has two layouts."""
        return any("_exps." in name and info.type.name == "IQ2_XXS" for name, info in self.tensors.items())

    def other(self) -> MemoryPlan:
        """The same with the other layout."""
        return self.change(layout=_other(self.options.layout))

    def fastest(self, room: int) -> MemoryPlan:
        """The same with layout A if all of it fits into `room` bytes with a little to spare, else with layout B."""
        plan = self.change(layout="a")
        return plan if self.has_layouts and plan.card_bytes <= room - _spare(room) else self.change(layout="b")

    def check(self, room: int) -> None:
        """Raise `Ds4Error` with advice if more than `room` bytes are needed on the card."""
        if self.card_bytes > room:
            o = self.options
            sessions = f"{o.sessions} session{'s' if o.sessions > 1 else ''} of {o.context:,} tokens"
            experts = " and experts in layout A" if o.layout == "a" and self.has_layouts else ""
            raise Ds4Error(
                f"the model with {sessions}{experts} takes {size(self.card_bytes)} on the card, but"
                f" {size(max(room, 0))} are free there; {'; '.join(_less(self, room))}"
            )

    def settled(self, room: int, steps: Iterable[tuple[int, int]]) -> MemoryPlan:
        """The same with the first of these chunks and experts at once that fits `room` bytes; as it is if none does."""
        plans = (self.change(chunk=chunk, experts_at_once=experts) for chunk, experts in steps)
        return next((plan for plan in plans if plan.card_bytes <= room), self)

    def table(self, cards: Iterable[float] = CARDS, auto: bool = False, steps: Sequence[tuple[int, int]] = ()) -> str:
        """The plan as text: items, sums, and a verdict for each card.

        Args:
            auto: each card has the layout that it would get.
            steps: as in `settled`, what a start would try.
        """
        chosen = [(card, self.settled(_room(card), steps)) for card in cards]
        return plan_table(self, [(card, p.fastest(_room(card)) if auto else p) for card, p in chosen], auto)


def memory_plan(path: str | os.PathLike[str], options: Options) -> MemoryPlan:
    """The plan for a model file, from its header: what `ds4 --plan -m FILE --ctx N --sessions M` prints as a table.

    Raises:
        FileFormatError: the file cannot be used.
        Ds4Error: the context is longer than the model's.
    """
    file = open_model(path)
    if options.context > file.shape.context:
        raise Ds4Error(f"a context of {options.context} tokens is more than the model's {file.shape.context}")
    return plan_memory(file.shape, file.tensors, options)


def fit(
    shape: Shape,
    tensors: Mapping[str, TensorInfo],
    room: int,
    *,
    context: int | None = None,
    sessions: int | None = None,
    chunk: int | None = None,
    layout: ExpertLayout = "auto",
    checkpoint_bytes: int = GIB,
    quality: bool | None = None,
) -> MemoryPlan:
    """The plan for a card with `room` free bytes: what is None becomes the most that fits, up to its default.

    The defaults: the model's context, `DEFAULT_SESSIONS` sessions, `quality` for a model that `is_small`, and chunks of
    4,096 tokens, 2,048 with `quality`.
    Smaller chunks are taken only if nothing else helps, fewer sessions only if the context has been given or is too
    small otherwise. A context that is made smaller leaves a little. Layout "auto" makes nothing smaller: it is A where
    what would be planned with B fits with A too.

    Raises:
        Ds4Error: what is wanted does not fit; with advice.
    """
    least_layout: Iq2Layout = "b" if layout == "auto" else layout
    quality = is_small(tensors) if quality is None else quality
    most = min(context or shape.context, shape.context)
    counts = [DEFAULT_SESSIONS, 4, 2, 1] if sessions is None else [sessions]
    plans = [
        plan_memory(shape, tensors, Options(most, count, least_layout, tokens, experts, checkpoint_bytes, quality))
        for tokens, experts in steps_of(chunk, quality)
        for count in counts
    ]
    for least in (min(most, _SMALL_CONTEXT), 1):
        for plan in plans:
            found = most if plan.card_bytes <= room else 0
            if not found and context is None:
                found = _most(plan, "context", most, room - _spare(room), min(1024, most))
            if found >= least:
                plan = plan.change(context=found)
                return plan.fastest(room) if layout == "auto" else plan
    plans[0].check(room)
    raise AssertionError("a plan that fits was not taken")


def is_small(tensors: Mapping[str, TensorInfo]) -> bool:
    """Whether a file's weights are at most `SMALL_MODEL`."""
    return sum({info.offset: weight_bytes(info, "b") for info in tensors.values()}.values()) <= SMALL_MODEL


def steps_of(chunk: int | None, quality: bool) -> list[tuple[int, int]]:
    """Chunks, and experts that `quality` decodes at once, that are tried, in this order; float32 takes much more."""
    steps = [(4096, 64), (2048, 32), (1024, 16), (512, 8)][1 if quality else 0 :]
    return steps if chunk is None else [(chunk, experts) for _, experts in steps]


def plan_memory(shape: Shape, tensors: Mapping[str, TensorInfo], options: Options) -> MemoryPlan:
    """The plan for a shape and the tensors of a file."""
    items = [*_weights(shape, tensors, options), *_sessions(shape, options), *_checkpoints(shape, options)]
    items += [*_prefill(shape, options), *_decode(shape, options)]
    return MemoryPlan(shape, options, tensors, tuple(items))


# --- weights ----------------------------------------------------------------------------------------------------------

_FAMILIES = {
    "token_embd": "embedding",
    "output.": "vocabulary matrix",
    "_exps.": "routed experts",
    "_shexp.": "shared experts",
    "compressor": "compressors and indexers",
    "indexer": "compressors and indexers",
    "ffn_gate": "routers",
    "exp_probs": "routers",
    "hc_": "hyper-connections",
    "attn_": "attention projections",
    "": "others",
}
"""The first of these parts that a matrix's name has says what it is."""

_VECTORS = "norms, biases and the like"


def _weights(shape: Shape, tensors: Mapping[str, TensorInfo], options: Options) -> list[Item]:
    """One item for each family and type. Tensors that share their data in the file are loaded once."""
    sums: dict[tuple[str, GGMLQuantizationType], int] = {}
    others: dict[tuple[str, GGMLQuantizationType], int] = {}
    seen, other = set(), _other(options.layout)
    for info in sorted(tensors.values(), key=lambda info: info.offset):
        if info.offset in seen:
            continue
        seen.add(info.offset)
        family = next(family for part, family in _FAMILIES.items() if part in info.name)
        key = (_VECTORS, GGMLQuantizationType.F32) if _is_vector(info) else (family, info.type)
        sums[key] = sums.get(key, 0) + weight_bytes(info, options.layout)
        if info.type.name == "IQ2_XXS":
            others[key] = others.get(key, 0) + weight_bytes(info, other)
    order = [*dict.fromkeys(_FAMILIES.values()), _VECTORS]
    items = []
    for (family, kind), nbytes in sorted(sums.items(), key=lambda entry: (order.index(entry[0][0]), entry[0][1].name)):
        if kind.name == "IQ2_XXS":
            detail = f"{size(others[family, kind])} in layout {other.upper()}"
            items.append(Item("weights", f"{family}, {kind.name}, layout {options.layout.upper()}", nbytes, detail))
        else:
            items.append(Item("weights", f"{family}, {kind.name}", nbytes))
    return items


def _is_vector(info: TensorInfo) -> bool:
    """Kept as float32: vectors and the small tables of the compressors."""
    return len(info.dims) == 1 or "_ape." in info.name


def weight_bytes(info: TensorInfo, layout: Iq2Layout) -> int:
    """Bytes of a tensor on the card: planes of matrices, float32 vectors, the rest as stored."""
    if _is_vector(info):
        return 4 * info.n_values
    if info.name.startswith("token_embd"):
        return info.nbytes
    k, n, *experts = info.dims
    try:
        return planes_nbytes(info.type, n, k, experts[0] if experts else 1, layout)
    except (ValueError, KeyError):
        return info.nbytes  # types without planes


# --- state ------------------------------------------------------------------------------------------------------------


def row_bytes(shape: Shape) -> int:
    """A window or compressed row: FP8 codes, the bf16 tail, an exponent for each 64 channels and a byte to fill up."""
    return shape.head_dim - shape.rope_dim + 2 * shape.rope_dim + shape.head_dim // 64


def key_bytes(shape: Shape) -> int:
    """An index key: FP4 codes and an exponent for each 32 channels."""
    return shape.index_dim // 2 + shape.index_dim // 32


def _paged(tokens: int, ratio: int) -> int:
    """Compressed rows that memory is set aside for with so many tokens: whole pages, at least one."""
    return max(1, -(-(tokens // ratio) // PAGE_ROWS)) * PAGE_ROWS


def _compressors(shape: Shape) -> list[tuple[int, int, int]]:
    """Ratio, tokens of a pooled block and channels of each compressor, one of a layer or, with indexer, two."""
    found = []
    for layer, ratio in enumerate(shape.ratios):
        if ratio:
            sparse = shape.has_indexer(layer)
            wide = 2 if sparse else 1
            found.append((ratio, wide * ratio, wide * shape.head_dim))
            if sparse:
                found.append((ratio, wide * ratio, wide * shape.index_dim))
    return found


def _ratios(shape: Shape) -> list[int]:
    return sorted({*shape.ratios} - {0})


def _sessions(shape: Shape, options: Options) -> list[Item]:
    m, n = options.sessions, options.context
    items = []
    for ratio in _ratios(shape):
        layers = shape.ratios.count(ratio)
        rows = layers * _paged(n, ratio) * row_bytes(shape)
        detail = f"{layers} layers x {_paged(n, ratio):,} rows x {row_bytes(shape)} B"
        items.append(Item("sessions", f"rows, ratio {ratio}", m * rows, detail))
        if ratio == shape.sparse_ratio:
            keys = layers * _paged(n, ratio) * key_bytes(shape)
            items.append(Item("sessions", "index keys", m * keys, f"the same rows x {key_bytes(shape)} B"))
    ring = shape.window + _SLACK
    window = shape.layers * ring * row_bytes(shape)
    items.append(Item("sessions", "windows", m * window, f"{shape.layers} layers x {ring} rows"))
    frontier = sum(2 * 4 * (block + _SLACK - 1) * channels for _, block, channels in _compressors(shape))
    items.append(Item("sessions", "frontiers", m * frontier, "float32"))
    tables = sum(4 * _paged(n, ratio) // PAGE_ROWS for ratio in _ratios(shape))
    items.append(Item("sessions", "page tables", m * tables, "int32"))
    return [replace(item, detail=f"{size(item.nbytes // m)} each: {item.detail}") if m > 1 else item for item in items]


def checkpoint_sizes(shape: Shape) -> tuple[int, int]:
    """The least and most bytes of a checkpoint: at a multiple of all ratios, and one token before one."""
    window = shape.layers * (shape.window - 1) * (row_bytes(shape) - 1)
    previous = sum(2 * 4 * ratio * channels // 2 for ratio, block, channels in _compressors(shape) if block > ratio)
    pending = sum(2 * 4 * (ratio - 1) * channels for ratio, _, channels in _compressors(shape))
    return window + previous, window + previous + pending + 4 * shape.vocab


def _checkpoints(shape: Shape, options: Options) -> list[Item]:
    least, most = checkpoint_sizes(shape)
    detail = f"{size(least)} to {size(most)} each, shared by all sessions"
    return [
        Item("host memory", "checkpoints", options.checkpoint_bytes, detail, "host"),
        Item("host memory", "pinned, while loading", 2 * _STAGE, "two pieces of the weights on their way", "host"),
        Item("host memory", "pinned, for states on disk", MOST_LANES * LANE_BYTES, "with --kv-disk-dir", "host"),
    ]


# --- scratch ----------------------------------------------------------------------------------------------------------


def _prefill(shape: Shape, options: Options) -> list[Item]:
    s, t = shape, options.chunk
    half = 4 if options.quality else 2  # bytes of what is 16 bits else
    wide = s.heads * s.head_dim
    low = s.o_groups * s.o_lora_rank
    streams = t * (2 * 4 * s.hc_streams + 4 + half) * s.hidden  # old and new ones; the normalised input, twice
    streams += piece_ring(t, s.window) * row_bytes(s)
    dense = max(s.q_lora_rank * wide, wide // s.o_groups * low, low * s.hidden, 2 * s.hidden * s.expert_hidden)
    if options.quality:
        dense = max(dense, min(s.vocab, VOCABULARY_ROWS) * s.hidden)
    keys = _paged(options.context, s.sparse_ratio) if s.sparse_ratio in s.ratios else 0
    scores = min(4 * t * keys, max(SCORE_BYTES, 4 * SCORE_QUERIES * keys))
    pooled: dict[int, int] = {}
    for ratio, _, channels in _compressors(s):
        pooled[ratio] = pooled.get(ratio, 0) + 4 * 2 * channels
    widest = max((total // s.ratios.count(ratio) for ratio, total in pooled.items()), default=0)
    projected = 4 * (s.q_lora_rank + s.head_dim) + half * s.q_lora_rank + widest
    indexer = (4 + 2) * s.index_heads * s.index_dim + 4 * s.index_heads + 4 * s.index_top_k if keys else 0
    inputs = half * s.hidden + 4 * s.hidden + projected + 2 * widest  # 16 bits, both terms, and their products with F16
    attention = t * (projected + indexer + 2 * half * wide + half * low + 4 * s.hidden) + scores
    pairs = t * s.experts_used
    experts = pairs * (half * s.expert_hidden + 4 * s.hidden + 16)
    experts += t * (3 * half * s.expert_hidden + (4 + half) * s.hidden + 4 * s.experts)
    kind = "float32" if options.quality else "bf16"
    part = "scratch of prefill"
    items = [
        Item(part, "streams and inputs", streams, f"{t:,} rows"),
        Item(part, "activations", max(t * inputs, attention, experts), "the larger of attention and experts"),
        Item(part, f"a dense matrix in {kind}", half * dense),
    ]
    if options.quality:
        at_once = min(options.experts_at_once, s.experts)
        decoded = 4 * at_once * 2 * s.expert_hidden * s.hidden
        items.append(Item(part, "experts in float32", decoded, f"gate and up of {at_once} experts at once"))
    return items


def piece_ring(tokens: int, window: int) -> int:
    """Rows of the ring that holds the windows of a long piece."""
    return max(PIECE_RING, 1 << (tokens + window - 2).bit_length())


def bucket(sessions: int) -> int:
    """Rows of the decode step for so many sessions; more than the largest bucket has take several steps."""
    return next((b for b in BUCKETS if b >= sessions), BUCKETS[-1])


def splits(rows: int, heads: int) -> int:
    """Parts of a step's attention (as `ds4.ops.kernels.attention.splits_for` says, which needs triton)."""
    each = max(1, 264 // (rows * -(-heads // 16)))
    return min(32, 1 << (each.bit_length() - 1))


def _quantised(k: int, planes: int = 1, sums: bool = False) -> int:
    """Bytes of a row of int8 activations: codes and scales for Q8_0, for experts or for both, sums."""
    return k // 128 * 4 + planes * k + (k // 128 * 32 if sums else 0)


def step_bytes(shape: Shape, rows: int, keys: int, exact: bool = False) -> int:
    """What `StepBuffers` or `ExactBuffers` of `ds4.model.cuda` takes for so many rows, at most; without the logits."""
    s, top, wide = shape, shape.experts_used, shape.heads * shape.head_dim
    indexed = s.sparse_ratio in s.ratios
    index = s.index_heads * s.index_dim if indexed else 0
    per_layer: dict[int, int] = {}
    for ratio, _, channels in _compressors(s):
        per_layer[ratio] = per_layer.get(ratio, 0) + 2 * channels
    side = max((n // s.ratios.count(r) for r, n in per_layer.items()), default=0) + s.index_heads
    kinds, low = 2 + len(_ratios(s)), s.o_groups * s.o_lora_rank
    partials = 32 * min(128, s.hidden // 32)
    row = 12 + 4 * kinds * s.rope_dim + 4 * (2 * s.hc_streams * s.hidden + 24 + partials + 2 * s.hidden)
    row += 4 * (s.q_lora_rank + s.head_dim + side + s.q_lora_rank) + 4 * (wide + index) + 4 * max(index, 1)
    if indexed:
        row += 2 * index + 4 * s.index_top_k
        row += 8 * s.index_top_k * -(-keys // _SELECT_BLOCK) if keys > _SELECT_BLOCK else 0
    row += 4 * low + 4 * s.experts + 8 * top + 4 * (top + 1) * s.hidden
    row += (EXACT_SPLITS if exact else splits(rows, s.heads)) * s.heads * 4 * (s.head_dim + 2)
    if exact:  # queries that are ready, what the heads give, and gate, up and hidden values
        row += 8 * wide + 12 * (top + 1) * s.expert_hidden
    else:
        row += 2 * wide + _quantised(wide) + _quantised(s.hidden, 2, True) + _quantised(s.q_lora_rank) + _quantised(low)
        row += top * (4 * s.expert_hidden + _quantised(s.expert_hidden, 1, True))
        row += 8 * s.expert_hidden + _quantised(s.expert_hidden)
    return rows * row


def sampling_bytes(shape: Shape, rows: int) -> int:
    """What `ds4.model.cuda.sampling.TokenSampler` takes for so many rows."""
    chunks = -(-shape.vocab // 1024)
    row = 12 * shape.vocab + 4 * -(-shape.vocab // 32) + chunks * 48 + 4 * 512 + 16 * 2048
    return rows * (row + 4 + 40 + 8 + 4 + 12)


def _decode(shape: Shape, options: Options) -> list[Item]:
    s, rows = shape, bucket(options.sessions)
    keys = _paged(options.context, s.sparse_ratio) if s.sparse_ratio in s.ratios else 1
    graphs = [b for b in BUCKETS if b <= rows]
    # Short pieces of a prompt go through steps of every size, however few sessions there are; exact ones do not.
    sizes = graphs if options.quality else BUCKETS
    every, scratch = sum(sizes), sum(step_bytes(s, b, keys, options.quality) for b in sizes)
    ring = 0 if options.quality else (BUCKETS[-1] + s.window) * row_bytes(s)  # of short pieces
    steps = ", ".join(map(str, graphs))
    nodes = len(graphs) * (s.layers * (_EXACT_NODES if options.quality else _NODES) + 32)
    part = "decode and the runtime"
    return [
        Item(part, "logits", every * 4 * s.vocab, f"{every} rows x {s.vocab:,}, of steps of all sizes"),
        Item(part, "logits of sessions", options.sessions * 4 * s.vocab, "from which their next tokens are chosen"),
        Item(part, "sampling", sampling_bytes(s, rows), f"{rows} rows"),
        Item(part, "activations of steps", scratch + ring, f"of 1 to {sizes[-1]} rows"),
        Item(part, "index scores", 4 * BUCKETS[-1] * keys, f"{BUCKETS[-1]} rows x {keys:,} keys"),
        Item(part, "states on their way to disk", MOST_LANES * LANE_BYTES, "counted without --kv-disk-dir as well"),
        Item(part, "CUDA graphs", nodes * _NODE, f"estimate: steps of {steps} rows, {nodes:,} kernels"),
        Item(part, "CUDA context", _CONTEXT, "estimate"),
    ]


# --- advice -----------------------------------------------------------------------------------------------------------


def _room(card_gb: float) -> int:
    """Bytes that a card of a size, as it is sold, has for all of it."""
    return int(card_gb * GIB * _USABLE)


def _spare(room: int) -> int:
    return min(_SPARE, room // 32)


def _other(layout: Iq2Layout) -> Iq2Layout:
    return "b" if layout == "a" else "a"


def _most(plan: MemoryPlan, name: str, limit: int, room: int, step: int = 1) -> int:
    """The largest multiple of `step`, up to `limit`, of an option with which the plan fits; 0 for none."""
    low, high = 0, limit // step
    while low < high:
        middle = (low + high + 1) // 2
        if plan.change(**{name: middle * step}).card_bytes <= room:
            low = middle
        else:
            high = middle - 1
    return low * step


def _more(plan: MemoryPlan, room: int) -> list[str]:
    """What else fits on a card on which the plan fits."""
    o, advice = plan.options, []
    sessions = _most(plan, "sessions", MAX_SESSIONS, room)
    if sessions > o.sessions:
        advice.append(f"up to {sessions} sessions of this length fit")
    context = _most(plan, "context", plan.shape.context, room, min(1024, plan.shape.context))
    if context > o.context:
        advice.append(f"up to --ctx {context} fits")
    return advice


def _less(plan: MemoryPlan, room: int) -> list[str]:
    """What to change so that the plan fits, each thing alone if that is enough, all together if not."""
    o, advice = plan.options, []
    if o.layout == "a" and plan.has_layouts:
        other = plan.other()
        if other.card_bytes <= room:
            less = size(plan.card_bytes - other.card_bytes)
            return [f"layout B of the experts (--expert-layout b or auto) takes {less} less and fits"]
        plan = other
        advice.append("layout B of the experts (--expert-layout b or auto) is needed, and more")
    chunks = [c for c in _CHUNKS if c < o.chunk]
    least_experts = min(o.experts_at_once, _LEAST_EXPERTS)  # a start takes fewer by itself
    found = []
    if context := _most(plan, "context", o.context, room, min(1024, o.context)):
        found.append(f"--ctx {context}")
    if sessions := _most(plan, "sessions", o.sessions, room):
        found.append(f"{sessions} session{'s' if sessions > 1 else ''} instead of {o.sessions}")
    smaller = (plan.change(chunk=c, experts_at_once=least_experts) for c in chunks)
    if fitting := next((p for p in smaller if p.card_bytes <= room), None):
        found.append(f"a prefill chunk of {fitting.options.chunk}")
    if found:
        return [*advice, "each of these is enough: " + "; ".join(found)]
    least = plan.change(sessions=1, chunk=min([*chunks, o.chunk]), experts_at_once=least_experts)
    context = _most(least, "context", o.context, room, min(1024, o.context))
    if context:
        return [*advice, f"together: one session, --ctx {context}, a prefill chunk of {least.options.chunk}"]
    weights = plan.bytes_of("weights")
    if weights > room:
        return [f"the weights alone take {size(weights)}: a larger card or a smaller quantisation is needed"]
    return [*advice, f"beside {size(weights)} of weights there is no room to work: a larger card is needed"]
