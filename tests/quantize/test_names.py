"""Every name of the layouts lands where it belongs, and nothing else does."""

from __future__ import annotations

import re
from dataclasses import replace
from types import ModuleType

import pytest

from ds4.gguf.shape import FLASH, PRO, TINY, Shape, expected_tensors
from ds4.quantize.names import Place, places
from tests.quantize.conftest import TOY


def landed(builder: ModuleType, shape: Shape, layout: str, drafts: str | None = None) -> dict[str, int]:
    """GGUF name -> how many tensors of the checkpoint go there, scales aside."""
    counts: dict[str, int] = {}
    for entry in builder.entries(shape, lambda name: None, layout, drafts):
        for name in entry.tensors:
            found = places(name)
            assert found, name
            for place in found:
                assert place.scale == (len(entry.tensors) == 2 and name.endswith(".scale")), name
                if not place.scale:
                    counts[place.tensor] = counts.get(place.tensor, 0) + 1
    return counts


@pytest.mark.parametrize("layout", ["official", "fp8", "bf16"])
@pytest.mark.parametrize("shape", [FLASH, TINY, TOY], ids=["flash", "tiny", "toy"])
def test_official_names_fill_every_tensor(builder: ModuleType, shape: Shape, layout: str) -> None:
    shape = replace(shape, experts=min(shape.experts, 8), experts_used=2)
    counts = landed(builder, shape, layout)
    assert set(counts) == set(expected_tensors(shape))
    assert {n for name, n in counts.items() if name.endswith("_exps.weight")} == {shape.experts}
    assert {n for name, n in counts.items() if not name.endswith("_exps.weight")} == {1}


def test_transformers_names_fill_every_tensor(builder: ModuleType) -> None:
    counts = landed(builder, PRO, "transformers")
    assert set(counts) == set(expected_tensors(PRO))
    assert set(counts.values()) == {1}


@pytest.mark.parametrize(("kind", "tensors"), [("mtp", 32), ("dspark", 81)])
def test_draft_names(builder: ModuleType, kind: str, tensors: int) -> None:
    """The counts are those of the published files."""
    counts = landed(builder, TINY, "official", kind)
    assert sum(name.startswith("mtp.") for name in counts) == tensors


def test_what_save_pretrained_writes() -> None:
    assert places("model.layers.3.attn.norm.weight") == (Place("blk.3.attn_kv_a_norm.weight"),)
    assert places("model.layers.3.attn.indexer.compressor.norm.weight") == (
        Place("blk.3.indexer_compressor_norm.weight"),
    )
    assert places("model.embed_tokens.weight") == places("embed.weight") == (Place("token_embd.weight"),)
    assert places("model.hc_head.hc_fn") == (Place("output_hc_fn.weight"),)


def test_experts_and_scales() -> None:
    assert places("layers.7.ffn.experts.255.w2.weight") == (Place("blk.7.ffn_down_exps.weight", expert=255),)
    assert places("layers.7.ffn.experts.255.w3.scale") == (Place("blk.7.ffn_up_exps.weight", expert=255, scale=True),)
    assert places("model.layers.0.mlp.experts.2.gate_proj.weight") == (Place("blk.0.ffn_gate_exps.weight", expert=2),)
    assert places("model.layers.0.self_attn.q_a_proj.weight_scale_inv") == (Place("blk.0.attn_q_a.weight", scale=True),)
    assert places("model.layers.1.mlp.experts.gate_up_proj") == (
        Place("blk.1.ffn_gate_exps.weight", half=0),
        Place("blk.1.ffn_up_exps.weight", half=1),
    )
    assert places("mtp.0.ffn.experts.1.w1.weight") == (Place("mtp.0.ffn_gate_exps.weight", expert=1),)


@pytest.mark.parametrize(
    "name",
    ["vision.patch_embed.proj.weight", "layers.x.attn_norm.weight", "layers.0.engram.embed.weight",
     "layers.0.e_proj.weight", "layers.0.ffn.experts.1.w4.weight", "layers.0.attn.wq_c.weight", "mtp.0.unknown.weight",
     "layers.0.attn.wq_a.bias", "", "embed", "model.model.embed.weight", "layers.0.attn.attn_sink.scale",
     "layers.0.ffn.gate.tid2eid.scale"],
)  # fmt: skip
def test_unknown_names(name: str) -> None:
    assert places(name) == ()


def test_no_name_of_the_table_is_ambiguous(builder: ModuleType) -> None:
    """Two names of one checkpoint never go to the same place."""
    for layout in builder.LAYOUTS:
        seen: set[Place] = set()
        for entry in builder.entries(TOY, lambda name: None, layout, "dspark"):
            for name in entry.tensors:
                for place in places(name):
                    assert place not in seen, name
                    seen.add(place)
        assert not [p for p in seen if re.search(r"\s", p.tensor)]
