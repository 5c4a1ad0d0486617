"""One TOML a deployment; each process reads the sections it needs and nothing else.

``load(path, overrides, Section)`` parses one section into a frozen pydantic model. Every file may use
``{home}`` in its values: the folder that holds the store, the policies and the sockets (``[home] path``,
overridden by ``RATCHET_HOME``). Unknown tables and keys are errors.
"""

from __future__ import annotations

import argparse
import os
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

S = TypeVar("S", bound="Section")
TABLES = {
    "artifacts",
    "demo",
    "engine",
    "gateway",
    "home",
    "judge",
    "learner",
    "model",
    "store",
    "tiers",
    "up",
}


class ConfigError(Exception):
    """The configuration cannot be used; the message names the file and the key."""


class Section(BaseModel):
    """A frozen section that refuses unknown keys. `NAME` is its table in the TOML."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class StoreConfig(Section):
    url: str = "sqlite:///{home}/ratchet.db"
    """SQLAlchemy URL: ``sqlite:///FILE`` or ``postgresql+psycopg://USER@HOST/DB``."""


class ArtifactsConfig(Section):
    root: str = "{home}/artifacts"
    """Folder that holds `policies/` and `files/`."""


class RopeConfig(Section):
    """More context than the model was trained for (`rollout.positions`)."""

    method: Literal["ntk", "yarn"]
    factor: float = Field(gt=1, le=8)
    """How many times the trained length."""


class ModelConfig(Section):
    """The one model that is served and trained."""

    name: str = "ratchet"
    """The name callers use; ``NAME-fast`` is the fast tier, ``NAME@p000041`` one policy."""
    path: str = "{home}/models/default"
    """A Hugging Face folder; built on first use when `build` names a recipe."""
    build: str | None = "smollm2-moe"
    """Recipe of `learner.build` that makes `path` when it is missing; None for a folder of your own."""
    warm_start: str | None = "deploy/warm-start"
    """Folder of the first adapter policy; None starts from the bare base."""
    rope: RopeConfig | None = None
    """Scaled positions, the same while serving and while learning."""
    tool_parser: str = "hermes"
    """vLLM's parser for the model's tool-call format."""


class TierConfig(Section):
    recipe: str
    """Key of `quant.recipes.RECIPES`."""
    kv_cache_dtype: Literal["auto", "fp8_e4m3", "fp8_e5m2"] = "auto"
    """Keys and values in the cache: the model's own type, or 8 bits, which hold more context in the same
    memory and cost some accuracy (`python -m quant accept` says how much)."""
    replicas: int = 1
    speculation: dict[str, Any] | None = None
    """Passed to vLLM as ``--speculative-config``."""
    drafts: Literal["auto", "all", "none"] = "auto"
    """Which drafted tokens are verified: those worth their time, as measured; all; none."""


class EngineConfig(Section):
    """How vLLM runs, for every replica."""

    device: str = "auto"
    dtype: str = "float32"
    max_model_len: int = 2048
    max_num_seqs: int = 64
    max_policies: int = 4
    """Addressable policies at once: promoted, previous, canary, candidate."""
    max_lora_rank: int = 16
    target_modules: list[str] = ["q_proj", "k_proj", "v_proj", "o_proj"]
    """Modules an adapter may touch: what every tier can serve."""
    block_size: int | None = 32
    prefill_chunk: int = Field(default=64, ge=0)
    """Tokens of one prompt that a step computes at most, so that the requests in that step get their next
    token soon: a longer prompt takes several steps. 0 leaves it to vLLM."""
    kv_cache_gb: int = 1
    threads: str = "auto"
    """CPU cores that the threads of every engine are bound to, such as "0-3"; "auto" divides those of the
    machine among the replicas."""
    extra_args: list[str] = []


def home(document: dict[str, Any]) -> Path:
    """The deployment's folder, absolute."""
    configured = os.environ.get("RATCHET_HOME") or document.get("home", {}).get("path", ".ratchet")
    return Path(configured).resolve()


def read(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The whole document with ``--set a.b=c`` applied and ``{home}`` filled in.

    Raises ConfigError when the file is missing, is not TOML, has an unknown table, or an override is not
    ``key=value``.
    """
    try:
        document = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: {error}") from None
    for override in overrides:
        key, sep, value = override.partition("=")
        if not sep:
            raise ConfigError(f"--set {override}: expected KEY=VALUE")
        _override(document, key, _value(value))
    if unknown := sorted(document.keys() - TABLES):
        raise ConfigError(f"{path}: {unknown[0]!r} is not a table; those are {', '.join(sorted(TABLES))}")
    filled: dict[str, Any] = _fill(document, str(home(document)))
    return filled


def section(document: dict[str, Any], name: str, model: type[S]) -> S:
    """Table `name` (dotted for nested) of `document` as `model`; an absent table gives the defaults."""
    table: Any = document
    for part in name.split("."):
        table = table.get(part, {})
    try:
        parsed = model.model_validate(table)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join([name, *map(str, first["loc"])])
        raise ConfigError(f"{where}: {first['msg']}") from None
    # Defaults may use {home} too; validating again fills them in.
    return model.model_validate(_fill(parsed.model_dump(), str(home(document))))


def tiers(document: dict[str, Any]) -> dict[str, TierConfig]:
    """``[tiers.NAME]`` tables by name."""
    return {name: section(document, f"tiers.{name}", TierConfig) for name in document.get("tiers", {})}


def arguments(description: str, *, add_help: bool = True) -> argparse.ArgumentParser:
    """The parser every process starts from: ``--config FILE`` and ``--set KEY=VALUE``."""
    parser = argparse.ArgumentParser(description=description, add_help=add_help)
    parser.add_argument(
        "--config", type=Path, default=Path("deploy/local.toml"), help="the deployment's TOML"
    )
    parser.add_argument(
        "--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE", help="override one key"
    )
    return parser


def _override(document: dict[str, Any], key: str, value: Any) -> None:
    table = document
    *parents, leaf = key.split(".")
    for parent in parents:
        table = table.setdefault(parent, {})
        if not isinstance(table, dict):
            raise ConfigError(f"--set {key}: {parent} is a value, not a table")
    table[leaf] = value


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return text


def _fill(value: Any, folder: str) -> Any:
    if isinstance(value, str):
        return value.replace("{home}", folder)
    if isinstance(value, dict):
        return {k: _fill(v, folder) for k, v in value.items()}
    if isinstance(value, list):
        return [_fill(v, folder) for v in value]
    return value
