"""Q8_0: 32 signed bytes and a float16 scale, on any device of torch.

The scale is the largest magnitude / 127, and codes are rounded with the scale as it is stored. Importance cannot change
much at 8 bits and is not used.
"""

from __future__ import annotations

import torch

BLOCK, BLOCK_BYTES = 32, 34

_LARGEST = 65504.0


def encode(values: torch.Tensor) -> torch.Tensor:
    """uint8 [rows, cols / 32 * 34] from finite float32 values [rows, cols], on their device."""
    blocks = values.reshape(-1, BLOCK)
    d = (blocks.abs().amax(dim=1, keepdim=True) / 127).clamp_(max=_LARGEST).half()
    inverse = torch.where(d > 0, 1 / d.float(), 0.0)
    out = torch.empty(len(blocks), BLOCK_BYTES, dtype=torch.uint8, device=values.device)
    out[:, :2] = d.view(torch.uint8)
    codes = (blocks * inverse).round_().clamp_(-127, 127)
    out[:, 2:].view(torch.int8).copy_(codes)
    return out.view(len(values), -1)
