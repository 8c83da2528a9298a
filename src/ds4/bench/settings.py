"""What is measured; the command line fills it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds4.errors import Ds4Error
from ds4.files import destination

PLOT_TYPES = (".png", ".svg", ".pdf")

MAX_SESSIONS = 1000

_LOWEST = {
    "start": ("--ctx-start", 1),
    "end": ("--ctx-max", 1),
    "multiply": ("--step-mul", 1),
    "increment": ("--step-incr", 1),
    "decode": ("--gen-tokens", 0),
    "sessions": ("--sessions", 1),
    "repeats": ("--repeat", 1),
    "fill_prefill": ("--fill-prefill", 0),
    "first_token": ("--first-token", 0),
    "seed": ("--seed", 0),
}
"""The flag of a field and its lowest value."""


@dataclass(frozen=True)
class Settings:
    """What is measured; lengths in tokens.

    Attributes:
        start, end: first and last context of the walk.
        multiply: each context is this many times the one before; 1: `increment` more.
        increment: tokens from one context to the next with `multiply` 1.
        decode: tokens that each session decodes at each context; 0: prefill alone.
        sessions: how many decode together.
        repeats: runs whose median counts.
        fill: contexts whose state is random instead of prefilled; with any, they are measured and not the walk.
        fill_prefill: tokens that are prefilled at the end of each of them, and measured.
        first_token: prompt for the time to the first token; 0: it is not measured.
        seed: of random token ids and states.
    """

    start: int = 2048
    end: int = 32_768
    multiply: int = 1
    increment: int = 2048
    decode: int = 128
    sessions: int = 1
    repeats: int = 3
    fill: tuple[int, ...] = ()
    fill_prefill: int = 0
    first_token: int = 4096
    seed: int = 1

    def __post_init__(self) -> None:
        for name, (flag, low) in _LOWEST.items():
            if getattr(self, name) < low:
                raise Ds4Error(f"{flag} is {getattr(self, name)}, but must be at least {low}")
        if self.sessions > MAX_SESSIONS:
            raise Ds4Error(f"--sessions is {self.sessions}, but at most {MAX_SESSIONS} can decode together")
        if not self.fill and self.start > self.end:
            raise Ds4Error(f"--ctx-start {self.start} is above --ctx-max {self.end}")
        for length in self.fill:
            if length <= self.fill_prefill:
                raise Ds4Error(
                    f"--fill-context {length} has to be more than the {self.fill_prefill} tokens of --fill-prefill"
                )
        if self.fill_prefill and not self.fill:
            raise Ds4Error("--fill-prefill belongs to --fill-context; give that too")

    def contexts(self) -> list[tuple[int, int]]:
        """(where the measured prefill begins, the context), ascending."""
        if self.fill:
            return [(length - self.fill_prefill, length) for length in sorted(set(self.fill))]
        lengths, length = [], self.start
        while length < self.end:
            lengths.append(length)
            length = length * self.multiply if self.multiply > 1 else length + self.increment
        lengths.append(self.end)
        return list(zip([0, *lengths[:-1]], lengths, strict=True))

    @property
    def longest(self) -> int:
        """Tokens of the longest session: what is decoded, begun ahead, and tells sessions apart counts too."""
        return max(self.contexts()[-1][1] + self.decode, self.first_token) + 2

    @property
    def live_sessions(self) -> int:
        """How many are live at once: the walk keeps two."""
        return self.sessions + 2


SMALL: dict[str, Any] = {"start": 64, "end": 256, "multiply": 2, "decode": 16, "first_token": 64}
"""Defaults for models of up to `SMALL_HIDDEN` channels, which take seconds on a CPU."""
SMALL_HIDDEN = 512


@dataclass(frozen=True)
class Outputs:
    """Files to write; None: not this one."""

    csv: Path | None = None
    json: Path | None = None
    plot: Path | None = None
    profile: Path | None = None
    logits: Path | None = None

    def check(self) -> None:
        """Raise `Ds4Error` now for what could only be found out after the measurement."""
        files = [path for path in (self.csv, self.json, self.plot, self.profile) if path is not None]
        for path in files:
            destination(path)
        if len({path.resolve() for path in files}) < len(files):
            raise Ds4Error("two of --csv, --json, --plot and --profile name the same file; give each its own")
        if self.logits is not None and not self.logits.is_dir():
            raise Ds4Error(f"--dump-frontier-logits-dir {self.logits}: this is no directory; create it first")
        if self.plot is not None:
            if self.plot.suffix.lower() not in PLOT_TYPES:
                raise Ds4Error(f"--plot {self.plot}: the name must end in {', '.join(PLOT_TYPES)}")
            from ds4.bench.plot import need_matplotlib

            need_matplotlib()
