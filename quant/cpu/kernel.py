"""The native int8 kernel as two calls on torch tensors.

Plain C through ctypes: no torch headers to match, a call costs microseconds, and the interpreter lock is
released while it runs. Threads come from the OpenMP runtime that the process already has (torch's, or the
one an engine preloads), so there is one pool.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from quant.cpu import build
from quant.cpu.quantize import BLOCK, GROUP, PANEL, pack, pack_gate_up, quantize


class Isa(IntEnum):
    """Instruction sets of the kernel, slowest first; all give the same bits."""

    PLAIN = 0
    AVX2 = 1
    AVX512 = 2
    VNNI = 3


@dataclass(slots=True, frozen=True)
class LinearWeights:
    """One matrix in the kernel's order (`quantize.pack`) with its number of outputs."""

    q: Tensor
    scales: Tensor
    outputs: int

    @classmethod
    def of(cls, weight: Tensor) -> LinearWeights:
        """From float [N, K]."""
        return cls(*pack(quantize(weight)), outputs=weight.shape[0])


@dataclass(slots=True, frozen=True)
class ExpertWeights:
    """All experts of one layer in the kernel's order (`quantize.pack_gate_up` and `quantize.pack`)."""

    q13: Tensor
    s13: Tensor
    q2: Tensor
    s2: Tensor

    @classmethod
    def of(cls, w13: Tensor, w2: Tensor) -> ExpertWeights:
        """From float gate-and-up [E, 2 I, H] and down [E, H, I] matrices."""
        padded = functional.pad(w2, (0, -w2.shape[2] % BLOCK))
        return cls(*pack_gate_up(quantize(w13)), *pack(quantize(padded)))


class _ExpertsStruct(ctypes.Structure):
    _fields_ = [
        ("q13", ctypes.c_void_p),
        ("s13", ctypes.c_void_p),
        ("q2", ctypes.c_void_p),
        ("s2", ctypes.c_void_p),
        ("experts", ctypes.c_int64),
        ("hidden", ctypes.c_int64),
        ("inter", ctypes.c_int64),
    ]


class Int8Kernel:
    """The library at `path`, on one instruction set (the best this CPU has unless told)."""

    def __init__(self, path: Path, isa: Isa | None = None) -> None:
        self._library = ctypes.CDLL(str(path))
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        self._linear = self._library.ratchet_int8_linear
        self._linear.argtypes = [ctypes.c_int, pointer, size, size, pointer, pointer, pointer, size, pointer]
        self._linear.restype = None
        self._experts = self._library.ratchet_int8_experts
        self._experts.argtypes = [
            ctypes.c_int,
            ctypes.POINTER(_ExpertsStruct),
            *(pointer, size, pointer, pointer, size, pointer),
        ]
        self._experts.restype = ctypes.c_int
        available = self.supported()
        if isa is not None and isa not in available:
            raise ValueError(f"this CPU does not run {isa.name}")
        self.isa = available[-1] if isa is None else isa

    def supported(self) -> list[Isa]:
        """What this CPU runs, slowest first."""
        return [isa for isa in Isa if self._library.ratchet_int8_isa_supported(int(isa))]

    def linear(self, x: Tensor, weights: LinearWeights, bias: Tensor | None = None) -> Tensor:
        """``x @ weight.T + bias``: float32 [..., K] to [..., N]."""
        n, k = weights.outputs, x.shape[-1]
        rows = _float_rows(x, groups=weights.q.shape[2])
        y = torch.empty((rows.shape[0], n), dtype=torch.float32)
        self._linear(
            int(self.isa),
            rows.data_ptr(),
            rows.shape[0],
            k,
            weights.q.data_ptr(),
            weights.scales.data_ptr(),
            None if bias is None else bias.data_ptr(),
            n,
            y.data_ptr(),
        )
        return y.view(*x.shape[:-1], n)

    def experts(self, x: Tensor, weights: ExpertWeights, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        """Weighted sum of each token's chosen SwiGLU experts: float32 [T, H] to [T, H].

        `topk_ids` [T, C] names experts, a negative id none; an id past the last expert is a ValueError.
        """
        count, panels, hidden = weights.q13.shape[0], weights.q13.shape[1], x.shape[-1]
        rows = _float_rows(x, groups=weights.q13.shape[3])
        ids = topk_ids.to(torch.int32).contiguous()
        scores = topk_weights.to(torch.float32).contiguous()
        if (
            ids.shape != scores.shape
            or ids.shape[0] != rows.shape[0]
            or -(-hidden // PANEL) != weights.q2.shape[1]
        ):
            raise ValueError(
                f"ids {list(ids.shape)} and weights {list(scores.shape)} do not fit {list(x.shape)}"
            )
        layer = _ExpertsStruct(
            weights.q13.data_ptr(),
            weights.s13.data_ptr(),
            weights.q2.data_ptr(),
            weights.s2.data_ptr(),
            count,
            hidden,
            panels * BLOCK,
        )
        y = torch.empty_like(rows)
        failed = self._experts(
            int(self.isa),
            ctypes.byref(layer),
            rows.data_ptr(),
            rows.shape[0],
            ids.data_ptr(),
            scores.data_ptr(),
            ids.shape[1],
            y.data_ptr(),
        )
        if failed:
            raise ValueError(f"expert {int(ids.max())} of {count}")
        return y


def _float_rows(x: Tensor, groups: int) -> Tensor:
    """`x` as contiguous float32 rows; raises ValueError when it does not fit weights of so many groups."""
    k = x.shape[-1]
    if x.dtype is not torch.float32 or -(-k // GROUP) != groups:
        raise ValueError(
            f"activations {x.dtype} {list(x.shape)} do not fit weights of {groups} groups of {GROUP}"
        )
    return x.reshape(-1, k).contiguous()


@functools.cache
def load() -> Int8Kernel:
    """The kernel of this process, built first when needed. Raises build.BuildError."""
    return Int8Kernel(build.library())
