"""What a server answers with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ds4.engine import Engine
from ds4.engine.packing import StateCodec
from ds4.server.decode import ChooserFactory, sampling_chooser


@dataclass
class Backend:
    """What answers: an engine, how its tokens are chosen, its name, and how to end what it waits for.

    `codec` makes bytes of its states, and states of bytes; None: they cannot be stored.
    """

    engine: Engine
    name: str
    chooser: ChooserFactory = sampling_chooser
    close: Callable[[], None] = lambda: None
    codec: StateCodec | None = None
