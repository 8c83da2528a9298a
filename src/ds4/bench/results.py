"""A measurement as a table, CSV and JSON."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds4.files import replacing

if TYPE_CHECKING:
    from rich.table import Table

    from ds4.bench.growth import Growth
    from ds4.bench.kernels import Profile
    from ds4.bench.walk import FirstToken, Row

SCHEMA = "ds4-bench/1"
"""Name and version of the JSON: the number grows when a key changes its meaning or goes."""

_MIB = 1 << 20


@dataclass
class Results:
    """All that a run found; see docs/performance.md for the keys of the JSON.

    Attributes:
        machine, model, settings: what was measured, on what.
        traffic: bytes of a token's reads by part, and by which a state grows.
        copy_bandwidth: bytes a second.
    """

    machine: dict[str, Any]
    model: dict[str, Any]
    settings: dict[str, Any]
    traffic: dict[str, float]
    copy_bandwidth: float
    load_seconds: float
    warm_up_seconds: float
    note: str = ""
    rows: list[Row] = field(default_factory=list)
    first_token: FirstToken | None = None
    growth: list[Growth] = field(default_factory=list)

    def to_json(self) -> str:
        """The whole as JSON."""
        found: dict[str, Any] = {"schema": SCHEMA}
        found |= {entry.name: getattr(self, entry.name) for entry in fields(self)}
        found["rows"] = [asdict(row) for row in self.rows]
        found["first_token"] = None if self.first_token is None else asdict(self.first_token)
        found["growth"] = [{**asdict(growth), "per_item": growth.per_item} for growth in self.growth]
        return json.dumps(found, indent=1) + "\n"

    def to_csv(self) -> str:
        """One line for each context: all of `Row` but the single runs; empty where there is no value."""
        from ds4.bench.walk import Row

        names = [entry.name for entry in fields(Row) if not entry.name.endswith("_seconds")]
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(names)
        for row in self.rows:
            writer.writerow([_csv_cell(getattr(row, name)) for name in names])
        return out.getvalue()

    def heading(self) -> str:
        """What was measured, on what, in three lines."""
        machine, model, settings = self.machine, self.model, self.settings
        where = machine["gpu"] or f"{machine['cpu']}, {machine['threads']} thread{'s'[: machine['threads'] > 1]}"
        size = f"{model['bytes'] / 1e9:.2f} GB" if model["bytes"] >= 1e9 else f"{model['bytes'] / 1e6:.1f} MB"
        name = f", {model['name']}" if model["name"] else ""
        name += f", experts in layout {settings['expert_layout'].upper()}" if settings["expert_layout"] else ""
        name += ", in float32" if settings["quality"] and machine["gpu"] else ""
        lines = [
            f"{model['file']} ({size}{name}) on {where}; torch {machine['torch']}, triton {machine['triton'] or '-'}",
            f"copy {self.copy_bandwidth / 1e9:,.1f} GB/s (read + written); loaded in {self.load_seconds:.1f} s, warm-up"
            f" {self.warm_up_seconds:.1f} s; seed {settings['seed']}, medians of {settings['repeats']}",
        ]
        return "\n".join([*lines, *([self.note] if self.note else [])])

    def table(self) -> Table:
        """The rows, and the first token below them."""
        from rich import box
        from rich.table import Table

        profiled = any(row.kernels is not None for row in self.rows)
        on_device = any(row.device_peak_bytes is not None for row in self.rows)
        table = Table(box=box.SIMPLE, pad_edge=False)
        names = ["context", "prefilled", "tokens/s", "ms", "sessions", "decoded", "tokens/s", "ms/step", "read/token"]
        names += ["of copy", *(["kernels"] if profiled else []), "KV/token", "KV", "host peak"]
        for name in [*names, *(["device peak"] if on_device else [])]:
            table.add_column(name, justify="right", no_wrap=True)
        for row in self.rows:
            cells = [
                f"{row.ctx_tokens:,}", f"{row.prefill_tokens:,}", _number(row.prefill_tps), _number(row.prefill_ms),
                str(row.sessions), f"{row.gen_tokens:,}", _number(row.gen_tps), _number(row.step_ms),
                _bytes(row.bytes_per_token), _percent(row.bandwidth_fraction),
                *([_number(row.kernels)] if profiled else []), _bytes(row.kv_bytes_per_token),
                _bytes(row.kvcache_bytes), _bytes(row.host_peak_bytes),
                *([_bytes(row.device_peak_bytes)] if on_device else []),
            ]  # fmt: skip
            table.add_row(*cells)
        if self.first_token is not None:
            first = self.first_token
            table.add_section()
            table.add_row("first token", f"{first.tokens:,}", _number(first.tps), _number(first.ms))
        return table

    def growth_lines(self) -> list[str]:
        """Memory before and after, in text."""
        lines = []
        for growth in self.growth:
            for name, each in growth.per_item.items():
                before, after = growth.before[name], growth.after[name]
                lines.append(
                    f"{growth.count:,} {growth.what}: {name} {before / _MIB:,.2f} MiB before, {after / _MIB:,.2f} MiB"
                    f" after, {each:+,.1f} bytes each"
                )
        return lines


def profile_json(profiles: Sequence[Profile], results: Results) -> str:
    """The kernels of a step at every context, as JSON of their own."""
    found: dict[str, Any] = {"schema": f"{SCHEMA.partition('/')[0]}-profile/1"}
    found |= {"machine": results.machine, "model": results.model, "copy_bandwidth": results.copy_bandwidth}
    return json.dumps(found | {"profiles": [asdict(profile) for profile in profiles]}, indent=1) + "\n"


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file at once or not at all. Raises `Ds4Error` if it cannot be written."""
    with replacing(path) as new:
        new.write_bytes(data)


def write_text(path: Path, text: str) -> None:
    """See `write_bytes`."""
    write_bytes(path, text.encode())


def _csv_cell(value: object) -> object:
    if value is None:
        return ""
    if isinstance(value, bool):
        return int(value)
    return f"{value:.6g}" if isinstance(value, float) and not value.is_integer() else value


def _number(value: float | None) -> str:
    """Three or four digits."""
    if value is None:
        return ""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(value))) if value > 0 else 1}f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"


def _bytes(value: float | None) -> str:
    """Decimal units, as bandwidths have."""
    if value is None:
        return ""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}" if value < 999.5 * size else f"{value / size:,.0f} {unit}"
    return f"{value:.0f} B"
