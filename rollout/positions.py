"""More context than a model was trained for, by scaled rotary positions: the same for engine and learner.

A rotary embedding turns pair i of a head of size d by ``position * theta ** (-2 i / d)``. Past the trained
length the slow pairs reach angles that the model never saw. Static NTK raises theta, so that the slowest pair
at the longest position is where it was in training (bloc97, 2023): ``theta * factor ** (d / (d - 2))``. YaRN
(Peng et al., 2023, arXiv 2309.00071) leaves fast pairs alone, interpolates slow ones and sharpens attention.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollout.config import ConfigError, ModelConfig


def overrides(model: ModelConfig) -> dict[str, Any]:
    """Keys of the model's own ``config.json`` and what they become; empty without `model.rope`.

    Raises ConfigError when this model's positions cannot be scaled.
    """
    if model.rope is None:
        return {}
    config = _read(model.path)
    if config is None:
        raise ConfigError(
            f"model.rope: {model.path} is no folder with a config.json; name the model's folder"
        )
    known: Mapping[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = known.get("rope_theta") or config.get("rope_theta")
    if theta is None:
        raise ConfigError(f"model.rope: {model.path} has no single rotary embedding to scale; leave it out")
    kind = known.get("rope_type") or known.get("type") or "default"
    if kind != "default":
        raise ConfigError(f"model.rope: {model.path} scales its positions already ({kind}); leave it out")
    trained, factor = int(config["max_position_embeddings"]), model.rope.factor
    scaled = {"max_position_embeddings": math.floor(trained * factor)}
    if model.rope.method == "yarn":
        own = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": trained}
        return scaled | {"rope_parameters": own | {"rope_theta": theta}}
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    raised = theta * factor ** (size / (size - 2))
    return scaled | {"rope_parameters": {"rope_type": "default", "rope_theta": raised}}


def check_length(model: ModelConfig, max_model_len: int) -> None:
    """Raises ConfigError when the engine is to serve more positions than the model in this folder has."""
    longest = ((_read(model.path) or {}) | overrides(model)).get("max_position_embeddings")
    if longest is not None and max_model_len > longest:
        raise ConfigError(
            f"engine.max_model_len: {max_model_len} is more than the {longest} positions of {model.path}; "
            f'lower it, or scale them: model.rope = {{ method = "yarn", factor = 2.0 }}'
        )


def _read(path: str) -> dict[str, Any] | None:
    """None for a name that is no folder here: vLLM knows how to find that."""
    file = Path(path) / "config.json"
    return dict(json.loads(file.read_text())) if file.exists() else None
