"""Weights to int8 and back, and the order in which the native kernel reads them.

Pure functions of tensors. Symmetric, one scale per output channel: ``weight[n] ~ scale[n] * q[n]`` with
``|q| <= 127``, so the error of an element is at most half its channel's scale.

Shapes: E experts, N output channels, K inputs, I intermediate size, P panels of 32 channels.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

LEVELS = 127
ACTIVATION_LEVELS = 8191
"""What the kernel rounds a row of activations to: 14 bits."""
BLOCK = 16
PANEL = 32
_SMALLEST = 1e-30


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Float [..., N, K] to (int8 [..., N, K], float32 scales [..., N]).

    Raises ValueError when a weight is not finite: a scale made from it would silence its whole channel.
    """
    weight = weight.float()
    scale = weight.abs().amax(-1) / LEVELS
    if not bool(torch.isfinite(scale).all()):
        raise ValueError("weights hold NaN or infinity: refusing to quantize them")
    scale = scale.clamp_min(_SMALLEST)
    return (weight / scale.unsqueeze(-1)).round_().clamp_(-LEVELS, LEVELS).to(torch.int8), scale


def dequantize(q: Tensor, scale: Tensor) -> Tensor:
    """The float32 weights that the kernel multiplies with, [..., N, K]."""
    return q.float() * scale.unsqueeze(-1)


def pack(q: Tensor) -> Tensor:
    """Int8 [..., N, K] to the kernel's [..., P, 2, K/2, 16, 2]; N and K are padded with zeros."""
    *lead, n, k = q.shape
    padded = functional.pad(q, (0, k % 2, 0, -n % PANEL))
    return padded.view(*lead, -1, 2, BLOCK, (k + 1) // 2, 2).transpose(-3, -2).contiguous()


def pack_gate_up(q: Tensor) -> Tensor:
    """Int8 [E, 2 I, K], gate rows then up rows, to [E, I/16, 2, K/2, 16, 2].

    A panel is 16 gates and their ups. I is padded with zeros to a multiple of 16, which adds
    ``silu(0) * 0``.
    """
    experts, double, k = q.shape
    inter = double // 2
    padded = functional.pad(q.view(experts, 2, inter, k), (0, k % 2, 0, -inter % BLOCK))
    blocks = padded.view(experts, 2, -1, BLOCK, (k + 1) // 2, 2)
    return blocks.permute(0, 2, 1, 4, 3, 5).contiguous()


def pad_last(values: Tensor, multiple: int) -> Tensor:
    """`values` with zeros appended to its last dimension up to a multiple."""
    return functional.pad(values, (0, -values.shape[-1] % multiple))
