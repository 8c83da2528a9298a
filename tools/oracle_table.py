"""How far the graph is from transformers' DeepseekV4ForCausalLM: a table of the largest logit differences.

    .venv/bin/python tools/oracle_table.py

Random weights, float32, quantisation round trips off (transformers has none). `tests/oracle` asserts the same with a
bound of 1e-4.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

import ds4
from tests.oracle.conftest import CONFIGS, LENGTHS, random_model


def chunked(engine: ds4.Engine, tokens: list[int], size: Callable[[], int]) -> torch.Tensor:
    """Logits of every position, evaluated in chunks of the sizes that `size` gives."""
    session, parts = engine.session(), []
    while len(session.tokens) < len(tokens):
        (part,) = engine.step([(session, tokens[len(session.tokens) :][: size()])], logits="all")
        assert part is not None
        parts.append(part)
    return torch.cat(parts)


def main() -> None:
    """Print the table."""
    rng = random.Random(3)
    print("| configuration | tokens | largest logit | one prefill | 20 random chunkings | token by token |")
    print("|---|---|---|---|---|---|")
    for name in CONFIGS:
        model = random_model(name, seed=1)
        ids = torch.randint(0, 128, (1, LENGTHS.get(name, 150)), generator=torch.Generator().manual_seed(2))
        with torch.no_grad():
            expected = model(ids).logits[0]
        engine, tokens = ds4.from_transformers(model), ids[0].tolist()

        def difference(size: Callable[[], int]) -> float:
            return float((chunked(engine, tokens, size) - expected).abs().max())  # noqa: B023

        whole, single = difference(lambda: 1 << 20), difference(lambda: 1)
        random_sizes = max(difference(lambda: rng.choice([1, 2, 3, 5, 16, 17, 40, 100])) for _ in range(20))
        row = (name, len(tokens), f"{expected.abs().max():.2f}", f"{whole:.1e}", f"{random_sizes:.1e}", f"{single:.1e}")
        print("| " + " | ".join(map(str, row)) + " |")


if __name__ == "__main__":
    main()
