"""Checkpoints in every layout, made once."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from ds4.gguf.shape import TINY
from ds4.quantize.checkpoint import INDEX

TOOLS = Path(__file__).parents[2] / "tools"

TOY = replace(
    TINY, name="custom", layers=3, ratios=(0, 4, 128), heads=2, head_dim=128, hash_layers=1, experts=3, context=8192
)
"""Every kind of layer, rows that all block types take, the vocabulary of the small tokenizer."""


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Products this small only wait for a second thread."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def builder() -> ModuleType:
    """tools/fake_checkpoint.py."""
    spec = importlib.util.spec_from_file_location("fake_checkpoint", TOOLS / "fake_checkpoint.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fake_checkpoint"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


Make = Callable[..., Path]


@pytest.fixture(scope="session")
def toy(builder: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """(layout, drafts) -> the folder of a random toy checkpoint; not to be changed."""
    made: dict[tuple[str, str | None], Path] = {}

    def make(layout: str = "official", drafts: str | None = None) -> Path:
        if (layout, drafts) not in made:
            out = tmp_path_factory.mktemp("checkpoint") / f"toy-{layout}"
            builder.build(out, TOY, builder.random_values(TOY, 5), layout=layout, drafts=drafts)
            made[layout, drafts] = out
        return made[layout, drafts]

    return make


@pytest.fixture(scope="session")
def tiny(builder: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ds4-tiny's weights in the official layout, FP8 and FP4, with MTP blocks."""
    out = tmp_path_factory.mktemp("checkpoint") / "tiny"
    shape, get = builder.file_values(builder.embedded_model_path())
    builder.build(out, shape, get, drafts="mtp")
    return out


def copy_of(folder: Path, to: Path) -> Path:
    """A copy of a checkpoint that a test may spoil."""
    to.mkdir()
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    return to


def spoil_index(folder: Path, change: dict[str, str | None]) -> None:
    """Change places in a checkpoint's index; None takes a name away."""
    index = json.loads((folder / INDEX).read_text())
    places = {**index["weight_map"], **change}
    index["weight_map"] = {name: file for name, file in places.items() if file is not None}
    (folder / INDEX).write_text(json.dumps(index))
