"""Initial values that hold the two halves of keyed lookup, so that training need not find them by chance.

From random values, copying the token behind an earlier occurrence ("induction") did not appear within 1,100 steps on
rows made for it. It needs two parts that are useless without each other: heads that read the token a few places
back, and later heads that compare what stood before a row with what stands at the query. Both start here, in a few
channels; everything else stays random and every value stays trainable.

Token identity lives in `WIDTH` channels (basis OWN). Layer 0 writes the identity of the tokens 1, 2 and 3 places
back into bases BACK. Rows of layer 1 hold those four parts in four blocks of their plain channels; queries of some
heads ask for rows whose token before (or two before) equals the present, the previous or the third token back. What
a head finds is written to basis OUT, which the output matrix reads.

A compressed row pools the tokens of its block, so its channels are cut in four: part s holds token s of the block
alone (the position bias of the gate chooses it), as a key (what stood one and two before) and a value (the token).
One head asks each part. The indexer starts with the same keys.
"""

from __future__ import annotations

import torch

WIDTH = 42
CONSTANT = 0.35  # channel 0 of every embedding; the identity part has length 1
PAIRS = 6  # rotary pairs that tell neighbours apart
# (block of the row, what the query puts there): block n is the token n before the row's own; 0 = own, n = n back.
HEADS = (((1, 0),), ((2, 1),), ((1, 0), (2, 1)), ((1, 3),), ((2, 3),))


def plant_lookup(model, shape, generator: torch.Generator) -> None:
    """Overwrites the initial values of a new module (float32, in place)."""
    with torch.no_grad():
        basis = torch.linalg.qr(torch.randn(shape.hidden - 1, 5 * WIDTH, generator=generator))[0].t()
        basis = torch.nn.functional.pad(basis, (1, 0))  # [5 * WIDTH, hidden], channel 0 stays for the constant
        own, *back, out = basis.split(WIDTH)
        identity = torch.randn(shape.vocab, WIDTH, generator=generator) / WIDTH**0.5
        embed = model.model.embed_tokens.weight
        embed.mul_(0.3).add_(identity @ own)
        embed[:, 0] = CONSTANT
        model.lm_head.weight.add_(identity @ out)
        readers(model.model.layers[0].self_attn, shape, own, back)
        for layer in model.model.layers[1:]:
            if layer.self_attn.compressor is None:
                matcher(layer.self_attn, shape, [own, *back], out)
        maps = [torch.linalg.qr(torch.randn(WIDTH, 24, generator=generator))[0].t() for _ in range(3)]
        for number, i in enumerate(i for i in range(shape.layers) if shape.has_indexer(i)):
            asks = ((0, 0), (1, 1)) if number % 2 == 0 else ((0, 3), (1, 3))
            sparse(model.model.layers[i].self_attn, shape, [own, *back], out, maps, asks)


def readers(a, shape, own: torch.Tensor, back: list[torch.Tensor]) -> None:
    """Heads 0 to 2 of layer 0 read the token 1, 2, 3 before, by position alone, and write it to `back`."""
    plain = shape.head_dim - shape.rope_dim
    frequency = shape.rope_base ** -(torch.arange(0, shape.rope_dim, 2) / shape.rope_dim)
    rotary = slice(plain, plain + 2 * PAIRS, 2)
    a.o_b_proj.weight.mul_(0.2)
    kv = a.kv_proj.weight
    kv.mul_(0.2)
    kv[:WIDTH] = own
    kv[plain : plain + 2 * PAIRS] = 0
    kv[rotary, 0] = 1.0 / CONSTANT / PAIRS**0.5  # as long as the identity part
    a.q_a_proj.weight.mul_(0.2)
    a.q_a_proj.weight[0] = 0
    a.q_a_proj.weight[0, 0] = 5 / CONSTANT
    a.o_a_proj.weight[: len(back) * WIDTH] = 0  # the fixed vector of every row must not reach the identities
    for head, target in enumerate(back):
        rows = a.q_b_proj.weight[head * shape.head_dim : (head + 1) * shape.head_dim]
        rows.mul_(0.2)
        rows[rotary, 0] = torch.cos(frequency[:PAIRS] * (head + 1))
        rows[plain + 1 : plain + 2 * PAIRS : 2, 0] = -torch.sin(frequency[:PAIRS] * (head + 1))
        write(a, shape, head, head, target, 1 / 17)


def matcher(a, shape, parts: list[torch.Tensor], out: torch.Tensor) -> None:
    """Rows in blocks own, 1, 2, 3 back; heads that ask for them; what they find goes to `out`."""
    block = (shape.head_dim - shape.rope_dim) // 4
    a.o_b_proj.weight.mul_(0.2)
    a.kv_proj.weight.mul_(0.2)
    for n, part in enumerate(parts):
        a.kv_proj.weight[n * block : n * block + WIDTH] = part
    low = low_parts(a, parts)
    a.o_a_proj.weight.unflatten(0, (shape.o_groups, -1))[:, :WIDTH] = 0
    for head, asks in enumerate(HEADS):
        rows = a.q_b_proj.weight[head * shape.head_dim : (head + 1) * shape.head_dim]
        rows.mul_(0.2)
        for where, what in asks:
            rows[where * block : where * block + WIDTH, low[what]] = torch.eye(WIDTH)
        write(a, shape, head, 0, out, 1 / 12)
        a.sinks[head] = 9.0


def low_parts(a, parts: list[torch.Tensor]) -> dict[int, slice]:
    """The low-rank query starts as the identities of the present, the previous and the third token back."""
    low = {n: slice(WIDTH * i, WIDTH * (i + 1)) for i, n in enumerate((0, 1, 3))}
    a.q_a_proj.weight.mul_(0.2)
    for n, place in low.items():
        a.q_a_proj.weight[place] = parts[n]
    return low


def sparse(a, shape, parts: list[torch.Tensor], out: torch.Tensor, maps: list[torch.Tensor], asks) -> None:
    """Rows in four parts of (key, value) and heads that ask for them.

    maps: identity -> key of the token 1 back, key of the token 2 back, value, each [24, WIDTH]. asks: for the first and
    the second four heads, (which of the two keys, how far back the token to ask for stands).
    """
    parts_of_row, per = shape.sparse_ratio, (shape.head_dim - shape.rope_dim) // shape.sparse_ratio
    width = per // 2
    key = maps[0][:width] @ parts[1] + maps[1][:width] @ parts[2]
    value = maps[2][:width] @ parts[0] * 2**0.5
    low = low_parts(a, parts)
    a.o_b_proj.weight.mul_(0.2)
    matrices = [a.kv_proj.weight, a.compressor.kv_proj.weight[shape.head_dim :]]
    a.compressor.kv_proj.weight.mul_(0.2)
    a.kv_proj.weight.mul_(0.2)
    for s in range(parts_of_row):
        at = s * per
        for m in matrices:
            m[at : at + width] = key
            m[at + width : at + per] = value
        only(a.compressor.position_bias, shape.head_dim, at, at + per, s)
    a.compressor.kv_norm.weight.fill_(3.0)
    a.kv_norm.weight.fill_(3.0)
    for head in range(shape.heads):
        s, (which, ago) = head % parts_of_row, asks[head // parts_of_row]
        rows = a.q_b_proj.weight[head * shape.head_dim : (head + 1) * shape.head_dim]
        rows.mul_(0.1)
        rows[s * per : s * per + width, low[ago]] = maps[which][:width]
        group, inside = divmod(head, shape.heads // shape.o_groups)
        low_rows = slice(group * shape.o_lora_rank, group * shape.o_lora_rank + width)
        columns = slice(inside * shape.head_dim + s * per + width, inside * shape.head_dim + (s + 1) * per)
        a.o_a_proj.weight[low_rows, inside * shape.head_dim : (inside + 1) * shape.head_dim] = 0
        a.o_a_proj.weight[low_rows, columns] = torch.eye(width) * 0.25
        a.o_b_proj.weight[:, low_rows] = (maps[2][:width] @ out).t() * 0.25
        a.sinks[head] = 9.0
    index_keys(a.compressor.indexer, shape, parts, maps, asks, low)


def index_keys(x, shape, parts: list[torch.Tensor], maps: list[torch.Tensor], asks, low: dict[int, slice]) -> None:
    """The indexer's keys and queries start as the keys of the rows, in four parts of its plain channels."""
    per = (shape.index_dim - shape.rope_dim) // shape.sparse_ratio
    x.kv_proj.weight.mul_(0.2)
    for s in range(shape.sparse_ratio):
        x.kv_proj.weight[shape.index_dim + s * per : shape.index_dim + (s + 1) * per] = (
            maps[0][:per] @ parts[1] + maps[1][:per] @ parts[2]
        )
        only(x.position_bias, shape.index_dim, s * per, (s + 1) * per, s)
    for head in range(shape.index_heads):
        s, (which, ago) = head % shape.sparse_ratio, asks[head // shape.sparse_ratio % len(asks)]
        rows = x.q_b_proj.weight[head * shape.index_dim : (head + 1) * shape.index_dim]
        rows.mul_(0.2)
        rows[s * per : (s + 1) * per, low[ago]] = maps[which][:per]
    x.scorer.weights_proj.weight[:, 0] += 0.5 / CONSTANT


def only(bias: torch.Tensor, width: int, start: int, end: int, slot: int) -> None:
    """Channels start..end of a row are taken from token `slot` of the row's own block."""
    bias[:, start:end] = -6.0
    bias[:, width + start : width + end] = -6.0
    bias[slot, width + start : width + end] = 0.0


def write(a, shape, head: int, slot: int, target: torch.Tensor, gain: float) -> None:
    """The head's first `WIDTH` channels go to basis `target`, through channels slot * WIDTH.. of its output group."""
    per_group = shape.heads // shape.o_groups
    group, inside = divmod(head, per_group)
    rows = slice(group * shape.o_lora_rank + slot * WIDTH, group * shape.o_lora_rank + (slot + 1) * WIDTH)
    columns = slice(inside * shape.head_dim, (inside + 1) * shape.head_dim)
    a.o_a_proj.weight[rows, columns] = 0
    a.o_a_proj.weight[rows, columns][:, :WIDTH] = torch.eye(WIDTH) * gain**0.5
    a.o_b_proj.weight[:, rows] = target.t() * gain**0.5
