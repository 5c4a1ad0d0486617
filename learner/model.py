"""The model being trained: a Hugging Face causal language model, its frozen weights, and one LoRA adapter.

Only attention projections get an adapter, since those are what both tiers can serve. Frozen weights ask for
no gradient, so backward costs activations only; logits are computed at sampled positions only.

Invariant: every module named as a target exists in every layer, or loading fails: an adapter that silently
covers part of a model is the field's most repeated fault.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from learner.batch import MicroBatch

WEIGHTS, SETTINGS = "adapter_model.safetensors", "adapter_config.json"
ADAPTER = "default"
"""peft's name of the one adapter that exists."""


class ModelError(Exception):
    """The model or adapter is not what the configuration says; the message names the modules."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """Shape of the adapter."""

    target_modules: tuple[str, ...]
    rank: int
    alpha: int


class PolicyModel(nn.Module):
    """Log-probs of sampled tokens under the base model with its adapter."""

    language_model: Any

    def __init__(self, language_model: nn.Module, adapter: Adapter | None) -> None:
        super().__init__()
        self.language_model = language_model
        self.adapter = adapter

    def forward(self, batch: MicroBatch) -> torch.Tensor:
        """Log-prob in nats of every target of `batch`, float32. [N]"""
        causal = self.language_model.get_base_model() if self.adapter else self.language_model
        hidden_BLH = causal.model(
            input_ids=batch.ids_BL,
            attention_mask=batch.mask_B1LL,
            position_ids=batch.positions_BL if batch.mask_B1LL is not None else None,
            use_cache=False,
        ).last_hidden_state
        logits_NV = causal.lm_head(hidden_BLH[batch.row_N, batch.predictor_N]).float()
        return -functional.cross_entropy(logits_NV, batch.target_N, reduction="none")

    def trainable(self) -> dict[str, nn.Parameter]:
        """The parameters being trained by name, in a fixed order."""
        return {name: p for name, p in self.named_parameters() if p.requires_grad}


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """How the frozen weights are held."""

    dtype: str = "float32"
    device: str = "cpu"
    experts: str | None = None
    """transformers' ``experts_implementation``; None leaves its choice."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the model's configuration and what they become (`rollout.positions`)."""


def load(path: str, adapter: Adapter | None, loading: Loading, *, seed: int) -> PolicyModel:
    """The model at `path` with a fresh adapter (an exact no-op); all of its weights train when None.

    Raises ModelError when a target module matches nothing, or not in every layer.
    """
    disable_progress_bar()
    extra = dict(loading.overrides)
    if loading.experts:
        extra["experts_implementation"] = loading.experts
    base = AutoModelForCausalLM.from_pretrained(
        path, dtype=getattr(torch, loading.dtype), attn_implementation="sdpa", **extra
    ).to(loading.device)
    if adapter is None:
        return PolicyModel(base, None)
    count_targets(base, adapter.target_modules)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        tuned = get_peft_model(base, _peft_config(adapter), autocast_adapter_dtype=True)
    return PolicyModel(tuned, adapter)


def count_targets(model: Any, targets: Sequence[str]) -> dict[str, int]:
    """How many modules each target names. Raises ModelError unless each is in every layer."""
    layers = int(model.config.get_text_config().num_hidden_layers)
    counts = {
        target: sum(name.endswith(f".{target}") for name, _ in model.named_modules()) for target in targets
    }
    wrong = {target: count for target, count in counts.items() if count != layers}
    if wrong:
        raise ModelError(f"target modules must match once in each of {layers} layers; matches: {wrong}")
    return counts


def adapter_weights(model: PolicyModel) -> dict[str, torch.Tensor]:
    """The adapter's tensors by the names that peft and vLLM read, detached, not copied."""
    return {_exported(name): p.detach() for name, p in model.trainable().items()}


@torch.no_grad()
def set_adapter_weights(model: PolicyModel, weights: dict[str, torch.Tensor]) -> None:
    """Copies `weights` into the adapter. Raises ModelError when names or shapes differ."""
    own = adapter_weights(model)
    if own.keys() != weights.keys():
        raise ModelError(f"the adapters differ in {sorted(own.keys() ^ weights.keys())[:4]}")
    for name, tensor in own.items():
        if tensor.shape != weights[name].shape:
            raise ModelError(f"{name} has shape {tuple(tensor.shape)}, not {tuple(weights[name].shape)}")
        tensor.copy_(weights[name])


def without_effect(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """An adapter of the same shape under which the model is the bare base."""
    return {name: torch.zeros_like(tensor) for name, tensor in weights.items()}


def save_adapter(folder: Path, adapter: Adapter, weights: dict[str, torch.Tensor]) -> None:
    """Writes ``adapter_config.json`` and ``adapter_model.safetensors`` (float32) into `folder`."""
    tensors = {name: tensor.float().cpu().contiguous() for name, tensor in weights.items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / WEIGHTS).chmod(0o644)  # safetensors makes it private to its writer
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": sorted(adapter.target_modules),
    }
    (folder / SETTINGS).write_text(json.dumps(settings, indent=2) + "\n")


def read_adapter(folder: Path, adapter: Adapter) -> dict[str, torch.Tensor]:
    """The tensors of the adapter in `folder`. Raises ModelError when its shape is not `adapter`."""
    settings: dict[str, Any] = json.loads((folder / SETTINGS).read_text())
    found = (settings["r"], settings["lora_alpha"], set(settings["target_modules"]))
    if found != (adapter.rank, adapter.alpha, set(adapter.target_modules)):
        raise ModelError(f"{folder}: rank, alpha and targets are {found}, the configuration says {adapter}")
    weights: dict[str, torch.Tensor] = load_file(folder / WEIGHTS)
    return weights


def _peft_config(adapter: Adapter) -> LoraConfig:
    return LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        target_modules=list(adapter.target_modules),
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )


def _exported(name: str) -> str:
    return name.removeprefix("language_model.").replace(f".{ADAPTER}.", ".")
