"""Which type each tensor of the new file gets: recipes for the routed experts, overrides for families of tensors.

The recipe that makes 2 bits usable quantises the routed experts alone that hard: 97 % of Flash's weights, of which a
token uses a fortieth. All other matrices are Q8_0 or F16, vectors F32, as the strict profiles want them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type

from ds4.errors import Ds4Error
from ds4.gguf.shape import TensorSpec

TYPES = (Type.F32, Type.F16, Type.BF16, Type.Q8_0, Type.Q4_K, Type.Q2_K, Type.IQ2_XXS, Type.MXFP4)
"""Types that a file can be written in."""

EXPERTS = {
    "q2": (Type.IQ2_XXS, Type.IQ2_XXS, Type.Q2_K),
    "q2-q4": (Type.IQ2_XXS, Type.IQ2_XXS, Type.Q2_K),
    "q4": (Type.Q4_K, Type.Q4_K, Type.Q4_K),
    "mxfp4": (Type.MXFP4, Type.MXFP4, Type.MXFP4),
    "q8": (Type.Q8_0, Type.Q8_0, Type.Q8_0),
}
"""Recipe -> types of the routed experts' gate, up and down."""

# Drafts are small and wrong guesses cost time: two bits are not worth it there.
DRAFT_EXPERTS = {"q2": Type.Q4_K, "q2-q4": Type.Q4_K, "q4": Type.Q4_K, "mxfp4": Type.MXFP4, "q8": Type.Q8_0}

LAST_LAYERS = 6
"""Layers at the end whose experts `q2-q4` keeps at Q4_K, as in the published file."""

FAMILIES: Mapping[str, str] = {
    "gate": r"ffn_gate_exps\.weight",
    "up": r"ffn_up_exps\.weight",
    "down": r"ffn_down_exps\.weight",
    "experts": r"ffn_(gate|up|down)_exps\.weight",
    "shared": r"ffn_(gate|up|down)_shexp\.weight",
    "attention": r"attn_(q_a|q_b|kv|output_a|output_b)\.weight",
    "compressor": r"attn_compressor_(kv|gate|ape)\.weight",
    "indexer": r"indexer\.(attn_q_b|proj)\.weight|indexer_compressor_(kv|gate|ape)\.weight",
    "router": r"ffn_gate_inp\.weight",
    "hyper": r"(hc_(attn|ffn)|output_hc|hc_head)_fn\.weight",
    "embedding": r"token_embd\.weight",
    "output": r"output\.weight",
    "draft": r"(e_proj|h_proj|main_proj|markov_head\.markov_w[12]|confidence_head\.proj)\.weight",
}
"""Family -> the names of its tensors, without `blk.N.` or `mtp.N.`. Vectors and tables are in none."""

VECTORS = "vectors and tables"


def _bare(name: str) -> str:
    return re.sub(r"^(blk|mtp)\.\d+\.", "", name)


def family(name: str) -> str:
    """The narrowest family of a tensor, or `VECTORS`."""
    bare = _bare(name)
    return next((key for key, pattern in FAMILIES.items() if re.fullmatch(pattern, bare)), VECTORS)


@dataclass(frozen=True)
class Recipe:
    """How the types are chosen.

    Attributes:
        name: a key of `EXPERTS`.
        last_layers: for `q2-q4`, how many layers at the end have Q4_K experts.
        overrides: family -> type, the narrow family before `experts`.
    """

    name: str = "q2"
    last_layers: int = LAST_LAYERS
    overrides: Mapping[str, Type] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name not in EXPERTS:
            raise Ds4Error(f"recipe {self.name!r} is not known; use {', '.join(EXPERTS)}")
        if self.last_layers < 0:
            raise Ds4Error(f"last_layers is {self.last_layers}, but cannot be negative")
        if self._override("gate") != self._override("up"):
            raise Ds4Error("gate and up experts need one type; override both, or experts")

    def type_of(self, name: str, spec: TensorSpec, layers: int) -> Type:
        """The type of a tensor of a model with `layers` layers, or of a draft block.

        Raises:
            Ds4Error: the rows of the tensor cannot be cut into the blocks of the type.
        """
        kind = family(name)
        type = self._override(kind)
        if type is None:
            type = self._experts(name, kind, layers) if kind in ("gate", "up", "down") else _default(spec)
        block = GGML_QUANT_SIZES[type][0]
        if spec.dims[0] % block:
            raise Ds4Error(
                f"tensor {name!r} has rows of {spec.dims[0]} values, which {type.name} cannot hold (blocks of "
                f"{block}); use --override {kind}=TYPE with another type"
            )
        return type

    def _experts(self, name: str, kind: str, layers: int) -> Type:
        if name.startswith("mtp."):
            return DRAFT_EXPERTS[self.name]
        if self.name == "q2-q4" and int(name.split(".")[1]) >= layers - self.last_layers:
            return Type.Q4_K
        return EXPERTS[self.name][("gate", "up", "down").index(kind)]

    def _override(self, kind: str) -> Type | None:
        found = self.overrides.get(kind)
        return self.overrides.get("experts") if found is None and kind in ("gate", "up", "down") else found


def parse_overrides(texts: Iterable[str]) -> dict[str, Type]:
    """`FAMILY=TYPE` each, to types; case of the type does not matter.

    Raises:
        Ds4Error: another form, family or type.
    """
    overrides: dict[str, Type] = {}
    types = {type.name: type for type in TYPES}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise Ds4Error(f"--override {text!r}: expected FAMILY=TYPE, such as down=Q4_K")
        if key not in FAMILIES:
            raise Ds4Error(f"--override {text!r}: no family {key!r}; there are {', '.join(FAMILIES)}")
        if value.upper() not in types:
            raise Ds4Error(f"--override {text!r}: no type {value!r}; there are {', '.join(types)}")
        overrides[key] = types[value.upper()]
    return overrides


def _default(spec: TensorSpec) -> Type:
    """What the strict profiles have; F16 where rows of a small model are shorter than a block."""
    wanted = spec.types[0]
    return Type.F16 if spec.dims[0] % GGML_QUANT_SIZES[wanted][0] else wanted
