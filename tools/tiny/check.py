"""Checks of the training forward that need no GPU: equality with transformers in float32, Sinkhorn's gradient."""

from __future__ import annotations

import sys

import model as m
import ops
import quantize as q
import torch


def randomise(module, seed: int) -> None:
    """Values that exercise every parameter: normals everywhere, norms near 1."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in module.named_parameters():
            noise = torch.randn(p.shape, generator=g)
            if "norm" in name:
                p.copy_(1 + 0.1 * noise)
            elif name.endswith(("base", "sinks", "position_bias", "scale")):
                p.copy_(0.5 * noise)
            else:
                p.copy_(0.06 * noise)


def against_transformers(length: int = 768) -> float:
    """Largest logit difference to transformers on random weights, top-k on, rounding off, float32."""
    shape = m.tiny_shape(index_heads=32)  # with few heads equal scores (ReLU zeros) make the selection ambiguous
    model = m.new_model(shape)
    randomise(model, 1)
    tokens = torch.randint(0, shape.vocab, (2, length), generator=torch.Generator().manual_seed(2))
    forward = m.Forward(model, shape, "cpu", torch.float32)
    with torch.no_grad():
        ours = forward.logits(tokens, qat=False, select=shape.index_top_k)
        theirs = model(tokens, use_cache=False).logits
    print("logit size", theirs.abs().max().item())
    return (ours - theirs).abs().max().item()


def flex_against_dense(length: int = 256, device: str = "cpu", gradients: bool = False) -> float:
    """Largest difference of the FlexAttention path to the dense one: losses, and gradients where a GPU is at hand."""
    shape = m.tiny_shape()
    model = m.new_model(shape)
    randomise(model, 1)
    model.to(device)
    g = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, shape.vocab, (2, length), generator=g).to(device)
    sample = (torch.randint(0, length, (2, 16), generator=g).to(device), torch.rand(2, 16, generator=g).to(device))
    worst = 0.0
    for select in (0, 32):
        results = []
        for flex in (False, True):
            forward = m.Forward(model, shape, device, torch.float32, compiled=flex and gradients, flex=flex)
            model.zero_grad()
            with torch.set_grad_enabled(gradients):
                ce, _, kl, held, _ = forward.loss(tokens, tokens, sample, qat=False, select=select)
            if gradients:
                (ce.mean() + sum(kl)).backward()
            results.append(
                (ce.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
            )
        (ce0, g0), (ce1, g1) = results
        worst = max(
            [worst, (ce0 - ce1).abs().max().item()] + [((g0[n] - g1[n]).norm() / g0[n].norm()).item() for n in g0]
        )
        print("select", select, "kl", [k.item() for k in kl], "held", [h.item() for h in held])
    return worst


def no_parameter_without_gradient(length: int = 256) -> float:
    """Number of parameters that language loss and indexer loss together leave without a gradient."""
    shape = m.tiny_shape()
    model = m.new_model(shape)
    randomise(model, 1)
    g = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, shape.vocab, (2, length), generator=g)
    sample = (torch.randint(0, length, (2, 16), generator=g), torch.rand(2, 16, generator=g))
    ce, _, kl, _, _ = m.Forward(model, shape, "cpu", torch.float32).loss(tokens, tokens, sample)
    (ce.mean() + sum(kl)).backward()
    missing = [n for n, p in model.named_parameters() if p.grad is None or p.grad.abs().sum() == 0]
    print(missing)
    return float(len(missing))


def sinkhorn_gradient() -> float:
    """Largest difference of the stored-divisor gradient to autograd through the plain iteration, float64 reference."""
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    g = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
    ref = x.double().requires_grad_()
    c = torch.softmax(ref.view(-1, 4, 4), -1) + ops.EPS
    for step in range(ops.STEPS):
        c = c / (c.sum(1 if step % 2 == 0 else 2, keepdim=True) + ops.EPS)
    c.reshape(-1, 16).backward(g.double())
    mine = x.clone().requires_grad_()
    out = ops.sinkhorn(mine)[0]
    out.backward(g)
    return max((out - c.reshape(-1, 16)).abs().max().item(), (mine.grad - ref.grad).abs().max().item())


def codecs_against_gguf() -> float:
    """Largest difference between the values used in training and the gguf package's decoding of the packed bytes."""
    import gguf

    worst = 0.0
    g = torch.Generator().manual_seed(3)
    for name in ("Q8_0", "Q2_K", "IQ2_XXS"):
        for size in (1.0, 0.05, 1e-3):
            w = size * torch.randn(64, 512, generator=g)
            w[:3, :256] = 0  # blocks of zeros
            data, kind = q.encode(w, name), getattr(gguf.GGMLQuantizationType, name)
            decoded = torch.from_numpy(gguf.dequantize(data, kind))
            mine = q.rounded(w, name)
            worst = max(worst, (decoded - mine).abs().max().item())
            print(name, size, "relative error", ((mine - w).norm() / w.norm()).item())
    return worst


if __name__ == "__main__":
    failures = 0
    for check, limit in (
        (sinkhorn_gradient, 1e-5),
        (against_transformers, 1e-4),
        (flex_against_dense, 1e-3),
        (no_parameter_without_gradient, 0),
        (codecs_against_gguf, 0),
    ):
        worst = check()
        failures += worst > limit
        print(f"{check.__name__}: {worst:.2e} (limit {limit:.0e})", flush=True)
    sys.exit(failures)
