"""Cases of `ds4.ops.kernels.sample`: rows that take the best, plain ones, and ones with top_k and top_p."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ds4.engine.sampling import Sampling, distribution
from ds4.ops.kernels.sample import SamplingRows, SamplingScratch, sample, top_logprobs
from kernel_cases.harness import Bench, Case, error

SETTINGS = {
    "greedy": (Sampling(temperature=0), 2.0),
    "min_p": (Sampling(), 2.0),
    "top_p": (Sampling(top_p=0.95, min_p=0), 4.0),
    "top_k": (Sampling(temperature=0.7, top_k=40, min_p=0), 2.0),
    "top_p of a flat row": (Sampling(temperature=2.0, top_p=0.95, min_p=0), 1.0),
}
"""Name -> settings and the spread of the logits. The last keeps more than the short list holds."""


def choose(bench: Bench) -> Iterator[Case]:
    vocab = bench.shape.vocab
    for name, (setting, spread) in SETTINGS.items():
        for count in bench.rows:
            logits, tokens = bench.randn(count, vocab, scale=spread), bench.empty(count, dtype=torch.int32)
            rows = SamplingRows.allocate(count, vocab, bench.device)
            scratch = SamplingScratch.allocate(count, vocab, bench.device)
            for field in ("temperature", "top_k", "top_p", "min_p"):
                getattr(rows, field).fill_(getattr(setting, field))
            rows.uniform.copy_(torch.arange(count, device=bench.device) / count * 0.99 + 0.004)
            select = setting.top_k > 0 or setting.top_p < 1

            def check(logits=logits, rows=rows, tokens=tokens, setting=setting) -> float:
                """The share of rows with another token than the reference's."""
                wrong = 0
                for row, u, token in zip(logits, rows.uniform.tolist(), tokens.tolist(), strict=True):
                    ids, p = distribution(row, setting)
                    sums = p.cumsum()
                    place = min(int(sums.searchsorted(u * sums[-1], side="right")), len(ids) - 1)
                    wrong += int(ids[place]) != token
                return wrong / len(tokens)

            def run(logits=logits, rows=rows, scratch=scratch, tokens=tokens, select=select) -> None:
                sample(logits, rows, scratch, tokens, select=select)

            yield Case(f"{name}, rows {count}", [run], 4 * logits.numel(), check, 0.0, [tokens])


def logprobs(bench: Bench) -> Iterator[Case]:
    vocab, top = bench.shape.vocab, 20
    for count in bench.rows:
        logits, tokens = bench.randn(count, vocab, scale=3.0), bench.empty(count, dtype=torch.int32)
        rows = SamplingRows.allocate(count, vocab, bench.device)
        scratch = SamplingScratch.allocate(count, vocab, bench.device)
        orders = bench.empty(count, scratch.best.shape[1] * top, dtype=torch.int64)
        ids, values = bench.empty(count, top, dtype=torch.int32), bench.empty(count, top)

        def check(logits=logits, ids=ids, values=values) -> float:
            want, best = torch.log_softmax(logits.double(), 1).topk(top)
            return error(values, want) if torch.equal(ids.long(), best) else 1.0

        def run(
            logits=logits, rows=rows, scratch=scratch, tokens=tokens, orders=orders, ids=ids, values=values
        ) -> None:
            sample(logits, rows, scratch, tokens, select=False)
            top_logprobs(logits, scratch, orders, ids, values)

        yield Case(f"rows {count}", [run], 8 * logits.numel(), check, 1e-6, [tokens, orders, ids, values])


CASES = {"sample": choose, "sample.logprobs": logprobs}
