"""The keys of the new file from config.json and tokenizer.json (GGUF container, metadata and tokenizer)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import tokenizers
from gguf import GGUFValueType

from ds4.errors import Ds4Error
from ds4.gguf.keys import ARCHITECTURE, QAT_SIM_KEY, RATIOS_KEY, TOKENIZER_PREFIX, Value, metadata_of
from ds4.gguf.shape import CUSTOM, PROFILES, Shape
from ds4.gguf.vocabulary import PROTOCOL_TOKENS
from ds4.quantize.checkpoint import Checkpoint, read_json
from ds4.tokenizer import Tokenizer

_U32, _STRING, _ARRAY = GGUFValueType.UINT32, GGUFValueType.STRING, GGUFValueType.ARRAY

# Shape's field -> its name in config.json.
_FIELDS = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "head_dim": "head_dim",
    "q_lora_rank": "q_lora_rank",
    "o_groups": "o_groups",
    "o_lora_rank": "o_lora_rank",
    "window": "sliding_window",
    "index_heads": "index_n_heads",
    "index_dim": "index_head_dim",
    "index_top_k": "index_topk",
    "experts": "n_routed_experts",
    "experts_used": "num_experts_per_tok",
    "expert_hidden": "moe_intermediate_size",
    "route_scale": "routed_scaling_factor",
    "vocab": "vocab_size",
    "context": "max_position_embeddings",
    "shared_experts": "n_shared_experts",
    "swiglu_clamp": "swiglu_limit",
    "hc_streams": "hc_mult",
    "sinkhorn_iterations": "hc_sinkhorn_iters",
    "hc_eps": "hc_eps",
    "rms_eps": "rms_norm_eps",
}
_YARN = {
    "yarn_factor": "factor",
    "yarn_original_context": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
# What the graph has built in; a checkpoint that says otherwise is another model.
_FIXED = {
    "num_key_value_heads": 1,
    "scoring_func": "sqrtsoftplus",
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
_FLOATS = frozenset(
    {"route_scale", "swiglu_clamp", "hc_eps", "rms_eps", "rope_base", "compress_rope_base", "yarn_factor",
     "yarn_beta_fast", "yarn_beta_slow"}
)  # fmt: skip

CONTROL, USER_DEFINED, UNUSED, NORMAL = 3, 4, 5, 1
"""Types of tokens in `tokenizer.ggml.token_type`."""

_PROBE = (
    "Zahlen 3141592653 und 0.5e-3, ünïcödé; 漢字かなカナ混じり2026年!\n\n"
    "\tdef f(x):  # it's\r\n    return {'a': [1,2]}\n"
    "  three   blanks,\u00a0no-break, \U0001f642\u200d\U0001f525 … «quotes» I'll we've <a href=\"b\"> ~~~ \n \n x\t"
)


def shape_of(checkpoint: Checkpoint) -> Shape:
    """The shape that config.json describes; it has the name of the strict profile whose numbers it has, if any.

    Raises:
        Ds4Error: it is no DeepSeek V4, or a number is missing or of no use.
    """
    config, place = checkpoint.config, checkpoint.folder / "config.json"
    _check_family(config, place)
    values: dict[str, Any] = {field: _number(config, key, place, field in _FLOATS) for field, key in _FIELDS.items()}
    plain, yarn = _rope(config, place)
    values["rope_base"] = _number(plain, "rope_theta", place, True)
    values["compress_rope_base"] = _number(
        yarn if "rope_theta" in yarn else config,
        "rope_theta" if "rope_theta" in yarn else "compress_rope_theta",
        place,
        True,
    )
    values |= {field: _number(yarn, key, place, field in _FLOATS) for field, key in _YARN.items()}
    values["rope_dim"] = _rope_dim(config, plain, values["head_dim"], place)
    rates = config.get("compress_rates")
    rates = rates if isinstance(rates, Mapping) else {}
    sparse = rates.get("compressed_sparse_attention", config.get("compress_rate_csa", 4))
    dense = rates.get("heavily_compressed_attention", config.get("compress_rate_hca", 128))
    values["sparse_ratio"] = sparse
    values["ratios"] = tuple(_ratios(config, sparse, dense, place)[: values["layers"]])
    values["hash_layers"] = _hash_layers(config, place)
    try:
        shape = Shape(name=CUSTOM, **values)
    except Ds4Error as error:
        raise Ds4Error(f"{place}: {error}") from error
    return next((profile for profile in PROFILES if replace(shape, name=profile.name) == profile), shape)


def _check_family(config: Mapping[str, Any], place: Path) -> None:
    model = config.get("model_type")
    if model != "deepseek_v4":
        hint = "; V4.1 is another network" if model == "deepseek_v41" else ""
        raise Ds4Error(f"{place}: model_type is {model!r}, expected 'deepseek_v4' (Flash or Pro){hint}")
    for key, expected in _FIXED.items():
        if config.get(key, expected) != expected:
            raise Ds4Error(f"{place}: {key} is {config[key]!r}, expected {expected!r}; this network is not supported")
    for key in ("n_group", "topk_group"):
        if config.get(key) not in (None, 0, 1):
            raise Ds4Error(f"{place}: {key} is {config[key]!r}; groups of experts are not supported")


def _number(values: Mapping[str, Any], key: str, place: Path, fraction: bool) -> Any:
    value = values.get(key)
    if value is None:
        raise Ds4Error(f"{place}: {key} is missing, expected a number; download the file again")
    if isinstance(value, bool) or not isinstance(value, int | float if fraction else int):
        raise Ds4Error(f"{place}: {key} is {value!r}, expected a {'number' if fraction else 'whole number'}")
    return float(value) if fraction else value


def _rope(config: Mapping[str, Any], place: Path) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Where the rotary numbers of plain and of compressing layers stand: official and transformers' way."""
    parameters = config.get("rope_parameters")
    if isinstance(parameters, Mapping):
        plain, yarn = parameters.get("main"), parameters.get("compress")
        if isinstance(plain, Mapping) and isinstance(yarn, Mapping):
            kind = yarn.get("rope_type", yarn.get("type"))
        else:
            plain, yarn, kind = config, parameters, parameters.get("rope_type", parameters.get("type"))
            # Unnested, `rope_theta` of the parameters is that of plain layers.
            yarn = {key: value for key, value in yarn.items() if key != "rope_theta"}
            plain = plain if "rope_theta" in plain else parameters
    else:
        scaling = config.get("rope_scaling")
        if not isinstance(scaling, Mapping):
            raise Ds4Error(f"{place}: neither rope_scaling nor rope_parameters; download the file again")
        plain, yarn, kind = config, {k: v for k, v in scaling.items() if k != "rope_theta"}, scaling.get("type")
        kind = scaling.get("rope_type", kind)
    if kind != "yarn":
        raise Ds4Error(f"{place}: the rotary scaling of compressing layers is {kind!r}, expected 'yarn'")
    return plain, yarn


def _rope_dim(config: Mapping[str, Any], plain: Mapping[str, Any], head_dim: int, place: Path) -> int:
    if "qk_rope_head_dim" in config:
        return int(_number(config, "qk_rope_head_dim", place, False))
    source = config if config.get("partial_rotary_factor") is not None else plain
    return round(head_dim * float(_number(source, "partial_rotary_factor", place, True)))


def _ratios(config: Mapping[str, Any], sparse: Any, dense: Any, place: Path) -> list[Any]:
    """One ratio per layer, and what config.json has beyond that for draft blocks."""
    if config.get("compress_ratios") is not None:
        ratios = config["compress_ratios"]
        if not isinstance(ratios, list):
            raise Ds4Error(f"{place}: compress_ratios is {ratios!r}, expected a list")
        return ratios
    kinds = {"sliding_attention": 0, "compressed_sparse_attention": sparse, "heavily_compressed_attention": dense}
    types = config.get("layer_types")
    if not isinstance(types, list) or not all(isinstance(t, str) and t in kinds for t in types):
        raise Ds4Error(
            f"{place}: neither compress_ratios nor layer_types of {', '.join(kinds)}; which layer compresses?"
        )
    return [kinds[kind] for kind in types]


def _hash_layers(config: Mapping[str, Any], place: Path) -> int:
    kinds = config.get("mlp_layer_types")
    if "num_hash_layers" in config or not isinstance(kinds, list):
        return int(_number(config, "num_hash_layers", place, False))
    count = kinds.count("hash_moe")
    if kinds[:count] != ["hash_moe"] * count:
        raise Ds4Error(f"{place}: mlp_layer_types has hash_moe layers behind others, expected them first")
    return count


def model_keys(checkpoint: Checkpoint, shape: Shape, name: str) -> dict[str, Value]:
    """Key -> value of everything but the tokenizer, for a file of this shape."""
    custom = shape.name == CUSTOM
    keys = {
        "general.name": Value(name, _STRING),
        "general.quantization_version": Value(2, _U32),
    } | metadata_of(shape, custom=custom)
    if shape.round_trip_problems():  # a model of these sizes was not trained with them
        keys[QAT_SIM_KEY] = Value(False, GGUFValueType.BOOL)
    listed = checkpoint.config.get("compress_ratios")
    if isinstance(listed, list) and all(isinstance(r, int) and 0 <= r < 2**31 for r in listed):
        keys[RATIOS_KEY] = Value(list(listed), _ARRAY, _U32)
    stages = checkpoint.config.get("num_nextn_predict_layers", 0)
    if isinstance(stages, int) and 0 <= stages < 1024:
        keys[f"{ARCHITECTURE}.nextn_predict_layers"] = Value(stages, _U32)
    return keys


def tokenizer_keys(checkpoint: Checkpoint, vocab: int) -> dict[str, Value]:
    """The keys `tokenizer.ggml.*` for a vocabulary of `vocab` rows; ids beyond the tokenizer's are unused tokens.

    Raises:
        Ds4Error: tokenizer.json is missing, damaged, or not the tokenizer of DeepSeek V4.
    """
    place = checkpoint.folder / "tokenizer.json"
    data = read_json(place)
    try:
        by_id = {id: token for token, id in data["model"]["vocab"].items()}
        kinds = {}
        for token in data["added_tokens"]:
            by_id[token["id"]] = token["content"]
            kinds[token["id"]] = CONTROL if token["special"] else USER_DEFINED
        merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in data["model"]["merges"]]
        if not all(type(id) is int and id >= 0 and isinstance(token, str) for id, token in by_id.items()):
            raise ValueError("a token is no text, or its id no number")
        last = max(by_id)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise Ds4Error(f"{place}: not the byte-level BPE of DeepSeek V4 ({what}); download the file again") from error
    if last >= vocab:
        raise Ds4Error(f"{place}: has a token {last}, but config.json has a vocabulary of {vocab}")
    tokens = [by_id.get(id, f"[PAD{id}]") for id in range(vocab)]
    types = [kinds.get(id, NORMAL if id in by_id else UNUSED) for id in range(vocab)]
    values = {
        "model": Value("gpt2", _STRING),
        "pre": Value("joyai-llm", _STRING),
        "tokens": Value(tokens, _ARRAY, _STRING),
        "token_type": Value(types, _ARRAY, GGUFValueType.INT32),
        "merges": Value(merges, _ARRAY, _STRING),
    }
    keys = {TOKENIZER_PREFIX + key: value for key, value in values.items()}
    _check_tokenizer(place, keys)
    ids = {token: id for id, token in enumerate(tokens)}
    for key, token in (("bos", PROTOCOL_TOKENS["bos"]), ("eos", PROTOCOL_TOKENS["eos"]), ("padding", "<｜▁pad▁｜>")):
        if token in ids:
            keys[f"{TOKENIZER_PREFIX}{key}_token_id"] = Value(ids[token], _U32)
    keys[f"{TOKENIZER_PREFIX}add_bos_token"] = Value(False, GGUFValueType.BOOL)
    return keys


def _check_tokenizer(place: Path, keys: Mapping[str, Value]) -> None:
    """Raise unless ds4's tokenizer, made from these keys, gives a text the ids that tokenizer.json gives it."""
    try:
        ours = Tokenizer.from_metadata({key: value.value for key, value in keys.items()})
    except Ds4Error as error:
        raise Ds4Error(f"{place}: {error}") from error
    try:
        theirs = tokenizers.Tokenizer.from_file(str(place))
    except Exception as error:  # the library raises no type of its own
        raise Ds4Error(f"{place}: cannot be read as a tokenizer ({error}); download the file again") from error
    if ours.encode(_PROBE) != theirs.encode(_PROBE, add_special_tokens=False).ids:
        raise Ds4Error(
            f"{place}: cuts text otherwise than the tokenizer of DeepSeek V4 (joyai-llm), which the file would claim; "
            "give the tokenizer.json of the model"
        )
