"""The table of the kernels' errors."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

main = runpy.run_path(str(Path(__file__).parents[2] / "tools" / "kernel_errors.py"))["main"]


def write(path: Path, *entries: tuple[str, float, float, bool]) -> str:
    keys = ("test", "error", "bar", "gpu")
    path.write_text("".join(json.dumps(dict(zip(keys, entry, strict=True))) + "\n" for entry in entries))
    return str(path)


def test_the_worst_error_of_each_test_and_bar(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gemv = "tests/ops/kernels/test_gemv.py::test_q8"
    here = write(tmp_path / "a", (f"{gemv}[1]", 1e-6, 5e-6, False), (f"{gemv}[2]", 2e-6, 5e-6, False))
    there = write(tmp_path / "b", (f"{gemv}[1]", 3e-6, 5e-6, True), (f"{gemv}[1]", 4e-3, 1e-2, True))
    assert main([there, here]) == 0
    assert capsys.readouterr().out.splitlines()[2:] == [
        "| gemv | q8 | 5e-06 | 2.0e-06 | 2 | 3.0e-06 | 1 |",
        "| gemv | q8 | 0.01 |  |  | 4.0e-03 | 1 |",
    ]


def test_a_row_for_each_kernel_and_kind_of_bar(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gemv = "tests/ops/kernels/test_gemv.py::test_"
    path = write(
        tmp_path / "a",
        (f"{gemv}q8", 1e-6, 5e-6, True), (f"{gemv}f16", 2e-6, 2e-5, True), (f"{gemv}q8", 4e-3, 1e-2, False),
    )  # fmt: skip
    assert main([path, "--short"]) == 0
    assert capsys.readouterr().out.splitlines()[2:] == [
        "| gemv | bytes | 0.01 | 4.0e-03 | 1 |  |  |",
        "| gemv | float32 | 2e-05 |  |  | 2.0e-06 | 2 |",
    ]


@pytest.mark.parametrize("error", [1e-5, float("nan")])
def test_an_error_above_its_bar(tmp_path: Path, capsys: pytest.CaptureFixture[str], error: float) -> None:
    name = "tests/ops/kernels/test_gemv.py::test_q8"
    path = write(tmp_path / "a", (name, error, 5e-6, False), (name, 1e-6, 5e-6, False))
    assert main([path]) == 1
    assert f"**{error:.1e}**" in capsys.readouterr().out
