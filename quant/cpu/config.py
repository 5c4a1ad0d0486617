"""Which layers are quantized while loading on a CPU. Imported in every vLLM process: loads nothing more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

if TYPE_CHECKING:
    from quant.cpu.scheme import Scheme

ROUTERS = ("gate", "router", "shared_expert_gate")
"""Last part of the names of layers that choose or weigh experts: tiny, and an error there moves much."""


class OnlineConfig(QuantizationConfig):  # type: ignore[misc]
    """Linear layers, experts and the head; not embeddings, not routers. Activations are float32."""

    name: ClassVar[str]

    def get_name(self) -> str:
        return self.name

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return -1

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> OnlineConfig:
        return cls()

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        # Kernels and vLLM's layers are imported only in the process that builds a model.
        from quant.cpu.layers import method_for

        return method_for(layer, self.scheme(), router=prefix.rpartition(".")[2] in ROUTERS)

    def scheme(self) -> Scheme:
        raise NotImplementedError


class CpuInt8(OnlineConfig):
    """`quant.cpu.scheme.Int8`."""

    name = "cpu_int8"

    def scheme(self) -> Scheme:
        from quant.cpu.scheme import Int8

        return Int8()


class CpuBnbNf4(OnlineConfig):
    """`quant.cpu.bnb.Nf4`."""

    name = "cpu_bnb_nf4"

    def scheme(self) -> Scheme:
        from quant.cpu.bnb import Nf4

        return Nf4()


class CpuBnbInt8(OnlineConfig):
    """`quant.cpu.bnb.Int8Rows`."""

    name = "cpu_bnb_int8"

    def scheme(self) -> Scheme:
        from quant.cpu.bnb import Int8Rows

        return Int8Rows()


CONFIGS = (CpuInt8, CpuBnbNf4, CpuBnbInt8)
