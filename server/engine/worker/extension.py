"""What runs inside vLLM's worker: control calls of the engine client, and the repairs that make them right.

vLLM imports this module in each worker before it builds the model (``--worker-extension-cls``) and mixes
`RatchetWorker` into the worker's class, whose own methods win. Importing it therefore applies the repairs:
the one place of this project where an import does something, because it is the one hook that vLLM offers.

Invariant: the repairs fit exactly the vLLM they were written against; with another version, or when what
they replace has moved, the worker refuses to start.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import vllm
from safetensors import SafetensorError, safe_open
from vllm.logger import init_logger
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method
from vllm.model_executor.layers.fused_moe.oracle import unquantized
from vllm.platforms import current_platform
from vllm.v1.sample import rejection_sampler
from vllm.v1.worker import lora_model_runner_mixin
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from server.engine.worker import drafting, seeds

VLLM = "0.32."
"""Versions of vLLM that the repairs were written against and tested with."""

logger = init_logger("vllm.ratchet")


class AdapterManager(LRUCacheWorkerLoRAManager):  # type: ignore[misc]
    """Adapters by name; refuses those that would silently do nothing, and never drops one that is in use.

    vLLM keeps loaded adapters in a cache that forgets the least used and reads it again when a request
    names it. Reading fails inside a step if the folder is gone, and then the engine dies. So an adapter is
    dropped only after its name was released, and a load that would need to drop another one is refused.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._ids: dict[str, int] = {}
        self._released: set[int] = set()

    def release(self, name: str) -> None:
        """The name is gone from the API; the memory goes when the next adapter needs it."""
        adapter = self._ids.pop(name, None)
        if adapter is not None:
            self._released.add(adapter)

    def add_adapter(self, lora_request: LoRARequest) -> bool:
        held = self.list_adapters()
        if lora_request.lora_int_id not in held:
            self._make_room(held)
        added: bool = super().add_adapter(lora_request)
        self._ids[lora_request.lora_name] = lora_request.lora_int_id
        return added

    def _make_room(self, held: set[int]) -> None:
        self._released &= held
        room = self._adapter_manager.capacity - len(held)
        for adapter in sorted(self._released)[: max(0, 1 - room)]:
            self._released.discard(adapter)
            self.remove_adapter(adapter)
            room += 1
        if room < 1:
            raise ValueError(f"all {len(held)} places for adapters are taken; unload one first")

    def _load_adapter(self, lora_request: LoRARequest) -> Any:
        adapter = super()._load_adapter(lora_request)
        manager = self._adapter_manager
        served = set(manager.modules) - set(manager.packed_modules)
        served |= {part for parts in manager.packed_modules.values() for part in parts}
        ignored = sorted(set(adapter.loras) - served)
        if ignored:
            raise ValueError(f"modules {_few(ignored)} would be ignored: this engine adapts {_kinds(served)}")
        if not adapter.loras:
            raise ValueError("the adapter adapts no module of this model")
        halves = sorted(
            name for name, lora in adapter.loras.items() if lora.lora_a is None or lora.lora_b is None
        )
        if halves:
            raise ValueError(f"modules {_few(halves)} have only one of their two matrices")
        return adapter


class RatchetWorker:
    """Mixed into vLLM's worker; its methods are called by name through ``/collective_rpc``."""

    model_runner: Any
    vllm_config: Any

    def release_adapter(self, name: str) -> None:
        self.model_runner.lora_manager.release(name)

    def choose_drafts(self, mode: str) -> None:
        """Verify "all" or "none" of what is drafted, or what pays ("auto"), until the engine ends."""
        drafting.controller(self.model_runner).mode = mode

    def speculation(self) -> dict[str, Any]:
        """What the controller of drafts has counted."""
        return drafting.controller(self.model_runner).report()

    def check_weights(self, path: str) -> dict[str, str] | None:
        """Why `path` is not a checkpoint of the very architecture that is served; None when it is.

        Returned, not raised: vLLM would answer an exception by closing the caller's connection.
        """
        try:
            wanted, offered = _tensors(Path(self.vllm_config.model_config.model)), _tensors(Path(path))
        except (ValueError, OSError, SafetensorError) as error:
            return {"message": str(error)}
        missing, foreign = sorted(wanted.keys() - offered.keys()), sorted(offered.keys() - wanted.keys())
        if missing or foreign:
            return {"message": f"{path}: tensors missing {_few(missing)}, not of this model {_few(foreign)}"}
        reshaped = sorted(name for name in wanted if wanted[name] != offered[name])
        return {"message": f"{path}: other shapes for {_few(reshaped)}"} if reshaped else None

    def replace_weights(self, path: str) -> None:
        """Load the checkpoint folder `path` over the base weights.

        Nothing may be computing. On failure the weights are in no defined state and the process ends.
        """
        try:
            model = self.model_runner.get_model()
            if current_platform.is_cpu():
                forget_prepacked_experts(model)
            self.model_runner.reload_weights(weights_path=path)
            if current_platform.is_cpu():
                prepack_tied_head(model)
        except BaseException:
            logger.exception("Replacing the weights by %s failed; ending this engine", path)
            os._exit(70)


def forget_prepacked_experts(model: torch.nn.Module) -> None:
    """Make the experts' kernels be built anew from the next weights.

    A CPU kernel computes on a re-laid copy of its weights. vLLM takes an existing kernel as a sign that
    the new weights can be copied over the old ones in place, and the copy would keep the wrong layout.
    """
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def prepack_tied_head(model: torch.nn.Module) -> None:
    """Rebuild the head's re-laid copy when its weights are the embedding's: a reload does not visit it."""
    head = getattr(model, "lm_head", None)
    if head is None or not getattr(getattr(model, "config", None), "tie_word_embeddings", False):
        return
    head = getattr(head, "base_layer", head)
    method = getattr(head, "quant_method", None)
    if method is not None:
        method.process_weights_after_loading(head)


def install() -> None:
    """Apply the repairs to vLLM in this process. Raises RuntimeError when they do not fit it."""
    if not vllm.__version__.startswith(VLLM):
        raise RuntimeError(f"this worker fits vLLM {VLLM}x, installed is {vllm.__version__}")
    _replace(lora_model_runner_mixin, "LRUCacheWorkerLoRAManager", LRUCacheWorkerLoRAManager, AdapterManager)
    GPUModelRunner.execute_model = drafting.execute(GPUModelRunner.execute_model)
    GPUModelRunner.propose_draft_token_ids = drafting.propose(GPUModelRunner.propose_draft_token_ids)
    if not current_platform.is_cpu():
        return
    stock = "vllm.lora.punica_wrapper.punica_cpu.PunicaWrapperCPU"
    if current_platform.get_punica_wrapper() != stock:
        raise RuntimeError(f"vLLM's adapters on CPU are no longer {stock}")
    type(current_platform).get_punica_wrapper = classmethod(
        lambda cls: "server.engine.worker.lora.GroupedAdapters"
    )
    select = unquantized.select_unquantized_moe_backend

    def select_without_adapters(moe_config: Any) -> Any:
        """Adapters here are on attention; asked for experts with adapters vLLM picks a GPU kernel."""
        moe_config.is_lora_enabled = False
        return select(moe_config)

    for module in (unquantized, unquantized_fused_moe_method):
        _replace(module, "select_unquantized_moe_backend", select, select_without_adapters)
    expand = rejection_sampler.expand_batch_to_tokens
    _replace(rejection_sampler, "expand_batch_to_tokens", expand, drafting.expand_batch_to_tokens)
    GPUModelRunner._sample = seeds.sample(GPUModelRunner._sample)
    GPUModelRunner._bookkeeping_sync = seeds.bookkeeping(GPUModelRunner._bookkeeping_sync)


def _replace(module: Any, name: str, expected: Any, replacement: Any) -> None:
    if getattr(module, name, None) is not expected:
        raise RuntimeError(f"vLLM's {module.__name__}.{name} is not what this worker replaces")
    setattr(module, name, replacement)


def _tensors(folder: Path) -> dict[str, list[int]]:
    """Shape of every tensor of a checkpoint folder, from the headers alone."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        files = sorted(path.name for path in folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder}: no safetensors files")
    shapes: dict[str, list[int]] = {}
    for name in files:
        with safe_open(folder / name, framework="pt") as file:
            shapes |= {key: list(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    return shapes


def _few(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"[{', '.join(names[:3])}{more}]"


def _kinds(modules: set[str]) -> str:
    return ", ".join(sorted({name.rpartition(".")[2] for name in modules}))


install()
