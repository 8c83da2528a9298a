"""Optimisers of the training run: Muon for matrices inside the blocks, AdamW for everything else."""

from __future__ import annotations

import torch

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ADAM_NAMES = ("embed_tokens", "lm_head", "norm", "hc", "gate.weight", "sinks", "position_bias")


def orthogonalise(g: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Newton-Schulz iteration: g [n, rows, cols] -> the nearest semi-orthogonal matrices, bfloat16."""
    a, b, c = COEFFICIENTS
    x = g.bfloat16()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    for _ in range(steps):
        s = x @ x.mT
        x = a * x + (b * s + c * s @ s) @ x
    return x.mT if tall else x


def stacked(name: str, p: torch.Tensor, shape) -> torch.Tensor:
    """View [n, rows, cols] of a parameter as its independent matrices: gate, up, down of each expert, output groups."""
    if p.dim() == 3:
        return p.view(2 * p.shape[0], p.shape[1] // 2, p.shape[2]) if "gate_up" in name else p
    return p.view(shape.o_groups, -1, p.shape[1]) if "o_a_proj" in name else p.unsqueeze(0)


class Optimiser:
    """Muon and AdamW over one module; `step(scale)` multiplies every learning rate by the schedule's value."""

    def __init__(
        self, model, shape, lr: float = 0.02, adam_lr: float = 3e-3, index_lr: float = 2.1e-3, decay: float = 0.01
    ):
        self.lr, self.decay, self.momentum, self.shape = lr, decay, 0.95, shape
        self.groups: dict[tuple[int, int], list[tuple[str, torch.Tensor]]] = {}
        adam, index = [], []
        for name, p in model.named_parameters():
            if "indexer" in name:
                index.append(p)
            elif any(n in name for n in ADAM_NAMES) and "compressor.gate_proj" not in name:
                adam.append(p)
            else:
                self.groups.setdefault(tuple(stacked(name, p, shape).shape[1:]), []).append((name, p))
        self.sizes = {s: [len(stacked(n, p, shape)) for n, p in v] for s, v in self.groups.items()}
        self.buffers = {s: torch.zeros(sum(self.sizes[s]), *s, device=v[0][1].device) for s, v in self.groups.items()}
        fused = next(model.parameters()).is_cuda
        self.base = [adam_lr, index_lr]
        groups = [{"params": adam, "lr": adam_lr}, {"params": index, "lr": index_lr}]
        self.adam = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0, fused=fused)
        self.adam_params = [adam, index]

    @torch.no_grad()
    def step(self, scale: float) -> None:
        for size, members in self.groups.items():
            grad = torch.cat([stacked(name, p.grad, self.shape) for name, p in members])
            buffer = self.buffers[size]
            buffer.lerp_(grad, 1 - self.momentum)
            update = orthogonalise(grad.lerp(buffer, self.momentum)).float()
            lr = self.lr * scale
            data = [stacked(name, p.data, self.shape) for name, p in members]
            torch._foreach_mul_(data, 1 - lr * self.decay)
            torch._foreach_add_(
                data, list(update.split(self.sizes[size])), alpha=-lr * max(1, size[0] / size[1]) ** 0.5
            )
        for params in self.adam_params:
            torch.nn.utils.clip_grad_norm_([p for p in params if p.grad is not None], 1.0, foreach=True)
        for group, lr in zip(self.adam.param_groups, self.base, strict=True):
            group["lr"] = lr * scale
        self.adam.step()

    def zero_grad(self, model) -> None:
        for p in model.parameters():
            p.grad = None
