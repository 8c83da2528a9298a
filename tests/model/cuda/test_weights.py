"""Weights on a device: every tensor of a file in its place, shared data once, types that there are no planes for."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as T

from ds4.errors import Ds4Error
from ds4.gguf import blocks
from ds4.gguf.file import embedded_model_path, open_model
from ds4.gguf.shape import TINY
from ds4.model.cuda.runner import CudaRunner, RunnerConfig
from ds4.model.cuda.support import check_shape
from ds4.model.cuda.weights import (
    CompressorWeights,
    DeviceLayer,
    DeviceWeights,
    FileBytes,
    TensorBytes,
    _convert,
    copy_parts,
)
from ds4.ops.kernels.planes import Planes, Q8Planes, unpack
from tests.helpers import random_tensors


def test_a_file(device: str) -> None:
    file = open_model(embedded_model_path())
    seen: list[tuple[int, int]] = []
    weights = DeviceWeights.load(FileBytes(file), device, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] == sum(t.nbytes for t in file.tensors.values())
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)

    def stored(*names: str) -> torch.Tensor:
        parts = []
        for name in names:
            info = file.tensors[name]
            parts.append(blocks.dequantize(file.raw(name), info.type, info.n_values).view(-1, info.shape[-1]))
        return torch.cat(parts)

    def check(planes: Planes | torch.Tensor, *names: str) -> None:
        values = planes.float().view(-1, planes.shape[-1]) if isinstance(planes, torch.Tensor) else unpack(planes)
        assert torch.equal(values.cpu(), stored(*names)), names

    check(weights.embedding, "token_embd.weight")
    check(weights.output, "output.weight")
    check(weights.hc_head.fn, "output_hc_fn.weight")
    for number, layer in enumerate(weights.layers):
        p = f"blk.{number}."
        check(layer.q_a_kv, f"{p}attn_q_a.weight", f"{p}attn_kv.weight")
        check(layer.gate, f"{p}ffn_gate_exps.weight")
        check(layer.down, f"{p}ffn_down_exps.weight")
        check(layer.shared_gate_up, f"{p}ffn_gate_shexp.weight", f"{p}ffn_up_shexp.weight")
        side = []
        for prefix in ("attn_compressor", "indexer_compressor"):
            if f"{p}{prefix}_kv.weight" in file.tensors:
                side += [f"{p}{prefix}_kv.weight", f"{p}{prefix}_gate.weight"]
        if file.shape.has_indexer(number):
            side.append(f"{p}indexer.proj.weight")
        assert (layer.side is None) == (not side)
        if layer.side is not None:
            check(layer.side, *side)
        index = [f"{p}indexer.attn_q_b.weight"] if file.shape.has_indexer(number) else []
        if layer.index_q is not None:
            check(layer.index_q, *index)
            index = []
        check(layer.q_b, f"{p}attn_q_b.weight", *index)


class Shared(TensorBytes):
    """All layers' experts at one place, as a synthetic file has them."""

    def key(self, name: str) -> object:
        return name.split(".", 2)[2] if "_exps." in name else name


@pytest.mark.parametrize("size", [1, 4 << 20, (4 << 20) + 1, 9 << 20])
def test_copies_in_parts_are_whole(size: int) -> None:
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))
    target = torch.zeros((9 << 20) + 5, dtype=torch.uint8)
    with ThreadPoolExecutor(3) as threads:
        copy_parts(source, target, threads)
    assert torch.equal(target[:size], source)
    assert not target[size:].any()


def test_shared_data_is_loaded_once(device: str) -> None:
    shape = replace(TINY, name="custom", hidden=128, vocab=64, layers=2, ratios=(0, 0), experts=2)
    seen: list[tuple[int, int]] = []
    source = Shared(shape, random_tensors(shape, 1))
    weights = DeviceWeights.load(source, device, progress=lambda done, total: seen.append((done, total)))
    assert weights.layers[0].gate is weights.layers[1].gate
    assert weights.layers[0].q_b is not weights.layers[1].q_b
    assert seen[-1][0] == seen[-1][1]


@pytest.mark.parametrize("kind", [T.F32, T.F16, T.BF16])
def test_other_types_are_converted(kind: T) -> None:
    dtype = {T.F32: torch.float32, T.F16: torch.float16, T.BF16: torch.bfloat16}[kind]
    values = torch.randn(6, 256, generator=torch.Generator().manual_seed(1)).to(dtype)
    raw = values.view(torch.uint8).flatten()
    half = _convert(raw, kind, T.F16, 256)
    assert torch.equal(half.view(torch.float16).view(6, 256), values.half())
    q8 = blocks.dequantize(_convert(raw, kind, T.Q8_0, 256), T.Q8_0, values.numel()).view(6, 256)
    assert (q8 - values.float()).norm() / values.float().norm() < 8e-3


def test_refusals() -> None:
    check_shape(TINY)
    for name, value in (("hidden", 192), ("head_dim", 320), ("hc_streams", 2), ("hc_eps", 1e-13), ("q_lora_rank", 64)):
        with pytest.raises(Ds4Error, match=f"do not take {name} {value}"):
            check_shape(replace(TINY, **{name: value}))


def test_experts_that_are_no_numbers_are_refused(device: str) -> None:
    weights = DeviceWeights.load(FileBytes(open_model(embedded_model_path())), device)
    assert all(scales.h == 512 for scales in weights.expert_scales())
    layer, config = weights.layers[1], RunnerConfig(context=256, slots=1)
    norm = layer.hc_ffn.norm.clone()
    norm[3] = float("nan")
    changes = {
        "ffn_norm": replace(layer, hc_ffn=replace(layer.hc_ffn, norm=norm)),
        "ffn_down_exps": replace(layer, down=without_scales(layer.down)),
        "ffn_gate_exps or ffn_up_exps": replace(layer, up=without_scales(layer.up)),
    }
    for name, changed in changes.items():
        broken = replace(weights, layers=(weights.layers[0], changed, *weights.layers[2:]))
        with pytest.raises(Ds4Error, match=rf"blk\.1\.{name}: a value is no number"):
            broken.expert_scales()
        with pytest.raises(Ds4Error, match="a value is no number"):
            CudaRunner(broken, config)
    CudaRunner(broken, replace(config, quality=True))  # in float32, where it is the numbers' own business


NORMS = "attn_kv_a_norm or attn_compressor_norm"


@pytest.fixture(scope="module")
def tiny_weights(device: str) -> DeviceWeights:
    return DeviceWeights.load(FileBytes(open_model(embedded_model_path())), device)


def with_layer(weights: DeviceWeights, **changes: Any) -> DeviceWeights:
    """Another third layer."""
    changed = replace(weights.layers[2], **changes)
    return replace(weights, layers=(*weights.layers[:2], changed, *weights.layers[3:]))


def scaled(planes: Q8Planes, factor: float) -> Q8Planes:
    return replace(planes, scales=(planes.scales.float() * factor).half())


def with_rows(layer: DeviceLayer, factor: float) -> dict[str, CompressorWeights]:
    rows = layer.compressors["rows"]
    return layer.compressors | {"rows": replace(rows, norm=rows.norm * factor)}


def test_attention_that_is_no_number_or_too_large_is_refused(tiny_weights: DeviceWeights) -> None:
    layer, config = tiny_weights.layers[2], RunnerConfig(context=256, slots=1)
    kv_norm = layer.kv_norm.clone()
    kv_norm[5] = float("nan")
    changes: list[tuple[dict[str, Any], str, str]] = [
        ({"kv_norm": kv_norm}, NORMS, "no number"),
        ({"kv_norm": layer.kv_norm * 1e5}, NORMS, "so large .* --quality"),
        ({"compressors": with_rows(layer, 1e5)}, NORMS, "so large .* --quality"),
        ({"output_a": scaled(layer.output_a, float("inf"))}, "attn_output_a", "no number"),
        ({"output_b": scaled(layer.output_b, float("inf"))}, "attn_output_b", "no number"),
    ]
    for change, name, message in changes:
        broken = with_layer(tiny_weights, **change)
        with pytest.raises(Ds4Error, match=rf"blk\.2\.{name}: .*{message}"):
            CudaRunner(broken, config)
        CudaRunner(broken, replace(config, quality=True))


def test_where_float16_holds_the_attentions_projections(tiny_weights: DeviceWeights) -> None:
    """By a row's length, that of a group of heads, and that of the longest row of the matrix."""
    s, layer = TINY, tiny_weights.layers[2]
    assert tiny_weights.attention_fits() == [True] * s.layers
    # All scales and all weights of the norms are the same, so that the bound can be written down.
    norm = torch.full_like(layer.kv_norm, 2.0)
    a, b = (replace(planes, scales=torch.ones_like(planes.scales)) for planes in (layer.output_a, layer.output_b))
    channels = s.heads // s.o_groups * s.head_dim
    bound = 1.1 * s.head_dim**0.5 * 2 * (s.heads / s.o_groups) ** 0.5 * 128 * channels**0.5
    plain = with_layer(tiny_weights, kv_norm=norm, compressors=with_rows(layer, 0.0), output_b=scaled(b, 1e-3))
    for part, fits in ((0.99, True), (1.01, False)):
        changed = with_layer(plain, output_a=scaled(a, part * 65504 / bound))
        assert changed.attention_fits() == [True, True, fits, True, True, True]
    # Where rows are short, the values of a matrix count by themselves.
    short = with_layer(plain, kv_norm=norm * 1e-4)
    for name, planes in (("output_a", a), ("output_b", b)):
        for part, fits in ((0.99, True), (1.01, False)):
            changed = with_layer(short, **({"output_a": scaled(a, 1e-3)} | {name: scaled(planes, part * 65504 / 128)}))
            assert changed.attention_fits()[2] == fits


def without_scales(planes: Any) -> Any:
    """Whose scales are infinite, or NaN."""
    return replace(planes, d=torch.full_like(planes.d.view(torch.int16), 0x7C00).view(planes.d.dtype))
