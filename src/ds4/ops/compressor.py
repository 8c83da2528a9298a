"""The compressor: blocks of tokens pooled into one row each (V4 graph, Compressor)."""

from __future__ import annotations

import torch
from torch import Tensor

from ds4.ops.elementwise import tree_sum


def pool_blocks(k: Tensor, z: Tensor, ratio: int, overlap: bool, first: bool) -> Tensor:
    """Pool complete blocks of `ratio` tokens by a softmax over the tokens, channel by channel.

    Args:
        k: values, float32 [blocks * ratio, width]; with `overlap` [(blocks + 1) * ratio, 2 * width], the block before
            the first included.
        z: gate logits (position bias added), same shape as k.
        overlap: row n pools the first half of block n - 1's channels and the second half of block n's own.
        first: with `overlap`, block n - 1 of the first row does not exist: its slots get weight 0.

    Returns:
        float32 [blocks, width], before norm and rope.
    """
    k, z = k.unflatten(0, (-1, ratio)), z.unflatten(0, (-1, ratio))
    if overlap:
        width = k.shape[-1] // 2
        k = torch.cat((k[:-1, :, :width], k[1:, :, width:]), dim=1)
        z = torch.cat((z[:-1, :, :width], z[1:, :, width:]), dim=1)
        if first:
            k[0, :ratio] = 0.0
            z[0, :ratio] = -torch.inf
    weight = torch.exp(z - z.amax(1, keepdim=True))
    return tree_sum(weight * k, 1) / tree_sum(weight, 1)
