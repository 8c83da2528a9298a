from dataclasses import replace

import pytest
from gguf import GGMLQuantizationType as T

from ds4.errors import Ds4Error
from ds4.gguf.header import row_bytes
from ds4.gguf.shape import BLOCK_TYPES, FLASH, FLOAT_TYPES, PRO, PROFILES, TINY, TensorSpec, expected_tensors


def size(shape, gate_up, down):
    """Bytes of all tensors of a file with these expert types, which the published sizes must confirm."""
    total = 0
    for name, spec in expected_tensors(shape).items():
        type = gate_up if "gate_exps" in name or "up_exps" in name else down if "down_exps" in name else spec.types[0]
        rows = 1
        for dim in spec.dims[1:]:
            rows *= dim
        total += rows * row_bytes(type, spec.dims[0])
    return total


def test_tensor_counts():
    assert len(expected_tensors(FLASH)) == 1328
    assert len(expected_tensors(PRO)) == 1894


@pytest.mark.parametrize(
    ("shape", "gate_up", "down", "gib"),
    [
        (FLASH, T.IQ2_XXS, T.Q2_K, 80.8),
        (FLASH, T.Q4_K, T.Q4_K, 153.3),
        (PRO, T.IQ2_XXS, T.Q2_K, 432.7),
        (PRO, T.Q4_K, T.Q4_K, 838.0),
    ],
)
def test_sizes_are_those_of_the_published_files(shape, gate_up, down, gib):
    assert size(shape, gate_up, down) / 2**30 == pytest.approx(gib, abs=0.051)


def test_layer_pattern():
    assert [FLASH.ratios.count(r) for r in (0, 4, 128)] == [2, 21, 20]
    assert [PRO.ratios.count(r) for r in (0, 4, 128)] == [0, 30, 31]
    assert [layer for layer in range(6) if FLASH.has_indexer(layer)] == [2, 4]


def test_flash_layers_have_the_tensors_of_their_ratio():
    specs = expected_tensors(FLASH)
    assert "blk.0.attn_compressor_kv.weight" not in specs
    assert specs["blk.2.attn_compressor_kv.weight"].dims == (4096, 1024)
    assert specs["blk.3.attn_compressor_kv.weight"].dims == (4096, 512)
    assert specs["blk.2.attn_compressor_ape.weight"].dims == (1024, 4)
    assert specs["blk.3.attn_compressor_ape.weight"].dims == (512, 128)
    assert specs["blk.2.indexer_compressor_ape.weight"].dims == (256, 4)
    assert specs["blk.2.indexer.attn_q_b.weight"] == TensorSpec((1024, 8192), (T.F16, T.Q8_0))
    assert "blk.3.indexer.proj.weight" not in specs
    assert specs["blk.2.ffn_gate_tid2eid.weight"] == TensorSpec((6, 129280), (T.I32,))
    assert "blk.3.ffn_gate_tid2eid.weight" not in specs
    assert specs["blk.3.exp_probs_b.bias"] == TensorSpec((256,), (T.F32,))
    assert specs["blk.7.attn_output_a.weight"] == TensorSpec((4096, 8192), (T.Q8_0,))
    assert specs["blk.7.ffn_down_exps.weight"].dims == (2048, 4096, 256)
    assert set(specs["blk.7.ffn_down_exps.weight"].types) == {T.IQ2_XXS, T.Q2_K, T.Q4_K, T.MXFP4}
    assert specs["blk.7.hc_ffn_fn.weight"] == TensorSpec((16384, 24), (T.F16,))
    assert specs["output_hc_scale.weight"] == TensorSpec((1,), (T.F32,))


def test_custom_allows_floats_everywhere_and_blocks_where_they_fit():
    specs = expected_tensors(replace(TINY, name="custom", expert_hidden=96))
    assert set(specs["blk.0.attn_norm.weight"].types) == set(FLOAT_TYPES)
    assert set(specs["output.weight"].types) == {*FLOAT_TYPES, *BLOCK_TYPES}
    assert set(specs["blk.0.ffn_down_exps.weight"].types) == {*FLOAT_TYPES, T.Q8_0, T.MXFP4}
    assert specs["blk.0.ffn_gate_tid2eid.weight"].types == (T.I32,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 5}, "ratios has 6 entries, expected one for each of 5"),
        ({"layers": 2000, "ratios": (0,) * 2000}, "layers is 2000"),
        ({"hidden": 0}, "hidden is 0"),
        ({"hidden": True}, "hidden is True"),
        ({"heads": 8.0}, "heads is 8.0"),
        ({"vocab": 2**40}, "vocab is 1099511627776"),
        ({"rms_eps": float("nan")}, "rms_eps is nan"),
        ({"route_scale": -1.0}, "route_scale is -1.0"),
        ({"rope_dim": 63}, "rope_dim is 63"),
        ({"head_dim": 511}, "head_dim is 511, expected an even number"),
        ({"index_dim": 32}, "rope_dim is 64, expected an even number of at most 32"),
        ({"o_groups": 3}, "o_groups is 3"),
        ({"experts_used": 9}, "experts_used is 9"),
        ({"hash_layers": 7}, "hash_layers is 7"),
        ({"shared_experts": 2}, "shared_experts is 2"),
        ({"ratios": (0, 0, 4, 128, 4, -1)}, "ratios is"),
    ],
)
def test_impossible_shapes_are_refused(change, message):
    with pytest.raises(Ds4Error, match=message.replace("(", r"\(")):
        replace(TINY, **change)


def test_profiles_differ_in_many_numbers():
    assert len({shape.hidden for shape in PROFILES}) == len(PROFILES)
    assert replace(TINY, ratios=list(TINY.ratios)) == TINY
