"""Weights to int8 and back, and the order in which the native kernel reads them.

Pure functions of tensors. A group is 32 consecutive inputs of one output channel; it has a scale and an
offset: ``w ~ scale * q + offset`` with q in -128..127 spanning the group's own range, so the error of an
element is at most half its group's scale. One scale a channel was measured to be too coarse for the
default model (top-1 agreement with full precision 95.8 %).

Shapes: E experts, N output channels, K inputs, G groups of 32 inputs, I intermediate size, P panels of 32
channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, unflatten
from torch.nn import functional

GROUP = 32
BLOCK = 16
PANEL = 32
STEPS = 255
ACTIVATION_LEVELS = 32767
"""What the kernel rounds the largest magnitude of a row of activations to."""


@dataclass(slots=True, frozen=True)
class Quantized:
    """Weights in their natural order: q int8 [..., N, 32 G], scale and offset float32 [..., N, G]."""

    q: Tensor
    scale: Tensor
    offset: Tensor


def quantize(weight: Tensor) -> Quantized:
    """From float [..., N, K]; K is padded with zeros to whole groups.

    Raises ValueError when a weight is not finite: it would silence its whole group.
    """
    weight = functional.pad(weight.float(), (0, -weight.shape[-1] % GROUP))
    grouped = unflatten(weight, -1, (-1, GROUP))
    low, high = grouped.aminmax(dim=-1)
    scale = (high - low) / STEPS
    if not bool(torch.isfinite(scale).all()):
        raise ValueError("weights hold NaN or infinity: refusing to quantize them")
    # A group of equal weights is its offset alone.
    steps = torch.where(scale > 0, scale, torch.ones_like(scale)).unsqueeze(-1)
    q = ((grouped - low.unsqueeze(-1)) / steps).round_().clamp_(0, STEPS).sub_(128).to(torch.int8)
    return Quantized(q.flatten(-2), scale, low + 128 * scale)


def dequantize(weights: Quantized) -> Tensor:
    """The float32 weights that the kernel multiplies with, [..., N, 32 G]."""
    grouped = unflatten(weights.q, -1, (-1, GROUP)).float()
    return (grouped * weights.scale.unsqueeze(-1) + weights.offset.unsqueeze(-1)).flatten(-2)


def pack(weights: Quantized) -> tuple[Tensor, Tensor]:
    """The kernel's order: q [..., P, 2, G, 16, 16, 2] and scales [..., P, 2, G, 2, 16].

    A panel is two blocks of 16 channels. N is padded with channels whose scale and offset are zero.
    """
    missing = -weights.q.shape[-2] % PANEL
    q, scale, offset = (functional.pad(part, (0, 0, 0, missing)) for part in _parts(weights))
    blocks = unflatten(unflatten(q, -2, (-1, 2, BLOCK)), -1, (-1, GROUP // 2, 2))
    return blocks.movedim(-4, -2).contiguous(), _pack_scales(scale, offset)


def pack_gate_up(weights: Quantized) -> tuple[Tensor, Tensor]:
    """As `pack`, of [E, 2 I, ...] with gate channels then up channels: a panel is 16 gates and their ups.

    I is padded to a multiple of 16 with channels of zeros, which add ``silu(0) * 0``.
    """
    halves = [unflatten(part, 1, (2, -1)) for part in _parts(weights)]
    missing = -halves[0].shape[2] % BLOCK
    interleaved = [
        unflatten(functional.pad(half, (0, 0, 0, missing)), 2, (-1, BLOCK)).transpose(1, 2).flatten(1, 3)
        for half in halves
    ]
    return pack(Quantized(*interleaved))


def _parts(weights: Quantized) -> tuple[Tensor, Tensor, Tensor]:
    return weights.q, weights.scale, weights.offset


def _pack_scales(scale: Tensor, offset: Tensor) -> Tensor:
    both = torch.stack([scale, offset], dim=-1)  # [..., N, G, 2]
    return unflatten(both, -3, (-1, 2, BLOCK)).movedim(-3, -1).contiguous()
