"""Checkpoints that transformers wrote itself, through ds4-quantize, give transformers' logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ds4
from ds4.engine import loading
from ds4.quantize.checkpoint import open_checkpoint
from ds4.quantize.main import main
from ds4.quantize.recipe import FAMILIES
from tests.oracle import conftest

TOKENIZER = Path(__file__).parents[2] / "tools" / "tiny" / "tokenizer.json"


@pytest.mark.parametrize("original", [True, False], ids=["save_pretrained", "module names"])
def test_logits_of_what_transformers_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, original: bool) -> None:
    monkeypatch.setitem(conftest.CONFIGS, "text", {"vocab_size": 4096})
    model = conftest.random_model("text", seed=3)
    ids = torch.randint(0, 4096, (1, 150), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        expected = model(ids).logits[0]
    folder = tmp_path / "saved"
    model.save_pretrained(folder, save_original_format=original, max_shard_size="1MB")
    (folder / "tokenizer.json").write_bytes(TOKENIZER.read_bytes())
    names = open_checkpoint(folder).tensors
    assert ("model.layers.0.attn.norm.weight" in names) == original
    assert ("model.layers.0.mlp.experts.gate_up_proj" in names) != original
    overrides = [flag for family in FAMILIES for flag in ("--override", f"{family}=F32")]
    assert main([str(folder), "--out", str(tmp_path / "m.gguf"), *overrides]) == 0

    engine = loading.load(tmp_path / "m.gguf", qat_sim=False)
    session = engine.session()
    found = []
    session.sync(ids[0, :100].tolist())
    for id in ids[0, 100:].tolist():
        found.append(session.logits.clone())
        session.step(id)
    assert isinstance(engine, ds4.Engine)
    assert float((torch.stack(found) - expected[99:149]).abs().max()) < 1e-4
