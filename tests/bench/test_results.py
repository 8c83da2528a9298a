"""What is printed above the table of a measurement."""

from __future__ import annotations

import pytest

from ds4.bench.results import Results


@pytest.mark.parametrize(
    ("gpu", "quality", "layout", "expected"),
    [
        ("H200", False, "b", "m.gguf (2.00 GB, Name, experts in layout B) on H200; "),
        ("H200", True, None, "m.gguf (2.00 GB, Name, in float32) on H200; "),
        (None, True, None, "m.gguf (2.00 GB, Name) on CPU, 2 threads; "),
    ],
)
def test_the_heading_says_how_the_model_is_computed(
    gpu: str | None, quality: bool, layout: str | None, expected: str
) -> None:
    machine = {"gpu": gpu, "cpu": "CPU", "threads": 2, "torch": "2", "triton": "3"}
    settings = {"expert_layout": layout, "quality": quality, "seed": 1, "repeats": 3}
    results = Results(machine, {"file": "m.gguf", "bytes": 2 * 10**9, "name": "Name"}, settings, {}, 1e9, 1.0, 2.0, "")
    assert results.heading().startswith(expected)
