"""`ds4 --plan`: what a model takes on a card, from its header."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds4.cli.main import main
from ds4.gguf.file import embedded_model_path


def test_the_embedded_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--plan", "-c", "4096", "--sessions", "2", "--prefill-chunk", "1024", "--cards", "141,0.5"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("Memory plan: tiny, 2 sessions of 4,096 tokens, prefill chunk 1,024, in float32\n")
    for part in ("weights: ", "sessions: ", "host memory: ", "scratch of prefill: ", "on the card: "):
        assert part in text
    assert "141 GB card: fits, " in text
    assert "0.5 GB card: does not fit, " in text


def test_without_numbers_one_session_of_the_whole_context(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--plan", "-m", str(embedded_model_path())]) == 0
    text = capsys.readouterr().out
    # So small a model computes in float32.
    assert "1 session of 1,048,576 tokens, prefill chunk 2,048" in text
    assert [f"{card} GB card: fits" in text for card in (141, 96, 80, 24)] == [True] * 4


@pytest.mark.parametrize(("flags", "exact"), [([], True), (["--quality"], True), (["--no-quality"], False)])
def test_quality(flags: list[str], exact: bool, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--plan", *flags]) == 0
    text = capsys.readouterr().out
    assert f"1 session of 1,048,576 tokens, prefill chunk {'2,048' if exact else '4,096'}" in text
    assert ("experts in float32" in text) == exact


def test_layouts_of_the_experts(capsys: pytest.CaptureFixture[str]) -> None:
    """The embedded model has IQ2_XXS experts."""
    plan = ["--plan", "-c", "4096", "--cards", "141"]
    texts = {}
    for layout in ("auto", "a", "b"):
        assert main([*plan, "--expert-layout", layout]) == 0
        texts[layout] = capsys.readouterr().out
    assert main(plan) == 0
    assert capsys.readouterr().out == texts["b"]
    assert "routed experts, IQ2_XXS, layout B     1.64 MiB   2.39 MiB in layout A" in texts["auto"]
    assert "routed experts, IQ2_XXS, layout A     2.39 MiB   1.64 MiB in layout B" in texts["a"]
    for layout, taken, other in (("auto", "A", "B"), ("a", "A", "B"), ("b", "B", "A")):
        (line,) = (line for line in texts[layout].splitlines() if line.startswith("141 GB card: "))
        assert f"left with layout {taken} (layout {other}: fits, " in line


def test_a_file_of_full_width_and_its_header(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing but the header is read: the data may be cut into holes."""
    data = embedded_model_path().read_bytes()
    path = tmp_path / "holes.gguf"
    path.write_bytes(data[: 1 << 20])
    with path.open("r+b") as file:
        file.truncate(len(data))
    assert main(["--plan", "-c", "100", "-m", str(path)]) == 0
    whole = capsys.readouterr().out.split("routed experts")[1]
    assert main(["--plan", "-c", "100"]) == 0
    assert capsys.readouterr().out.split("routed experts")[1] == whole


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("-c 2000000", "a context of 2000000 tokens is more than the model's 1048576"),
        ("--sessions 1025", "1025 sessions cannot be live at once"),
        ("-m no-such-file.gguf", "no-such-file.gguf"),
    ],
)
def test_what_cannot_be_planned(flags: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--plan", *flags.split()]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("ds4: ")
    assert message in captured.err


def test_a_model_without_kernels_is_named(model_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--plan", "-m", str(model_file)]) == 1
    assert "this model runs on the CPU only: the kernels for CUDA do not take hidden 32" in capsys.readouterr().err


def test_a_device_that_is_not_there(
    model_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["-p", "Hi", "-m", str(model_file), "--device", "cuda"]) == 1
    assert "ds4: device 'cuda' is not available: PyTorch finds no CUDA device here" in capsys.readouterr().err
