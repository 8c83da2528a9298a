"""Prefill and decode over the context as a picture; matplotlib is asked for only here."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds4.bench.results import Results, write_bytes
from ds4.errors import Ds4Error

if TYPE_CHECKING:
    from ds4.bench.walk import Row


def need_matplotlib() -> None:
    """Raise `Ds4Error` if it is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise Ds4Error(
            f"--plot needs matplotlib ({error}); install it with: pip install 'ds4[plot]', or: pip install matplotlib"
        ) from error


def write_plot(results: Results, path: Path) -> None:
    """Two curves over the context, one below the other; the type follows the name's end.

    Raises:
        Ds4Error: matplotlib is missing, or the file cannot be written.
    """
    need_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 6), layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True)
    sessions = results.settings["sessions"]
    decode = "decode, tokens/s" + (f", {sessions} sessions together" if sessions > 1 else "")
    _curve(upper, results.rows, "prefill, tokens/s", lambda row: row.prefill_tps)
    _curve(lower, results.rows, decode, lambda row: row.gen_tps)
    lower.set_xlabel("context, tokens")
    if len(results.rows) > 1 and results.rows[-1].ctx_tokens >= 8 * results.rows[0].ctx_tokens:
        lower.set_xscale("log", base=2)
    machine, model = results.machine, results.model
    figure.suptitle(f"{model['file']}, {machine['gpu'] or machine['cpu']}", fontsize="medium")
    out = io.BytesIO()
    figure.savefig(out, format=path.suffix[1:].lower(), dpi=150)
    write_bytes(path, out.getvalue())


def _curve(axes: Any, rows: Sequence[Row], label: str, value: Callable[[Row], float | None]) -> None:
    points = [(row.ctx_tokens, speed) for row in rows if (speed := value(row)) is not None]
    axes.plot([x for x, _ in points], [y for _, y in points], marker="o")
    axes.set_ylabel(label)
    axes.set_ylim(0, 1.1 * max((y for _, y in points), default=1.0))
    axes.grid(alpha=0.3)
