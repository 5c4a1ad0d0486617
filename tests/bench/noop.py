"""A worker whose products can be left out: what an engine's step takes before anything is multiplied.

Given to vLLM instead of the deployment's worker by a bench (``--worker-extension-cls``), which switches it
over ``/collective_rpc``. The speed without products bounds what any kernel can reach.
"""

from __future__ import annotations

from typing import Any

import torch

from quant.cpu.kernel import Int8Kernel
from server.engine.worker.extension import RatchetWorker

_linear, _experts = Int8Kernel.linear, Int8Kernel.experts


class NoopWorker(RatchetWorker):
    """The deployment's worker with one call more."""

    def leave_products_out(self, out: bool) -> None:
        """True: linear layers, experts and head of recipe cpu-int8 answer zeros at once."""
        Int8Kernel.linear = _zeros if out else _linear  # type: ignore[method-assign, assignment]
        Int8Kernel.experts = _no_experts if out else _experts  # type: ignore[method-assign, assignment]


def _zeros(kernel: Int8Kernel, x: torch.Tensor, weights: Any, bias: Any = None) -> torch.Tensor:
    return x.new_zeros(*x.shape[:-1], weights.outputs)


def _no_experts(kernel: Int8Kernel, x: torch.Tensor, *rest: Any) -> torch.Tensor:
    return torch.zeros_like(x)
