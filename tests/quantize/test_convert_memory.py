"""How much memory a conversion takes: each unit, all in work together, and whatever the checkpoint's size."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from gguf import GGMLQuantizationType as T
from safetensors.torch import save_file

from ds4.errors import Ds4Error
from ds4.gguf.header import row_bytes
from ds4.quantize.checkpoint import open_checkpoint
from ds4.quantize.convert import Pool, Settings, convert, encode_unit
from ds4.quantize.plan import Output, Unit, make_plans
from ds4.quantize.recipe import Recipe
from ds4.quantize.source import Sources
from tests.quantize.conftest import TOY


def units_of(sizes: list[int]) -> Iterator[tuple[int, Unit]]:
    for number, size in enumerate(sizes):
        yield number, SimpleNamespace(work_bytes=size)  # type: ignore[misc]


@pytest.mark.parametrize(("jobs", "memory", "peak"), [(4, 100, 100), (2, 10_000, 120), (8, 59, 60), (3, 1, 60)])
def test_units_in_work_stay_within_the_budget(jobs: int, memory: int, peak: int) -> None:
    sizes = [10, 20, 30, 40, 50, 60] * 20
    with Pool(jobs, memory) as pool:
        done = dict(pool.run(units_of(sizes), lambda unit: unit.work_bytes))
        assert done == dict(enumerate(sizes))
        assert pool.peak <= max(memory, 60)
        assert pool.peak <= jobs * 60
        assert peak * 0.5 <= pool.peak <= max(peak, 60)


def test_the_first_error_ends_the_pool() -> None:
    made: list[int] = []

    def job(unit: Unit) -> int:
        made.append(unit.work_bytes)
        if unit.work_bytes == 3:
            raise Ds4Error("three")
        return 0

    with pytest.raises(Ds4Error, match="three"), Pool(1, 1 << 20) as pool:
        list(pool.run(units_of(list(range(1000))), job))
    assert len(made) < 10


def peak_growth(action: Callable[[], object]) -> int:
    """Bytes by which the resident set grows at most while an action runs, mapped files included."""

    def resident(field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(field)) << 10

    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from now on
    except OSError:
        pytest.skip("the system does not let the peak be reset")
    before = resident("VmRSS")
    action()
    return resident("VmHWM") - before


@pytest.mark.parametrize(("layout", "type"), [("fp4", T.F32), ("fp8", T.F16), ("f64", T.Q8_0), ("bf16", T.Q8_0)])
def test_a_unit_takes_no_more_memory_than_its_bound(builder: ModuleType, tmp_path: Path, layout: str, type: T) -> None:
    """Of every kind of source the type that takes most, or nearly."""
    rows, cols, name = 2048, 4096, "layers.0.ffn.experts.0.w1"  # an expert of Flash
    values = torch.randn(rows, cols, generator=torch.Generator().manual_seed(1))
    if layout.startswith("fp"):
        stored = builder.to_fp4(values) if layout == "fp4" else builder.to_fp8(values, torch.float8_e8m0fnu)
        tensors = {f"{name}.weight": stored[0], f"{name}.scale": stored[1]}
    else:
        tensors = {f"{name}.weight": values.double() if layout == "f64" else values.bfloat16()}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    name = "blk.0.ffn_gate_exps.weight"
    source = Sources(open_checkpoint(tmp_path)).source(name, (cols, rows, 1))
    unit = Unit(Output(name, type, (cols, rows, 1), 0, rows * row_bytes(type, cols), source), 0, 0, rows)
    encode_unit(unit, 1, Settings())  # compiles
    del values, tensors
    ctypes.CDLL(None).malloc_trim(0)  # or what was freed before would be taken again
    grown = peak_growth(lambda: encode_unit(unit, 1, Settings()))
    assert unit.n_values < grown < unit.work_bytes


def test_memory_does_not_grow_with_the_checkpoint(
    builder: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """160 MB are read and written through units of 0.25 million values."""
    monkeypatch.setattr("ds4.quantize.plan.UNIT_VALUES", 1 << 18)
    shape = replace(TOY, expert_hidden=2048, experts=64)
    builder.build(tmp_path / "c", shape, None, sparse=True)
    plans = make_plans(open_checkpoint(tmp_path / "c"), tmp_path / "b.gguf", Recipe("mxfp4"))
    assert plans[0].size > 160e6
    bound = 2 * max(unit.work_bytes for unit in plans[0].units())
    grown = peak_growth(lambda: convert(plans, Settings(jobs=2), lambda *_: None, lambda _: None))
    assert grown < bound + (16 << 20), f"{grown:,} bytes"
