"""Two measurements side by side: new over old, row by row."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds4.bench.results import SCHEMA
from ds4.errors import Ds4Error
from ds4.files import read_text

if TYPE_CHECKING:
    from rich.table import Table

_SAME = {
    "model": ("file", "bytes", "identity"),
    "machine": ("gpu", "cpu", "threads", "torch", "triton"),
    "settings": ("seed", "quality", "prefill_chunk", "expert_layout"),
}
"""What two measurements should share; a difference is told."""
_SPEEDS = {"prefill_tps": "prefill, tokens/s", "gen_tps": "decode, tokens/s"}


@dataclass(frozen=True)
class Ratio:
    """One speed of both; `ratio` is the new one over the old one, above 1 where the new one is faster."""

    ctx_tokens: int
    sessions: int
    name: str
    old: float
    new: float

    @property
    def ratio(self) -> float:
        return self.new / self.old


@dataclass(frozen=True)
class Comparison:
    """What two files say of the same.

    Attributes:
        differences: in what was measured, or on what; as text.
        only: rows that only one of them has; as text.
    """

    ratios: tuple[Ratio, ...]
    differences: tuple[str, ...]
    only: tuple[str, ...]

    def worst(self) -> float:
        """The lowest ratio."""
        return min(ratio.ratio for ratio in self.ratios)

    def table(self) -> Table:
        """The ratios."""
        from rich import box
        from rich.table import Table

        table = Table(box=box.SIMPLE, pad_edge=False)
        for name in ("context", "sessions", "what", "old", "new", "new / old"):
            table.add_column(name, justify="left" if name == "what" else "right", no_wrap=True)
        for r in self.ratios:
            table.add_row(
                f"{r.ctx_tokens:,}", str(r.sessions), r.name, f"{r.old:,.1f}", f"{r.new:,.1f}", f"{r.ratio:.3f}"
            )
        return table


def read_results(path: Path) -> dict[str, Any]:
    """The JSON of a measurement.

    Raises:
        Ds4Error: it cannot be read, or is none.
    """
    try:
        found = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise Ds4Error(f"{path}: this is no JSON ({error}); give a file that ds4-bench --json wrote") from error
    schema = found.get("schema") if isinstance(found, dict) else None
    if schema != SCHEMA:
        raise Ds4Error(f"{path}: its schema is {schema!r}, expected {SCHEMA!r}; give a file of ds4-bench --json")
    return dict(found)


def compare(old_path: Path, new_path: Path) -> Comparison:
    """Compare the speeds of two files, where both have a row of the same context and number of sessions.

    Raises:
        Ds4Error: a file cannot be used, or there is nothing to compare.
    """
    old, new = read_results(old_path), read_results(new_path)
    try:
        before, after = dict(_speeds(old)), dict(_speeds(new))
        differences = tuple(_differences(old, new))
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else f"something is wrong in it ({error})"
        raise Ds4Error(f"{old_path} or {new_path}: {what}; give files of ds4-bench --json") from error
    shared = [key for key in before if key in after]
    if not shared:
        raise Ds4Error(f"{old_path} and {new_path} have no row in common: measure the same contexts and sessions")
    only = [f"only in {old_path}: {_text(key)}" for key in before if key not in after]
    only += [f"only in {new_path}: {_text(key)}" for key in after if key not in before]
    return Comparison(tuple(Ratio(*key, before[key], after[key]) for key in shared), differences, tuple(only))


def _speeds(found: dict[str, Any]) -> Iterator[tuple[tuple[int, int, str], float]]:
    for row in found["rows"]:
        for key, name in _SPEEDS.items():
            if row[key]:
                label = f"{name} (of the last {row['prefill_tokens']:,})" if key == "prefill_tps" else name
                yield (int(row["ctx_tokens"]), int(row["sessions"]), label), float(row[key])
    first = found["first_token"]
    if first:
        yield (int(first["tokens"]), 1, "first token, tokens/s"), float(first["tps"])


def _differences(old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    for part, keys in _SAME.items():
        for key in keys:
            if old[part].get(key) != new[part].get(key):
                yield f"{part}, {key}: {old[part].get(key)} / {new[part].get(key)}"
    a, b = float(old["copy_bandwidth"]), float(new["copy_bandwidth"])
    if abs(a - b) > 0.02 * max(a, b):
        yield f"copy bandwidth: {a / 1e9:,.1f} / {b / 1e9:,.1f} GB/s"


def _text(key: tuple[int, int, str]) -> str:
    return f"{key[2]} at {key[0]:,} tokens, {key[1]} session{'s'[: key[1] > 1]}"
