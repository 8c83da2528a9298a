"""Choosing the next token of every row on the device, as `ds4.engine.sampling` does on the CPU.

Probabilities are whole numbers here: a token's mass is exp((logit - best) / temperature), computed in float64, times
2^44 and rounded. Their sums do not depend on the order in which they are added, so however the vocabulary is cut, the
same token is chosen; what has no mass is less probable than 2^-45 of the best.

Everything that can be kept - top_k, min_p, top_p - is a beginning of the order by logit, then by id, so no sort is
needed: a bound on the logit is found bit by bit, by counting or adding what lies above. That runs over the few thousand
best tokens, collected by a histogram, where those are enough to know the answer; over the whole row where not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ds4.ops.kernels.sample_search import ONE, first_id, items_at, nth_id, order_of, score_of, search, sum_from

CHUNK = 1024
"""Tokens of one program."""
MAX_TOP_K = 1024
"""A larger top_k counts as this, as in `ds4.engine.sampling`."""

_MOST = tl.constexpr(MAX_TOP_K)
_BINS = tl.constexpr(512)  # of the histogram: sixteen to each 1.0 of logits below the best
_NOTHING = tl.constexpr(-(2**63))
_LEAST_KEY = tl.constexpr(-(2**31))


@triton.jit
def _finite(scores):
    return tl.abs(scores) < float("inf")  # false for NaN


@triton.jit
def _load_chunk(logits, row, stride, at, V: tl.constexpr):
    return tl.load(logits + row * stride + at, mask=at < V, other=float("nan")).to(tl.float32)


@triton.jit
def _composite(scores, ids, usable):
    """Scores in order as integers, below them the ids in reverse: the largest is the best of lowest id."""
    return tl.where(usable, (order_of(scores) << 32) | (2147483647 - ids).to(tl.int64), _NOTHING)


@triton.jit
def _bin(scores, best):
    distance = (best.to(tl.float64) - scores.to(tl.float64)) * 16.0
    return tl.minimum(distance, 511.0).to(tl.int32)


@triton.jit
def _limits(top_k, V: tl.constexpr):
    return (top_k > 0) & (tl.minimum(top_k, _MOST) < V)


@triton.jit
def _selects(top_k, top_p, V: tl.constexpr):
    return _limits(top_k, V) | (top_p < 1.0)


@triton.jit
def _best_kernel(
    logits, stride, masks, mask_stride, masked, chunk_best, chunk_max, chunk_sum, histogram, counter,
    V: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The best allowed token of each chunk, and maximum and sum for the log-softmax over all."""
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    scores = _load_chunk(logits, row, stride, at, V)
    finite = _finite(scores)
    usable = finite
    if MASKED:
        if tl.load(masked + row) != 0:
            words = tl.load(masks + row * mask_stride + at // 32, mask=at < V, other=0)
            usable = usable & (((words >> (at % 32)) & 1) != 0)
    here = row * CHUNKS + chunk
    tl.store(chunk_best + here, tl.max(_composite(scores, at, usable), axis=0))
    largest = tl.max(tl.where(finite, scores, -float("inf")), axis=0)
    tl.store(chunk_max + here, largest)
    shift = tl.where(_finite(largest), largest, 0.0)
    tl.store(chunk_sum + here, tl.sum(tl.where(finite, tl.exp(scores - shift), 0.0), axis=0))
    if chunk == 0:
        tl.store(histogram + row * _BINS + tl.arange(0, _BINS), tl.zeros([_BINS], tl.int32))
        tl.store(counter + row, 0)


@triton.jit
def _row_best(chunk_best, row, CHUNKS: tl.constexpr, CP: tl.constexpr):
    c = tl.arange(0, CP)
    return tl.max(tl.load(chunk_best + row * CHUNKS + c, mask=c < CHUNKS, other=_NOTHING), axis=0)


@triton.jit
def _mass_kernel(
    logits, stride, masks, mask_stride, masked, temperature, top_k, top_p, min_p, chunk_best, chunk_total, chunk_kept,
    mass, histogram,
    V: tl.constexpr, CHUNKS: tl.constexpr, CP: tl.constexpr, CHUNK: tl.constexpr, MASKED: tl.constexpr,
    SELECT: tl.constexpr,
):  # fmt: skip
    """The mass of each token, and of each chunk: in all, and of what min_p keeps."""
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    heat = tl.load(temperature + row)
    best = _row_best(chunk_best, row, CHUNKS, CP)
    if (heat > 0.0) & (best != _NOTHING):
        at = chunk * CHUNK + tl.arange(0, CHUNK)
        scores = _load_chunk(logits, row, stride, at, V)
        usable = _finite(scores)
        if MASKED:
            if tl.load(masked + row) != 0:
                words = tl.load(masks + row * mask_stride + at // 32, mask=at < V, other=0)
                usable = usable & (((words >> (at % 32)) & 1) != 0)
        top = score_of(best >> 32)
        exponent = (tl.where(usable, scores, top).to(tl.float64) - top.to(tl.float64)) / heat
        masses = (tl.exp(exponent) * ONE + 0.5).to(tl.int64)
        masses = tl.where(usable, masses, 0)
        tl.store(mass + row * V + at, masses, mask=at < V)
        least = tl.maximum((tl.load(min_p + row) * ONE + 0.5).to(tl.int64), 1)
        here = row * CHUNKS + chunk
        tl.store(chunk_total + here, tl.sum(masses, axis=0))
        tl.store(chunk_kept + here, tl.sum(tl.where(masses >= least, masses, 0), axis=0))
        if SELECT:
            if _selects(tl.load(top_k + row), tl.load(top_p + row), V):
                there = masses > 0
                counts = tl.histogram(_bin(tl.where(there, scores, top), top), _BINS, mask=there)
                tl.atomic_add(histogram + row * _BINS + tl.arange(0, _BINS), counts, mask=counts > 0)


@triton.jit
def _collect_kernel(
    logits, stride, temperature, top_k, top_p, chunk_best, mass, histogram, counter, scores_out, masses_out, ids_out,
    V: tl.constexpr, CHUNKS: tl.constexpr, CP: tl.constexpr, CHUNK: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """As many whole bins of the best tokens as there is room for. They come in any order."""
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    best = _row_best(chunk_best, row, CHUNKS, CP)
    selects = _selects(tl.load(top_k + row), tl.load(top_p + row), V)
    if selects & (tl.load(temperature + row) > 0.0) & (best != _NOTHING):
        counts = tl.load(histogram + row * _BINS + tl.arange(0, _BINS))
        bins = tl.sum((tl.cumsum(counts, axis=0) <= CAPACITY).to(tl.int32), axis=0)
        at = chunk * CHUNK + tl.arange(0, CHUNK)
        masses = tl.load(mass + row * V + at, mask=at < V, other=0)
        top = score_of(best >> 32)
        scores = tl.where(masses > 0, _load_chunk(logits, row, stride, at, V), top)
        member = (masses > 0) & (_bin(scores, top) < bins)
        places = tl.cumsum(member.to(tl.int32), axis=0)
        found = tl.max(places, axis=0)
        if found > 0:
            start = row * CAPACITY + tl.atomic_add(counter + row, found) - 1
            tl.store(scores_out + start + places, scores, mask=member)
            tl.store(masses_out + start + places, masses, mask=member)
            tl.store(ids_out + start + places, at, mask=member)


@triton.jit
def _times(fraction, total):
    return (fraction * total.to(tl.float64)).to(tl.int64)


@triton.jit
def _choose(
    scores, masses, ids, n, total, kept, least, limited, k, p, u,
    V: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The token, from n items that hold all that can be chosen.

    total: mass of everything; kept: of what min_p keeps, that is, of masses from `least` on.
    """
    key = tl.full((), _LEAST_KEY, tl.int64)
    last = tl.full((), V, tl.int64)
    if limited:
        if sum_from(scores, masses, n, key, True, BLOCK) > k:
            key = search(scores, masses, n, k.to(tl.int64), True, BLOCK)
            above, count, each = items_at(scores, masses, n, key, BLOCK)
            total = above + (k - count) * each
            last = nth_id(scores, masses, ids, n, key, k - count, V, FULL, BLOCK)
    kept = tl.minimum(kept, total)
    token = tl.full((), 0, tl.int64)
    if p < 1.0:
        wanted = _times(p, total)
        wanted = tl.where(wanted.to(tl.float64) < p * total.to(tl.float64), wanted + 1, wanted)
        wanted = tl.maximum(wanted, 1)
        if wanted < kept:
            bound = search(scores, masses, n, wanted, False, BLOCK)
            above, count, each = items_at(scores, masses, n, bound, BLOCK)
            kept = tl.minimum(kept, above + (wanted - above + each - 1) // each * each)
        target = tl.minimum(_times(u, kept), kept - 1) + 1
        key = search(scores, masses, n, target, False, BLOCK)
        above, count, each = items_at(scores, masses, n, key, BLOCK)
        nth = (target - above + each - 1) // each
        token = nth_id(scores, masses, ids, n, key, nth, V, FULL, BLOCK)
    else:
        target = tl.minimum(_times(u, kept), kept - 1) + 1
        token = first_id(scores, masses, ids, n, key, last, least, target, V, FULL, BLOCK)
    return token


@triton.jit
def _uniform(uniform, seed, step, row):
    """The row's own number, or where that is negative one from its seed and step: 53 random bits."""
    u = tl.load(uniform + row)
    if u < 0.0:
        a, b, _, _ = tl.randint4x(tl.load(seed + row), tl.load(step + row))
        high = (a.to(tl.uint32, bitcast=True) >> 5).to(tl.float64)
        u = (high * 67108864.0 + (b.to(tl.uint32, bitcast=True) >> 6).to(tl.float64)) * (1.0 / 9007199254740992.0)
    return u


@triton.jit
def _choose_kernel(
    logits, stride, temperature, top_k, top_p, min_p, uniform, seed, step,
    chunk_best, chunk_max, chunk_sum, chunk_total, chunk_kept, mass, counter, some_scores, some_masses, some_ids,
    tokens, logprobs,
    V: tl.constexpr, CHUNKS: tl.constexpr, CP: tl.constexpr, CHUNK: tl.constexpr, CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr, SELECT: tl.constexpr, LOGPROBS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    best = _row_best(chunk_best, row, CHUNKS, CP)
    token = 2147483647 - (best & 0xFFFFFFFF)
    c = tl.arange(0, CP)
    if best == _NOTHING:
        token = tl.full((), -1, tl.int64)
    elif tl.load(temperature + row) > 0.0:
        least = tl.maximum((tl.load(min_p + row) * ONE + 0.5).to(tl.int64), 1)
        k, p = tl.load(top_k + row), tl.load(top_p + row)
        u = _uniform(uniform, seed, step, row)
        kepts = tl.load(chunk_kept + row * CHUNKS + c, mask=c < CHUNKS, other=0)
        kept = tl.sum(kepts, axis=0)
        selects = False
        if SELECT:
            selects = _selects(k, p, V)
        if selects:
            if SELECT:
                total = tl.sum(tl.load(chunk_total + row * CHUNKS + c, mask=c < CHUNKS, other=0), axis=0)
                limited = _limits(k, V)
                k = tl.minimum(k, _MOST)
                n = tl.load(counter + row)
                some_scores += row * CAPACITY
                some_masses += row * CAPACITY
                some_ids += row * CAPACITY
                found = sum_from(some_scores, some_masses, n, tl.full((), _LEAST_KEY, tl.int64), False, BLOCK)
                needed = tl.minimum(tl.maximum(_times(p, total) + 1, 1), kept)
                enough = (found == total) | (limited & (n >= k)) | ((not limited) & (found >= needed))
                if enough:
                    token = _choose(
                        some_scores, some_masses, some_ids, n, total, kept, least, limited, k, p, u, V, False, BLOCK
                    )
                else:
                    token = _choose(
                        logits + row * stride, mass + row * V, some_ids, V, total, kept, least, limited, k, p, u,
                        V, True, BLOCK,
                    )  # fmt: skip
        else:
            # In order of id: the chunk, then the place in it.
            target = tl.minimum(_times(u, kept), kept - 1)
            chunk = tl.sum((tl.cumsum(kepts, axis=0) <= target).to(tl.int32), axis=0)
            before = tl.sum(tl.where(c < chunk, kepts, 0), axis=0)
            at = chunk * CHUNK + tl.arange(0, CHUNK)
            masses = tl.load(mass + row * V + at, mask=at < V, other=0)
            sums = tl.cumsum(tl.where(masses >= least, masses, 0), axis=0) + before
            token = (chunk * CHUNK + tl.sum((sums <= target).to(tl.int32), axis=0)).to(tl.int64)
    tl.store(tokens + row, token.to(tokens.dtype.element_ty))
    if LOGPROBS:
        largest, total_sum = _log_sum(chunk_max, chunk_sum, row, CHUNKS, CP)
        chosen = tl.load(logits + row * stride + tl.maximum(token, 0)).to(tl.float32)
        tl.store(logprobs + row, chosen - largest - total_sum)


@triton.jit
def _log_sum(chunk_max, chunk_sum, row, CHUNKS: tl.constexpr, CP: tl.constexpr):
    """The largest logit and the logarithm of the sum of exp(logit - largest)."""
    c = tl.arange(0, CP)
    maxima = tl.load(chunk_max + row * CHUNKS + c, mask=c < CHUNKS, other=-float("inf"))
    largest = tl.max(maxima, axis=0)
    shift = tl.where(_finite(largest), largest, 0.0)
    sums = tl.load(chunk_sum + row * CHUNKS + c, mask=c < CHUNKS, other=0.0)
    return largest, tl.log(tl.sum(tl.where(_finite(maxima), tl.exp(maxima - shift), 0.0) * sums, axis=0))


@triton.jit
def _top_chunks_kernel(
    logits, stride, orders, V: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, TOP: tl.constexpr
):
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    scores = _load_chunk(logits, row, stride, at, V)
    order = _composite(scores, at, _finite(scores))
    for i in range(TOP):
        best = tl.max(order, axis=0)
        tl.store(orders + (row * CHUNKS + chunk) * TOP + i, best)
        order = tl.where(order == best, _NOTHING, order)


@triton.jit
def _top_kernel(
    orders, chunk_max, chunk_sum, ids, logprobs,
    CHUNKS: tl.constexpr, CP: tl.constexpr, TOP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    order = tl.load(orders + row * (CHUNKS * TOP) + at, mask=at < CHUNKS * TOP, other=_NOTHING)
    largest, total = _log_sum(chunk_max, chunk_sum, row, CHUNKS, CP)
    for i in range(TOP):
        best = tl.max(order, axis=0)
        there = best != _NOTHING
        tl.store(ids + row * TOP + i, tl.where(there, 2147483647 - (best & 0xFFFFFFFF), -1).to(tl.int32))
        tl.store(logprobs + row * TOP + i, tl.where(there, score_of(best >> 32) - largest - total, -float("inf")))
        order = tl.where(order == best, _NOTHING, order)


# --- launchers --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SamplingRows:
    """How each row samples, in buffers that the host fills before a step (the meaning of `ds4.engine.Sampling`).

    Attributes:
        temperature: float64 [rows]; 0 takes the most probable token.
        top_k: int32 [rows]; 0 keeps all.
        top_p, min_p: float64 [rows]; 1 and 0 keep all.
        uniform: float64 [rows], the random number from 0 to below 1; a negative one asks for seed and step.
        seed, step: int64 and int32 [rows]; the same two draw the same number.
        masked: int32 [rows], 1 where the row's mask counts.
        mask: int32 [rows, ceil(vocab / 32)], bit i of word j allows token 32 j + i; None without masks.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    uniform: Tensor
    seed: Tensor
    step: Tensor
    masked: Tensor
    mask: Tensor | None

    @classmethod
    def allocate(cls, rows: int, vocab: int, device: torch.device | str, masks: bool = True) -> SamplingRows:
        """Buffers of rows that take the most probable token."""

        def take(value: float, dtype: torch.dtype) -> Tensor:
            return torch.full((rows,), value, dtype=dtype, device=device)

        return cls(
            temperature=take(0, torch.float64),
            top_k=take(0, torch.int32),
            top_p=take(1, torch.float64),
            min_p=take(0, torch.float64),
            uniform=take(-1, torch.float64),
            seed=take(0, torch.int64),
            step=take(0, torch.int32),
            masked=take(0, torch.int32),
            mask=torch.zeros((rows, -(-vocab // 32)), dtype=torch.int32, device=device) if masks else None,
        )


@dataclass(frozen=True)
class SamplingScratch:
    """What the launches of one call hand on, for up to so many rows. Nothing in it has to be set before."""

    best: Tensor  # int64 [rows, chunks]
    largest: Tensor  # float32 [rows, chunks]
    exponentials: Tensor  # float32 [rows, chunks]
    total: Tensor  # int64 [rows, chunks]
    kept: Tensor  # int64 [rows, chunks]
    mass: Tensor  # int64 [rows, vocab]
    histogram: Tensor  # int32 [rows, 512]
    counter: Tensor  # int32 [rows]
    scores: Tensor  # float32 [rows, capacity]
    masses: Tensor  # int64 [rows, capacity]
    ids: Tensor  # int32 [rows, capacity]

    @classmethod
    def allocate(cls, rows: int, vocab: int, device: torch.device | str, capacity: int = 2048) -> SamplingScratch:
        """`capacity`: tokens a row among which top_k and top_p look first, a power of two."""
        chunks = -(-vocab // CHUNK)

        def take(dtype: torch.dtype, *size: int) -> Tensor:
            return torch.empty((rows, *size), dtype=dtype, device=device)

        return cls(
            best=take(torch.int64, chunks),
            largest=take(torch.float32, chunks),
            exponentials=take(torch.float32, chunks),
            total=take(torch.int64, chunks),
            kept=take(torch.int64, chunks),
            mass=take(torch.int64, vocab),
            histogram=take(torch.int32, _BINS.value),
            counter=take(torch.int32),
            scores=take(torch.float32, capacity),
            masses=take(torch.int64, capacity),
            ids=take(torch.int32, capacity),
        )

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in vars(self).values())


def sample(
    logits: Tensor,
    rows: SamplingRows,
    scratch: SamplingScratch,
    tokens: Tensor,
    logprobs: Tensor | None = None,
    select: bool = True,
) -> None:
    """The token that `ds4.engine.sampling.Sampler.sample` chooses for the same random number, for every row.

    Args:
        logits: float32 [n, vocab], vocabulary contiguous; n up to the rows of the buffers.
        tokens: int32 or int64 [n]; -1 where no token is allowed and finite.
        logprobs: float32 [n], the log-softmax over all finite logits of the chosen token, or None.
        select: False leaves out the launches that top_k and top_p need; then no row may use them.
    """
    n, vocab = logits.shape
    if logits.dtype != torch.float32 or logits.stride(1) != 1 or vocab >= 2**31:
        raise ValueError(f"expected contiguous float32 logits, got {logits.dtype} {list(logits.shape)}")
    if scratch.mass.shape[1] != vocab or n > min(scratch.mass.shape[0], rows.temperature.shape[0]):
        raise ValueError(f"{n} rows of {vocab} do not fit scratch {list(scratch.mass.shape)}")
    if tokens.shape != (n,) or (rows.mask is not None and rows.mask.shape[1] * 32 < vocab):
        raise ValueError(f"expected {n} tokens and masks of {vocab} bits")
    chunks, capacity = scratch.best.shape[1], scratch.ids.shape[1]
    sizes = {"V": vocab, "CHUNKS": chunks, "CHUNK": CHUNK}
    padded = {"CP": triton.next_power_of_2(chunks)}
    mask = scratch.ids if rows.mask is None else rows.mask
    masks = (mask, mask.stride(0), rows.masked)
    masked = rows.mask is not None
    _best_kernel[(chunks, n)](
        logits, logits.stride(0), *masks, scratch.best, scratch.largest, scratch.exponentials, scratch.histogram,
        scratch.counter, **sizes, MASKED=masked, num_warps=4,
    )  # fmt: skip
    _mass_kernel[(chunks, n)](
        logits, logits.stride(0), *masks, rows.temperature, rows.top_k, rows.top_p, rows.min_p, scratch.best,
        scratch.total, scratch.kept, scratch.mass, scratch.histogram,
        **sizes, **padded, MASKED=masked, SELECT=select, num_warps=4,
    )  # fmt: skip
    if select:
        _collect_kernel[(chunks, n)](
            logits, logits.stride(0), rows.temperature, rows.top_k, rows.top_p, scratch.best, scratch.mass,
            scratch.histogram, scratch.counter, scratch.scores, scratch.masses, scratch.ids,
            **sizes, **padded, CAPACITY=capacity, num_warps=4,
        )  # fmt: skip
    _choose_kernel[(n,)](
        logits, logits.stride(0), rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.uniform, rows.seed,
        rows.step, scratch.best, scratch.largest, scratch.exponentials, scratch.total, scratch.kept, scratch.mass,
        scratch.counter, scratch.scores, scratch.masses, scratch.ids, tokens, logits if logprobs is None else logprobs,
        **sizes, **padded, CAPACITY=capacity, BLOCK=min(capacity, 2048), SELECT=select, LOGPROBS=logprobs is not None,
        num_warps=8,
    )  # fmt: skip


def top_logprobs(logits: Tensor, scratch: SamplingScratch, orders: Tensor, ids: Tensor, logprobs: Tensor) -> None:
    """The most probable tokens of rows that `sample` has just seen, with their log-softmax over all finite logits.

    Args:
        logits, scratch: those of the call of `sample`.
        orders: int64 [n, chunks * top], scratch, contiguous; chunks are those of `scratch.best`.
        ids, logprobs: int32 and float32 [n, top], contiguous, best first, of equals the lowest id first; -1 and -inf
            where there are fewer finite logits.
    """
    (n, vocab), top, chunks = logits.shape, ids.shape[1], scratch.best.shape[1]
    if not ids.shape == logprobs.shape == (n, top) or orders.shape != (n, chunks * top):
        raise ValueError(f"ids {list(ids.shape)}, logprobs {list(logprobs.shape)}, orders {list(orders.shape)}")
    _top_chunks_kernel[(chunks, n)](
        logits, logits.stride(0), orders, V=vocab, CHUNKS=chunks, CHUNK=CHUNK, TOP=top, num_warps=4
    )
    _top_kernel[(n,)](
        orders, scratch.largest, scratch.exponentials, ids, logprobs,
        CHUNKS=chunks, CP=triton.next_power_of_2(chunks), TOP=top, BLOCK=triton.next_power_of_2(chunks * top),
        num_warps=8,
    )  # fmt: skip
