"""What every training run begins with: the model with its adapter, and the engine around it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from learner import model as models
from learner.config import LearnerConfig
from learner.engine import Engine, Settings
from learner.model import Adapter, Loading
from rollout import artifacts, config, positions
from rollout.config import EngineConfig, ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    engine: Engine
    adapter: Adapter
    settings: LearnerConfig
    path: Path
    """Folder of the model."""
    base: str
    """Identity of its weights."""
    pad_id: int


def open_session(
    document: dict[str, Any],
    *,
    seed: int,
    learning_rate: float | None = None,
    warmup: int | None = None,
    initial: Path | None = None,
) -> Session:
    """Loads the model and starts the engine.

    `initial` is the folder of the adapter to begin with; None begins with one that has no effect. Raises
    ModelError when it, or the model, does not fit the configuration.
    """
    settings = config.section(document, "learner", LearnerConfig)
    targets = config.section(document, "engine", EngineConfig).target_modules
    served = config.section(document, "model", ModelConfig)
    path = Path(served.path)
    adapter = Adapter(target_modules=tuple(targets), rank=settings.rank, alpha=settings.alpha)
    device = _device(settings.device)
    loading = Loading(
        dtype=settings.dtype,
        device=device,
        experts=settings.experts_implementation,
        overrides=positions.overrides(served),
    )
    model = models.load(str(path), adapter, loading, seed=seed)
    if initial is not None:
        models.set_adapter_weights(model, models.read_adapter(initial, adapter))
    engine = Engine(
        model,
        Settings(
            learning_rate=learning_rate or settings.learning_rate,
            warmup=warmup or settings.warmup_updates,
            max_grad_norm=settings.max_grad_norm,
            zero_stage=settings.zero_stage,
            device=device,
            threads=settings.threads,
        ),
    )
    return Session(
        engine=engine,
        adapter=adapter,
        settings=settings,
        path=path,
        base=artifacts.base_id(path),
        pad_id=_pad_id(path),
    )


def _device(wanted: str) -> str:
    if wanted != "auto":
        return wanted
    return "cuda" if torch.cuda.is_available() else "cpu"


def _pad_id(path: Path) -> int:
    """Any valid id will do: padding is never looked at."""
    settings = json.loads((path / "config.json").read_text())
    text = settings.get("text_config") or settings
    return int(text.get("pad_token_id") or 0)
