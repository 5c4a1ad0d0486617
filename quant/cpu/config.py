"""Which layers `cpu_int8` quantizes. Imported in every vLLM process, so it loads nothing of its own."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from quant.cpu.plugin import NAME

ROUTERS = ("gate", "router", "shared_expert_gate")
"""Last part of the names of layers that choose or weigh experts: tiny, and an error there moves much."""


class CpuInt8Config(QuantizationConfig):  # type: ignore[misc]
    """Linear layers, experts and the head; not embeddings, not routers. Activations are float32."""

    def get_name(self) -> str:
        return NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return -1

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> CpuInt8Config:
        return cls()

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        # The kernel and vLLM's layers are imported only in the process that builds a model.
        from quant.cpu.method import method_for

        return method_for(layer, router=prefix.rpartition(".")[2] in ROUTERS)
