"""What a way of quantizing has to know: how weights are made small, and how they are multiplied.

`layers` brings it into vLLM's layers; a scheme sees tensors alone.

Shapes: N outputs, K inputs, E experts, I intermediate size, H hidden size, T tokens, C experts a token.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from quant.cpu import kernel
from quant.cpu.kernel import ExpertWeights, LinearWeights

Packed = tuple[Tensor, Tensor]
"""Small weights and their scales, in the order in which the scheme reads them."""


class Scheme(Protocol):
    """One way of quantizing."""

    dtype: torch.dtype
    """Of small weights: none that full precision has, so that what is done is told from what is not."""

    def pack_linear(self, weight: Tensor) -> Packed:
        """From float [N, K]."""

    def linear(self, x: Tensor, packed: Packed, outputs: int, bias: Tensor | None) -> Tensor:
        """``x @ weight.T + bias``: float32 [..., K] to [..., N]."""

    def pack_experts(self, w13: Tensor, w2: Tensor) -> tuple[Packed, Packed]:
        """From float gate-and-up [E, 2 I, H] and down [E, H, I] matrices."""

    def experts(self, x: Tensor, w13: Packed, w2: Packed, scores: Tensor, ids: Tensor) -> Tensor:
        """Sum of each token's chosen SwiGLU experts, weighted by `scores`: float32 [T, H] to [T, H].

        `ids` [T, C] names experts; a negative id names none.
        """


class Int8:
    """Our own kernel: groups of 32 weights, 16-bit activations, one native call a layer."""

    dtype = torch.int8

    def __init__(self) -> None:
        self._kernel = kernel.load()

    def pack_linear(self, weight: Tensor) -> Packed:
        made = LinearWeights.of(weight)
        return made.q, made.scales

    def linear(self, x: Tensor, packed: Packed, outputs: int, bias: Tensor | None) -> Tensor:
        return self._kernel.linear(x, LinearWeights(*packed, outputs), bias)

    def pack_experts(self, w13: Tensor, w2: Tensor) -> tuple[Packed, Packed]:
        made = ExpertWeights.of(w13, w2)
        return (made.q13, made.s13), (made.q2, made.s2)

    def experts(self, x: Tensor, w13: Packed, w2: Packed, scores: Tensor, ids: Tensor) -> Tensor:
        return self._kernel.experts(x, ExpertWeights(*w13, *w2), scores, ids)
