import os
import socket
from dataclasses import replace

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as T
from gguf import GGUFReader
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.pre_tokenizers import ByteLevel

from ds4.errors import Ds4Error
from ds4.gguf.blocks import as_tensor, dequantize
from ds4.gguf.file import open_model
from ds4.gguf.header import row_bytes
from ds4.gguf.shape import TINY, Shape, expected_tensors
from ds4.gguf.writer import save

SMALL = Shape(
    name="custom", layers=3, hidden=32, heads=2, head_dim=68, rope_dim=4, q_lora_rank=8, o_groups=2, o_lora_rank=6,
    window=8, ratios=(0, 4, 9), index_heads=2, index_dim=32, index_top_k=2, experts=4, experts_used=2, expert_hidden=64,
    route_scale=2.446, hash_layers=1, vocab=40, rms_eps=1e-5, yarn_factor=3.3, context=1000, swiglu_clamp=7.7,
)  # fmt: skip
TALKING = replace(SMALL, vocab=272)
TOKENIZER = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "joyai-llm",
    "tokenizer.ggml.tokens": [
        "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>",
        "<think>", "</think>", "｜DSML｜", *sorted(ByteLevel.alphabet()), "ab", "abc", *(f"t{i}" for i in range(7)),
    ],
    "tokenizer.ggml.merges": ["a b", "ab c"],
    "tokenizer.ggml.token_type": [3] * 7 + [1] * 265,
    "tokenizer.ggml.bos_token_id": 0,
}  # fmt: skip


def random_tensors(shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, spec in expected_tensors(shape).items():
        if T.I32 in spec.types:
            tensors[name] = torch.randint(0, shape.experts, spec.dims[::-1], generator=generator)
        else:
            tensors[name] = torch.randn(spec.dims[::-1], generator=generator).to(dtype)
    return tensors


def stored(model, name):
    info = model.tensors[name]
    if info.type == T.I32:
        return torch.from_numpy(model.raw(name).view("<i4").reshape(info.shape).copy())
    return dequantize(model.raw(name), info.type, info.n_values).view(info.shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_custom_file_comes_back(tmp_path, dtype):
    tensors = random_tensors(SMALL, dtype)
    save(tmp_path / "a.gguf", SMALL, tensors, qat_sim=False)
    model = open_model(tmp_path / "a.gguf")
    assert (model.shape, model.qat_sim, model.has_tokenizer) == (SMALL, False, False)
    assert model.metadata["ds4.profile"] == "custom"
    assert list(model.tensors) == list(expected_tensors(SMALL))
    for name, tensor in tensors.items():
        assert torch.equal(stored(model, name), tensor.to(torch.int32 if "tid2eid" in name else torch.float32)), name


def test_the_gguf_package_reads_it(tmp_path):
    tensors = random_tensors(TALKING)
    save(tmp_path / "a.gguf", TALKING, tensors, tokenizer=TOKENIZER)
    reader = GGUFReader(tmp_path / "a.gguf")
    assert reader.get_field("tokenizer.ggml.tokens").contents() == TOKENIZER["tokenizer.ggml.tokens"]
    assert reader.get_field("deepseek4.attention.compress_ratios").contents() == [0, 4, 9]
    for tensor in reader.tensors:
        assert np.array_equal(np.asarray(tensor.data), tensors[tensor.name].numpy()), tensor.name


def test_chosen_types_and_ready_blocks(tmp_path):
    tensors = random_tensors(SMALL)
    gate, up = "blk.1.ffn_gate_exps.weight", "blk.1.ffn_up_exps.weight"
    rng = np.random.default_rng(1)
    types = {
        gate: T.MXFP4,
        up: T.MXFP4,
        "output.weight": T.Q8_0,
        "token_embd.weight": T.F16,
        "output_norm.weight": T.BF16,
    }
    for name in (gate, up, "output.weight"):
        shape = tensors[name].shape
        tensors[name] = torch.from_numpy(
            rng.integers(0, 100, (*shape[:-1], row_bytes(types[name], shape[-1])), np.uint8)
        )
    save(tmp_path / "a.gguf", SMALL, tensors, types=types)
    model = open_model(tmp_path / "a.gguf")
    assert {name: model.tensors[name].type for name in types} == types
    for name in (gate, up, "output.weight"):
        assert model.raw(name).tobytes() == tensors[name].numpy().tobytes()
    assert torch.equal(stored(model, "token_embd.weight"), tensors["token_embd.weight"].half().float())
    assert torch.equal(stored(model, "output_norm.weight"), tensors["output_norm.weight"].bfloat16().float())


def test_strict_profile(tmp_path):
    rng = np.random.default_rng(2)
    tensors, types = {}, {}
    for name, spec in expected_tensors(TINY).items():
        types[name] = type = T.Q2_K if "down_exps" in name else spec.types[0]
        if type in (T.F32, T.F16):
            tensors[name] = torch.ones(spec.dims[::-1])
        elif type == T.I32:
            tensors[name] = torch.zeros(spec.dims[::-1], dtype=torch.int32)
        else:
            size = (*spec.dims[:0:-1], row_bytes(type, spec.dims[0]))
            tensors[name] = torch.from_numpy(rng.integers(0, 256, size, np.uint8))
    tokens = TOKENIZER["tokenizer.ggml.tokens"][:265] + [f"t{i}" for i in range(TINY.vocab - 265)]
    tokenizer = {**TOKENIZER, "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [1] * TINY.vocab}
    save(tmp_path / "a.gguf", TINY, tensors, tokenizer=tokenizer, types=types, metadata={"general.name": "t"})
    model = open_model(tmp_path / "a.gguf")
    assert model.shape == TINY
    assert "ds4.profile" not in model.metadata
    assert model.metadata["general.name"] == "t"
    assert as_tensor(model.raw("output.weight")).tolist() == tensors["output.weight"].flatten().tolist()
    with pytest.raises(Ds4Error, match=r"'output.weight' is to be F32, expected Q8_0"):
        save(tmp_path / "b.gguf", TINY, {**tensors, "output.weight": torch.ones(4096, 256)}, types=without(types))
    with pytest.raises(Ds4Error, match=r"shape 'tiny' is not one of the strict profiles; name it 'custom'"):
        save(tmp_path / "b.gguf", replace(TINY, window=64), tensors, types=types)
    with pytest.raises(Ds4Error, match=r"could not be loaded again: key 'tokenizer.ggml.model' is missing"):
        save(tmp_path / "b.gguf", TINY, tensors, types=types)
    assert [p.name for p in tmp_path.iterdir()] == ["a.gguf"]


def without(types):
    return {name: type for name, type in types.items() if name != "output.weight"}


def test_metadata_of_another_file(tmp_path):
    save(tmp_path / "a.gguf", TALKING, random_tensors(TALKING), tokenizer=TOKENIZER)
    first = open_model(tmp_path / "a.gguf")
    other = replace(TALKING, window=9)
    more = {
        **first.metadata,
        "general.alignment": 64,
        "x.negative": [-1, 2],
        "x.large": 2**40,
        "x.float": 0.1,
        "x.on": True,
    }
    save(tmp_path / "b.gguf", other, random_tensors(other), metadata=more, qat_sim=False)
    second = open_model(tmp_path / "b.gguf")
    assert (second.shape, second.qat_sim, second.has_tokenizer) == (other, False, True)
    for key in ("x.negative", "x.large", "x.float", "x.on", "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"):
        assert second.metadata[key] == more[key]
    assert "general.alignment" not in second.metadata


@settings(max_examples=40)
@given(data=st.data())
def test_any_shape_comes_back(tmp_path, data):
    def number(high, low=1):
        return data.draw(st.integers(low, high))

    def real():
        return data.draw(st.floats(1e-9, 1e9, exclude_min=True).filter(lambda value: value != 1.0))

    layers, groups, sparse = number(3), number(3), number(5)
    rope = 2 * number(4)
    shape = Shape(
        name="custom", layers=layers, hidden=number(9), heads=groups * number(3), head_dim=rope + 2 * number(3),
        rope_dim=rope,
        q_lora_rank=number(9), o_groups=groups, o_lora_rank=number(9), window=number(2**31 - 1),
        ratios=tuple(number(6, 0) for _ in range(layers)), index_heads=number(5), index_dim=rope + number(5),
        index_top_k=number(9), experts=4, experts_used=number(4), expert_hidden=number(9), route_scale=real(),
        hash_layers=number(layers, 0), vocab=number(9), context=number(2**31 - 1), sparse_ratio=sparse,
        swiglu_clamp=real(), hc_streams=number(4), sinkhorn_iterations=number(30), hc_eps=real(), rms_eps=real(),
        rope_base=real(), compress_rope_base=real(), yarn_factor=real(), yarn_original_context=number(2**31 - 1),
        yarn_beta_fast=real(), yarn_beta_slow=real(),
    )  # fmt: skip
    save(tmp_path / "a.gguf", shape, random_tensors(shape, seed=number(99)), qat_sim=False)
    model = open_model(tmp_path / "a.gguf")
    assert model.shape == shape


def test_integers_that_are_whole_numbers_in_a_float_field(tmp_path):
    shape = replace(SMALL, route_scale=2)
    save(tmp_path / "a.gguf", shape, random_tensors(shape))
    assert open_model(tmp_path / "a.gguf").shape == shape


@pytest.mark.parametrize(
    ("name", "tensor", "types", "message"),
    [
        ("output.weight", None, {}, r"'output.weight' is missing, expected dims \(32, 40\)"),
        ("more.weight", torch.ones(3), {}, "'more.weight' is not one of this shape"),
        ("output.weight", torch.ones(40, 33), {}, r"'output.weight' has shape \[40, 33\], expected \[40, 32\]"),
        ("output.weight", torch.ones(40, 32), {"x": T.F32}, "'x' is not one of this shape"),
        ("output.weight", torch.ones(40, 32), {"output.weight": T.Q8_0}, "block types are given as bytes"),
        ("output.weight", torch.ones(40, 32), {"output.weight": T.F64}, "stored as F64"),
        ("output.weight", torch.ones(40, 32, dtype=torch.int32), {}, "torch.int32"),
        ("output.weight", torch.ones(40, 34, dtype=torch.uint8), {}, "say in `types`"),
        ("output.weight", torch.ones(40, 33, dtype=torch.uint8), {"output.weight": T.Q8_0}, r"expected \[40, 34\]"),
        ("output.weight", torch.ones(40, 84, dtype=torch.uint8), {"output.weight": T.Q2_K}, "is to be Q2_K, expected"),
        ("output.weight", torch.full((40, 32), 1e5), {"output.weight": T.F16}, "beyond the range of F16"),
        ("blk.0.ffn_gate_tid2eid.weight", torch.ones(40, 2), {}, "expected integers"),
        ("blk.0.ffn_gate_tid2eid.weight", torch.full((40, 2), 4), {}, "could not be loaded again.* from 4 to 4"),
        ("blk.0.ffn_gate_tid2eid.weight", torch.full((40, 2), 2**40), {}, "beyond 32 bits"),
        ("blk.1.ffn_up_exps.weight", torch.ones(4, 64, 32).half(), {}, "could not be loaded again.*one type for both"),
    ],
)
def test_refusals_leave_the_old_file(tmp_path, name, tensor, types, message):
    path = tmp_path / "a.gguf"
    path.write_bytes(b"old")
    tensors = random_tensors(SMALL)
    if tensor is None:
        del tensors[name]
    else:
        tensors[name] = tensor
    with pytest.raises(Ds4Error, match=message):
        save(path, SMALL, tensors, types=types)
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.gguf"]


@pytest.mark.parametrize(
    ("value", "message"),
    [([], "empty list"), ([[1]], "lists of lists"), ([1, "a"], "mixes kinds"), (None, "NoneType"), (2**70, "is a int")],
)
def test_values_that_cannot_be_stored(tmp_path, value, message):
    with pytest.raises(Ds4Error, match=f"'x.y' .*{message}"):
        save(tmp_path / "a.gguf", SMALL, random_tensors(SMALL), metadata={"x.y": value})


def test_a_failure_while_writing_leaves_the_old_file(tmp_path):
    class Broken(dict):
        def __getitem__(self, name):
            if name == "output.weight" and self.armed:
                raise RuntimeError("lost")
            return super().__getitem__(name)

    tensors = Broken(random_tensors(SMALL))
    tensors.armed = False
    path = tmp_path / "a.gguf"
    save(path, SMALL, tensors)
    old = path.read_bytes()
    seen = []

    class Counting(Broken):
        def __getitem__(self, name):
            seen.append(name)
            self.armed = seen.count("output.weight") > 1  # the second look is the one that writes
            return super().__getitem__(name)

    with pytest.raises(RuntimeError, match="lost"):
        save(path, SMALL, Counting(tensors))
    assert path.read_bytes() == old
    assert [p.name for p in tmp_path.iterdir()] == ["a.gguf"]


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("kind", ["fifo", "socket", "directory", "loop"])
def test_what_is_not_a_file_is_never_replaced(tmp_path, monkeypatch, kind, linked):
    path = tmp_path / "target"
    with socket.socket(socket.AF_UNIX) as unix:
        if kind == "fifo":
            os.mkfifo(path)
        elif kind == "socket":
            monkeypatch.chdir(tmp_path)  # the path of a socket must be short
            unix.bind("target")
        elif kind == "directory":
            path.mkdir()
        else:
            path.symlink_to(path)
        before = path.lstat()
        given = path
        if linked:
            given = tmp_path / "link"
            given.symlink_to(path)
        names = sorted(tmp_path.iterdir())
        with pytest.raises(Ds4Error, match=r"cannot be written: .*(not a file|a directory|a link to itself)"):
            save(given, SMALL, random_tensors(SMALL))
        after = path.lstat()
    assert (after.st_mode, after.st_ino) == (before.st_mode, before.st_ino)
    assert sorted(tmp_path.iterdir()) == names


@pytest.mark.parametrize("there", [True, False])
def test_a_link_stays_and_its_file_is_replaced(tmp_path, there):
    (tmp_path / "folder").mkdir()
    path, link = tmp_path / "folder" / "a.gguf", tmp_path / "link.gguf"
    if there:
        path.write_bytes(b"old")
    link.symlink_to("folder/a.gguf")
    save(link, SMALL, random_tensors(SMALL))
    assert link.is_symlink()
    assert open_model(path).shape == SMALL
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["a.gguf", "folder", "link.gguf"]


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(Ds4Error, match=r"no/a\.gguf: cannot be written: .*no: no such folder; make it first"):
        save(tmp_path / "no" / "a.gguf", SMALL, random_tensors(SMALL))


def test_an_existing_file_is_replaced_with_ordinary_permissions(tmp_path):
    path = tmp_path / "a.gguf"
    path.write_bytes(b"old")
    mode = path.stat().st_mode
    save(path, SMALL, random_tensors(SMALL))
    assert open_model(path).shape == SMALL
    assert path.stat().st_mode == mode
