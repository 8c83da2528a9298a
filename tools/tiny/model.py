"""Fast training forward over the parameters of transformers' DeepseekV4ForCausalLM.

The module of transformers owns every parameter; nothing here copies one. `Forward` runs the same graph (V4 graph,
sections "Top level" to "MoE") as a few compiled functions: window and compressed rows in one attention call, all
experts dense with weight 0 outside the selection, Sinkhorn in one kernel. `qat` switches on the rounding that
inference applies to rows and indexer keys. The language loss reaches no indexer tensor, so `attention` also returns
the indexer's own loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import ops
import torch
import torch.nn.functional as F
from light import light_package
from lookup import plant_lookup
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention


def tiny_shape(**changes: Any):
    """The TINY entry of the package's shape table, with fields replaced."""
    light_package()
    from ds4.gguf.shape import TINY

    return replace(TINY, **changes)


def toy_shape():
    """A shape with every part of the graph that a CPU can train a few steps of; for trying the tools out."""
    toy = {"layers": 3, "ratios": (0, 4, 128), "heads": 2, "head_dim": 128, "hash_layers": 1, "experts": 2}
    return tiny_shape(name="custom", **toy)


def new_model(shape, seed: int = 0):
    """A transformers module of this shape with the initial values training starts from (float32)."""
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    config = DeepseekV4Config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        moe_intermediate_size=shape.expert_hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        head_dim=shape.head_dim,
        q_lora_rank=shape.q_lora_rank,
        num_experts_per_tok=shape.experts_used,
        n_routed_experts=shape.experts,
        routed_scaling_factor=shape.route_scale,
        compress_ratios=list(shape.ratios),
        num_hash_layers=shape.hash_layers,
        qk_rope_head_dim=shape.rope_dim,
        partial_rotary_factor=shape.rope_dim / shape.head_dim,
        sliding_window=shape.window,
        o_groups=shape.o_groups,
        o_lora_rank=shape.o_lora_rank,
        index_n_heads=shape.index_heads,
        index_head_dim=shape.index_dim,
        index_topk=shape.index_top_k,
        max_position_embeddings=8192,
        pad_token_id=None,
        rope_parameters={
            "rope_type": "yarn",
            "factor": shape.yarn_factor,
            "beta_fast": shape.yarn_beta_fast,
            "original_max_position_embeddings": shape.yarn_original_context,
            "beta_slow": shape.yarn_beta_slow,
            "rope_theta": shape.rope_base,
        },
        attn_implementation="eager",
    )
    torch.manual_seed(seed)
    model = DeepseekV4ForCausalLM(config).float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(("_hc.base", "hc_head.hc_base")):
                p.zero_()
                if name.endswith("_hc.base"):  # streams start separate: the mixing matrix starts near the identity
                    p[8:].view(4, 4).copy_(3 * torch.eye(4))
            elif name.endswith((".scale", "hc_scale")):
                p.fill_(0.1)
            elif name.endswith("kv_norm.weight") and "indexer" not in name:
                p.fill_(1.5)  # one row is key and value: longer rows let attention be sharp early
        for name, b in model.named_buffers():
            if name.endswith("tid2eid"):  # a fixed random pair of distinct experts per token
                order = torch.rand(b.shape[0], shape.experts, generator=generator).argsort(1)
                b.copy_(order[:, : b.shape[1]])
    if shape.name == "tiny":
        plant_lookup(model, shape, generator)
    return model


@dataclass
class Masks:
    """Everything that depends only on the row length: rotary tables and the block mask of each compress ratio."""

    tables: dict[str, tuple[torch.Tensor, torch.Tensor]]
    blocks: dict[int, Any]
    rows: int  # compressed rows are padded to this number in every layer, so that one attention kernel serves all
    every: torch.Tensor | None = None  # a selection of every row, built for the first batch


def visibility(length: int, window: int, ratio: torch.Tensor):
    """Mask function over (query, key): window keys first, then one key per compressed row."""

    def visible(b, h, q, k):
        return ((k <= q) & (q - k < window) & (k < length)) | ((k >= length) & (k - length < (q + 1) // ratio))

    return visible


def build_masks(shape, length: int, device, flex: bool) -> Masks:
    """Tables and masks for rows of `length` tokens (a multiple of 128)."""
    blocks: dict[int, Any] = {}
    rows = -(-(length // min(r for r in shape.ratios if r)) // 128) * 128
    for ratio in sorted(set(shape.ratios)):
        visible = visibility(length, shape.window, torch.tensor(ratio or 2**30, device=device))
        if flex:
            blocks[ratio] = create_block_mask(visible, None, None, length, length + rows, device=device)
        else:
            q, k = torch.arange(length, device=device)[:, None], torch.arange(length + rows, device=device)[None]
            blocks[ratio] = visible(0, 0, q, k)
    return Masks(ops.rope_tables(shape, length, device), blocks, rows)


def attend(q, kv, mask, selected, flex: bool):
    """Attention without sink: out [batch, heads, tokens, dim] and log-sum-exp [batch, heads, tokens].

    q [batch, heads, tokens, dim]; kv [batch, keys, dim] is key and value; selected bool [batch, tokens, rows].
    """
    scale, length = q.shape[-1] ** -0.5, q.shape[2]
    if flex:
        # One copy of the row per head: with a single one the backward kernel has too few programs to fill the GPU.
        kv = kv.unsqueeze(1).expand(-1, q.shape[1], -1, -1)

        def keep(score, b, h, i, j):
            row = torch.clamp(j - length, min=0)
            return torch.where((j < length) | selected[b, i, row], score, -float("inf"))

        out, aux = flex_attention(
            q, kv, kv, score_mod=keep, block_mask=mask, scale=scale, return_aux=AuxRequest(lse=True)
        )
        return out, aux.lse
    score = torch.einsum("bhtd,bkd->bhtk", q.float(), kv.float()) * scale
    mask = mask & F.pad(selected, (length, 0), value=True).unsqueeze(1)
    score = score.masked_fill(~mask, -float("inf"))
    lse = torch.logsumexp(score, -1)
    return torch.einsum("bhtk,bkd->bhtd", torch.exp(score - lse[..., None]), kv.float()).to(q.dtype), lse


def hc_pre(x, fn, base, scale, shape):
    """Sublayer input [batch, tokens, hidden], post [.., 4] and mixing matrix [.., 4, 4] (V4 graph, hc_pre)."""
    flat = x.flatten(2)
    norm = torch.rsqrt(flat.float().square().mean(-1, keepdim=True) + shape.rms_eps)
    m = F.linear(flat, fn.to(flat.dtype)).float() * norm
    pre = torch.sigmoid(m[..., :4] * scale[0] + base[:4]) + shape.hc_eps
    post = 2 * torch.sigmoid(m[..., 4:8] * scale[1] + base[4:8])
    logits = m[..., 8:] * scale[2] + base[8:]
    comb = ops.sinkhorn(logits.reshape(-1, 16))[0].view(*x.shape[:2], 4, 4)
    return (pre.unsqueeze(-1) * x.float()).sum(2).to(x.dtype), post, comb


def hc_post(y, x, post, comb):
    """Next state [batch, tokens, 4, hidden] (V4 graph, hc_post)."""
    mixed = (comb.unsqueeze(-1) * x.float().unsqueeze(3)).sum(2)
    return (post.unsqueeze(-1) * y.float().unsqueeze(2) + mixed).to(x.dtype)


def index_parts(h, qr, w, tables, shape, qat: bool):
    """Indexer queries [batch, tokens, heads, dim], keys [batch, rows, dim], head weights [batch, tokens, heads]."""
    dt = h.dtype
    cos, sin = tables
    q = F.linear(qr, w["iqb"].to(dt)).unflatten(-1, (shape.index_heads, shape.index_dim))
    q = ops.rope(q, cos[:, None], sin[:, None])
    k = ops.pool(F.linear(h, w["ikv"].to(dt)), F.linear(h, w["igate"].to(dt)), w["iape"], shape.sparse_ratio, True)
    k = ops.rope(ops.rms(k, w["inorm"]), cos[:: shape.sparse_ratio], sin[:: shape.sparse_ratio]).to(dt)
    if qat:
        had = ops.hadamard_matrix(shape.index_dim, h.device, dt)
        q = ops.round_fp4((q @ had).float() * shape.index_dim**-0.5).to(dt)
        k = ops.round_fp4((k @ had).float() * shape.index_dim**-0.5).to(dt)
    weight = F.linear(h, w["iproj"].to(dt)).float() * (shape.index_dim * shape.index_heads) ** -0.5
    return q, k, weight


def index_scores(q, k, weight):
    """Scores [batch, tokens, rows], float32 (V4 graph, Indexer)."""
    return (torch.relu(torch.einsum("bthd,bnd->bthn", q, k).float()) * weight.unsqueeze(-1)).sum(2)


def before(x, w, tables, shape, ratio: int, rows: int, qat: bool):
    """First part of an attention sublayer: (q, keys, h, qr, post, comb).

    q [batch, heads, tokens, dim]; keys [batch, tokens + rows, dim]: window rows, compressed rows, zeros.
    """
    dt = x.dtype
    cos, sin = tables
    collapsed, post, comb = hc_pre(x, w["hc_fn"], w["hc_base"], w["hc_scale"], shape)
    h = ops.rms(collapsed, w["norm"])
    qr = ops.rms(F.linear(h, w["qa"].to(dt)), w["qa_norm"])
    q = ops.rms(F.linear(qr, w["qb"].to(dt)).unflatten(-1, (shape.heads, shape.head_dim)))
    q = ops.rope(q, cos[:, None], sin[:, None]).transpose(1, 2)
    kv = ops.rope(ops.rms(F.linear(h, w["kv"].to(dt)), w["kv_norm"]), cos, sin)
    if ratio:
        c = ops.pool(
            F.linear(h, w["ckv"].to(dt)), F.linear(h, w["cgate"].to(dt)), w["cape"], ratio, ratio == shape.sparse_ratio
        )
        c = ops.rope(ops.rms(c, w["cnorm"]), cos[::ratio], sin[::ratio]).to(dt)
        kv = torch.cat((kv, c), 1)
    if qat:
        kv = ops.round_fp8(kv, shape.head_dim - shape.rope_dim)
    return q, F.pad(kv, (0, 0, 0, x.shape[1] + rows - kv.shape[1])), h, qr, post, comb


def after(x, out, lse, post, comb, sinks, oa, ob, tables, shape):
    """Last part of an attention sublayer: sink, inverse rotation, output projections; the new state."""
    cos, sin = tables
    out = out.float() * torch.sigmoid(lse - sinks[:, None].float()).unsqueeze(-1)
    out = ops.rope(out.to(x.dtype).transpose(1, 2), cos[:, None], -sin[:, None])
    low = torch.einsum("btgi,goi->btgo", out.reshape(*x.shape[:2], shape.o_groups, -1), oa.to(x.dtype))
    return hc_post(F.linear(low.flatten(2), ob.to(x.dtype)), x, post, comb)


def choose(h, qr, w, tables, shape, count: int, rows: int, qat: bool):
    """The indexer's selection: bool [batch, tokens, rows], the `count` best visible rows of every query."""
    ratio, length = shape.sparse_ratio, h.shape[1]
    n = length // ratio
    seen = torch.arange(n, device=h.device) < (torch.arange(length, device=h.device)[:, None] + 1) // ratio
    scores = index_scores(*index_parts(h, qr, w, tables, shape, qat)).masked_fill(~seen, -float("inf"))
    best = scores.topk(min(count, n), -1).indices
    return torch.zeros(h.shape[0], length, rows, dtype=torch.bool, device=h.device).scatter_(2, best, True)


def index_loss(h, qr, q, keys, lse, sinks, w, tables, positions, weights, shape, qat: bool):
    """The indexer's own loss and the share of the teacher's mass that its top-k holds (scalars).

    KL divergence from the attention's own mass on the compressed rows, summed over heads, to the indexer's softmax,
    at the queries `positions` [batch, n] with `weights` [batch, n]. Everything but the indexer's weights is detached.
    """
    ratio, length = shape.sparse_ratio, h.shape[1]
    rows = keys[:, length : length + length // ratio]
    iq, ik, iw = index_parts(h, qr, w, tables, shape, qat)
    pick = positions[..., None, None]
    iq = iq.gather(1, pick.expand(-1, -1, *iq.shape[2:]))
    iw = iw.gather(1, positions[..., None].expand(-1, -1, iw.shape[-1]))
    seen = torch.arange(rows.shape[1], device=rows.device) < ((positions + 1) // ratio).unsqueeze(-1)
    with torch.no_grad():
        z = torch.logaddexp(lse, sinks[:, None].float().expand_as(lse)).transpose(1, 2)
        q = q.transpose(1, 2)
        q = q.gather(1, pick.expand(-1, -1, *q.shape[2:]))
        z = z.gather(1, positions[..., None].expand(-1, -1, z.shape[2]))
        mass = torch.einsum("bthd,bnd->bthn", q, rows).float() * shape.head_dim**-0.5
        mass = torch.exp((mass - z.unsqueeze(-1)).clamp(max=20.0)).sum(2) * seen
        p = mass / (mass.sum(-1, keepdim=True) + 1e-9)
    score = index_scores(iq, ik, iw).masked_fill(~seen, -1e9)
    kl = (p * (torch.log(p + 1e-9) - torch.log_softmax(score, -1))).sum(-1)
    weight = weights * (seen.sum(-1) > 1)
    with torch.no_grad():
        best = score.topk(min(shape.index_top_k, score.shape[-1]), -1).indices
        held = (p.gather(-1, best).sum(-1) * weight).sum() / (weight.sum() + 1e-9)
    return (kl * weight).sum() / (weight.sum() + 1e-9), held


def moe(x, forced, hashed, w, shape):
    """One MoE sublayer on the state; returns the new state and each expert's use [batch, tokens, experts] (bool).

    forced: bool [batch, tokens, experts], the selection by token where the 0-dim bool tensor `hashed` is true.
    """
    dt = x.dtype
    collapsed, post, comb = hc_pre(x, w["hc_fn"], w["hc_base"], w["hc_scale"], shape)
    h = ops.rms(collapsed, w["norm"])
    p = torch.sqrt(F.softplus(F.linear(h.float(), w["router"].float())))
    ids = torch.arange(shape.experts, device=x.device)
    rank = p.detach() + w["bias"]
    use = torch.zeros_like(rank, dtype=torch.bool)
    for _ in range(shape.experts_used):
        use = use | (rank.masked_fill(use, -float("inf")).argmax(-1, keepdim=True) == ids)
    use = torch.where(hashed, forced, use)
    weight = torch.where(use, p, 0.0)
    weight = weight / (weight.sum(-1, keepdim=True) + 1e-20) * shape.route_scale
    weight = torch.cat((weight, torch.ones_like(weight[..., :1])), -1)  # the shared expert is the last, always on
    clamp = shape.swiglu_clamp
    inner = F.linear(h, w["up_all"])
    gate, up = inner.unflatten(-1, (shape.experts + 1, 2, shape.expert_hidden)).float().unbind(-2)
    act = F.silu(gate.clamp(max=clamp)) * up.clamp(-clamp, clamp) * weight.unsqueeze(-1)
    y = F.linear(act.to(dt).flatten(-2), w["down_all"])
    return hc_post(y, x, post, comb), use


def join_experts(gate_up, down, shared_gate, shared_up, shared_down, delta, dt):
    """Experts and shared expert as one pair of matrices: up_all [(e+1) * 2F, D], down_all [D, (e+1) * F].

    delta: what rounding to the file's formats adds, (gate_up, down) or None; the gradient passes it straight through.
    """
    if delta is not None:
        gate_up, down = gate_up + delta[0], down + delta[1]
    up_all = torch.cat((gate_up.flatten(0, 1), shared_gate, shared_up), 0).to(dt)
    down_all = torch.cat((down.permute(1, 0, 2).flatten(1), shared_down), 1).to(dt)
    return up_all, down_all


def head_loss(x, fn, base, scale, norm, lm_head, targets, shape):
    """Cross-entropy [batch, tokens] of `targets` and whether the arg-max is right (V4 graph, Output head)."""
    logits = head_logits(x, fn, base, scale, norm, lm_head, shape)
    ce = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
    return ce, logits.detach().argmax(-1) == targets


def head_logits(x, fn, base, scale, norm, lm_head, shape):
    """Logits [batch, tokens, vocab], float32."""
    flat = x.flatten(2)
    m = F.linear(flat, fn.to(flat.dtype)).float()
    m = m * torch.rsqrt(flat.float().square().mean(-1, keepdim=True) + shape.rms_eps)
    pre = torch.sigmoid(m * scale + base) + shape.hc_eps
    h = ops.rms((pre.unsqueeze(-1) * x.float()).sum(2).to(x.dtype), norm)
    return F.linear(h, lm_head.to(h.dtype)).float()


class Forward:
    """The training forward of one module. `dtype` is the activation dtype; parameters stay float32."""

    def __init__(self, model, shape, device, dtype=torch.bfloat16, compiled: bool = False, flex: bool = False) -> None:
        self.model, self.shape, self.device, self.dtype, self.flex = model, shape, device, dtype, flex
        self.masks: dict[int, Masks] = {}
        self.delta: list[tuple[torch.Tensor, torch.Tensor]] | None = None

        def make(fn):
            return torch.compile(fn, dynamic=False, fullgraph=True) if compiled else fn

        self._before, self._attend, self._after, self._moe = make(before), make(attend), make(after), make(moe)
        self._choose, self._index_loss, self._head, self._join = (
            make(choose),
            make(index_loss),
            make(head_loss),
            make(join_experts),
        )
        self.layers = [self._weights(i) for i in range(shape.layers)]
        self.hashed = [torch.tensor(i < shape.hash_layers, device=device) for i in range(shape.layers)]
        self.no_bias = torch.zeros(shape.experts, device=device)

    def _weights(
        self, i: int
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, torch.Tensor], tuple]:
        layer = self.model.model.layers[i]
        a, m = layer.self_attn, layer.mlp
        att = {
            "hc_fn": layer.attn_hc.fn,
            "hc_base": layer.attn_hc.base,
            "hc_scale": layer.attn_hc.scale,
            "norm": layer.input_layernorm.weight,
            "qa": a.q_a_proj.weight,
            "qa_norm": a.q_a_norm.weight,
            "qb": a.q_b_proj.weight,
            "kv": a.kv_proj.weight,
            "kv_norm": a.kv_norm.weight,
        }
        index = {}
        if a.compressor is not None:
            c = a.compressor
            att |= {
                "ckv": c.kv_proj.weight,
                "cgate": c.gate_proj.weight,
                "cape": c.position_bias,
                "cnorm": c.kv_norm.weight,
            }
            if self.shape.has_indexer(i):
                n = c.indexer
                index = {
                    "iqb": n.q_b_proj.weight,
                    "ikv": n.kv_proj.weight,
                    "igate": n.gate_proj.weight,
                    "iape": n.position_bias,
                    "inorm": n.kv_norm.weight,
                    "iproj": n.scorer.weights_proj.weight,
                }
        ffn = {
            "hc_fn": layer.ffn_hc.fn,
            "hc_base": layer.ffn_hc.base,
            "hc_scale": layer.ffn_hc.scale,
            "norm": layer.post_attention_layernorm.weight,
            "router": m.gate.weight,
        }
        e, sh = m.experts, m.shared_experts
        experts = (e.gate_up_proj, e.down_proj, sh.gate_proj.weight, sh.up_proj.weight, sh.down_proj.weight)
        return att, index, ffn, experts

    def state(self, tokens, sample=None, qat: bool = True, select: int = 0):
        """State after the last layer, indexer losses and captured shares (one per sparse layer), expert use per layer.

        select: 0 attends every visible compressed row, else the `select` best by the indexer. sample: None, or
        (positions int64 [batch, n], weights float32 [batch, n]): the queries on which the indexer is trained.
        """
        s, length = self.shape, tokens.shape[1]
        if length not in self.masks:
            self.masks[length] = build_masks(s, length, self.device, self.flex)
        masks = self.masks[length]
        if masks.every is None or masks.every.shape[0] != len(tokens):
            masks.every = torch.ones(len(tokens), length, masks.rows, dtype=torch.bool, device=self.device)
        x = self.model.model.embed_tokens.weight.to(self.dtype)[tokens].unsqueeze(2).expand(-1, -1, 4, -1).contiguous()
        ids = torch.arange(s.experts, device=tokens.device)
        losses, held, used, forced = [], [], [], None
        for i, (att, index, ffn, experts) in enumerate(self.layers):
            ratio, layer = s.ratios[i], self.model.model.layers[i]
            table = masks.tables["compress" if ratio else "main"]
            q, keys, h, qr, post, comb = self._before(x, att, table, s, ratio, masks.rows, qat)
            selected, a = masks.every, layer.self_attn
            if select and s.has_indexer(i):
                with torch.no_grad():
                    selected = self._choose(h.detach(), qr.detach(), index, table, s, select, masks.rows, qat)
            out, lse = self._attend(q, keys, masks.blocks[ratio], selected, self.flex)
            if sample is not None and s.has_indexer(i):
                taught = (t.detach() for t in (h, qr, q, keys, lse, a.sinks))
                loss, captured = self._index_loss(*taught, index, table, *sample, s, qat)
                losses.append(loss)
                held.append(captured)
            oa = a.o_a_proj.weight.view(s.o_groups, s.o_lora_rank, -1)
            x = self._after(x, out, lse, post, comb, a.sinks, oa, a.o_b_proj.weight, table, s)
            up_all, down_all = self._join(*experts, self.delta[i] if self.delta else None, self.dtype)
            if i < s.hash_layers:
                forced, bias = (layer.mlp.gate.tid2eid[tokens].unsqueeze(-1) == ids).any(-2), self.no_bias
            else:
                bias = layer.mlp.gate.e_score_correction_bias
            x, use = self._moe(
                x, forced, self.hashed[i], ffn | {"bias": bias, "up_all": up_all, "down_all": down_all}, s
            )
            used.append(use)
        return x, losses, held, used

    def _head_weights(self):
        m = self.model
        return (
            m.model.hc_head.hc_fn,
            m.model.hc_head.hc_base,
            m.model.hc_head.hc_scale,
            m.model.norm.weight,
            m.lm_head.weight,
        )

    def loss(self, tokens, targets, sample=None, qat: bool = True, select: int = 0):
        """(cross-entropy [batch, tokens], right [batch, tokens], indexer losses, captured shares, expert use)."""
        x, losses, held, used = self.state(tokens, sample, qat, select)
        ce, right = self._head(x, *self._head_weights(), targets, self.shape)
        return ce, right, losses, held, used

    def logits(self, tokens, qat: bool = True, select: int = 0):
        """Logits [batch, tokens, vocab], float32."""
        return head_logits(self.state(tokens, None, qat, select)[0], *self._head_weights(), self.shape)


def parameter_count(model) -> int:
    """Number of trained values."""
    return sum(math.prod(p.shape) for p in model.parameters())
