"""Choosing the next tokens on the device that has the logits: one upload of numbers, one download of token ids.

What differs from step to step stands in buffers that never move, so that the launches can be captured in CUDA graphs:
one for each number of rows, with masks and without, and with the launches that top_k and top_p need and without.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ds4.model.cuda.plan import BUCKETS
from ds4.model.draw import Draw
from ds4.ops.kernels.sample import SamplingRows, SamplingScratch, sample, top_logprobs

_DOUBLES = ("temperature", "top_p", "min_p", "uniform")


class TokenSampler:
    """Buffers and captured launches for up to `rows` rows, which is one of `BUCKETS`."""

    def __init__(self, rows: int, vocab: int, device: torch.device, capture: bool) -> None:
        self._device, self._capture = device, capture
        self._buckets = [b for b in BUCKETS if b <= rows]
        pinned = device.type == "cuda"

        def host(*size: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(size, dtype=dtype, pin_memory=pinned)

        # The numbers of a step are one piece: four float64 a row, then top_k and whether there is a mask.
        self._numbers_host = host(rows * 40, dtype=torch.uint8)
        self._numbers = torch.zeros_like(self._numbers_host, device=device)
        self._masks_host = host(rows, -(-vocab // 32))
        self._masks = torch.zeros_like(self._masks_host, device=device)
        self._tokens = torch.zeros(2, rows, dtype=torch.int32, device=device)
        self._tokens_host = host(2, rows)
        self._logits = torch.zeros(rows, vocab, device=device)
        self._scratch = SamplingScratch.allocate(rows, vocab, device)
        self._orders = torch.zeros(rows, self._scratch.best.shape[1], dtype=torch.int64, device=device)
        self._best = torch.zeros(rows, 1, device=device)
        self._seed = torch.zeros(rows, dtype=torch.int64, device=device)
        self._step = torch.zeros(rows, dtype=torch.int32, device=device)
        self._graphs: dict[tuple[int, bool, bool], torch.cuda.CUDAGraph] = {}

    @property
    def rows(self) -> int:
        """Most draws of one call."""
        return self._buckets[-1]

    def warm_up(self) -> list[Callable[[], object]]:
        """What compiles and captures everything, piece by piece."""
        flags = (False, True)
        return [
            lambda n=n, masked=masked, select=select: self._run(n, masked, select)  # type: ignore[misc]
            for n in self._buckets
            for masked in flags
            for select in flags
        ]

    @torch.no_grad()
    def sample(
        self, draws: Sequence[Draw], best: bool, then: Callable[[Tensor], None] | None = None
    ) -> list[tuple[int, int]]:
        """See `ds4.engine.sample_rows.DeviceSampler`. Waits for the device, but not for what `then` gives it to do.

        Args:
            then: called with the tokens, int32 on the device, before they are known here; for up to `rows` draws.
        """
        chosen: list[tuple[int, int]] = []
        with torch.cuda.device(self._device) if self._device.type == "cuda" else contextlib.nullcontext():
            for first in range(0, len(draws), self.rows):
                chosen += self._some(draws[first : first + self.rows], best, then)
        return chosen

    def _some(self, draws: Sequence[Draw], best: bool, then: Callable[[Tensor], None] | None) -> list[tuple[int, int]]:
        count = len(draws)
        masked = best or any(draw.allowed is not None for draw in draws)
        select = any(draw.temperature > 0 and (draw.top_k > 0 or draw.top_p < 1) for draw in draws)
        self._fill(draws, masked)
        torch.stack([draw.logits.to(self._device) for draw in draws], out=self._logits[:count])
        self._run(next(b for b in self._buckets if b >= count), masked, select)
        self._tokens_host.copy_(self._tokens, non_blocking=True)
        known = torch.cuda.Event() if self._device.type == "cuda" else None
        if known is not None:
            known.record()
        if then is not None:
            then(self._tokens[0, :count])
        if known is not None:
            known.synchronize()
        tokens, bests = self._tokens_host[:, :count].tolist()
        return list(zip(tokens, bests, strict=True))

    def _fill(self, draws: Sequence[Draw], masked: bool) -> None:
        doubles, integers = self._split(self._numbers_host)
        for i, name in enumerate(_DOUBLES):
            doubles[i, : len(draws)] = torch.tensor([getattr(draw, name) for draw in draws], dtype=torch.float64)
        integers[:, : len(draws)] = torch.tensor(
            [[draw.top_k for draw in draws], [draw.allowed is not None for draw in draws]], dtype=torch.int32
        )
        self._numbers.copy_(self._numbers_host, non_blocking=True)
        if masked:
            for row, draw in enumerate(draws):
                if draw.allowed is not None:
                    self._masks_host[row] = draw.allowed
            self._masks[: len(draws)].copy_(self._masks_host[: len(draws)], non_blocking=True)

    def _split(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """float64 [4, rows] and int32 [2, rows] in the piece of numbers."""
        doubles = numbers[: 32 * self.rows].view(torch.float64).view(4, self.rows)
        return doubles, numbers[32 * self.rows :].view(torch.int32).view(2, self.rows)

    def _run(self, rows: int, masked: bool, select: bool) -> None:
        if not self._capture:
            self._launch(rows, masked, select)
            return
        key = rows, masked, select
        if key not in self._graphs:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._launch(rows, masked, select)
            torch.cuda.current_stream().wait_stream(stream)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            # Other threads may use the device meanwhile: states come from files and go to them.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._launch(rows, masked, select)
            self._graphs[key] = graph
        self._graphs[key].replay()

    def _launch(self, n: int, masked: bool, select: bool) -> None:
        doubles, integers = self._split(self._numbers)
        temperature, top_p, min_p, uniform = (row[:n] for row in doubles)
        rows = SamplingRows(
            temperature=temperature,
            top_k=integers[0, :n],
            top_p=top_p,
            min_p=min_p,
            uniform=uniform,
            seed=self._seed[:n],
            step=self._step[:n],
            masked=integers[1, :n],
            mask=self._masks[:n] if masked else None,
        )
        logits = self._logits[:n]
        sample(logits, rows, self._scratch, self._tokens[0, :n], select=select)
        if masked:
            # Where something was forbidden, it matters whether the model wanted it.
            best = self._tokens[1, :n].view(n, 1)
            top_logprobs(logits, self._scratch, self._orders[:n], best, self._best[:n])
