"""The deployment's worker with what only a bench asks of it.

Given to vLLM instead of the deployment's own (``--worker-extension-cls``), called over ``/collective_rpc``.
With the products left out, an engine's speed is what no kernel can exceed: everything else that a step does.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch

from quant.cpu.kernel import Int8Kernel
from server.engine.worker.extension import RatchetWorker

NAME = f"{__name__}.BenchWorker"
_linear, _experts = Int8Kernel.linear, Int8Kernel.experts


class BenchWorker(RatchetWorker):
    """Mixed into vLLM's worker, as `RatchetWorker` is."""

    def leave_products_out(self, out: bool) -> None:
        """True: linear layers, experts and head of recipe cpu-int8 answer zeros at once."""
        Int8Kernel.linear = _zeros if out else _linear  # type: ignore[method-assign, assignment]
        Int8Kernel.experts = _no_experts if out else _experts  # type: ignore[method-assign, assignment]

    def weight_bytes(self) -> dict[str, int]:
        """Memory of the model's weights: ``experts``, ``embedding`` and the ``rest``, adapters left out.

        What is shared counts once, as what it is named first.
        """
        model = self.model_runner.get_model()
        sizes, seen = {"experts": 0, "embedding": 0, "rest": 0}, set()
        for name, tensor in chain(model.named_parameters(), model.named_buffers()):
            storage = tensor.untyped_storage()
            if "lora" in name or storage.data_ptr() in seen:
                continue
            seen.add(storage.data_ptr())
            kind = "experts" if "experts" in name else "embedding" if "embed_tokens" in name else "rest"
            sizes[kind] += storage.nbytes()
        return sizes


def _zeros(kernel: Int8Kernel, x: torch.Tensor, weights: Any, bias: Any = None) -> torch.Tensor:
    return x.new_zeros(*x.shape[:-1], weights.outputs)


def _no_experts(kernel: Int8Kernel, x: torch.Tensor, *rest: Any) -> torch.Tensor:
    return torch.zeros_like(x)
