"""Random transformers models to compare with."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

YARN = {
    "rope_type": "yarn",
    "factor": 16.0,
    "original_max_position_embeddings": 65536,
    "beta_fast": 32,
    "beta_slow": 1,
    "rope_theta": 10000.0,
}

# 32 index heads: with few heads ReLU leaves exact ties, which make even equivalent calls choose other rows.
BASE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "head_dim": 32,
    "q_lora_rank": 24,
    "num_experts_per_tok": 2,
    "n_routed_experts": 8,
    "compress_ratios": [0, 0, 4, 128, 4, 128, 0],
    "num_hash_layers": 3,
    "qk_rope_head_dim": 8,
    "compress_rate_hca": 16,
    "sliding_window": 16,
    "o_groups": 2,
    "o_lora_rank": 12,
    "index_n_heads": 32,
    "index_head_dim": 16,
    "index_topk": 4,
    "max_position_embeddings": 4096,
    "rope_parameters": YARN,
    "attn_implementation": "eager",
}

CONFIGS: dict[str, dict[str, Any]] = {
    "flash pattern": {},
    "pro pattern": {
        "compress_ratios": [128, 128, 4, 128, 4, 128, 0],
        "routed_scaling_factor": 2.5,
        "n_routed_experts": 12,
        "num_experts_per_tok": 3,
        "o_groups": 4,
        "index_topk": 6,
    },
    "true ratios": {"compress_rate_hca": 128, "sliding_window": 128, "index_topk": 16, "num_hidden_layers": 5,
                    "compress_ratios": [0, 0, 4, 128, 4, 0]},
    "one layer of each kind": {
        "compress_ratios": [4, 128, 0, 0],
        "num_hidden_layers": 3,
        "num_hash_layers": 1,
        "compress_rate_hca": 8,
        "sliding_window": 8,
        "index_topk": 3,
        "head_dim": 64,
        "qk_rope_head_dim": 16,
        "index_head_dim": 32,
    },
    "wide window, no hash layers": {
        "compress_ratios": [0, 4, 4, 128, 0],
        "num_hidden_layers": 4,
        "num_hash_layers": 0,
        "compress_rate_hca": 32,
        "sliding_window": 48,
        "swiglu_limit": 0.05,
    },
}  # fmt: skip

LENGTHS = {"true ratios": 330}


def random_model(name: str, seed: int) -> Any:
    """A transformers DeepseekV4ForCausalLM in float32 whose parameters, also those that start as zeros, are random."""
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.manual_seed(seed)
    config = DeepseekV4Config(**{**BASE, **CONFIGS[name]})
    model = DeepseekV4ForCausalLM(config).eval().float()
    with torch.no_grad():
        for key, p in model.named_parameters():
            if "norm" in key:
                p.copy_(1 + 0.1 * torch.randn_like(p))
            elif any(part in key for part in ("base", "sinks", "position_bias")):
                p.copy_(0.5 * torch.randn_like(p))
            elif "scale" in key:
                p.copy_(0.5 + 0.1 * torch.randn_like(p))
            else:
                p.copy_(0.15 * torch.randn_like(p))
        for key, b in model.named_buffers():
            if "e_score_correction_bias" in key:
                b.copy_(0.5 * torch.randn_like(b))
            elif "tid2eid" in key:
                b.copy_(torch.stack([torch.randperm(config.n_routed_experts)[: b.shape[1]] for _ in range(b.shape[0])]))
    return model


@pytest.fixture(scope="module", params=list(CONFIGS))
def oracle(request: pytest.FixtureRequest) -> Any:
    """(name, model, ids [1, tokens], logits [tokens, vocab]) for each configuration."""
    name = request.param
    model = random_model(name, seed=1)
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, 128, (1, LENGTHS.get(name, 150)), generator=generator)
    with torch.no_grad():
        logits = model(ids).logits[0]
    return name, model, ids, logits
