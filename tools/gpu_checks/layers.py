"""layers: a few layers of Flash's widths against the CPU."""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_checks import common
from gpu_checks.common import Report, error, random_ids

if TYPE_CHECKING:
    from ds4.gguf.shape import Shape

MEDIAN = 3e-2
"""Most median relative error of logits against the CPU's: decode rounds activations to bytes."""
BAR, SHARE = 0.1, 0.02
"""Relative error that at most this share of the positions, or one of them, may exceed: where two experts of a random
router are tied, rounding chooses between them, and the position goes on with another expert."""


def layer_shape(options: argparse.Namespace) -> Shape:
    """Flash's widths with few layers, experts and tokens, and a choice to make for the indexer."""
    from ds4.gguf.shape import FLASH

    ratios = (0, 4, 128, 4, 128, 0, 4, 128)[: options.layers]
    return replace(
        FLASH, name="custom", layers=len(ratios), ratios=ratios, experts=options.experts, vocab=options.vocab,
        hash_layers=min(1, len(ratios)), index_top_k=options.top_k, context=8192,
    )  # fmt: skip


def custom_file(path: Path, shape: Shape, recipe: str, seed: int) -> None:
    """A file of profile custom with the block types of the usual files and random weights."""
    import synthetic
    from gguf import GGUFValueType

    from ds4.gguf.file import open_model
    from ds4.gguf.keys import QAT_SIM_KEY, Value, metadata_of

    tensors = synthetic.plan(replace(shape, name="flash"), recipe, shape.layers)
    metadata = {
        "general.architecture": Value("deepseek4", GGUFValueType.STRING),
        "general.alignment": Value(synthetic.ALIGNMENT, GGUFValueType.UINT32),
        **metadata_of(shape, custom=True),
        QAT_SIM_KEY: Value(True, GGUFValueType.BOOL),
    }
    begin = synthetic.header(metadata, tensors)
    with path.open("wb") as file:
        file.write(begin)
        for tensor in tensors:
            file.seek(len(begin) + tensor.offset)
            for chunk in synthetic.values_of(tensor, shape, seed):
                file.write(memoryview(chunk))
        file.truncate(len(begin) + tensors[-1].offset + -(-tensors[-1].nbytes // 32) * 32)
    open_model(path)


def check_layers(options: argparse.Namespace, report: Report) -> None:
    """A model of few layers: the logits of every position of a prefill and of a decode against the CPU's.

    Judged are the median of the relative errors, and the share of positions above BAR.
    """
    import torch

    shape = layer_shape(options)
    for recipe in options.recipes.split(","):
        if report.late(recipe):
            break
        with tempfile.TemporaryDirectory() as folder:
            path = options.file or Path(folder) / "layers.gguf"
            if options.file is None:
                custom_file(path, shape, recipe, options.seed)
            size = path.stat().st_size
            context = options.tokens + options.decode + 64
            torch.set_num_threads(options.threads)
            there = common.cpu_engine(path, context, options.tokens, options.threads)
            here = common.open_engine(options.device, path, common.config_of(context, 3, options.tokens, quality=False))
            ids = random_ids(here.shape, options.tokens, options.seed)
            report.line(f"{recipe}: {here.shape.layers} layers, {here.shape.experts} experts, {size / 1e9:.2f} GB")
            begin = time.perf_counter()
            sessions = (here.session(), there.session())
            errors: dict[str, list[float]] = {"prefill": [], "short": [], "decode": []}
            same = dict.fromkeys(errors, 0)

            def both(
                kind: str, part: list[int], sessions: Any = sessions, errors: Any = errors, same: Any = same
            ) -> None:
                a, b = (s.engine.step([(s, part)], "all")[0] for s in sessions)
                errors[kind] += [error(x, y) for x, y in zip(a, b, strict=True)]
                same[kind] += int((a.argmax(-1) == b.argmax(-1)).sum())

            both("prefill", ids)
            both("short", random_ids(here.shape, 7, options.seed + 1))
            for token in random_ids(here.shape, options.decode, options.seed + 2):
                both("decode", [token])
            for kind, found in errors.items():
                ordered = sorted(found)
                middle, above = ordered[len(ordered) // 2], sum(not e <= BAR for e in found)
                row = (
                    recipe,
                    kind,
                    len(found),
                    middle,
                    ordered[int(0.99 * len(found))],
                    ordered[-1],
                    above,
                    same[kind],
                )
                columns = ("experts", "kind", "positions", "median", "99 %", "worst", f"above {BAR}", "same top")
                report.rows("layers", columns, row)
                report.judge(middle <= MEDIAN and above <= max(1, SHARE * len(found)))
            report.line(f"{time.perf_counter() - begin:.1f} s")
        if options.file is not None:
            break
