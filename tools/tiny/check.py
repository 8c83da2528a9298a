"""Checks that need no GPU: the training forward against transformers, Sinkhorn's gradient, the quantisers; a file.

    python tools/tiny/check.py [--file FILE.gguf --weights DIR [--done MARKER]]

With a file: its tensors are the rounded weights, and the engine's logits through it are those of the training forward.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import model as m
import ops
import quantize as q
import torch
import weights


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


def file_against_weights(file: Path, folder: Path, length: int = 384) -> float:
    """Mean difference of the probabilities of a dialogue's next tokens, engine through the file against training.

    The training forward rounds the experts as the file does; what differs is the 8-bit rounding of the other matrices.
    A factor on all logits (export.py --sharpen) is taken from the file.
    """
    from ds4.engine.loading import load
    from ds4.gguf.blocks import dequantize
    from ds4.gguf.file import open_model

    shape = m.toy_shape() if (weights.read_info(folder) or {}).get("shape") == "custom" else m.tiny_shape()
    model = m.new_model(shape)
    weights.load(model, folder)
    source = open_model(file)
    norm = dequantize(source.raw("output_norm.weight"), source.tensors["output_norm.weight"].type, shape.hidden)
    model.model.norm.weight.data *= (norm / model.model.norm.weight.detach()).median()
    engine = load(file)
    tokens = dialogue(length)
    theirs = engine.step([(engine.session(), tokens)], logits="all")[0]
    forward = m.Forward(model, shape, "cpu", torch.float32)
    forward.delta = q.expert_deltas(model)
    with torch.no_grad():
        ours = forward.logits(torch.tensor([tokens]), qat=True, select=shape.index_top_k)[0]
    ours, theirs = ours.softmax(-1), theirs.softmax(-1)
    return (ours - theirs).abs().sum(-1).mean().item() / 2


def dialogue(length: int) -> list[int]:
    """Token ids of training text, the same every time."""
    from data import Generator

    return Generator(3).row(length, "mixed")[0].tolist()


def main() -> int:
    """The number of checks that failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, help="an exported file")
    parser.add_argument("--weights", type=Path, help="the folder that it was made from")
    parser.add_argument("--done", type=Path, help="file to make if all is well")
    args = parser.parse_args()
    failures = 0
    checks = [
        (sinkhorn_gradient, 1e-5),
        (against_transformers, 1e-4),
        (flex_against_dense, 1e-3),
        (no_parameter_without_gradient, 0),
        (codecs_against_gguf, 0),
    ]
    for check, limit in checks:
        worst = check()
        failures += worst > limit
        print(f"{check.__name__}: {worst:.2e} (limit {limit:.0e})", flush=True)
    if args.file:
        worst = file_against_weights(args.file, args.weights)
        failures += worst > 0.03
        print(f"file_against_weights: {worst:.2e} (limit 3e-02)", flush=True)
    if args.done and not failures:
        args.done.touch()
    return failures


if __name__ == "__main__":
    sys.exit(main())
