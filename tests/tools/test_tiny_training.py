"""What trains ds4-tiny: the fast forward equals transformers', every parameter learns, Sinkhorn's gradient is right."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from check import against_transformers, flex_against_dense, no_parameter_without_gradient, sinkhorn_gradient
from tiny_path import TINY


@pytest.mark.parametrize(
    ("check", "limit"),
    [
        (sinkhorn_gradient, 1e-5),
        (against_transformers, 1e-4),
        (flex_against_dense, 1e-3),
        # The language model's loss alone leaves the indexer without one: its choice is not differentiable.
        (no_parameter_without_gradient, 0.0),
    ],
)
def test_the_training_forward(check: Callable[[], float], limit: float) -> None:
    assert TINY.is_dir()
    assert check() <= limit
