"""Checkpoint names to GGUF names (GGUF container, table of tensors; name map of the oracle).

Three spellings are read, also mixed: the official one (`layers.0.attn.wq_a.weight`), that of transformers' modules
(`model.layers.0.self_attn.q_a_proj.weight`), and what transformers' `save_pretrained` writes (official leaves under
`model.`, the norm of the key-value row as `attn.norm`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import product

SCALE_SUFFIXES = (".scale", ".weight_scale_inv", ".weight_scale")
"""What stands in place of `.weight` in the name of a quantised matrix's scales."""


@dataclass(frozen=True)
class Place:
    """Where a tensor of the checkpoint belongs.

    Attributes:
        tensor: GGUF name.
        expert: number of the routed expert that it is; None for all others, fused experts included.
        half: 0 or 1 for the first or second half of the rows of a fused gate and up matrix; else None.
        scale: it holds the scales of that tensor, not its codes.
    """

    tensor: str
    expert: int | None = None
    half: int | None = None
    scale: bool = False


_TOP = {
    "embed.weight": "token_embd.weight",
    "embed_tokens.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
    "head.weight": "output.weight",
    "lm_head.weight": "output.weight",
}
for _part in ("fn", "base", "scale"):
    _TOP[f"hc_head_{_part}"] = _TOP[f"hc_head.hc_{_part}"] = f"output_hc_{_part}.weight"

_BLOCK = {
    "attn_norm.weight": "attn_norm.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "ffn_norm.weight": "ffn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
}
for _kind, _part in product(("attn", "ffn"), ("fn", "base", "scale")):
    _BLOCK[f"hc_{_kind}_{_part}"] = _BLOCK[f"{_kind}_hc.{_part}"] = f"hc_{_kind}_{_part}.weight"

_ATTENTION = {
    "wq_a.weight": "attn_q_a.weight",
    "q_a_proj.weight": "attn_q_a.weight",
    "q_norm.weight": "attn_q_a_norm.weight",
    "q_a_norm.weight": "attn_q_a_norm.weight",
    "wq_b.weight": "attn_q_b.weight",
    "q_b_proj.weight": "attn_q_b.weight",
    "wkv.weight": "attn_kv.weight",
    "kv_proj.weight": "attn_kv.weight",
    "kv_norm.weight": "attn_kv_a_norm.weight",
    "norm.weight": "attn_kv_a_norm.weight",
    "attn_sink": "attn_sinks.weight",
    "sinks": "attn_sinks.weight",
    "wo_a.weight": "attn_output_a.weight",
    "o_a_proj.weight": "attn_output_a.weight",
    "wo_b.weight": "attn_output_b.weight",
    "o_b_proj.weight": "attn_output_b.weight",
}
_COMPRESSOR = {
    "ape": "ape.weight",
    "position_bias": "ape.weight",
    "wkv.weight": "kv.weight",
    "kv_proj.weight": "kv.weight",
    "wgate.weight": "gate.weight",
    "gate_proj.weight": "gate.weight",
    "norm.weight": "norm.weight",
    "kv_norm.weight": "norm.weight",
}
_INDEXER = {
    "wq_b.weight": "indexer.attn_q_b.weight",
    "q_b_proj.weight": "indexer.attn_q_b.weight",
    "weights_proj.weight": "indexer.proj.weight",
    "scorer.weights_proj.weight": "indexer.proj.weight",
}
_FFN = {
    "gate.weight": "ffn_gate_inp.weight",
    "gate.bias": "exp_probs_b.bias",
    "gate.e_score_correction_bias": "exp_probs_b.bias",
    "gate.tid2eid": "ffn_gate_tid2eid.weight",
    "experts.down_proj": "ffn_down_exps.weight",
}
_MATRICES = {"w1": "gate", "w2": "down", "w3": "up", "gate_proj": "gate", "down_proj": "down", "up_proj": "up"}
for _leaf, _matrix in _MATRICES.items():
    _FFN[f"shared_experts.{_leaf}.weight"] = f"ffn_{_matrix}_shexp.weight"

for _prefix in ("attn", "self_attn"):
    _BLOCK |= {f"{_prefix}.{leaf}": name for leaf, name in _ATTENTION.items()}
    _BLOCK |= {f"{_prefix}.compressor.{leaf}": f"attn_compressor_{name}" for leaf, name in _COMPRESSOR.items()}
    for _indexer in (f"{_prefix}.indexer", f"{_prefix}.compressor.indexer"):
        _BLOCK |= {f"{_indexer}.{leaf}": name for leaf, name in _INDEXER.items()}
    for _pool in (f"{_prefix}.indexer.compressor", f"{_prefix}.compressor.indexer"):
        _BLOCK |= {f"{_pool}.{leaf}": f"indexer_compressor_{name}" for leaf, name in _COMPRESSOR.items()}
for _prefix in ("ffn", "mlp"):
    _BLOCK |= {f"{_prefix}.{leaf}": name for leaf, name in _FFN.items()}

# Beside the block of a draft stage. `.weight` is added to names that lack it, as everywhere in GGUF.
_DRAFT = {
    name: name
    for name in (
        "e_proj.weight", "h_proj.weight", "enorm.weight", "hnorm.weight", "norm.weight", "main_proj.weight",
        "main_norm.weight", "markov_head.markov_w1.weight", "markov_head.markov_w2.weight",
        "confidence_head.proj.weight",
    )
} | {f"hc_head_{part}": f"hc_head_{part}.weight" for part in ("fn", "base", "scale")}  # fmt: skip

_EXPERT = re.compile(r"(?:ffn|mlp)\.experts\.(\d{1,6})\.(w[123]|(?:gate|up|down)_proj)\.weight")
_FUSED = re.compile(r"(?:ffn|mlp)\.experts\.gate_up_proj")
_NUMBERED = re.compile(r"(layers|mtp)\.(\d{1,6})\.(.+)")

DRAFT_PREFIX = "mtp."
"""GGUF names of the draft blocks begin with it."""


def places(name: str) -> tuple[Place, ...]:
    """The tensors of the file that a tensor of the checkpoint goes into (two for fused gate and up); () if unknown.

    A name that ends like scales is taken as such; `collect` of `ds4.quantize.source` finds out whether it has codes.
    """
    found = _weight_places(name)
    if found:
        return found
    for suffix in SCALE_SUFFIXES:
        if name.endswith(suffix):
            weights = _weight_places(f"{name.removesuffix(suffix)}.weight")
            return tuple(Place(p.tensor, p.expert, p.half, scale=True) for p in weights)
    return ()


def _weight_places(name: str) -> tuple[Place, ...]:
    bare = name.removeprefix("model.")
    if bare in _TOP:
        return (Place(_TOP[bare]),)
    numbered = _NUMBERED.fullmatch(bare)
    if numbered is None:
        return ()
    kind, number, part = numbered[1], int(numbered[2]), numbered[3]
    prefix = f"blk.{number}." if kind == "layers" else f"{DRAFT_PREFIX}{number}."
    expert = _EXPERT.fullmatch(part)
    if expert is not None:
        return (Place(f"{prefix}ffn_{_MATRICES[expert[2]]}_exps.weight", expert=int(expert[1])),)
    if _FUSED.fullmatch(part):
        return tuple(Place(f"{prefix}ffn_{m}_exps.weight", half=i) for i, m in enumerate(("gate", "up")))
    target = _BLOCK.get(part) or (_DRAFT.get(part) if kind == "mtp" else None)
    return () if target is None else (Place(prefix + target),)
