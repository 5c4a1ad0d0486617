"""bitsandbytes' own formats and kernels on a CPU: the same numbers as on a GPU, slowly.

For checking what a deployment on GPUs will answer, not for serving: weights are expanded, or multiplied one
expert after another, by kernels that were not made for small batches.
"""

from __future__ import annotations

from typing import Protocol

import bitsandbytes
import torch
from bitsandbytes.functional import QuantState, get_4bit_type, int8_vectorwise_quant, quantize_4bit
from torch import Tensor
from torch.nn import functional

from quant.cpu.scheme import Packed

BLOCK = 64
"""Weights of nf4 that share a scale: consecutive ones, rows one after another (bitsandbytes' default)."""


class _Matrix(Protocol):
    def pack_linear(self, weight: Tensor) -> Packed: ...

    def linear(self, x: Tensor, packed: Packed, outputs: int, bias: Tensor | None) -> Tensor: ...


class _OneByOne:
    """Experts as matrices of their own, each multiplied with the tokens that chose it."""

    def pack_experts(self: _Matrix, w13: Tensor, w2: Tensor) -> tuple[Packed, Packed]:
        first, second = (zip(*map(self.pack_linear, weights), strict=True) for weights in (w13, w2))
        (q13, s13), (q2, s2) = map(torch.stack, first), map(torch.stack, second)
        return (q13, s13), (q2, s2)

    def experts(self: _Matrix, x: Tensor, w13: Packed, w2: Packed, scores: Tensor, ids: Tensor) -> Tensor:
        out, hidden = torch.zeros_like(x), x.shape[-1]
        for expert in torch.unique(ids[ids >= 0]).tolist():
            rows, choices = torch.where(ids == expert)
            both = self.linear(x[rows], (w13[0][expert], w13[1][expert]), 2 * _inputs(w2, hidden), None)
            gate, up = both.chunk(2, dim=-1)
            down = (w2[0][expert], w2[1][expert])
            made = self.linear(functional.silu(gate) * up, down, hidden, None)
            out.index_add_(0, rows, made * scores[rows, choices, None].to(made.dtype))
        return out


class Nf4(_OneByOne):
    """Four bits, levels of a normal distribution, one scale a block of 64; activations float32."""

    dtype = torch.uint8

    def __init__(self) -> None:
        self._levels = get_4bit_type("nf4", device="cpu")

    def pack_linear(self, weight: Tensor) -> Packed:
        q, state = quantize_4bit(weight.float().contiguous(), blocksize=BLOCK, quant_type="nf4")
        return q.flatten(), state.absmax

    def linear(self, x: Tensor, packed: Packed, outputs: int, bias: Tensor | None) -> Tensor:
        q, scales = packed
        state = QuantState(
            absmax=scales,
            shape=torch.Size((outputs, x.shape[-1])),
            code=self._levels,
            blocksize=BLOCK,
            quant_type="nf4",
            dtype=torch.float32,
        )
        made: Tensor = bitsandbytes.matmul_4bit(x, q.view(-1, 1).t(), quant_state=state, bias=bias)
        return made


class Int8Rows(_OneByOne):
    """Eight bits, one scale an output; activations eight bits, one scale a row."""

    dtype = torch.int8

    def pack_linear(self, weight: Tensor) -> Packed:
        q, scales, _ = int8_vectorwise_quant(weight.float())
        return q, scales

    def linear(self, x: Tensor, packed: Packed, outputs: int, bias: Tensor | None) -> Tensor:
        rows, scales, _ = int8_vectorwise_quant(x.reshape(-1, x.shape[-1]))
        made: Tensor = torch.ops.bitsandbytes.int8_scaled_mm(
            rows, packed[0], scales, packed[1], bias=bias, dtype=torch.float32
        )
        return made.view(*x.shape[:-1], outputs)


def _inputs(w2: Packed, hidden: int) -> int:
    """Inputs of packed down matrices [E, ...] of either format: weights an expert over outputs."""
    q = w2[0]
    weights: int = q[0].numel() * (2 if q.dtype is torch.uint8 else 1)
    return weights // hidden
