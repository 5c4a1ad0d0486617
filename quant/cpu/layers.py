"""How vLLM's layers are quantized and computed by a scheme.

Full-precision weights are loaded one layer at a time (vLLM's own way for quantization while loading), made
small and dropped, so an engine never holds the whole model twice. Everything a product needs lies in the
layer's parameters in the scheme's order; nothing is cached beside them, so a reload that writes new
parameters is complete, and the quantized layers equal those of a fresh engine.

Adapters work on top: vLLM's wrappers call `apply` on the base layer and add their own product.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase, RoutedExperts
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG, FusedMoEQuantConfig
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import initialize_online_processing
from vllm.model_executor.parameter import ModelWeightParameter
from vllm.model_executor.utils import replace_parameter, set_weight_attrs

from quant.cpu.scheme import Scheme


def method_for(layer: Module, scheme: Scheme, *, router: bool) -> Any:
    """The method of one layer; None leaves it as vLLM has it."""
    if isinstance(layer, RoutedExperts):
        return ExpertsMethod(layer.moe_config, scheme)
    if isinstance(layer, LinearBase):
        return UnquantizedLinearMethod() if router else LinearMethod(scheme)
    if isinstance(layer, ParallelLMHead):
        return HeadMethod(scheme)
    return None


class LinearMethod(LinearMethodBase):  # type: ignore[misc]
    """A linear layer: `weight` and `weight_scales` as the scheme packs them."""

    uses_meta_device = True

    def __init__(self, scheme: Scheme) -> None:
        self._scheme = scheme

    def create_weights(
        self,
        layer: Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        shape = (sum(output_partition_sizes), input_size_per_partition)
        weight = ModelWeightParameter(
            data=torch.empty(shape, device="meta", dtype=params_dtype),
            input_dim=1,
            output_dim=0,
            weight_loader=extra_weight_attrs.pop("weight_loader"),
        )
        layer.register_parameter("weight", weight)
        set_weight_attrs(weight, extra_weight_attrs)
        initialize_online_processing(layer)

    def process_weights_after_loading(self, layer: Any) -> None:
        if layer.weight.dtype is self._scheme.dtype:
            return
        if getattr(layer, "_cpu_skip_gemm_dispatch", False):
            raise NotImplementedError("on a CPU this recipe does not serve latent attention (MLA)")
        layer.small_outputs = layer.weight.shape[0]
        q, scales = self._scheme.pack_linear(layer.weight.data)
        replace_parameter(layer, "weight", q)
        replace_parameter(layer, "weight_scales", scales)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return self._scheme.linear(x, (layer.weight, layer.weight_scales), layer.small_outputs, bias)


class HeadMethod(UnquantizedEmbeddingMethod):  # type: ignore[misc]
    """The head. Weights of its own become small; tied ones stay the embedding's, beside a small copy.

    A reload does not visit a tied head: whoever reloads calls `process_weights_after_loading` on it once
    the embedding is new, and the copy is made again.
    """

    def __init__(self, scheme: Scheme) -> None:
        self._scheme = scheme

    def process_weights_after_loading(self, layer: Any) -> None:
        if layer.weight.dtype is self._scheme.dtype:
            return
        layer.small_outputs = layer.weight.shape[0]
        q, scales = self._scheme.pack_linear(layer.weight.data)
        if layer.tied:
            _set(layer, "qweight", q)
        else:
            replace_parameter(layer, "weight", q)
        _set(layer, "weight_scales", scales)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        q = layer.qweight if layer.tied else layer.weight
        return self._scheme.linear(x, (q, layer.weight_scales), layer.small_outputs, bias)

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        super().create_weights(layer, *args, **kwargs)
        layer.tied = False

    def tie_weights(self, layer: Any, embed_tokens: Module) -> Module:
        layer.tied = True
        tied: Module = super().tie_weights(layer, embed_tokens)
        return tied


class ExpertsMethod(FusedMoEMethodBase):  # type: ignore[misc]
    """All experts of a layer; SwiGLU experts without biases."""

    uses_meta_device = True

    def __init__(self, moe: Any, scheme: Scheme) -> None:
        super().__init__(moe)
        if moe.has_bias or not moe.is_act_and_mul or moe.activation != MoEActivation.SILU:
            raise NotImplementedError("on a CPU this recipe serves SwiGLU experts without biases only")
        self._scheme = scheme

    def create_weights(
        self,
        layer: RoutedExperts,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        inter = intermediate_size_per_partition
        shapes = {
            "w13_weight": (num_experts, 2 * inter, hidden_size),
            "w2_weight": (num_experts, hidden_size, inter),
        }
        for name, shape in shapes.items():
            weight = Parameter(torch.empty(shape, device="meta", dtype=params_dtype), requires_grad=False)
            layer.register_parameter(name, weight)
            set_weight_attrs(weight, extra_weight_attrs)
        initialize_online_processing(layer)

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        if layer.w13_weight.dtype is self._scheme.dtype:
            return
        if layer.apply_router_weight_on_input:
            raise NotImplementedError("on a CPU this recipe does not serve experts whose inputs are scaled")
        packed = self._scheme.pack_experts(layer.w13_weight.data, layer.w2_weight.data)
        for name, (q, scales) in zip(("w13", "w2"), packed, strict=True):
            replace_parameter(layer, f"{name}_weight", q)
            replace_parameter(layer, f"{name}_scales", scales)

    def get_fused_moe_quant_config(self, layer: RoutedExperts) -> FusedMoEQuantConfig:
        return FUSED_MOE_UNQUANTIZED_CONFIG

    def apply(
        self,
        layer: RoutedExperts,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any,
        shared_experts_input: Tensor | None,
    ) -> Tensor:
        if layer.expert_map is not None:
            topk_ids = layer.expert_map[topk_ids.long()]
        w13, w2 = (layer.w13_weight, layer.w13_scales), (layer.w2_weight, layer.w2_scales)
        return self._scheme.experts(x, w13, w2, topk_weights, topk_ids)


def _set(layer: Module, name: str, value: Tensor) -> None:
    """Register `value`, or copy it into the parameter that is there: a reload keeps its parameters."""
    existing = getattr(layer, name, None)
    if existing is None:
        layer.register_parameter(name, Parameter(value, requires_grad=False))
    else:
        existing.data.copy_(value)
