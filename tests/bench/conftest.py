"""The random model of the command line's tests."""

from __future__ import annotations

import torch

from ds4.bench.meter import Meter
from tests.cli.conftest import embedded, engine, model_file, one_thread, tokenizer

__all__ = ["Ticks", "embedded", "engine", "meter", "model_file", "one_thread", "tokenizer"]


class Ticks:
    """A clock that moves by a quarter of a second whenever it is asked."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.25
        return self.now


def meter() -> Meter:
    """Of the CPU, with a clock that tells nothing."""
    return Meter(torch.device("cpu"), Ticks())
