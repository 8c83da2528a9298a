"""The bytes of a step, against sums made by hand."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType

import ds4
from ds4.bench.traffic import Traffic
from ds4.gguf.file import open_model
from ds4.gguf.header import row_bytes
from ds4.gguf.shape import FLASH, expected_tensors


@pytest.fixture(scope="module")
def traffic(engine: ds4.Engine, model_file: Path) -> Traffic:
    return Traffic.of(engine, open_model(model_file).tensors)


def test_every_tensor_belongs_to_one_part(traffic: Traffic, model_file: Path, engine: ds4.Engine) -> None:
    tensors = open_model(model_file).tensors
    rows = [info.nbytes for name, info in tensors.items() if "token_embd" in name or "tid2eid" in name]
    assert traffic.token == sum(rows) // engine.shape.vocab
    assert traffic.experts == sum(info.nbytes for name, info in tensors.items() if "_exps" in name)
    assert traffic.dense + traffic.experts + sum(rows) == sum(info.nbytes for info in tensors.values())


def test_flash_in_two_bits_reads_what_its_table_says() -> None:
    """The numbers of docs/performance.md."""
    found = {"dense": 0, "experts": 0}
    for name, spec in expected_tensors(FLASH).items():
        kind = spec.types[0]
        if "_exps." in name:
            kind = GGMLQuantizationType.Q2_K if "down" in name else GGMLQuantizationType.IQ2_XXS
        if "token_embd" not in name and "tid2eid" not in name:
            found["experts" if "_exps." in name else "dense"] += row_bytes(kind, spec.dims[0]) * prod(spec.dims[1:])
    traffic = Traffic(FLASH, found["dense"], 0, found["experts"], 583, 68)
    assert traffic.dense == pytest.approx(7.73e9, rel=1e-3)
    assert traffic.experts_read(1) == pytest.approx(1.826e9, rel=1e-3)
    assert traffic.experts_read(16) == pytest.approx(24.6e9, rel=1e-3)
    assert traffic.kv_read(32_768) == pytest.approx(24.2e6, rel=1e-2)


def test_rows_are_as_wide_as_they_are_stored(traffic: Traffic) -> None:
    assert traffic.row_bytes == 64 + 2 * 16 + 1  # FP8 codes, bfloat16 tail, an exponent
    assert traffic.key_bytes == 32 // 2 + 1


def test_experts_of_many_sessions_are_those_that_somebody_chose() -> None:
    traffic = Traffic(FLASH, 0, 0, 1000, 583, 68)
    assert traffic.experts_read(1) == pytest.approx(1000 * FLASH.experts_used / FLASH.experts)
    assert traffic.experts_read(2) < 2 * traffic.experts_read(1)
    assert traffic.experts_read(10_000) == pytest.approx(1000)


def test_a_token_looks_at_its_window_at_chosen_rows_and_at_all_keys() -> None:
    traffic = Traffic(FLASH, 5, 7, 0, 583, 68)
    sparse, dense = FLASH.ratios.count(4), FLASH.ratios.count(128)
    assert traffic.kv_read(100) == FLASH.layers * 100 * 583 + sparse * 25 * (68 + 583)
    long = FLASH.layers * 128 * 583 + sparse * (250_000 * 68 + FLASH.index_top_k * 583) + dense * (10**6 // 128) * 583
    assert traffic.kv_read(10**6) == long
    assert traffic.step(100, 3) == 5 + 3 * (7 + traffic.kv_read(100))
    # What the plan of a million tokens says (docs/cuda.md): 3.4 GiB, with a byte more in each row.
    assert traffic.kv_per_token() * 2**20 / 2**30 == pytest.approx(3.43, abs=0.03)
