"""Ways to get an engine: a GGUF file, tensors in memory, a transformers model."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from ds4.engine import device as devices
from ds4.engine.engine import Engine, EngineConfig, ModelRunner
from ds4.errors import Ds4Error
from ds4.gguf import file as gguf_file
from ds4.gguf.shape import Shape, expected_tensors
from ds4.model.deepseek_v4 import DeepseekV4, IndexSelection
from ds4.model.weights import FileSource, ModelWeights, TensorSource
from ds4.tokenizer import Tokenizer

_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_WHOLE = (torch.int32, torch.int64)
ONE_THREAD_HIDDEN = 512
"""Hidden size up to which one thread is used by default: products this small spend more time on sharing the work than
they save. Measured with the Tiny shape on two cores that were busy: 52 tokens/s with one thread, 11 with two."""


def load(
    path: str | os.PathLike[str] | None = None,
    device: str = "auto",
    qat_sim: bool | None = None,
    *,
    config: EngineConfig | None = None,
    index_selection: IndexSelection = "topk",
    progress: Callable[[int, int], None] | None = None,
) -> Engine:
    """An engine over a GGUF file.

    Args:
        path: the file; None: the small model that comes with the package.
        device: "cpu", "cuda" (the current one), "cuda:N" (its number), or "auto": CUDA where the card, the packages and
            the model allow it (see `ds4.engine.device.choose`), else the CPU.
        qat_sim: run the quantisation round trips the model was trained with. None: what the file records, else on.
        config: context, prefill chunk, sessions, checkpoint budget, threads, layout of the experts. On a CUDA device a
            plan is made of it before anything is loaded, and what the configuration leaves open becomes what fits.
        index_selection: "topk" is the model; "random" and "all" measure what its indexer is worth.
        progress: called with (bytes read, bytes in all) while the weights are read.

    Raises:
        FileFormatError: the file is not a model this engine runs. Ds4Error: device or options do not fit, or the
            model does not fit on the device.
    """
    devices.check_name(device)
    if index_selection not in ("topk", "random", "all"):
        raise Ds4Error(f"index_selection is {index_selection!r}; use topk, random or all")
    if path is not None and not isinstance(path, (str, os.PathLike)):
        raise Ds4Error(f"a model is given by the path of its file, not by {type(path).__name__}")
    if config is not None and not isinstance(config, EngineConfig):
        raise Ds4Error(f"config is {config!r:.60}; give a ds4.EngineConfig")
    file = gguf_file.open_model(gguf_file.embedded_model_path() if path is None else path, qat_sim)
    round_trips = file.qat_sim if qat_sim is None else qat_sim
    tokenizer = Tokenizer.from_metadata(file.metadata, file.path) if file.has_tokenizer else None
    threads = config.threads if config else None
    chosen = devices.choose(device, file, round_trips, index_selection)
    if chosen.type == "cuda":
        if threads is not None:
            torch.set_num_threads(threads)
        runner, config = devices.load_runner(file, chosen, config or EngineConfig(), progress)
        return Engine(runner, tokenizer, config, identity=file.identity())
    weights = ModelWeights.load(FileSource(file, progress))
    model = DeepseekV4(weights, round_trips, index_selection)
    if threads is None and file.shape.hidden <= ONE_THREAD_HIDDEN:
        threads = 1
    if threads is not None:
        torch.set_num_threads(threads)
    return Engine(ModelRunner(model), tokenizer, config, identity=file.identity())


def from_tensors(
    shape: Shape,
    tensors: Mapping[str, Tensor],
    tokenizer: Tokenizer | None = None,
    device: str = "cpu",
    qat_sim: bool = True,
    *,
    config: EngineConfig | None = None,
) -> Engine:
    """An engine over tensors in memory, under their GGUF names and in torch's order of dimensions ([out, in]).

    It runs on the CPU: kernels for CUDA read the quantised matrices of a file.

    Raises:
        Ds4Error: a tensor is missing, unknown, or has another shape or kind of numbers than `shape` says; or `device`
            or `qat_sim` do not fit.
    """
    devices.check_name(device)
    if device not in ("auto", "cpu"):
        raise Ds4Error(
            f"device {device!r} is not available for tensors in memory, which run on the CPU (device='cpu' or 'auto')"
        )
    expected = expected_tensors(shape)
    for name in tensors:
        if name not in expected:
            raise Ds4Error(f"tensor {name} is unknown: the shape {shape.name!r} has none of that name")
    for name, spec in expected.items():
        if name not in tensors:
            raise Ds4Error(f"tensor {name} is missing: the shape {shape.name!r} needs it")
        if not isinstance(tensors[name], Tensor):
            raise Ds4Error(f"tensor {name} is a {type(tensors[name]).__name__}; torch tensors are needed")
        if tuple(tensors[name].shape) != spec.dims[::-1]:
            raise Ds4Error(f"tensor {name} has shape {tuple(tensors[name].shape)}, but {spec.dims[::-1]} is needed")
        table = GGMLQuantizationType.I32 in spec.types
        if tensors[name].dtype not in (_WHOLE if table else _FLOATS):
            kinds = ", ".join(str(kind) for kind in (_WHOLE if table else _FLOATS))
            raise Ds4Error(f"tensor {name} has dtype {tensors[name].dtype}, but one of {kinds} is needed")
        if table and not 0 <= int(tensors[name].min()) <= int(tensors[name].max()) < shape.experts:
            raise Ds4Error(f"tensor {name} holds numbers that are no experts; they are from 0 to {shape.experts - 1}")
    if config and config.threads is not None:
        torch.set_num_threads(config.threads)
    model = DeepseekV4(ModelWeights.load(TensorSource(shape, tensors)), qat_sim)
    return Engine(ModelRunner(model), tokenizer, config, tensors=dict(tensors))


def from_transformers(
    model: Any,
    device: str = "cpu",
    qat_sim: bool = False,
    *,
    tokenizer: Tokenizer | None = None,
    config: EngineConfig | None = None,
) -> Engine:
    """An engine over the weights of a transformers `DeepseekV4ForCausalLM` of any size."""
    if getattr(getattr(model, "config", None), "model_type", None) != "deepseek_v4":
        raise Ds4Error(f"from_transformers takes a DeepseekV4ForCausalLM, not a {type(model).__name__}")
    shape = shape_from_transformers(model.config)
    return from_tensors(shape, tensors_from_transformers(model, shape), tokenizer, device, qat_sim, config=config)


def shape_from_transformers(config: Any) -> Shape:
    """The shape that a transformers `DeepseekV4Config` describes."""
    sparse = int(config.compress_rates["compressed_sparse_attention"])
    dense = int(config.compress_rates["heavily_compressed_attention"])
    by_type = {"sliding_attention": 0, "compressed_sparse_attention": sparse, "heavily_compressed_attention": dense}
    layers = int(config.num_hidden_layers)
    hashed = sum(1 for kind in config.mlp_layer_types if kind == "hash_moe")
    plain, yarn = config.rope_parameters["main"], config.rope_parameters["compress"]
    return Shape(
        name="custom",
        layers=layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        head_dim=config.head_dim,
        rope_dim=round(config.head_dim * float(yarn.get("partial_rotary_factor", 1.0))),
        q_lora_rank=config.q_lora_rank,
        o_groups=config.o_groups,
        o_lora_rank=config.o_lora_rank,
        window=config.sliding_window,
        ratios=tuple(by_type[kind] for kind in config.layer_types[:layers]),
        index_heads=config.index_n_heads,
        index_dim=config.index_head_dim,
        index_top_k=config.index_topk,
        experts=config.n_routed_experts,
        experts_used=config.num_experts_per_tok,
        expert_hidden=config.moe_intermediate_size,
        route_scale=config.routed_scaling_factor,
        hash_layers=hashed,
        vocab=config.vocab_size,
        context=config.max_position_embeddings,
        sparse_ratio=sparse,
        swiglu_clamp=config.swiglu_limit,
        hc_streams=config.hc_mult,
        sinkhorn_iterations=config.hc_sinkhorn_iters,
        hc_eps=config.hc_eps,
        rms_eps=config.rms_norm_eps,
        rope_base=plain["rope_theta"],
        compress_rope_base=yarn["rope_theta"],
        yarn_factor=yarn.get("factor", 1.0),
        yarn_original_context=yarn.get("original_max_position_embeddings", config.max_position_embeddings),
        yarn_beta_fast=yarn.get("beta_fast", 32.0),
        yarn_beta_slow=yarn.get("beta_slow", 1.0),
    )


_LAYER_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_a_proj.weight": "attn_q_a.weight",
    "self_attn.q_a_norm.weight": "attn_q_a_norm.weight",
    "self_attn.q_b_proj.weight": "attn_q_b.weight",
    "self_attn.kv_proj.weight": "attn_kv.weight",
    "self_attn.kv_norm.weight": "attn_kv_a_norm.weight",
    "self_attn.sinks": "attn_sinks.weight",
    "self_attn.o_a_proj.weight": "attn_output_a.weight",
    "self_attn.o_b_proj.weight": "attn_output_b.weight",
    "self_attn.compressor.indexer.q_b_proj.weight": "indexer.attn_q_b.weight",
    "self_attn.compressor.indexer.scorer.weights_proj.weight": "indexer.proj.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.gate.tid2eid": "ffn_gate_tid2eid.weight",
    "mlp.experts.down_proj": "ffn_down_exps.weight",
    "mlp.shared_experts.gate_proj.weight": "ffn_gate_shexp.weight",
    "mlp.shared_experts.up_proj.weight": "ffn_up_shexp.weight",
    "mlp.shared_experts.down_proj.weight": "ffn_down_shexp.weight",
}
for _kind in ("attn", "ffn"):
    for _part in ("fn", "base", "scale"):
        _LAYER_NAMES[f"{_kind}_hc.{_part}"] = f"hc_{_kind}_{_part}.weight"
for _theirs, _ours in (("compressor", "attn_compressor"), ("compressor.indexer", "indexer_compressor")):
    for _their_part, _our_part in (
        ("kv_proj.weight", "kv"),
        ("gate_proj.weight", "gate"),
        ("position_bias", "ape"),
        ("kv_norm.weight", "norm"),
    ):
        _LAYER_NAMES[f"self_attn.{_theirs}.{_their_part}"] = f"{_ours}_{_our_part}.weight"

_TOP_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "model.hc_head.hc_fn": "output_hc_fn.weight",
    "model.hc_head.hc_base": "output_hc_base.weight",
    "model.hc_head.hc_scale": "output_hc_scale.weight",
}


def tensors_from_transformers(model: Any, shape: Shape) -> dict[str, Tensor]:
    """The tensors of a transformers model under their GGUF names.

    Raises:
        Ds4Error: the model has a tensor that the V4 graph does not have.
    """
    tensors: dict[str, Tensor] = {}
    for name, value in {**dict(model.named_buffers()), **dict(model.named_parameters())}.items():
        value = value.detach()
        if name in _TOP_NAMES:
            tensors[_TOP_NAMES[name]] = value
            continue
        if not name.startswith("model.layers."):
            if "rotary" in name or "inv_freq" in name:
                continue
            raise Ds4Error(f"tensor {name} of the transformers model has no place in the V4 graph")
        layer, part = name.removeprefix("model.layers.").split(".", 1)
        prefix = f"blk.{layer}."
        if part == "mlp.experts.gate_up_proj":
            gate, up = value.chunk(2, dim=1)
            tensors[prefix + "ffn_gate_exps.weight"] = gate.contiguous()
            tensors[prefix + "ffn_up_exps.weight"] = up.contiguous()
        elif part in _LAYER_NAMES:
            target = _LAYER_NAMES[part]
            tensors[prefix + target] = value.to(torch.int32) if "tid2eid" in target else value
        elif "inv_freq" not in part:
            raise Ds4Error(f"tensor {name} of the transformers model has no place in the V4 graph")
    return tensors
