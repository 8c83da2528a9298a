"""The comparison with the C quantisers prints speeds, errors and hours."""

import re

import pytest
import torch

from tools import quantize_bench


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    threads = torch.get_num_threads()
    monkeypatch.setattr("sys.argv", ["quantize_bench.py", *arguments])
    try:
        quantize_bench.main()
    finally:
        torch.set_num_threads(threads)


def test_one_type(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pywhispercpp")
    run(monkeypatch, "--types", "Q8_0", "--rows", "2", "--error-rows", "1")
    out = capsys.readouterr().out
    assert re.search(r"^Q8_0 +[\d.]+ +[\d.]+ +[\d.]+ +[\d.]+$", out, re.MULTILINE)
    assert len(re.findall(r"^Q8_0 .* (?:none|mild|heavy|few channels) ", out, re.MULTILINE)) == 28
    assert re.search(r"ours / C: median 0\.9\d+|median 1\.0000", out)


def test_without_the_c_library(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def missing() -> None:
        raise ImportError("the C quantisers need pywhispercpp")

    monkeypatch.setattr(quantize_bench.ggml_quantize, "_library", missing)
    run(monkeypatch, "--types", "Q8_0", "--rows", "2")
    out = capsys.readouterr().out
    assert "no errors: the C quantisers need pywhispercpp" in out
    assert re.search(r"^Q8_0 +[\d.]+ +- +- +[\d.]+$", out, re.MULTILINE)


def test_hours_of_flash() -> None:
    assert quantize_bench.hours(1e9, 1) == pytest.approx(43 * 256 * 3 * 4096 * 2048 * 2 / 1e9 / 3600)
