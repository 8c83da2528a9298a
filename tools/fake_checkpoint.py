"""Makes a checkpoint folder in the layouts that ds4-quantize reads, from a GGUF file or random weights.

    python tools/fake_checkpoint.py --out DIR                         ds4-tiny's weights, FP8 matrices and FP4 experts
    python tools/fake_checkpoint.py --out DIR --layout transformers   bf16 under transformers' module names
    python tools/fake_checkpoint.py --out DIR --drafts dspark         with random draft blocks
    python tools/fake_checkpoint.py --out DIR --shape flash --sparse  Flash in names and shapes; zeros without room

Layouts: `official` (FP8 E4M3 with a scale per 128 x 128, packed FP4 experts with an E8M0 scale per 32), `fp8` (experts
FP8 too, scales F32), `bf16` (official names), `transformers` (module names, fused experts). Names are written out here
and not taken from ds4.quantize, which is to be tested with them.
"""

from __future__ import annotations

import argparse
import json
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ds4.gguf.blocks import dequantize
from ds4.gguf.file import embedded_model_path, open_model
from ds4.gguf.shape import FLASH, PRO, TINY, Shape, expected_tensors

LAYOUTS = ("official", "fp8", "bf16", "transformers")
SHAPES = {"flash": FLASH, "pro": PRO, "tiny": TINY}
TOKENIZER = Path(__file__).resolve().parent / "tiny" / "tokenizer.json"

_TOP = {
    "token_embd.weight": ("embed.weight", "model.embed_tokens.weight"),
    "output_norm.weight": ("norm.weight", "model.norm.weight"),
    "output.weight": ("head.weight", "lm_head.weight"),
    "output_hc_fn.weight": ("hc_head_fn", "model.hc_head.hc_fn"),
    "output_hc_base.weight": ("hc_head_base", "model.hc_head.hc_base"),
    "output_hc_scale.weight": ("hc_head_scale", "model.hc_head.hc_scale"),
}
_LAYER = {
    "hc_attn_fn.weight": ("hc_attn_fn", "attn_hc.fn"),
    "hc_attn_base.weight": ("hc_attn_base", "attn_hc.base"),
    "hc_attn_scale.weight": ("hc_attn_scale", "attn_hc.scale"),
    "hc_ffn_fn.weight": ("hc_ffn_fn", "ffn_hc.fn"),
    "hc_ffn_base.weight": ("hc_ffn_base", "ffn_hc.base"),
    "hc_ffn_scale.weight": ("hc_ffn_scale", "ffn_hc.scale"),
    "attn_norm.weight": ("attn_norm.weight", "input_layernorm.weight"),
    "ffn_norm.weight": ("ffn_norm.weight", "post_attention_layernorm.weight"),
    "attn_q_a.weight": ("attn.wq_a.weight", "self_attn.q_a_proj.weight"),
    "attn_q_a_norm.weight": ("attn.q_norm.weight", "self_attn.q_a_norm.weight"),
    "attn_q_b.weight": ("attn.wq_b.weight", "self_attn.q_b_proj.weight"),
    "attn_kv.weight": ("attn.wkv.weight", "self_attn.kv_proj.weight"),
    "attn_kv_a_norm.weight": ("attn.kv_norm.weight", "self_attn.kv_norm.weight"),
    "attn_sinks.weight": ("attn.attn_sink", "self_attn.sinks"),
    "attn_output_a.weight": ("attn.wo_a.weight", "self_attn.o_a_proj.weight"),
    "attn_output_b.weight": ("attn.wo_b.weight", "self_attn.o_b_proj.weight"),
    "attn_compressor_kv.weight": ("attn.compressor.wkv.weight", "self_attn.compressor.kv_proj.weight"),
    "attn_compressor_gate.weight": ("attn.compressor.wgate.weight", "self_attn.compressor.gate_proj.weight"),
    "attn_compressor_ape.weight": ("attn.compressor.ape", "self_attn.compressor.position_bias"),
    "attn_compressor_norm.weight": ("attn.compressor.norm.weight", "self_attn.compressor.kv_norm.weight"),
    "indexer.attn_q_b.weight": ("attn.indexer.wq_b.weight", "self_attn.compressor.indexer.q_b_proj.weight"),
    "indexer.proj.weight": (
        "attn.indexer.weights_proj.weight", "self_attn.compressor.indexer.scorer.weights_proj.weight"),
    "indexer_compressor_kv.weight": (
        "attn.indexer.compressor.wkv.weight", "self_attn.compressor.indexer.kv_proj.weight"),
    "indexer_compressor_gate.weight": (
        "attn.indexer.compressor.wgate.weight", "self_attn.compressor.indexer.gate_proj.weight"),
    "indexer_compressor_ape.weight": (
        "attn.indexer.compressor.ape", "self_attn.compressor.indexer.position_bias"),
    "indexer_compressor_norm.weight": (
        "attn.indexer.compressor.norm.weight", "self_attn.compressor.indexer.kv_norm.weight"),
    "ffn_gate_inp.weight": ("ffn.gate.weight", "mlp.gate.weight"),
    "exp_probs_b.bias": ("ffn.gate.bias", "mlp.gate.e_score_correction_bias"),
    "ffn_gate_tid2eid.weight": ("ffn.gate.tid2eid", "mlp.gate.tid2eid"),
    "ffn_gate_shexp.weight": ("ffn.shared_experts.w1.weight", "mlp.shared_experts.gate_proj.weight"),
    "ffn_up_shexp.weight": ("ffn.shared_experts.w3.weight", "mlp.shared_experts.up_proj.weight"),
    "ffn_down_shexp.weight": ("ffn.shared_experts.w2.weight", "mlp.shared_experts.down_proj.weight"),
}  # fmt: skip
_EXPERTS = {"ffn_gate_exps.weight": "w1", "ffn_up_exps.weight": "w3", "ffn_down_exps.weight": "w2"}
_FP8 = re.compile(r"attn\.(wq_a|wq_b|wkv|wo_a|wo_b|indexer\.wq_b)\.weight|ffn\.shared_experts\.w[123]\.weight|"
                  r"(e_proj|h_proj|main_proj)\.weight")  # fmt: skip
_F32 = re.compile(r".*(hc_\w+|ape|attn_sink|gate\.bias)")

_NAMES = {torch.float8_e4m3fn: "F8_E4M3", torch.float8_e8m0fnu: "F8_E8M0", torch.bfloat16: "BF16",
          torch.float32: "F32", torch.int8: "I8", torch.int64: "I64"}  # fmt: skip
FP4_VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])

Make = Callable[[], dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Entry:
    """Tensors of the checkpoint that are made together (codes and their scales): name -> dtype and shape, and how."""

    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]]
    make: Make


# --------------------------------------------------------------------------------------------------------------------
# Values to stored types


def to_fp8(values: torch.Tensor, scale_type: torch.dtype = torch.float8_e8m0fnu) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 codes [rows, cols] and one scale per 128 x 128, a power of two unless the scales are F32."""
    rows, cols = values.shape
    padded = torch.nn.functional.pad(values.float(), (0, -cols % 128, 0, -rows % 128))
    tiles = padded.view(padded.shape[0] // 128, 128, -1, 128)
    scale = tiles.abs().amax((1, 3)).clamp_min(1e-12) / 448
    if scale_type == torch.float8_e8m0fnu:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    codes = (tiles / scale[:, None, :, None]).view_as(padded)[:rows, :cols]
    return codes.to(torch.float8_e4m3fn).contiguous(), scale.to(scale_type)


def to_fp4(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed E2M1 codes, int8 [rows, cols / 2], the first of two in the low nibble, and E8M0 scales per 32 values."""
    groups = values.float().view(values.shape[0], -1, 32)
    scale = torch.exp2(torch.ceil(torch.log2(groups.abs().amax(2, keepdim=True).clamp_min(2.0**-100) / 6)))
    scaled = groups / scale
    code = (scaled.abs().unsqueeze(3) - FP4_VALUES).abs().argmin(3)
    code = (code + 8 * (scaled < 0)).view(values.shape[0], -1, 2).to(torch.uint8)
    packed = code[:, :, 0] | (code[:, :, 1] << 4)
    return packed.view(torch.int8), scale.squeeze(2).to(torch.float8_e8m0fnu)


# --------------------------------------------------------------------------------------------------------------------
# Tensors of a checkpoint

Get = Callable[[str], torch.Tensor]
"""GGUF name -> values in torch order, float32 or integers."""


def entries(shape: Shape, get: Get, layout: str, drafts: str | None) -> Iterator[Entry]:
    """Everything that the checkpoint holds."""
    modules = layout == "transformers"
    for name, spec in expected_tensors(replace(shape, name="custom")).items():
        numbered = re.match(r"blk\.(\d+)\.(.+)", name)
        if numbered is None:
            yield _plain(_TOP[name][modules], name, spec.dims, get, layout)
            continue
        prefix, part = f"{'model.' * modules}layers.{numbered[1]}.", numbered[2]
        if part in _EXPERTS:
            yield from _experts(prefix, part, name, spec.dims, get, layout)
        else:
            yield _plain(prefix + _LAYER[part][modules], name, spec.dims, get, layout)
    if drafts:
        yield from draft_entries(shape, layout, drafts)


def _plain(target: str, name: str, dims: tuple[int, ...], get: Get, layout: str) -> Entry:
    size = dims[::-1]
    local = re.sub(r"^(layers|mtp)\.\d+\.", "", target)
    if "tid2eid" in name:
        return Entry({target: (torch.int64, size)}, lambda: {target: get(name).long()})
    if layout in ("official", "fp8") and _FP8.fullmatch(local):
        kind = torch.float8_e8m0fnu if layout == "official" else torch.float32
        return _fp8_entry(target, size, lambda: get(name), kind)
    # Softmax sinks, mixing weights and biases are full floats in every layout.
    dtype = torch.float32 if layout != "transformers" and _F32.fullmatch(local) else torch.bfloat16
    return Entry({target: (dtype, size)}, lambda: {target: get(name).to(dtype)})


def _fp8_entry(target: str, size: tuple[int, ...], values: Callable[[], torch.Tensor], kind: torch.dtype) -> Entry:
    scale = f"{target.removesuffix('.weight')}.scale"
    tiles = tuple(-(-n // 128) for n in size)
    return Entry(
        {target: (torch.float8_e4m3fn, size), scale: (kind, tiles)},
        lambda: dict(zip((target, scale), to_fp8(values(), kind), strict=True)),
    )


def _experts(prefix: str, part: str, name: str, dims: tuple[int, ...], get: Get, layout: str) -> Iterator[Entry]:
    count, rows, cols = dims[::-1]
    if layout == "transformers":
        if part == "ffn_down_exps.weight":
            target = f"{prefix}mlp.experts.down_proj"
            yield Entry({target: (torch.bfloat16, dims[::-1])}, lambda: {target: get(name).bfloat16()})
        elif part == "ffn_gate_exps.weight":
            fused, up = f"{prefix}mlp.experts.gate_up_proj", name.replace("gate", "up")
            size = (count, 2 * rows, cols)
            yield Entry({fused: (torch.bfloat16, size)}, lambda: {fused: torch.cat((get(name), get(up)), 1).bfloat16()})
        return
    for expert in range(count):
        target = f"{prefix}ffn.experts.{expert}.{_EXPERTS[part]}.weight"
        yield _expert(target, (rows, cols), lambda expert=expert: get(name)[expert], layout)


def _expert(target: str, size: tuple[int, int], values: Callable[[], torch.Tensor], layout: str) -> Entry:
    if layout == "fp8":
        return _fp8_entry(target, size, values, torch.float32)
    if layout == "bf16":
        return Entry({target: (torch.bfloat16, size)}, lambda: {target: values().bfloat16()})
    scale = f"{target.removesuffix('.weight')}.scale"
    return Entry(
        {
            target: (torch.int8, (size[0], size[1] // 2)),
            scale: (torch.float8_e8m0fnu, (size[0], size[1] // 32)),
        },
        lambda: dict(zip((target, scale), to_fp4(values()), strict=True)),
    )


def draft_entries(shape: Shape, layout: str, kind: str) -> Iterator[Entry]:
    """Random draft blocks: one stage for `mtp`, three for `dspark`."""
    D, stages = shape.hidden, 1 if kind == "mtp" else 3
    block = replace(shape, name="custom", layers=stages, ratios=(0,) * stages, hash_layers=0)
    get = random_values(block, seed=1)
    for entry in entries(block, get, "official" if layout == "transformers" else layout, None):
        renamed = {name: "mtp." + name.removeprefix("layers.") for name in entry.tensors if name.startswith("layers.")}
        if renamed:
            tensors = {renamed[name]: value for name, value in entry.tensors.items()}
            yield Entry(tensors, lambda entry=entry, names=renamed: {names[n]: v for n, v in entry.make().items()})
    last = f"mtp.{stages - 1}."
    extra = {f"{last}norm.weight": (D,), f"{last}hc_head_fn": (shape.hc_streams, shape.hc_streams * D),
             f"{last}hc_head_base": (shape.hc_streams,), f"{last}hc_head_scale": (1,)}  # fmt: skip
    if kind == "mtp":
        extra |= {"mtp.0.e_proj.weight": (D, D), "mtp.0.h_proj.weight": (D, D)}
        extra |= {"mtp.0.enorm.weight": (D,), "mtp.0.hnorm.weight": (D,)}
    else:
        extra |= {"mtp.0.main_proj.weight": (D, 3 * D), "mtp.0.main_norm.weight": (D,)}
        extra |= {f"{last}markov_head.markov_w{i}.weight": (shape.vocab, 256) for i in (1, 2)}
        extra |= {f"{last}confidence_head.proj.weight": (1, D + 256)}
    for target, size in extra.items():
        yield _plain(target, target, size[::-1], lambda name, size=size: _random(size, len(name)), layout)


# --------------------------------------------------------------------------------------------------------------------
# Values


def _random(size: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) / size[-1] ** 0.5


def random_values(shape: Shape, seed: int) -> Get:
    """Values of any tensor, the same for the same seed and name."""
    specs = expected_tensors(replace(shape, name="custom"))

    def get(name: str) -> torch.Tensor:
        size = specs[name].dims[::-1]
        number = seed * 65_536 + list(specs).index(name)
        if "tid2eid" in name:
            order = torch.rand((size[0], shape.experts), generator=torch.Generator().manual_seed(number)).argsort(1)
            return order[:, : size[1]]
        values = _random(size, number)
        return 1 + 0.1 * values if name.endswith("norm.weight") else values

    return get


def file_values(path: Path) -> tuple[Shape, Get]:
    """The shape and the decoded tensors of a GGUF file."""
    file = open_model(path)

    def get(name: str) -> torch.Tensor:
        info, raw = file.tensors[name], file.raw(name)
        if info.type.name == "I32":
            return torch.from_numpy(raw.view("<i4").copy()).view(info.shape)
        return dequantize(raw, info.type, info.n_values).view(info.shape)

    return file.shape, get


def config_of(shape: Shape, layout: str, drafts: str | None) -> dict[str, Any]:
    """config.json: the official fields, or what transformers writes."""
    config = {
        "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "attention_bias": False,
        "bos_token_id": 0, "eos_token_id": 1, "hidden_act": "silu", "tie_word_embeddings": False,
        "num_key_value_heads": 1, "norm_topk_prob": True, "scoring_func": "sqrtsoftplus",
        "num_hidden_layers": shape.layers, "hidden_size": shape.hidden, "num_attention_heads": shape.heads,
        "head_dim": shape.head_dim, "qk_rope_head_dim": shape.rope_dim, "q_lora_rank": shape.q_lora_rank,
        "o_groups": shape.o_groups, "o_lora_rank": shape.o_lora_rank, "sliding_window": shape.window,
        "index_n_heads": shape.index_heads, "index_head_dim": shape.index_dim, "index_topk": shape.index_top_k,
        "n_routed_experts": shape.experts, "num_experts_per_tok": shape.experts_used,
        "n_shared_experts": shape.shared_experts, "moe_intermediate_size": shape.expert_hidden,
        "routed_scaling_factor": shape.route_scale, "vocab_size": shape.vocab,
        "max_position_embeddings": shape.context, "swiglu_limit": shape.swiglu_clamp, "hc_mult": shape.hc_streams,
        "hc_sinkhorn_iters": shape.sinkhorn_iterations, "hc_eps": shape.hc_eps, "rms_norm_eps": shape.rms_eps,
        "rope_theta": shape.rope_base,
    }  # fmt: skip
    yarn = {"factor": shape.yarn_factor, "original_max_position_embeddings": shape.yarn_original_context,
            "beta_fast": shape.yarn_beta_fast, "beta_slow": shape.yarn_beta_slow}  # fmt: skip
    if layout == "transformers":
        dense = next((r for r in shape.ratios if r not in (0, shape.sparse_ratio)), 128)
        kinds = {0: "sliding_attention", shape.sparse_ratio: "compressed_sparse_attention",
                 dense: "heavily_compressed_attention"}  # fmt: skip
        config["compress_rates"] = {kinds[shape.sparse_ratio]: shape.sparse_ratio, kinds[dense]: dense}
        config["layer_types"] = [kinds[ratio] for ratio in shape.ratios]
        config["mlp_layer_types"] = ["hash_moe"] * shape.hash_layers + ["moe"] * (shape.layers - shape.hash_layers)
        config["rope_parameters"] = {
            "main": {"rope_type": "default", "rope_theta": shape.rope_base},
            "compress": {"rope_type": "yarn", "rope_theta": shape.compress_rope_base, **yarn},
        }
        return config
    config["compress_ratios"] = [*shape.ratios, *[0] * (3 if drafts == "dspark" else 1)]
    config |= {"num_hash_layers": shape.hash_layers, "compress_rope_theta": shape.compress_rope_base,
               "rope_scaling": {"type": "yarn", **yarn}, "num_nextn_predict_layers": 1}  # fmt: skip
    if layout in ("official", "fp8"):
        config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0",
                                         "weight_block_size": [128, 128]}  # fmt: skip
    if layout == "official":
        config["expert_dtype"] = "fp4"
    if drafts == "dspark":
        config |= {"dspark_block_size": 5, "dspark_markov_rank": 256, "dspark_noise_token_id": shape.vocab - 1,
                   "dspark_target_layer_ids": list(range(shape.layers - 3, shape.layers))}  # fmt: skip
    return config


# --------------------------------------------------------------------------------------------------------------------
# The folder


def build(
    out: Path,
    shape: Shape,
    get: Get,
    *,
    layout: str = "official",
    drafts: str | None = None,
    shards: int = 3,
    tokenizer: Path = TOKENIZER,
    sparse: bool = False,
) -> None:
    """Write config.json, tokenizer.json, shards and their index into a new folder.

    Args:
        sparse: data are holes of zeros: any size of checkpoint in no room; `get` is not called.
    """
    out.mkdir(parents=True)
    groups: list[list[Entry]] = [[] for _ in range(shards)]
    every = list(entries(shape, get, layout, drafts))
    for number, entry in enumerate(every):
        groups[number * shards // len(every)].append(entry)
    places: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        file = f"model-{number:05d}-of-{shards:05d}.safetensors"
        if sparse:
            write_sparse(out / file, {name: value for entry in group for name, value in entry.tensors.items()})
        else:
            tensors = {name: value.contiguous() for entry in group for name, value in entry.make().items()}
            save_file(tensors, out / file, metadata={"format": "pt"})
        places |= {name: file for entry in group for name in entry.tensors}
    (out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    (out / "config.json").write_text(json.dumps(config_of(shape, layout, drafts), indent=1))
    (out / "tokenizer.json").write_bytes(tokenizer.read_bytes())


def write_sparse(path: Path, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
    """A safetensors file whose data are one hole."""
    header, end = {}, 0
    for name, (dtype, size) in tensors.items():
        nbytes = torch.Size(size).numel() * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": size, "data_offsets": [end, end + nbytes]}
        end += nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to make")
    parser.add_argument("--layout", choices=LAYOUTS, default="official")
    parser.add_argument("--model", type=Path, help="GGUF file with the weights (default: ds4-tiny)")
    parser.add_argument("--shape", choices=SHAPES, help="random weights of this shape instead")
    parser.add_argument("--layers", type=int, help="with --shape: only the first layers")
    parser.add_argument("--drafts", choices=("mtp", "dspark"))
    parser.add_argument("--shards", type=int, default=3)
    parser.add_argument("--tokenizer", type=Path, default=TOKENIZER, help="tokenizer.json")
    parser.add_argument("--sparse", action="store_true", help="with --shape: zeros that take no room on disk")
    args = parser.parse_args()
    if args.shape:
        shape = SHAPES[args.shape]
        if args.layers:
            shape = replace(shape, name="custom", layers=args.layers, ratios=shape.ratios[: args.layers],
                            hash_layers=min(shape.hash_layers, args.layers))  # fmt: skip
        get = random_values(shape, seed=1)
    else:
        shape, get = file_values(args.model or embedded_model_path())
    build(args.out, shape, get, layout=args.layout, drafts=args.drafts, shards=args.shards, tokenizer=args.tokenizer,
          sparse=args.sparse)  # fmt: skip


if __name__ == "__main__":
    main()
