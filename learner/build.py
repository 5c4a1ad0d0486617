"""``python -m learner build``: makes sure that the model named in the TOML is there and usable.

Invariant: a model folder appears whole or not at all; one that exists is left as it is. Torch is imported
only when there is something to build.
"""

from __future__ import annotations

import importlib
import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout import artifacts, config
from rollout.config import ModelConfig

Report = Callable[[str], None]


class BuildError(Exception):
    """The model cannot be built or used; the message says what to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A real mixture of experts that can be named in the TOML instead of the default model."""

    name: str
    path: str
    """What to write as ``model.path``: a Hugging Face name or a folder."""
    tool_parser: str
    """vLLM's ``--tool-call-parser``."""
    target_modules: tuple[str, ...]
    """Modules an adapter may touch: attention only, since adapters on fused experts are not served."""
    experts: str
    measured: bool = False


CHECKPOINTS: dict[str, Checkpoint] = {
    "qwen3-30b-a3b": Checkpoint(
        name="qwen3-30b-a3b",
        path="Qwen/Qwen3-30B-A3B-Instruct-2507",
        tool_parser="hermes",
        target_modules=("q_proj", "k_proj", "v_proj", "o_proj"),
        experts="128, top-8; 30.5 B parameters, 3.3 B active",
    ),
    "gpt-oss-20b": Checkpoint(
        name="gpt-oss-20b",
        path="openai/gpt-oss-20b",
        tool_parser="openai",
        target_modules=("q_proj", "k_proj", "v_proj", "o_proj"),
        experts="32, top-4; 20.9 B parameters, 3.6 B active",
    ),
}


RECIPES: dict[str, tuple[str, str]] = {"smollm2-moe": ("learner.upcycle", "build_smollm2")}
"""Module and function that make a model folder, by the name that ``model.build`` uses."""


def ensure(model: ModelConfig, report: Report) -> Path:
    """The folder of a usable model, built first when it is missing and `model.build` names a recipe.

    Raises BuildError when there is none and no recipe, or when what is there is not a mixture of experts.
    """
    path = Path(model.path)
    if model.build and not path.exists():
        if model.build not in RECIPES:
            raise BuildError(f"model.build: no recipe {model.build!r}; known: {', '.join(RECIPES)}")
        module, function = RECIPES[model.build]
        getattr(importlib.import_module(module), function)(path, report)
    check(model.path)
    return path


def check(path: str) -> None:
    """Raises BuildError unless `path` is a Hugging Face checkpoint of a mixture of experts."""
    file = Path(path) / "config.json"
    if file.is_file():
        settings = json.loads(file.read_text())
    elif Path(path).is_absolute():
        raise BuildError(f"model.path: {path} holds no config.json; name a Hugging Face model folder")
    else:
        settings = _hub_config(path)
    if expert_count(settings) < 2:
        raise BuildError(
            f"model.path: {path} ({settings.get('model_type')}) has no experts; name a mixture of experts"
        )


def expert_count(settings: dict[str, Any]) -> int:
    """Experts of a layer by any of the names that model families use in config.json; 0 for a dense model."""
    text = settings.get("text_config") or settings
    return max(int(text.get(name) or 0) for name in ("num_local_experts", "num_experts", "n_routed_experts"))


def _hub_config(name: str) -> dict[str, Any]:
    transformers = importlib.import_module("transformers")
    try:
        settings: dict[str, Any] = transformers.AutoConfig.from_pretrained(name).to_dict()
    except (OSError, ValueError) as error:
        raise BuildError(
            f"model.path: {name} is neither a folder nor a Hugging Face model: {error}"
        ) from error
    return settings


def write_folder(path: Path, fill: Callable[[Path], None]) -> None:
    """Has `fill` write a folder under a temporary name and renames it to `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        fill(temporary)
        temporary.chmod(0o755)
        temporary.rename(path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def main(argv: list[str]) -> int:
    arguments = config.arguments("Build or check the model that the TOML names.").parse_args(argv)
    document = config.read(arguments.config, arguments.overrides)
    path = ensure(config.section(document, "model", ModelConfig), lambda line: print(line, flush=True))
    print(f"model {path}, base {artifacts.base_id(path)}")
    return 0
