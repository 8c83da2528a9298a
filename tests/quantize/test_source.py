"""Parts of tensors: fused and single experts, slices on tiles, and everything that does not fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ds4.errors import Ds4Error
from ds4.quantize.checkpoint import Checkpoint, open_checkpoint
from ds4.quantize.source import Source, Sources
from tests.quantize.conftest import Make

CPU = torch.device("cpu")
GATE = "blk.0.ffn_gate_exps.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Checkpoint]:
    """Tensors by checkpoint name -> the checkpoint that holds them."""

    def make(tensors: Mapping[str, torch.Tensor], **config: Any) -> Checkpoint:
        save_file({name: value.contiguous() for name, value in tensors.items()}, tmp_path / "model.safetensors")
        return open_checkpoint_with(tmp_path, config)

    return make


def open_checkpoint_with(path: Path, config: Mapping[str, Any]) -> Checkpoint:
    import json

    (path / "config.json").write_text(json.dumps(config))
    return open_checkpoint(path)


def values(*size: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def whole(source: Source, part: int = 0) -> torch.Tensor:
    return source.read(part, 0, source.rows, CPU)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_float_matrices_and_rows_of_them(folder: Callable[..., Checkpoint], dtype: torch.dtype) -> None:
    weight = values(10, 64).to(dtype)
    source = Sources(folder({"head.weight": weight})).source("output.weight", (64, 10))
    assert torch.equal(whole(source), weight.float())
    assert torch.equal(source.read(0, 3, 7, CPU), weight[3:7].float())
    assert not source.is_fp4(0)


@pytest.mark.parametrize("size", [(), (1,), (1, 1)])
def test_scalars_and_vectors_of_any_rank(folder: Callable[..., Checkpoint], size: tuple[int, ...]) -> None:
    source = Sources(folder({"hc_head_scale": torch.full(size, 0.5)})).source("output_hc_scale.weight", (1,))
    assert whole(source).tolist() == [[0.5]]
    vector = values(1, 12)
    source = Sources(folder({"mtp.0.confidence_head.proj.weight": vector})).source(
        "mtp.0.confidence_head.proj.weight", (12,)
    )
    assert torch.equal(whole(source), vector)


@pytest.mark.parametrize("scales", [torch.float8_e8m0fnu, torch.float32])
def test_fp8_rows_that_begin_on_a_tile(
    folder: Callable[..., Checkpoint], builder: ModuleType, scales: torch.dtype
) -> None:
    weight = values(300, 200)
    codes, scale = builder.to_fp8(weight, scales)
    source = Sources(folder({"layers.0.attn.wq_a.weight": codes, "layers.0.attn.wq_a.scale": scale})).source(
        "blk.0.attn_q_a.weight", (200, 300)
    )
    found = whole(source)
    assert float((found - weight).abs().max()) < 0.07 * float(weight.abs().max())
    assert torch.equal(source.read(0, 128, 300, CPU), found[128:])
    assert torch.equal(source.read(0, 0, 128, CPU), found[:128])


def test_fp8_tiles_of_config_json(folder: Callable[..., Checkpoint]) -> None:
    codes = torch.ones(4, 4).to(torch.float8_e4m3fn)
    scale = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    tensors = {"model.layers.0.self_attn.q_a_proj.weight": codes,
               "model.layers.0.self_attn.q_a_proj.weight_scale_inv": scale}  # fmt: skip
    checkpoint = folder(tensors, quantization_config={"weight_block_size": [2, 2]})
    source = Sources(checkpoint).source("blk.0.attn_q_a.weight", (4, 4))
    assert whole(source).tolist() == [[1, 1, 2, 2]] * 2 + [[3, 3, 4, 4]] * 2
    for wrong in ([2], "big", [0, 2], [2, 1.5]):
        with pytest.raises(Ds4Error, match="weight_block_size is"):
            Sources(folder(tensors, quantization_config={"weight_block_size": wrong}))


def test_fp4_experts(folder: Callable[..., Checkpoint], builder: ModuleType) -> None:
    tensors = {}
    grids = [torch.tensor([0.5, -6, 3, 1])[torch.randint(0, 4, (4, 64))] * 2.0**e for e in (-3, 2)]
    for expert, grid in enumerate(grids):
        packed, scale = builder.to_fp4(grid)
        tensors |= {
            f"layers.0.ffn.experts.{expert}.w1.weight": packed,
            f"layers.0.ffn.experts.{expert}.w1.scale": scale,
        }
    source = Sources(folder(tensors)).source(GATE, (64, 4, 2))
    for expert, grid in enumerate(grids):
        assert source.is_fp4(expert)
        assert torch.equal(whole(source, expert), grid)
        assert torch.equal(source.read(expert, 1, 3, CPU), grid[1:3])
        assert source.read_mxfp4(expert, 1, 3).shape == (2, 34)
    with pytest.raises(Ds4Error, match=r"experts.1.w1.weight': is expert 1, but config.json says 1 experts"):
        Sources(folder(tensors)).source(GATE, (64, 4, 1))
    with pytest.raises(Ds4Error, match=r"expert 2 of tensor 'blk.0.ffn_gate_exps.weight' is missing"):
        Sources(folder(tensors)).source(GATE, (64, 4, 3))


def test_fused_experts(folder: Callable[..., Checkpoint]) -> None:
    fused = values(3, 8, 32).bfloat16()
    down = values(3, 5, 4)
    sources = Sources(
        folder({"model.layers.0.mlp.experts.gate_up_proj": fused, "layers.0.mlp.experts.down_proj": down})
    )
    gate, up = (sources.source(f"blk.0.ffn_{kind}_exps.weight", (32, 4, 3)) for kind in ("gate", "up"))
    for expert in range(3):
        assert torch.equal(whole(gate, expert), fused[expert, :4].float())
        assert torch.equal(up.read(expert, 1, 3, CPU), fused[expert, 5:7].float())
    assert torch.equal(whole(sources.source("blk.0.ffn_down_exps.weight", (4, 5, 3)), 2), down[2])
    with pytest.raises(Ds4Error, match=r"gate_up_proj': has shape \[3, 8, 32\], expected \[3, 10, 32\]"):
        sources.source(GATE, (32, 5, 3))


def test_experts_of_several_types(folder: Callable[..., Checkpoint], builder: ModuleType) -> None:
    """Each is read as what it is."""
    grid = torch.tensor([0.5, -6, 3, 1])[torch.randint(0, 4, (4, 64), generator=torch.Generator().manual_seed(1))]
    packed, scale = builder.to_fp4(grid)
    plain = values(4, 64).bfloat16()
    prefix = "layers.0.ffn.experts"
    tensors = {f"{prefix}.0.w1.weight": plain, f"{prefix}.1.w1.weight": packed, f"{prefix}.1.w1.scale": scale}
    source = Sources(folder(tensors)).source(GATE, (64, 4, 2))
    assert [source.is_fp4(expert) for expert in range(2)] == [False, True]
    assert torch.equal(whole(source, 0), plain.float())
    assert torch.equal(whole(source, 1), grid)


def fp8(rows: int, cols: int) -> torch.Tensor:
    return torch.ones(rows, cols).to(torch.float8_e4m3fn)


NAME = "layers.0.attn.wq_a"
BAD = {
    "a shape": ({f"{NAME}.weight": torch.ones(8, 5)}, r"has shape \[8, 5\], expected \[8, 4\]"),
    "a transposed matrix": ({f"{NAME}.weight": torch.ones(4, 8)}, r"has shape \[4, 8\], expected \[8, 4\]"),
    "a missing scale": ({f"{NAME}.weight": fp8(8, 4)}, "is F8_E4M3, but its scales are missing"),
    "a type": ({f"{NAME}.weight": torch.ones(8, 4).to(torch.float8_e5m2)}, "type F8_E5M2 is not read; known are F64"),
    "an integer type": ({f"{NAME}.weight": torch.ones(8, 4, dtype=torch.int32)}, "type I32 is not read"),
    "a boolean": ({f"{NAME}.weight": torch.ones(8, 4, dtype=torch.bool)}, "type BOOL is not read"),
    "a scale too many": ({f"{NAME}.weight": torch.ones(8, 4), f"{NAME}.scale": torch.ones(1, 1)}, "F32 and needs none"),
    "a scale's shape": (
        {f"{NAME}.weight": fp8(8, 4), f"{NAME}.scale": torch.ones(2, 1)}, r"has shape \[2, 1\], expected \[1, 1\]"),
    "a scale's type": (
        {f"{NAME}.weight": fp8(8, 4), f"{NAME}.scale": torch.ones(1, 1).int()}, "has type I32, expected scales"),
    "FP4 that is too narrow": (
        {f"{NAME}.weight": torch.ones(8, 2).char(), f"{NAME}.scale": torch.ones(8, 1)}, "4 columns cannot be"),
    "scales alone": ({f"{NAME}.scale": torch.ones(1, 1)}, "nothing for tensor 'blk.0.attn_q_a.weight'"),
    "nothing": ({"layers.0.attn.wq_b.weight": torch.ones(8, 4)}, "nothing for tensor 'blk.0.attn_q_a.weight'"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_named(folder: Callable[..., Checkpoint], case: str) -> None:
    tensors, message = BAD[case]
    with pytest.raises(Ds4Error, match=message):
        Sources(folder(tensors)).source("blk.0.attn_q_a.weight", (4, 8))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_no_numbers(folder: Callable[..., Checkpoint], bad: float) -> None:
    weight = torch.ones(8, 4)
    weight[5, 2] = bad
    source = Sources(folder({f"{NAME}.weight": weight})).source("blk.0.attn_q_a.weight", (4, 8))
    assert torch.equal(source.read(0, 0, 5, CPU), torch.ones(5, 4))
    with pytest.raises(
        Ds4Error, match=r"model.safetensors: tensor 'layers.0.attn.wq_a.weight': 1 values are not finite"
    ):
        whole(source)


def test_codes_and_scales_that_are_no_numbers(folder: Callable[..., Checkpoint], builder: ModuleType) -> None:
    codes, scale = fp8(8, 4), torch.full((1, 1), 255, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    broken = codes.clone()
    broken.view(torch.uint8)[0, 0] = 0x7F
    for tensors in ((codes, scale), (broken, torch.ones(1, 1))):
        source = Sources(folder({f"{NAME}.weight": tensors[0], f"{NAME}.scale": tensors[1]})).source(
            "blk.0.attn_q_a.weight", (4, 8)
        )
        with pytest.raises(Ds4Error, match="not finite"):
            whole(source)
    packed, exponents = builder.to_fp4(values(2, 32))
    for byte in (255, 253):
        exponents.view(torch.uint8)[1, 0] = byte
        tensors = {"layers.0.ffn.experts.0.w1.weight": packed, "layers.0.ffn.experts.0.w1.scale": exponents}
        source = Sources(folder(tensors)).source(GATE, (32, 2, 1))
        with pytest.raises(Ds4Error, match="not finite"):
            source.read_mxfp4(0, 0, 2)


def test_unknown_and_doubled_names(folder: Callable[..., Checkpoint]) -> None:
    checkpoint = folder({"vision.a": torch.ones(1), "vision.b": torch.ones(1), "embed.weight": torch.ones(1)})
    with pytest.raises(Ds4Error, match=r"2 tensors have no place in the V4 network, such as 'vision.a', 'vision.b'"):
        Sources(checkpoint)
    assert Sources(checkpoint, ["vision.*"]).names == {"token_embd.weight"}
    with pytest.raises(Ds4Error, match="is there twice"):
        Sources(folder({"embed.weight": torch.ones(1), "model.embed_tokens.weight": torch.ones(1)}))


def test_tables(folder: Callable[..., Checkpoint]) -> None:
    table = torch.arange(12).view(6, 2)
    sources = Sources(folder({"layers.0.ffn.gate.tid2eid": table}))
    assert torch.equal(sources.table("blk.0.ffn_gate_tid2eid.weight", (2, 6)).read_integers(), table)
    with pytest.raises(Ds4Error, match=r"is I64 \[6, 2\], expected integers \[6, 3\]"):
        sources.table("blk.0.ffn_gate_tid2eid.weight", (3, 6))
    with pytest.raises(Ds4Error, match=r"is F32 \[6, 2\], expected integers"):
        Sources(folder({"layers.0.ffn.gate.tid2eid": table.float()})).table("blk.0.ffn_gate_tid2eid.weight", (2, 6))


def test_a_whole_checkpoint_has_sources_for_everything(toy: Make) -> None:
    names = {layout: Sources(open_checkpoint(toy(layout))).names for layout in ("official", "transformers")}
    assert names["official"] == names["transformers"]


def test_vectors_in_fp8_are_refused(folder: Callable[..., Checkpoint]) -> None:
    """A vector is read whole, without scales."""
    name = "layers.0.attn_norm"
    checkpoint = folder({f"{name}.weight": fp8(1, 256), f"{name}.scale": torch.full((1, 2), 0.5)})
    with pytest.raises(Ds4Error, match=r"type F8_E4M3 is not read for a vector; known are F64, F32, F16, BF16$"):
        Sources(checkpoint).source("blk.0.attn_norm.weight", (256,))
