"""The next tokens of many sessions in one go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from ds4.engine.sampling import Choice, Sampler, check_choosable
from ds4.errors import Ds4Error
from ds4.model.draw import Draw

if TYPE_CHECKING:
    from ds4.engine.session import Session


@dataclass(frozen=True, slots=True)
class SampleRow:
    """What one session wants of `Engine.sample`; the arguments of `Sampler.choose`."""

    session: Session
    sampler: Sampler
    greedy: bool = False
    allowed: Tensor | None = None
    top: int | None = None
    best: bool = False

    def choose(self) -> Choice:
        """Its choice, made on the host. Raises Ds4Error as `Sampler.choose`."""
        return self.sampler.choose(self.session.logits, self.greedy, self.allowed, self.top, self.best)


class DeviceSampler(Protocol):
    """What chooses tokens on a device."""

    def sample(self, draws: Sequence[Draw], best: bool) -> list[tuple[int, int]]:
        """A token for each draw, -1 where none can be chosen.

        With `best`, the second number is the most probable token of the logits as they are.
        """
        ...


def sample_rows(device: DeviceSampler | None, rows: Sequence[SampleRow]) -> list[Choice | Ds4Error]:
    """See `ds4.engine.Engine.sample`; `device` takes the rows that it can."""
    drawn: dict[int, Draw] = {}
    able = [i for i, row in enumerate(rows) if device is not None and row.top is None and row.sampler.draws]
    for i in able:
        session, sampler = rows[i].session, rows[i].sampler
        # What is evaluated next is one batch: it is worth nothing to begin with a part of it.
        state = session.state if len(able) == len(rows) and session.whole else None
        drawn[i] = sampler.draw(session.device_logits, rows[i].greedy, rows[i].allowed, state)
    chosen: dict[int, Choice | Ds4Error] = {}
    if device is not None and drawn:
        tokens = device.sample(list(drawn.values()), any(rows[i].best for i in drawn))
        for (i, draw), (token, best) in zip(drawn.items(), tokens, strict=True):
            chosen[i] = _chosen(rows[i], draw, token, best)
    return [chosen[i] if i in chosen else _on_host(row) for i, row in enumerate(rows)]


def _chosen(row: SampleRow, draw: Draw, token: int, best: int) -> Choice | Ds4Error:
    if token >= 0:
        row.sampler.count([token])
        return Choice(token, best=best if row.best else None)
    try:
        check_choosable(draw.logits, draw.allowed)
    except Ds4Error as error:
        return error
    raise RuntimeError("the device found no token where there is one")


def _on_host(row: SampleRow) -> Choice | Ds4Error:
    try:
        return row.choose()
    except Ds4Error as error:
        return error
