"""`ds4 --inspect FILE`: what a model file holds and what would be refused, without loading it (and without torch)."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ds4.errors import FileFormatError
from ds4.gguf.file import Inspection, TensorInfo, inspect_file
from ds4.gguf.keys import QAT_SIM_KEY, TOKENIZER_PREFIX
from ds4.gguf.shape import EXPERT_TYPES, Shape

_MAX_PROBLEMS = 20
_MAX_TEXT = 200
_EXPERTS = ("ffn_gate_exps.weight", "ffn_up_exps.weight", "ffn_down_exps.weight")


def inspect(path: str | os.PathLike[str], console: Console | None = None) -> int:
    """Print what the file holds and what would be refused; 0 for a usable file, 1 for one that is refused."""
    console = console or Console()
    try:
        found = inspect_file(path)
    except FileFormatError as error:
        console.print(f"[bold red]refused[/]: {escape(str(error))}", soft_wrap=True, highlight=False)
        return 1
    console.print(_facts(Path(path), found))
    if found.header.tensors:
        console.print(_types(found.header.tensors.values()))
    if found.shape is not None:
        console.print(_experts(found.header.tensors, found.shape))
    _print_verdict(found, console)
    return 1 if found.problems else 0


def _facts(path: Path, found: Inspection) -> Table:
    metadata, shape = found.header.metadata, found.shape
    table = Table(title="Model file", title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")

    def row(name: str, value: object) -> None:
        table.add_row(name, _plain(value))

    row("file", str(path))
    row("size", _size(found.header.size))
    row("name", metadata.get("general.name", "not given"))
    row("architecture", metadata.get("general.architecture", "not given"))
    row("profile", shape.name if shape is not None else "none fits")
    if shape is not None:
        row("layers", f"{shape.layers} (hash-routed: the first {shape.hash_layers}), hidden size {shape.hidden}")
        row("compression", _ratios(shape))
        row("experts", f"{shape.experts}, {shape.experts_used} active, {shape.shared_experts} shared")
        row("context", f"{shape.context} tokens")
        row("quantisation round trips", "on" if metadata.get(QAT_SIM_KEY, True) is True else "off")
    row("tensors", len(found.header.tensors))
    row("tokenizer", _tokenizer(found))
    return table


def _tokenizer(found: Inspection) -> str:
    metadata = found.header.metadata
    tokens, merges = (metadata.get(f"{TOKENIZER_PREFIX}{name}") for name in ("tokens", "merges"))
    if not isinstance(tokens, list):
        return "none in the file"
    kind = f"{metadata.get(f'{TOKENIZER_PREFIX}model')} / {metadata.get(f'{TOKENIZER_PREFIX}pre')}"
    return f"{kind}, {len(tokens)} tokens, {len(merges) if isinstance(merges, list) else 'no'} merges"


def _types(tensors: Iterable[TensorInfo]) -> Table:
    """Tensors by type, routed experts apart. Data that several tensors refer to is counted once."""
    counts: dict[tuple[str, str], list[int]] = {}
    seen: set[int] = set()
    for info in tensors:
        kind = "routed experts" if info.name.endswith(_EXPERTS) else "others"
        entry = counts.setdefault((kind, info.type.name), [0, 0, 0])
        entry[0] += 1
        entry[1] += info.n_values
        entry[2] += 0 if info.offset in seen else info.nbytes
        seen.add(info.offset)
    table = Table(title="Tensors by type", title_justify="left")
    table.add_column("tensors of")
    table.add_column("type")
    for name in ("count", "values", "size"):
        table.add_column(name, justify="right")
    for (kind, type), (count, values, nbytes) in sorted(counts.items(), key=lambda item: -item[1][2]):
        table.add_row(kind, type, str(count), f"{values:,}", _size(nbytes))
    total = [sum(entry[i] for entry in counts.values()) for i in range(3)]
    table.add_section()
    table.add_row("all", "", str(total[0]), f"{total[1]:,}", _size(total[2]))
    return table


def _experts(tensors: dict[str, TensorInfo], shape: Shape) -> Table:
    """Types of the routed experts, one line for each run of layers that have the same."""

    def types(layer: int) -> tuple[str, ...]:
        infos = (tensors.get(f"blk.{layer}.{name}") for name in _EXPERTS)
        return tuple("missing" if i is None else i.type.name + ("" if _usable(i, shape) else " (!)") for i in infos)

    table = Table("layers", "gate", "up", "down", title="Routed experts", title_justify="left")
    start = 0
    for layer in range(1, shape.layers + 1):
        if layer == shape.layers or types(layer) != types(start):
            table.add_row(_run(start, layer - 1), *types(start))
            start = layer
    return table


def _usable(info: TensorInfo, shape: Shape) -> bool:
    return shape.name == "custom" or info.type in EXPERT_TYPES


def _ratios(shape: Shape) -> str:
    counts = sorted(Counter(shape.ratios).items())
    kinds = {0: " (window only)", shape.sparse_ratio: " (indexer)"}
    return ", ".join(f"ratio {ratio}{kinds.get(ratio, '')}: {count} layers" for ratio, count in counts)


def _plain(value: object) -> str:
    """A value from the file as one safe line: a file must not send control codes to the terminal."""
    text = value if isinstance(value, str) else repr(value)
    text = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text[:_MAX_TEXT])
    return escape(text if len(text) < _MAX_TEXT else f"{text}...")


def _run(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _print_verdict(found: Inspection, console: Console) -> None:
    if not found.problems:
        console.print("[bold green]usable[/]: every check passed", highlight=False)
        return
    console.print(f"[bold red]refused[/] for {len(found.problems)} reason(s):", highlight=False)
    for problem in found.problems[:_MAX_PROBLEMS]:
        console.print(f"- {escape(problem)}", soft_wrap=True, highlight=False)
    if len(found.problems) > _MAX_PROBLEMS:
        console.print(f"- and {len(found.problems) - _MAX_PROBLEMS} more", highlight=False)


def _size(nbytes: int) -> str:
    """Bytes in the unit that keeps three or four digits."""
    if nbytes < 1 << 20:
        return f"{nbytes:,} bytes"
    if nbytes < 1 << 30:
        return f"{nbytes / (1 << 20):.1f} MiB"
    return f"{nbytes / (1 << 30):.2f} GiB ({nbytes / 1e9:.1f} GB)"
