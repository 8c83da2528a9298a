"""Negative log likelihood of given tokens, in natural logarithms (nats)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ds4.engine import Engine
from ds4.errors import Ds4Error

_LOGIT_BYTES = 256 << 20
"""Logits of one step, in bytes."""
_ROWS = 64
"""Rows that are computed with in float64 at once."""


def logits_before(engine: Engine, ids: Sequence[int], first: int) -> Iterator[tuple[int, Tensor]]:
    """Evaluate `ids` in a session of their own; the logits that predict the tokens from place `first` on.

    Yields:
        (place of the first predicted token, float32 [predicted tokens, vocab]), one behind the other; the last token
        is not evaluated, since nothing is predicted from it.

    Raises:
        Ds4Error: `first` is not at least 1 and at most the last place, or the ids do not fit the context.
    """
    if not 1 <= first < len(ids):
        raise Ds4Error(f"of {len(ids)} tokens those from {first} on cannot be scored: each needs one before it")
    wide = max(1, min(engine.prefill_chunk, _LOGIT_BYTES // (4 * engine.shape.vocab)))
    session = engine.session()
    try:
        at = 0
        while at < len(ids) - 1:
            skipped = at < first - 1
            end = min(at + engine.prefill_chunk, first - 1) if skipped else min(at + wide, len(ids) - 1)
            (logits,) = engine.step([(session, ids[at:end])], "none" if skipped else "all")
            if logits is not None:
                yield at + 1, logits
            at = end
    finally:
        session.close()


def token_nll(logits: Tensor, targets: Sequence[int]) -> list[float]:
    """-log p of each target under its row of float32 [targets, vocab]; computed in float64.

    Raises:
        Ds4Error: the model gives no finite number for a target.
    """
    return [-float(row[target]) for row, target in zip(log_softmax_rows(logits), targets, strict=True)]


def log_softmax_rows(logits: Tensor) -> Iterator[Tensor]:
    """Each row's log probabilities, float64 [vocab], on the CPU. Raises Ds4Error for rows that are not finite."""
    for rows in logits.split(_ROWS):
        values = torch.log_softmax(rows.to("cpu", torch.float64), dim=-1)
        if bool(values.isnan().any()):
            raise Ds4Error("the model gives logits that are no numbers: the file is damaged, or was quantised wrongly")
        yield from values
