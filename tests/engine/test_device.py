"""The choice of the device, and what is refused before anything is loaded, on machines with and without a card."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import ds4
from ds4.engine import device as devices
from ds4.gguf.file import ModelFile, embedded_model_path, open_model
from tests.helpers import SMALL, random_engine, random_tensors

GIB = 1 << 30


@pytest.fixture(scope="module")
def tiny() -> ModelFile:
    """The file that comes with the package, whose shape and types the kernels take."""
    return open_model(embedded_model_path())


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cards of compute capability 9.0, as far as PyTorch's answers go; the second is the current one."""
    for name, value in {
        "is_available": True,
        "device_count": 2,
        "current_device": 1,
        "get_device_capability": (9, 0),
        "get_device_name": "Card",
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setitem(sys.modules, "triton", sys)


@pytest.fixture
def no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("no_card")
def test_without_a_card_everything_runs_on_the_cpu(tiny: ModelFile) -> None:
    assert devices.choose("auto", tiny) == devices.choose("cpu", tiny) == torch.device("cpu")
    for name in ("cuda", "cuda:0"):
        with pytest.raises(ds4.Ds4Error, match=f"'{name}' is not available: PyTorch finds no CUDA device"):
            ds4.load(device=name)


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:-1", "cuda:x", "CPU", "", "cpu:0", "cuda:99999"])
def test_what_is_no_device_is_refused(name: str) -> None:
    with pytest.raises(ds4.Ds4Error, match="use auto, cpu, cuda or cuda:N"):
        ds4.load(device=name)
    with pytest.raises(ds4.Ds4Error, match="use auto, cpu, cuda or cuda:N"):
        ds4.from_tensors(SMALL, random_tensors(SMALL, 1), device=name)


@pytest.mark.usefixtures("card")
def test_a_card_is_taken(tiny: ModelFile) -> None:
    assert devices.choose("auto", tiny) == devices.choose("cuda", tiny) == torch.device("cuda", 1)
    assert devices.choose("cuda:0", tiny) == torch.device("cuda", 0)
    assert devices.choose("cpu", tiny) == torch.device("cpu")
    with pytest.raises(ds4.Ds4Error, match="'cuda:2' is not available: there are only 2 here"):
        devices.choose("cuda:2", tiny)


@pytest.mark.usefixtures("card")
def test_a_card_that_is_too_old_is_named(tiny: ModelFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 6))
    assert devices.choose("auto", tiny) == torch.device("cpu")
    with pytest.raises(ds4.Ds4Error, match=r"Card has compute capability 8\.6, but the kernels are made for 9\.0"):
        devices.choose("cuda", tiny)


@pytest.mark.usefixtures("card")
def test_triton_is_needed(tiny: ModelFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    assert devices.choose("auto", tiny) == torch.device("cpu")
    with pytest.raises(ds4.Ds4Error, match="the package triton cannot be imported"):
        devices.choose("cuda", tiny)


@pytest.mark.usefixtures("card")
def test_what_kernels_do_not_take_is_left_to_the_cpu(tiny: ModelFile, tmp_path: Path) -> None:
    random_engine().save_gguf(tmp_path / "small.gguf")
    small = open_model(tmp_path / "small.gguf")
    cases = [
        (tiny, False, "topk", "qat_sim=False works on the CPU only"),
        (tiny, True, "all", "index_selection='all' works on the CPU only"),
        (small, True, "topk", r"do not take hidden 32; use --device cpu \(device='cpu'\)$"),
    ]
    for file, qat_sim, selection, message in cases:
        assert devices.choose("auto", file, qat_sim, selection) == torch.device("cpu")
        with pytest.raises(ds4.Ds4Error, match=message):
            devices.choose("cuda", file, qat_sim, selection)
    assert ds4.load(tmp_path / "small.gguf").session().tokens == []


@pytest.mark.usefixtures("card")
def test_tensors_in_memory_run_on_the_cpu() -> None:
    with pytest.raises(ds4.Ds4Error, match="'cuda' is not available for tensors in memory"):
        ds4.from_tensors(SMALL, random_tensors(SMALL, 1), device="cuda")
    assert ds4.from_tensors(SMALL, random_tensors(SMALL, 1), device="auto").session().tokens == []


def test_a_plan_fills_what_the_configuration_leaves_open(tiny: ModelFile) -> None:
    plenty = devices.plan_for(tiny, ds4.EngineConfig(), 64 * GIB).options
    assert (plenty.context, plenty.sessions, plenty.chunk) == (tiny.shape.context, 8, 2048)
    assert plenty.quality
    fast = devices.plan_for(tiny, ds4.EngineConfig(quality=False), 64 * GIB).options
    assert (fast.chunk, fast.quality) == (4096, False)
    tight = devices.plan_for(tiny, ds4.EngineConfig(), int(1.5 * GIB))
    assert 32768 <= tight.options.context < tiny.shape.context
    assert tight.card_bytes <= 1.5 * GIB * 31 / 32  # a little is left
    given = devices.plan_for(tiny, ds4.EngineConfig(context=100_000, prefill_chunk=256, sessions=2), 2 * GIB).options
    assert (given.context, given.sessions, given.chunk) == (100_000, 2, 256)


def test_a_model_that_does_not_fit_is_refused_with_advice(tiny: ModelFile) -> None:
    config = ds4.EngineConfig(context=1_000_000, sessions=64)
    with pytest.raises(ds4.Ds4Error, match=r"64 sessions of 1,000,000 tokens takes .* but 1\.50 GiB are free.*--ctx"):
        devices.load_runner(tiny, torch.device("cpu"), config, room=int(1.5 * GIB))
    with pytest.raises(ds4.Ds4Error, match=r"1024 can"):
        devices.plan_for(tiny, ds4.EngineConfig(sessions=2000), GIB)


def test_the_layout_of_the_experts_is_part_of_the_plan(tiny: ModelFile) -> None:
    config = ds4.EngineConfig(context=4096, sessions=2, prefill_chunk=64)
    assert config.expert_layout == "b"
    plans = {name: devices.plan_for(tiny, replace(config, expert_layout=name), 4 * GIB) for name in ("auto", "a", "b")}
    assert {name: found.options.layout for name, found in plans.items()} == {"auto": "a", "a": "a", "b": "b"}
    room = plans["b"].card_bytes
    assert devices.plan_for(tiny, config, room).options.layout == "b"
    a = replace(config, expert_layout="a")
    with pytest.raises(ds4.Ds4Error, match=r"experts in layout A takes .* \(--expert-layout b or auto\) takes .* less"):
        devices.load_runner(tiny, torch.device("cpu"), a, room=room)
    for wrong in ("A", "c", "", None, []):
        with pytest.raises(ds4.Ds4Error, match=r"expert_layout is .*; use 'auto', 'a' or 'b'"):
            replace(config, expert_layout=wrong)


def test_the_cpu_needs_no_triton() -> None:
    code = "import sys; sys.modules['triton'] = None; import ds4; ds4.load(device='cpu').session()"
    code += "; ds4.load().session(); assert not [m for m in sys.modules if m.startswith('ds4.model.cuda')]"
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}  # with a card, `auto` looks whether the model suits it
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, env=environment)


@pytest.mark.parametrize("name", ["prefill_chunk", "sessions", "context"])
def test_numbers_of_the_configuration(name: str) -> None:
    assert getattr(ds4.EngineConfig(), name) is None
    with pytest.raises(ds4.Ds4Error, match=f"{name} is 0; it must be a whole number from 1"):
        ds4.EngineConfig(**{name: 0})


def test_load_passes_everything_on(tiny: ModelFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with a card; the runner itself is tested with the kernels."""
    small = random_engine()
    seen: list[object] = []

    def load_runner(file: ModelFile, device: torch.device, config: ds4.EngineConfig, progress: object) -> object:
        seen.extend((file.path, device, config, progress))
        return small.runner, ds4.EngineConfig(context=64, prefill_chunk=7, sessions=3)

    def progress(done: int, total: int) -> None:
        pass

    monkeypatch.setattr(devices, "choose", lambda name, *_: torch.device(name))
    monkeypatch.setattr(devices, "load_runner", load_runner)
    config = ds4.EngineConfig(sessions=3)
    engine = ds4.load(tiny.path, "cuda:1", config=config, progress=progress)
    assert seen == [tiny.path, torch.device("cuda", 1), config, progress]
    assert (engine.runner, engine.context, engine.prefill_chunk) == (small.runner, 64, 7)
    assert engine.has_tokenizer
