"""The metadata keys of a model file and the number of the shape that each one holds (GGUF container, metadata)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gguf import GGUFValueType

from ds4.gguf.shape import Shape

ARCHITECTURE = "deepseek4"
PROFILE_KEY = "ds4.profile"
QAT_SIM_KEY = "ds4.qat_sim"
SPARSE_RATIO_KEY = "ds4.sparse_ratio"
RATIOS_KEY = "deepseek4.attention.compress_ratios"
CLAMP_KEY = "deepseek4.swiglu_clamp_exp"
SHARED_CLAMP_KEY = "deepseek4.swiglu_clamp_shexp"

TOKENIZER_PREFIX = "tokenizer.ggml."

DAMAGED = "the file is damaged or holds another model; download or convert it again"
"""What to do about a key with a wrong value."""


@dataclass(frozen=True)
class NumberKey:
    """One key with one value.

    Attributes:
        field: the field of `Shape` that the key holds; None for a key with the same value in every file.
        fixed: that value.
        optional: an absent key means the default of the field, or `fixed`.
    """

    key: str
    type: GGUFValueType
    field: str | None = None
    fixed: Any = None
    optional: bool = False

    def of(self, shape: Shape) -> Any:
        """The value that a file of this shape has."""
        return self.fixed if self.field is None else getattr(shape, self.field)


_U32 = GGUFValueType.UINT32
_F32 = GGUFValueType.FLOAT32


def _key(
    name: str, type: GGUFValueType, field: str | None = None, fixed: Any = None, optional: bool = False
) -> NumberKey:
    return NumberKey(f"{ARCHITECTURE}.{name}", type, field, fixed, optional)


NUMBER_KEYS: tuple[NumberKey, ...] = (
    _key("block_count", _U32, "layers"),
    _key("context_length", _U32, "context"),
    _key("embedding_length", _U32, "hidden"),
    _key("vocab_size", _U32, "vocab"),
    _key("attention.head_count", _U32, "heads"),
    _key("attention.head_count_kv", _U32, fixed=1),
    _key("attention.key_length", _U32, "head_dim"),
    _key("attention.value_length", _U32, "head_dim"),
    _key("attention.q_lora_rank", _U32, "q_lora_rank"),
    _key("attention.output_lora_rank", _U32, "o_lora_rank"),
    _key("attention.output_group_count", _U32, "o_groups"),
    _key("attention.sliding_window", _U32, "window"),
    _key("attention.indexer.head_count", _U32, "index_heads"),
    _key("attention.indexer.key_length", _U32, "index_dim"),
    _key("attention.indexer.top_k", _U32, "index_top_k"),
    _key("attention.compress_rope_freq_base", _F32, "compress_rope_base"),
    _key("attention.layer_norm_rms_epsilon", _F32, "rms_eps"),
    _key("rope.dimension_count", _U32, "rope_dim"),
    _key("rope.freq_base", _F32, "rope_base"),
    _key("rope.scaling.type", GGUFValueType.STRING, fixed="yarn"),
    _key("rope.scaling.factor", _F32, "yarn_factor", optional=True),
    _key("rope.scaling.original_context_length", _U32, "yarn_original_context", optional=True),
    _key("rope.scaling.yarn_beta_fast", _F32, "yarn_beta_fast", optional=True),
    _key("rope.scaling.yarn_beta_slow", _F32, "yarn_beta_slow", optional=True),
    _key("expert_count", _U32, "experts"),
    _key("expert_used_count", _U32, "experts_used"),
    _key("expert_shared_count", _U32, "shared_experts"),
    _key("expert_feed_forward_length", _U32, "expert_hidden"),
    _key("expert_weights_scale", _F32, "route_scale"),
    _key("expert_weights_norm", GGUFValueType.BOOL, fixed=True),
    _key("expert_group_count", _U32, fixed=0, optional=True),
    _key("expert_group_used_count", _U32, fixed=0, optional=True),
    _key("hash_layer_count", _U32, "hash_layers"),
    _key("hyper_connection.count", _U32, "hc_streams"),
    _key("hyper_connection.sinkhorn_iterations", _U32, "sinkhorn_iterations"),
    _key("hyper_connection.epsilon", _F32, "hc_eps"),
)


def wrong_kind(entry: NumberKey, value: Any) -> str | None:
    """None if `value` has the right kind (u32 and u64, f32 and f64 are interchangeable), else the kind expected."""
    if entry.type == GGUFValueType.STRING:
        return None if isinstance(value, str) else "a string"
    if entry.type == GGUFValueType.BOOL:
        return None if isinstance(value, bool) else "true or false"
    if entry.type == _F32:
        return None if isinstance(value, float) else "a floating-point number"
    return None if isinstance(value, int) and not isinstance(value, bool) else "a whole number"


def same(value: Any, expected: Any) -> bool:
    """Equal; floats within 1e-6 of each other, relative."""
    if isinstance(expected, float):
        return isinstance(value, float) and abs(value - expected) <= 1e-6 * abs(expected)
    return bool(value == expected)


@dataclass(frozen=True)
class Value:
    """A metadata value with the type it is written in; `items` is the element type of an array."""

    value: Any
    type: GGUFValueType
    items: GGUFValueType | None = None


def metadata_of(shape: Shape, *, custom: bool) -> dict[str, Value]:
    """Key -> value of every shape key of a file of this shape.

    A custom file also says what the strict profiles imply, and its floats are 64-bit so that they come back unchanged.
    """
    float_type = GGUFValueType.FLOAT64 if custom else _F32
    values: dict[str, Value] = {}
    for entry in NUMBER_KEYS:
        if not (entry.optional and entry.field is None):
            type = float_type if entry.type == _F32 else entry.type
            values[entry.key] = Value(entry.of(shape), type)
    values[RATIOS_KEY] = Value(list(shape.ratios), GGUFValueType.ARRAY, _U32)
    values[CLAMP_KEY] = Value([shape.swiglu_clamp] * shape.layers, GGUFValueType.ARRAY, float_type)
    if custom:
        values[PROFILE_KEY] = Value(shape.name, GGUFValueType.STRING)
        values[SPARSE_RATIO_KEY] = Value(shape.sparse_ratio, _U32)
    return values


def numbers_of(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Field of `Shape` -> value, for every number key that the file has (of two keys for one field, the first)."""
    found: dict[str, Any] = {}
    for entry in NUMBER_KEYS:
        if entry.field is not None and entry.key in metadata:
            found.setdefault(entry.field, metadata[entry.key])
    return found
