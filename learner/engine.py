"""The training engine: the only file that imports DeepSpeed.

One process without a launcher, or as many as torchrun or DeepSpeed's launcher start; ZeRO stages 0 to 3. The
caller says when a batch ends: gradients add up over any number of `backward` calls until `step`.

Invariant: every process makes the same sequence of calls; what a process decides alone (the clock, the store)
is decided by rank 0 and told to the others by `broadcast`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import distributed, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, missing from its __all__

from learner.batch import MicroBatch
from learner.model import PolicyModel, adapter_weights, set_adapter_weights

T = TypeVar("T")

PATIENCE = timedelta(hours=2)
"""How long processes wait for each other; rank 0 may be waiting for samples."""
TAG = "state"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the engine needs to know of the configuration."""

    learning_rate: float
    max_grad_norm: float
    warmup: int = 1
    """Steps in which the learning rate rises to `learning_rate`."""
    zero_stage: int = 0
    device: str = "cpu"
    threads: int | None = None


class RescaledAdamW(torch.optim.AdamW):
    """AdamW whose gradients are multiplied by `scale` first, and whose learning rate rises in `warmup` steps.

    Without moments of its own yet, Adam moves every weight by the whole learning rate, noise or not.

    The number of tokens that count is known only when the last micro-batch has been computed, so gradients
    are summed with a provisional denominator and corrected here, wherever ZeRO has put them by then.
    """

    scale = 1.0
    max_norm: float | None = None
    """Clips first, as ZeRO does from stage 1 on; without ZeRO gradients are whole here."""
    norm: float | None = None
    """Of the gradients before clipping."""
    warmup = 1

    @property
    def age(self) -> int:
        """Steps made, those before a checkpoint included."""
        return max((int(state["step"]) for state in self.state.values() if "step" in state), default=0)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        if self.max_norm is not None:
            self.norm = float(nn.utils.clip_grad_norm_(parameters, self.max_norm))
        if self.scale != 1.0:
            for parameter in parameters:
                parameter.grad.mul_(self.scale)
        rate = self.defaults["lr"] * min(1.0, (self.age + 1) / self.warmup)
        for group in self.param_groups:
            group["lr"] = rate
        loss: float | None = super().step(closure)
        return loss


class Engine:
    """A `PolicyModel` with its optimizer, over all processes."""

    def __init__(self, model: PolicyModel, settings: Settings) -> None:
        if settings.threads:
            torch.set_num_threads(settings.threads)
        self.stage = settings.zero_stage
        self.device = torch.device(settings.device)
        self._deepspeed = _import_deepspeed(settings.device)
        _join_processes(self._deepspeed, settings.device)
        if self.stage == 3:
            _keep_experts_together(self._deepspeed, model)
        self.model = model
        self._optimizer = RescaledAdamW(
            list(model.trainable().values()), lr=settings.learning_rate, weight_decay=0.0
        )
        self._optimizer.warmup = settings.warmup
        if self.stage == 0:
            self._optimizer.max_norm = settings.max_grad_norm
        self._engine, *_ = self._deepspeed.initialize(
            model=model, optimizer=self._optimizer, config=_deepspeed_config(settings)
        )

    @property
    def rank(self) -> int:
        return distributed.get_rank()

    @property
    def world(self) -> int:
        return distributed.get_world_size()

    def logprobs(self, batch: MicroBatch) -> torch.Tensor:
        """Log-probs of the targets, with gradient. [N]"""
        logprobs_N: torch.Tensor = self._engine(batch.to(self.device))
        return logprobs_N

    @torch.no_grad()
    def score(self, batch: MicroBatch) -> torch.Tensor:
        """Log-probs of the targets, without gradient. [N]"""
        logprobs_N: torch.Tensor = self._engine.module(batch.to(self.device))
        return logprobs_N

    def backward(self, loss: torch.Tensor) -> None:
        """Adds the gradient of `loss`, this process's share of a sum over processes."""
        # DeepSpeed averages over processes; the loss is a share of a sum.
        self._engine.backward(loss * self.world)

    def step(self, scale: float = 1.0) -> float:
        """Updates with the gradients so far, times `scale` after clipping; returns their norm, unclipped."""
        self._optimizer.scale = scale
        self._engine.step()
        norm = self._engine.get_global_grad_norm() if self.stage else self._optimizer.norm
        assert norm is not None
        return float(norm) * scale

    def weights(self) -> dict[str, torch.Tensor]:
        """A copy of the adapter's tensors by exported name, whole on every process."""
        with self._whole():
            return {name: tensor.clone() for name, tensor in adapter_weights(self.model).items()}

    @contextmanager
    def using(self, weights: dict[str, torch.Tensor]) -> Iterator[None]:
        """Within the block the model computes with the adapter `weights` instead of its own."""
        own = self.weights()
        self._set(weights)
        try:
            yield
        finally:
            self._set(own)

    def sum(self, values: list[float]) -> list[float]:
        """Element-wise sums over processes."""
        total = torch.tensor(values, dtype=torch.float64, device=self._collective_device())
        distributed.all_reduce(total)
        return [float(value) for value in total]

    def broadcast(self, value: T) -> T:
        """Rank 0's `value` on every process."""
        box = [value]
        distributed.broadcast_object_list(box, src=0, device=self._collective_device())
        return box[0]

    def barrier(self) -> None:
        self.broadcast(None)

    def save(self, folder: Path) -> None:
        """Writes what `load` needs to go on: trained weights and optimizer. Every process calls it."""
        self._engine.save_checkpoint(str(folder), tag=TAG, save_latest=False, exclude_frozen_parameters=True)

    def load(self, folder: Path) -> None:
        """Continues from what `save` wrote with the same number of processes and stage."""
        found, _ = self._engine.load_checkpoint(str(folder), tag=TAG, load_module_strict=False)
        if found is None:
            raise FileNotFoundError(f"{folder} holds no training state")

    def close(self) -> None:
        self._engine.destroy()
        distributed.destroy_process_group()

    def _collective_device(self) -> torch.device:
        return self.device if self.device.type == "cuda" else torch.device("cpu")

    def _set(self, weights: dict[str, torch.Tensor]) -> None:
        with self._whole(write=True):
            set_adapter_weights(self.model, weights)

    @contextmanager
    def _whole(self, *, write: bool = False) -> Iterator[None]:
        """Within the block trained parameters are whole on every process (ZeRO-3 keeps them in parts)."""
        if self.stage < 3:
            yield
            return
        parameters = list(self.model.trainable().values())
        with self._deepspeed.zero.GatheredParameters(parameters, modifier_rank=0 if write else None):
            yield


def _import_deepspeed(device: str) -> ModuleType:
    if device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed  # after the line above: it picks its accelerator when it is imported

    deepspeed.utils.logger.setLevel(logging.WARNING)
    module: ModuleType = deepspeed
    return module


def _join_processes(deepspeed: ModuleType, device: str) -> None:
    if distributed.is_initialized():
        return
    backend = "nccl" if device.startswith("cuda") else "gloo"
    # DeepSpeed's own all-reduce through shared memory is compiled at the first start, which takes a minute
    # and a compiler; gloo does for the few megabytes of an adapter.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        deepspeed.init_distributed(dist_backend=backend, timeout=PATIENCE)
        return
    os.environ.setdefault("LOCAL_RANK", "0")
    distributed.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    deepspeed.init_distributed(dist_backend=backend)


def _keep_experts_together(deepspeed: ModuleType, model: nn.Module) -> None:
    """ZeRO-3 must gather a block of experts as one: which of them run differs between processes."""
    blocks = {type(module) for module in model.modules() if hasattr(module, "experts")}
    if blocks:
        deepspeed.utils.set_z3_leaf_modules(model, list(blocks))


def _deepspeed_config(settings: Settings) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": settings.max_grad_norm if settings.zero_stage else 0.0,
        "zero_optimization": {"stage": settings.zero_stage, "overlap_comm": False},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1_000_000_000,
    }
