"""The sizes of every known variant of the model, each number once, and the tensors that a file of each must hold."""

from __future__ import annotations

from dataclasses import dataclass, fields

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from ds4.errors import Ds4Error

MAX_LAYERS = 1024
"""More layers than this are refused: the table of expected tensors has to stay small whatever a file claims."""

_MAX_SIZE = 2**31 - 1
_LEAST, _MOST = 2.0**-126, 2.0**127
"""Of the constants, which are used as float32."""
_MAY_BE_ZERO = frozenset({"hash_layers"})


@dataclass(frozen=True)
class Shape:
    """Every size and constant of one DeepSeek V4 variant (V4 graph, hyper-parameters).

    Lengths are counted in channels, tokens or layers; `ratios` has one entry per layer: 0 (window only), `sparse_ratio`
    (overlapping compressor with indexer) or any other ratio (plain compressor, every visible row attended). `name` is
    `flash`, `pro` or `tiny` for the strict profiles and `custom` for everything else.

    Raises:
        Ds4Error: a number is not usable, or two numbers contradict each other.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    head_dim: int
    rope_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    window: int
    ratios: tuple[int, ...]
    index_heads: int
    index_dim: int
    index_top_k: int
    experts: int
    experts_used: int
    expert_hidden: int
    route_scale: float
    hash_layers: int
    vocab: int
    context: int = 1_048_576
    sparse_ratio: int = 4
    shared_experts: int = 1
    swiglu_clamp: float = 10.0
    hc_streams: int = 4
    sinkhorn_iterations: int = 20
    hc_eps: float = 1e-6
    rms_eps: float = 1e-6
    rope_base: float = 10_000.0
    compress_rope_base: float = 160_000.0
    yarn_factor: float = 16.0
    yarn_original_context: int = 65_536
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "ratios", tuple(self.ratios))
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "int":
                low = 0 if field.name in _MAY_BE_ZERO else 1
                if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= _MAX_SIZE:
                    raise Ds4Error(f"shape: {field.name} is {value!r}, expected a whole number from {low} on")
            elif field.type == "float" and not (isinstance(value, int | float) and _LEAST <= value <= _MOST):
                raise Ds4Error(f"shape: {field.name} is {value!r}, expected a positive finite number (float32)")
        self._check_relations()

    def _check_relations(self) -> None:
        """Raise for numbers that are possible alone but not together."""
        if self.layers > MAX_LAYERS:
            raise Ds4Error(f"shape: layers is {self.layers}, expected at most {MAX_LAYERS}")
        if len(self.ratios) != self.layers:
            raise Ds4Error(
                f"shape: ratios has {len(self.ratios)} entries, expected one for each of {self.layers} layers"
            )
        if not all(isinstance(r, int) and not isinstance(r, bool) and 0 <= r <= _MAX_SIZE for r in self.ratios):
            raise Ds4Error(f"shape: ratios is {self.ratios!r}, expected whole numbers from 0 on")
        rope_limit = min(self.head_dim, self.index_dim) if self.sparse_ratio in self.ratios else self.head_dim
        if self.rope_dim % 2 or self.rope_dim > rope_limit:
            raise Ds4Error(
                f"shape: rope_dim is {self.rope_dim}, expected an even number of at most {rope_limit} "
                f"(head_dim, and index_dim where there is an indexer)"
            )
        if self.head_dim % 2:
            # The last bits of a product of odd rows depend on what is computed beside it.
            raise Ds4Error(f"shape: head_dim is {self.head_dim}, expected an even number")
        if self.heads % self.o_groups:
            raise Ds4Error(f"shape: o_groups is {self.o_groups}, expected a divisor of heads ({self.heads})")
        if self.experts_used > self.experts:
            raise Ds4Error(f"shape: experts_used is {self.experts_used}, but there are only {self.experts} experts")
        if self.hash_layers > self.layers:
            raise Ds4Error(f"shape: hash_layers is {self.hash_layers}, but there are only {self.layers} layers")
        if self.compress_rope_base == 1.0:
            raise Ds4Error("shape: compress_rope_base is 1.0, expected another number: YaRN divides by its logarithm")
        if self.shared_experts != 1:
            raise Ds4Error(
                f"shape: shared_experts is {self.shared_experts}, expected 1: the graph has one shared expert"
            )

    def round_trip_problems(self) -> list[str]:
        """Why the quantisation round trips (qat_sim) are not defined for these sizes; empty if they are."""
        problems = []
        plain = self.head_dim - self.rope_dim
        if plain % 64:
            problems.append(
                f"shape: head_dim is {self.head_dim}, which leaves {plain} channels beside rope_dim {self.rope_dim}, "
                "expected a multiple of 64 plain channels for the quantisation round trips (qat_sim)"
            )
        if self.index_dim < 32 or self.index_dim & (self.index_dim - 1):
            problems.append(
                f"shape: index_dim is {self.index_dim}, expected a power of two of at least 32 for the quantisation "
                "round trips (qat_sim)"
            )
        return problems

    def has_indexer(self, layer: int) -> bool:
        """True where the layer's compressed rows are chosen by an indexer."""
        return self.ratios[layer] == self.sparse_ratio


def _ratios(layers: int, first: int) -> tuple[int, ...]:
    """Two layers of ratio `first`, then 4 and 128 in turn."""
    return (first, first, *(4 if i % 2 == 0 else 128 for i in range(2, layers)))


FLASH = Shape(
    name="flash",
    layers=43, hidden=4096, heads=64, head_dim=512, rope_dim=64, q_lora_rank=1024, o_groups=8, o_lora_rank=1024,
    window=128, ratios=_ratios(43, 0), index_heads=64, index_dim=128, index_top_k=512,
    experts=256, experts_used=6, expert_hidden=2048, route_scale=1.5, hash_layers=3, vocab=129_280,
)  # fmt: skip

PRO = Shape(
    name="pro",
    layers=61, hidden=7168, heads=128, head_dim=512, rope_dim=64, q_lora_rank=1536, o_groups=16, o_lora_rank=1024,
    window=128, ratios=_ratios(61, 128), index_heads=64, index_dim=128, index_top_k=1024,
    experts=384, experts_used=6, expert_hidden=3072, route_scale=2.5, hash_layers=3, vocab=129_280,
)  # fmt: skip

TINY = Shape(
    name="tiny",
    layers=6, hidden=256, heads=8, head_dim=256, rope_dim=64, q_lora_rank=128, o_groups=2, o_lora_rank=128,
    window=128, ratios=_ratios(6, 0), index_heads=8, index_dim=128, index_top_k=32,
    experts=8, experts_used=2, expert_hidden=256, route_scale=1.5, hash_layers=2, vocab=4096,
)  # fmt: skip

PROFILES: tuple[Shape, ...] = (FLASH, PRO, TINY)
"""The strict profiles: a file of one of these has exactly its numbers, tensors and types."""

CUSTOM = "custom"
"""Name of the profile whose numbers come from the file."""

# --------------------------------------------------------------------------------------------------------------------
# Tensors of a file (GGUF container, table of tensors)

_F32 = GGMLQuantizationType.F32
_F16 = GGMLQuantizationType.F16
_Q8_0 = GGMLQuantizationType.Q8_0
_I32 = GGMLQuantizationType.I32

FLOAT_TYPES = (_F32, _F16, GGMLQuantizationType.BF16)
# MXFP4 is the source checkpoint's own format of the experts, so it loses nothing.
EXPERT_TYPES = (
    GGMLQuantizationType.IQ2_XXS,
    GGMLQuantizationType.Q2_K,
    GGMLQuantizationType.Q4_K,
    GGMLQuantizationType.MXFP4,
)
BLOCK_TYPES = (_Q8_0, *EXPERT_TYPES)

OUTPUT_TENSORS = (
    "output_hc_fn.weight",
    "output_hc_scale.weight",
    "output_hc_base.weight",
    "output_norm.weight",
    "output.weight",
)


@dataclass(frozen=True)
class TensorSpec:
    """What a file must hold under one name: dims (innermost first, as GGUF writes them) and the allowed types."""

    dims: tuple[int, ...]
    types: tuple[GGMLQuantizationType, ...]


def expected_tensors(shape: Shape) -> dict[str, TensorSpec]:
    """Name -> dims and allowed types of every tensor that a file of this shape holds, in file order.

    The strict profiles follow the table of the GGUF container. `custom` allows F32, F16 and BF16 everywhere, and for
    matrices also the block types whose block divides the row.
    """
    D, hc = shape.hidden, shape.hidden * shape.hc_streams
    specs = {"token_embd.weight": TensorSpec((D, shape.vocab), (_F16,))}
    for layer in range(shape.layers):
        for part in (_attention_specs(shape, layer), _ffn_specs(shape, layer)):
            specs.update((f"blk.{layer}.{name}", spec) for name, spec in part.items())
    specs["output_hc_fn.weight"] = TensorSpec((hc, shape.hc_streams), (_F16,))
    specs["output_hc_scale.weight"] = TensorSpec((1,), (_F32,))
    specs["output_hc_base.weight"] = TensorSpec((shape.hc_streams,), (_F32,))
    specs["output_norm.weight"] = TensorSpec((D,), (_F32,))
    specs["output.weight"] = TensorSpec((D, shape.vocab), (_Q8_0,))
    if shape.name == CUSTOM:
        specs = {name: TensorSpec(spec.dims, _custom_types(spec)) for name, spec in specs.items()}
    return specs


def _custom_types(spec: TensorSpec) -> tuple[GGMLQuantizationType, ...]:
    if spec.types == (_I32,):
        return spec.types
    if len(spec.dims) == 1:
        return FLOAT_TYPES
    return FLOAT_TYPES + tuple(t for t in BLOCK_TYPES if spec.dims[0] % GGML_QUANT_SIZES[t][0] == 0)


def _hyper_connection_specs(shape: Shape, kind: str) -> dict[str, TensorSpec]:
    """Mixing tensors of one sublayer: per stream one pre and one post weight, and a row of the combination matrix."""
    S = shape.hc_streams
    rows = S * (2 + S)
    return {
        f"hc_{kind}_fn.weight": TensorSpec((shape.hidden * S, rows), (_F16,)),
        f"hc_{kind}_scale.weight": TensorSpec((3,), (_F32,)),
        f"hc_{kind}_base.weight": TensorSpec((rows,), (_F32,)),
    }


def _attention_specs(shape: Shape, layer: int) -> dict[str, TensorSpec]:
    D, d, Rq, ratio = shape.hidden, shape.head_dim, shape.q_lora_rank, shape.ratios[layer]
    low = shape.o_groups * shape.o_lora_rank
    specs = _hyper_connection_specs(shape, "attn")
    specs["attn_norm.weight"] = TensorSpec((D,), (_F32,))
    specs["attn_q_a.weight"] = TensorSpec((D, Rq), (_Q8_0,))
    specs["attn_q_a_norm.weight"] = TensorSpec((Rq,), (_F32,))
    specs["attn_q_b.weight"] = TensorSpec((Rq, shape.heads * d), (_Q8_0,))
    specs["attn_kv.weight"] = TensorSpec((D, d), (_Q8_0,))
    specs["attn_kv_a_norm.weight"] = TensorSpec((d,), (_F32,))
    specs["attn_sinks.weight"] = TensorSpec((shape.heads,), (_F32,))
    specs["attn_output_a.weight"] = TensorSpec((d * (shape.heads // shape.o_groups), low), (_Q8_0,))
    specs["attn_output_b.weight"] = TensorSpec((low, D), (_Q8_0,))
    if ratio:
        specs.update(_compressor_specs(shape, "attn_compressor", d, ratio))
    if shape.has_indexer(layer):
        index_rows = shape.index_heads * shape.index_dim
        specs["indexer.attn_q_b.weight"] = TensorSpec((Rq, index_rows), (_F16, _Q8_0))
        specs["indexer.proj.weight"] = TensorSpec((D, shape.index_heads), (_F16,))
        specs.update(_compressor_specs(shape, "indexer_compressor", shape.index_dim, ratio))
    return specs


def _compressor_specs(shape: Shape, prefix: str, dim: int, ratio: int) -> dict[str, TensorSpec]:
    """The overlapping compressor (sparse ratio) pools two halves, so its projections are twice as wide."""
    width = dim * (2 if ratio == shape.sparse_ratio else 1)
    return {
        f"{prefix}_kv.weight": TensorSpec((shape.hidden, width), (_F16,)),
        f"{prefix}_gate.weight": TensorSpec((shape.hidden, width), (_F16,)),
        f"{prefix}_ape.weight": TensorSpec((width, ratio), (_F16,)),
        f"{prefix}_norm.weight": TensorSpec((dim,), (_F32,)),
    }


def _ffn_specs(shape: Shape, layer: int) -> dict[str, TensorSpec]:
    D, F, E = shape.hidden, shape.expert_hidden, shape.experts
    specs = _hyper_connection_specs(shape, "ffn")
    specs["ffn_norm.weight"] = TensorSpec((D,), (_F32,))
    specs["ffn_gate_inp.weight"] = TensorSpec((D, E), (_F16,))
    if layer < shape.hash_layers:
        specs["ffn_gate_tid2eid.weight"] = TensorSpec((shape.experts_used, shape.vocab), (_I32,))
    else:
        specs["exp_probs_b.bias"] = TensorSpec((E,), (_F32,))
    specs["ffn_gate_exps.weight"] = TensorSpec((D, F, E), EXPERT_TYPES)
    specs["ffn_up_exps.weight"] = TensorSpec((D, F, E), EXPERT_TYPES)
    specs["ffn_down_exps.weight"] = TensorSpec((F, D, E), EXPERT_TYPES)
    specs["ffn_gate_shexp.weight"] = TensorSpec((D, F), (_Q8_0,))
    specs["ffn_up_shexp.weight"] = TensorSpec((D, F), (_Q8_0,))
    specs["ffn_down_shexp.weight"] = TensorSpec((F, D), (_Q8_0,))
    return specs
