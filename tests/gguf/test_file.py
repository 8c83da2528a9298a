"""Start-up rejections: every line of the list, with the key or tensor, the found and the expected value in the text."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from gguf import GGMLQuantizationType as T
from tokenizers.pre_tokenizers import ByteLevel

from ds4.errors import FileFormatError
from ds4.gguf.check import check
from ds4.gguf.file import collect_problems, inspect_file, open_model
from ds4.gguf.keys import NUMBER_KEYS
from ds4.gguf.shape import FLASH, PRO, TINY, expected_tensors
from ds4.gguf.vocabulary import PROTOCOL_TOKENS

A = "deepseek4."
BYTES = sorted(ByteLevel.alphabet())
OPTIONAL = {
    A + "rope.scaling.factor",
    A + "rope.scaling.original_context_length",
    A + "rope.scaling.yarn_beta_fast",
    A + "rope.scaling.yarn_beta_slow",
    A + "expert_group_count",
    A + "expert_group_used_count",
}
# A custom model that shares no size with a profile, so that only its own keys can give them.
ODD = replace(
    TINY, name="custom", layers=4, hidden=48, heads=6, head_dim=40, rope_dim=6, q_lora_rank=20, o_groups=3,
    o_lora_rank=10, window=11, ratios=(3, 0, 9, 3), index_heads=5, index_dim=14, index_top_k=7, experts=5,
    experts_used=3, expert_hidden=26, route_scale=1.7, hash_layers=2, vocab=277, context=1048576, sparse_ratio=3,
)  # fmt: skip


def problem(made):
    """The only problem of a spoiled draft."""
    problems = check(made.parsed())[1]
    assert len(problems) == 1, problems
    return problems[0]


def custom(draft, shape=ODD):
    made = draft(shape, gate_up=T.F32, down=T.F32)
    made.set("ds4.profile", "str", "custom")
    made.set("ds4.sparse_ratio", "u32", shape.sparse_ratio)
    made.set(A + "expert_weights_scale", "f64", shape.route_scale)
    made.set("ds4.qat_sim", "bool", False)
    return made


@pytest.mark.parametrize("shape", [FLASH, PRO, TINY], ids=lambda s: s.name)
@pytest.mark.parametrize(
    "types", [(T.IQ2_XXS, T.Q2_K), (T.Q4_K, T.Q4_K), (T.MXFP4, T.MXFP4)], ids=["q2", "q4", "mxfp4"]
)
def test_profiles_are_recognised(draft, shape, types):
    made = draft(shape, gate_up=types[0], down=types[1])
    assert check(made.parsed()) == (shape, [])


def test_a_real_file_is_opened(draft, tmp_path):
    model = open_model(draft(TINY).write(tmp_path / "a.gguf"))
    assert (model.shape, model.qat_sim, model.has_tokenizer) == (TINY, True, True)
    assert len(model.tensors) == len(expected_tensors(TINY))
    assert collect_problems(tmp_path / "a.gguf") == []


@pytest.mark.parametrize(
    ("types", "bits"), [((T.IQ2_XXS, T.Q2_K), 2), ((T.Q4_K, T.Q4_K), 4), ((T.MXFP4, T.MXFP4), 4), ((T.Q4_K, T.Q2_K), 2)]
)
def test_what_tells_states_apart(draft, tmp_path, types, bits):
    made = draft(TINY, gate_up=types[0], down=types[1])
    identity = open_model(made.write(tmp_path / "a.gguf")).identity()
    assert identity.expert_bits == bits
    assert open_model(tmp_path / "a.gguf").identity() == identity
    made.set("general.name", "str", "other")
    assert open_model(made.write(tmp_path / "b.gguf")).identity().weights != identity.weights


def test_expert_types_may_differ_between_layers(draft):
    made = draft(FLASH)
    for layer in range(37, 43):
        for kind in ("gate", "up", "down"):
            made.tensors[f"blk.{layer}.ffn_{kind}_exps.weight"].type = T.Q4_K
    for layer in range(2, 43, 2):
        made.tensors[f"blk.{layer}.indexer.attn_q_b.weight"].type = T.Q8_0
    assert check(made.parsed()) == (FLASH, [])


def test_optional_and_unknown_keys_and_tensors(draft, entry):
    made = draft(PRO)
    for key in OPTIONAL:
        del made.keys[key]
    made.set(A + "rope.freq_base_swa", "f32", 1.0)
    made.set(A + "expert_gating_func", "u32", 4)
    made.set("quantize.imatrix.file", "str", "x")
    made.set(A + "swiglu_clamp_shexp", "[f32]", [10.0] * 61)
    made.tensors["mtp.0.e_proj.weight"] = entry(T.Q8_0, (7168, 7168))
    made.tensors["blk.61.attn_norm.weight"] = entry(T.F32, (7168,))
    assert check(made.parsed()) == (PRO, [])


def test_kinds_of_numbers_are_interchangeable(draft, tmp_path):
    made = draft(TINY)
    for key, (kind, value) in made.keys.items():
        made.keys[key] = ({"u32": "u64", "f32": "f64"}.get(kind, kind), value)
    made.set(A + "attention.compress_ratios", "[u32]", list(TINY.ratios))
    made.set(A + "swiglu_clamp_exp", "[f64]", [10.0] * 9)
    assert open_model(made.write(tmp_path / "a.gguf")).shape == TINY


# -- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("entry", NUMBER_KEYS, ids=lambda entry: entry.key)
@pytest.mark.parametrize("shape", [FLASH, TINY], ids=lambda s: s.name)
def test_every_number_is_checked(draft, entry, shape):
    made = draft(shape)
    kind, value = made.keys[entry.key]
    other = (
        not value
        if kind == "bool"
        else "linear"
        if kind == "str"
        else value * (1 + 4e-6)
        if kind == "f32"
        else value + 1
    )
    made.keys[entry.key] = (kind, other)
    text = problem(made)
    assert f"'{entry.key}' is {other!r}, expected {value!r}" in text
    assert f"profile {shape.name}" in text
    made.keys[entry.key] = ("str", ["wrong kind"])
    assert f"'{entry.key}' is ['wrong kind'], expected a" in problem(made).replace("expected true", "expected a")
    del made.keys[entry.key]
    if entry.key in OPTIONAL:
        assert check(made.parsed())[1] == []
    else:
        assert f"'{entry.key}' is missing, expected {value!r}" in problem(made)


def test_the_list_of_keys_is_that_of_the_table(draft):
    lists = {A + "attention.compress_ratios", A + "swiglu_clamp_exp", A + "nextn_predict_layers"}
    assert {e.key for e in NUMBER_KEYS} == {key for key in draft(TINY).keys if key.startswith(A)} - lists


def test_floats_within_a_millionth(draft):
    made = draft(TINY)
    made.set(A + "rope.freq_base", "f32", 10000.0 * (1 + 0.9e-6))
    assert check(made.parsed())[1] == []
    for value in (10000.0 * (1 + 1.1e-6), float("nan"), float("inf")):
        made.set(A + "rope.freq_base", "f32", value)
        assert "rope.freq_base" in problem(made)


def test_a_truth_value_is_no_number(draft):
    made = draft(TINY)
    made.set(A + "expert_shared_count", "bool", True)
    assert "'deepseek4.expert_shared_count' is True, expected a whole number" in problem(made)
    made = draft(TINY)
    made.set(A + "expert_weights_norm", "u32", 1)
    assert "'deepseek4.expert_weights_norm' is 1, expected true or false" in problem(made)


def test_nothing_but_the_architecture(draft):
    made = draft(TINY)
    made.keys = {"general.architecture": ("str", "deepseek4")}
    assert "'deepseek4.block_count' is missing, as are all other sizes" in problem(made)


def test_the_nearest_profile_judges(draft):
    made = draft(PRO)
    made.set(A + "embedding_length", "u32", 4096)
    made.set(A + "expert_weights_scale", "f32", 1.5)
    problems = check(made.parsed())[1]
    assert len(problems) == 2
    assert all("profile pro" in p for p in problems)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("attention.compress_ratios", [0, 0, 4, 128, 4], "has 5 entries, expected at least 6"),
        ("attention.compress_ratios", [0, 0, 4, 128, 128, 4], "has ratio 128 for layer 4, expected 4"),
        ("attention.compress_ratios", [128, 128, 4, 128, 4, 128], "has ratio 128 for layer 0, expected 0"),
        ("attention.compress_ratios", [False, 0, 4, 128, 4, 128], "has ratio False for layer 0"),
        ("attention.compress_ratios", 4, "is 4, expected a list"),
        ("attention.compress_ratios", None, "is missing"),
        ("swiglu_clamp_exp", [10.0] * 5, "has 5 entries, expected at least 6"),
        ("swiglu_clamp_exp", [10.0] * 5 + [7.0], "has 7.0 for layer 5, expected 10.0"),
        ("swiglu_clamp_exp", [10.0] * 5 + ["10"], "has '10' for layer 5, expected 10.0"),
        ("swiglu_clamp_exp", None, "is missing"),
        ("swiglu_clamp_shexp", [7.0], "has 7.0 for layer 0, expected 10.0"),
        ("swiglu_clamp_shexp", 7.0, "has 7.0 for layer 0, expected 10.0"),
    ],
)
def test_lists_per_layer(draft, key, value, message):
    made = draft(TINY)
    made.set(A + key, "any", value)
    if value is None:
        del made.keys[A + key]
    assert f"'{A}{key}' {message}" in problem(made)


# -- other kinds of files ---------------------------------------------------------------------------------------------


def test_other_architectures(draft):
    made = draft(TINY)
    made.set("general.architecture", "str", "llama")
    assert "'general.architecture' is 'llama', expected 'deepseek4'" in problem(made)
    made.set("general.architecture", "str", "deepseek41")
    assert "DeepSeek V4.1" in problem(made)
    made.set("general.architecture", "u32", 4)
    assert "'general.architecture' is 4" in problem(made)
    del made.keys["general.architecture"]
    assert "'general.architecture' is missing" in problem(made)


@pytest.mark.parametrize("value", ["large", "", 3, ["custom"]])
def test_unknown_profile(draft, value):
    made = draft(TINY)
    made.set("ds4.profile", "any", value)
    assert f"'ds4.profile' is {value!r}, expected 'flash', 'pro', 'tiny' or 'custom'" in problem(made)


def test_a_stated_profile_is_kept(draft):
    made = draft(TINY)
    made.set("ds4.profile", "str", "tiny")
    assert check(made.parsed()) == (TINY, [])
    made.set("ds4.profile", "str", "flash")
    assert "'deepseek4.block_count' is 6, expected 43 (profile flash)" in check(made.parsed())[1][0]


def test_draft_block_files(draft, entry):
    made = draft(FLASH)
    made.tensors = {"mtp.0.e_proj.weight": entry(T.Q8_0, (4096, 4096)), "mtp.0.enorm.weight": entry(T.F32, (4096,))}
    assert "only the MTP draft blocks" in problem(made)
    made.tensors["mtp.0.main_proj.weight"] = entry(T.Q8_0, (12288, 4096))
    assert "only the DSpark draft blocks" in problem(made)
    made.tensors = {"dspark.0.norm.weight": entry(T.F32, (4096,))}
    assert "only the DSpark draft blocks" in problem(made)


def test_one_part_of_a_split_file(draft):
    made = draft(TINY)
    made.set("split.count", "u32", 3)
    assert "one of 3 parts" in problem(made)


@pytest.mark.parametrize(
    ("shape", "first", "last", "message"),
    [
        (PRO, 0, 30, "only layers 0 to 30 of 61 (profile pro), expected all"),
        (PRO, 31, 60, "only layers 31 to 60 of 61 (profile pro), expected all"),
        (TINY, 2, 3, "only layers 2 to 3 of 6"),
    ],
)
def test_half_of_a_model(draft, shape, first, last, message):
    made = draft(shape, gate_up=T.Q4_K, down=T.Q4_K)
    for name in list(made.tensors):
        layer = int(name.split(".")[1]) if name.startswith("blk.") else None
        if layer is not None:
            gone = not first <= layer <= last
        else:
            gone = first > 0 if name == "token_embd.weight" else last < shape.layers - 1
        if gone:
            del made.tensors[name]
    text = problem(made)
    assert message in text
    assert "half of a model in two files" in text
    assert ("layers 31 to 60 and the output head" in text) == (shape is PRO and first == 0)
    assert ("layers 0 to 30 and the embedding" in text) == (shape is PRO and first == 31)


def test_a_half_with_holes_is_just_incomplete(draft):
    made = draft(TINY)
    for name in list(made.tensors):
        if name.startswith(("blk.4.", "blk.5.", "output")):
            del made.tensors[name]
    del made.tensors["blk.1.attn_kv.weight"]
    problems = check(made.parsed())[1]
    assert any("'blk.1.attn_kv.weight' is missing" in p for p in problems)
    assert not any("two files" in p for p in problems)


# -- tensors ----------------------------------------------------------------------------------------------------------


def test_every_tensor_is_checked(draft):
    for name, spec in expected_tensors(TINY).items():
        made = draft(TINY)
        entry = made.tensors[name]
        entry.dims = (*spec.dims[:-1], spec.dims[-1] + 32)
        assert f"'{name}' has dims {entry.dims}, expected {spec.dims}" in problem(made)
        entry.dims = spec.dims[::-1]
        if entry.dims != spec.dims:
            assert f"'{name}' has dims {entry.dims}" in problem(made)
        entry.dims = spec.dims
        for wrong in (T.F64, T.BF16, T.Q5_K, *((T.F32,) if T.F32 not in spec.types else (T.F16,))):
            entry.type = wrong
            problems = check(made.parsed())[1]
            assert f"'{name}' has type {wrong.name}, expected {spec.types[0].name}" in problems[0]
        del made.tensors[name]
        if name.startswith("output"):
            assert "the output head is partial: found " in problem(made)
            assert name in problem(made).split("missing")[1]
        else:
            assert f"'{name}' is missing, expected dims {spec.dims}" in problem(made)


def test_the_whole_output_head_missing(draft):
    made = draft(TINY)
    for name in [n for n in made.tensors if n.startswith("output")]:
        del made.tensors[name]
    problems = check(made.parsed())[1]
    assert len(problems) == 5
    assert all("is missing" in p for p in problems)


def test_experts_of_an_unknown_type(draft):
    made = draft(FLASH)
    for kind in ("gate", "up"):
        made.tensors[f"blk.9.ffn_{kind}_exps.weight"].type = T.IQ3_XXS
    problems = check(made.parsed())[1]
    assert len(problems) == 2
    assert "'blk.9.ffn_gate_exps.weight' has type IQ3_XXS, expected IQ2_XXS or Q2_K or Q4_K or MXFP4" in problems[0]


@pytest.mark.parametrize("shape", [TINY, ODD], ids=lambda s: s.name)
def test_gate_and_up_share_a_type(draft, shape):
    made = custom(draft) if shape is ODD else draft(TINY)
    made.tensors["blk.1.ffn_up_exps.weight"].type = T.F16 if shape is ODD else T.Q4_K
    text = problem(made)
    assert "'blk.1.ffn_gate_exps.weight' has type" in text
    assert "'blk.1.ffn_up_exps.weight' has type" in text


def test_expert_rows_that_no_block_divides(draft, tmp_path):
    made = draft(TINY)
    made.tensors["blk.1.ffn_down_exps.weight"].dims = (250, 256, 8)
    with pytest.raises(FileFormatError, match=r"'blk\.1\.ffn_down_exps\.weight' has a bad row length: 250 values"):
        open_model(made.write(tmp_path / "a.gguf"))


@pytest.mark.parametrize("bad", [-1, 8, 2**31 - 1])
def test_expert_numbers_out_of_range(draft, tmp_path, bad):
    made = draft(TINY)
    ids = np.zeros(TINY.vocab * TINY.experts_used, "<i4")
    ids[:8] = range(8)
    made.tensors["blk.1.ffn_gate_tid2eid.weight"].data = ids.tobytes()
    assert open_model(made.write(tmp_path / "good.gguf")).shape == TINY
    ids[-1] = bad
    made.tensors["blk.1.ffn_gate_tid2eid.weight"].data = ids.tobytes()
    with pytest.raises(FileFormatError, match=f"'blk.1.ffn_gate_tid2eid.weight' holds .* {bad}.*expected 0 to 7"):
        open_model(made.write(tmp_path / "bad.gguf"))


# -- tokenizer --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tokens", "merges"])
@pytest.mark.parametrize("value", [None, [1, 2], "text", ["a", 1]])
def test_tokenizer_arrays(draft, name, value):
    made = draft(TINY)
    made.set(f"tokenizer.ggml.{name}", "any", value)
    if value is None:
        del made.keys[f"tokenizer.ggml.{name}"]
    assert f"'tokenizer.ggml.{name}' is " in problem(made)


@pytest.mark.parametrize("token", PROTOCOL_TOKENS.values())
def test_special_tokens(draft, token):
    for instead, count in (("other", 0), (None, 2)):
        made = draft(TINY)
        tokens = made.keys["tokenizer.ggml.tokens"][1]
        tokens[tokens.index(token) if instead else 300] = instead or token
        assert f"special token {token!r} {count} times" in problem(made)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model", "llama", "is 'llama', expected 'gpt2'"),
        ("pre", "llama-bpe", "is 'llama-bpe', expected 'joyai-llm'"),
        ("bos_token_id", 3, "is 3, expected 0"),
        ("eos_token_id", 0, "is 0, expected 1"),
        ("token_type", [1] * 5, "has 5 entries, expected 4096"),
        ("token_type", 1, "is 1, expected a list of whole numbers"),
        ("token_type", ["1"] * 4096, "is ['1', '1'"),
        ("scores", 1, "has 1, expected 4096"),
    ],
)
def test_tokenizer_contradictions(draft, key, value, message):
    made = draft(TINY)
    made.set(f"tokenizer.ggml.{key}", "any", value)
    assert f"'tokenizer.ggml.{key}' {message}" in problem(made)


def test_vocabulary_of_another_length(draft):
    made = draft(TINY)
    made.keys["tokenizer.ggml.tokens"][1].pop()
    assert "'tokenizer.ggml.tokens' has 4095 entries, expected 4096" in problem(made)


def test_strict_profiles_need_a_tokenizer(draft):
    made = draft(TINY)
    for key in [k for k in made.keys if k.startswith("tokenizer.")]:
        del made.keys[key]
    missing = [f"key 'tokenizer.ggml.{name}' is missing" for name in ("model", "pre", "tokens", "merges")]
    assert [problem.split(",")[0] for problem in check(made.parsed())[1]] == missing


# -- custom -----------------------------------------------------------------------------------------------------------


def test_custom_gives_every_number(draft, tmp_path):
    made = custom(draft)
    model = open_model(made.write(tmp_path / "a.gguf"))
    assert replace(model.shape, hc_eps=1e-6, rms_eps=1e-6) == ODD
    assert model.shape.rms_eps == pytest.approx(1e-6)
    assert model.qat_sim is False


def test_custom_without_the_word_is_refused(draft):
    made = custom(draft)
    del made.keys["ds4.profile"]
    assert len(check(made.parsed())[1]) > 10


def test_custom_needs_no_tokenizer(draft, tmp_path):
    made = custom(draft)
    for key in [k for k in made.keys if k.startswith("tokenizer.")]:
        del made.keys[key]
    assert open_model(made.write(tmp_path / "a.gguf")).has_tokenizer is False
    made.set("tokenizer.ggml.model", "str", "gpt2")
    assert "'tokenizer.ggml.pre' is missing" in collect_problems(made.write(tmp_path / "b.gguf"))[0]


@pytest.mark.parametrize("entry", NUMBER_KEYS, ids=lambda entry: entry.key)
def test_custom_numbers_of_the_wrong_kind_or_missing(draft, entry):
    made = custom(draft)
    made.set(entry.key, "any", ["x"])
    assert f"'{entry.key}' is ['x'], expected" in problem(made)
    del made.keys[entry.key]
    shape, problems = check(made.parsed())
    if entry.key in OPTIONAL:
        assert (shape is not None, problems) == (True, [])
    else:
        assert problems == [f"key {entry.key!r} is missing (profile custom); write the file again"]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (A + "block_count", 0, "key 'deepseek4.block_count': layers is 0"),
        (A + "block_count", 5, "'deepseek4.swiglu_clamp_exp' has 4 entries, expected at least 5"),
        (A + "block_count", 2**31, "'deepseek4.attention.compress_ratios' has 5 entries, expected at least 2147483648"),
        (A + "attention.value_length", 41, "'deepseek4.attention.value_length' is 41, expected 40"),
        (A + "attention.head_count_kv", 2, "'deepseek4.attention.head_count_kv' is 2, expected 1"),
        (A + "expert_weights_norm", False, "'deepseek4.expert_weights_norm' is False, expected True"),
        (A + "expert_group_count", 1, "'deepseek4.expert_group_count' is 1, expected 0"),
        (A + "rope.scaling.type", "linear", "'deepseek4.rope.scaling.type' is 'linear', expected 'yarn'"),
        (A + "attention.output_group_count", 4, "key 'deepseek4.attention.output_group_count': o_groups is 4"),
        (A + "hyper_connection.epsilon", float("nan"), "key 'deepseek4.hyper_connection.epsilon': hc_eps is nan"),
        (A + "rope.freq_base", 0.0, "key 'deepseek4.rope.freq_base': rope_base is 0.0"),
        (A + "rope.freq_base", 1e300, "key 'deepseek4.rope.freq_base': rope_base is 1e+300, expected a positive"),
        (A + "rope.scaling.factor", 1e-300, "key 'deepseek4.rope.scaling.factor': yarn_factor is 1e-300, expected a"),
        (A + "attention.compress_rope_freq_base", 1.0, "freq_base': compress_rope_base is 1.0, expected another"),
        (A + "attention.compress_ratios", [3, 0, 9], "has 3 entries, expected at least 4"),
        (A + "attention.compress_ratios", [3, 0, 9, -3], "key 'deepseek4.attention.compress_ratios': ratios is"),
        (A + "swiglu_clamp_exp", [10.0, 10.0, 10.0, 9.0], "has 9.0 for layer 3, expected 10.0"),
        (A + "swiglu_clamp_exp", ["x"] * 4, "key 'deepseek4.swiglu_clamp_exp': swiglu_clamp is 'x'"),
        ("ds4.sparse_ratio", 0, "key 'ds4.sparse_ratio': sparse_ratio is 0"),
        ("ds4.sparse_ratio", None, "'ds4.sparse_ratio' is missing"),
        ("ds4.qat_sim", 1, "'ds4.qat_sim' is 1, expected true or false"),
    ],
)
def test_custom_contradictions(draft, key, value, message):
    made = custom(draft)
    made.set(key, "any", value)
    if value is None:
        del made.keys[key]
    assert message in check(made.parsed())[1][0]


def test_custom_with_no_layers_and_empty_lists(draft):
    made = custom(draft)
    made.set(A + "block_count", "u32", 0)
    made.set(A + "attention.compress_ratios", "[u32]", [])
    made.set(A + "swiglu_clamp_exp", "[f32]", [])
    assert "layers is 0" in problem(made)


# -- all of it --------------------------------------------------------------------------------------------------------


def test_all_problems_are_collected_and_the_first_is_raised(draft, tmp_path):
    made = draft(TINY)
    made.set(A + "embedding_length", "u32", 255)
    made.set("tokenizer.ggml.pre", "str", "x")
    made.tensors["output.weight"].type = T.F16
    path = made.write(tmp_path / "a.gguf")
    problems = collect_problems(path)
    assert [p.split("'")[1] for p in problems] == [A + "embedding_length", "tokenizer.ggml.pre", "output.weight"]
    with pytest.raises(FileFormatError) as caught:
        open_model(path)
    assert str(caught.value) == f"{path}: {problems[0]} (and 2 more: `ds4 --inspect` lists them)"
    assert inspect_file(path).problems == problems
    path.write_bytes(b"x")
    assert collect_problems(path) == [
        "not a GGUF file (starts with b'x', expected b'GGUF'); give the path of a .gguf file"
    ]


def test_a_file_of_full_size_needs_little_memory_and_no_torch(draft, tmp_path):
    made = draft(FLASH)
    pairs = [f"{a} {b}" for a in BYTES for b in BYTES]
    merges = [*pairs, *(f"{pair.replace(' ', '')} {c}" for pair in pairs[:243] for c in BYTES)][:127741]
    tokens = [*PROTOCOL_TOKENS.values(), *BYTES, *(merge.replace(" ", "") for merge in merges)]
    tokens += [f"[PAD{id}]" for id in range(len(tokens), FLASH.vocab)]
    made.keys["tokenizer.ggml.merges"] = ("[str]", merges)
    made.keys["tokenizer.ggml.tokens"] = ("[str]", tokens)
    path = made.write(tmp_path / "flash.gguf")
    assert path.stat().st_size > 86e9
    # Not getrusage: its maximum includes the memory of the process that forked.
    code = (
        "import sys; from ds4.gguf.file import open_model; m = open_model(sys.argv[1]); "
        "peak = [line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')]; "
        "print(m.shape.name, len(m.raw('output.weight')), 'torch' in sys.modules, *peak)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    path.unlink()
    name, size, torch_loaded, kilobytes = done.stdout.split()
    assert (name, int(size), torch_loaded) == ("flash", 4096 * 129280 // 32 * 34, "False")
    assert int(kilobytes) < 300_000
