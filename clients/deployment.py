"""A deployment's TOML as `ratchet` needs it: what to run, where the gateway listens, where the key lies.

Read raw: the sections of the other processes are theirs to check. Placeholders in commands: ``{python}``,
``{config}``, ``{home}``. Overrides (``--set KEY=VALUE``) are applied here and handed on to every process.
"""

from __future__ import annotations

import os
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clients.processes import Spec


class DeploymentError(Exception):
    """The deployment cannot be used as it is; the message says what to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """One TOML, resolved."""

    config: Path
    overrides: list[str]
    home: Path
    host: str
    port: int
    model: str
    tiers: list[str]
    prepare: list[list[str]]
    """Commands that run one after another before the processes start."""
    processes: list[Spec]
    disposable: bool
    """Whether `ratchet demo` begins with an empty home (``[up] disposable``)."""

    @property
    def base_url(self) -> str:
        return f"http://{self.host}:{self.port}/v1"

    @property
    def key_file(self) -> Path:
        return self.home / "dev.key"

    @property
    def model_names(self) -> list[str]:
        return [self.model if tier == "standard" else f"{self.model}-{tier}" for tier in self.tiers]

    def command(self, *arguments: str) -> list[str]:
        """``python -m ARGUMENTS --config ... --set ...``, as the processes of this deployment run."""
        return [sys.executable, "-m", *arguments, "--config", str(self.config), *self._overrides()]

    def _overrides(self) -> list[str]:
        return [part for override in self.overrides for part in ("--set", override)]


def load(config: Path, overrides: list[str]) -> Deployment:
    """Raises DeploymentError naming the file and the key that is wrong."""
    config = config.resolve()
    document = _read(config)
    for override in overrides:
        _apply(document, override)
    home = Path(os.environ.get("RATCHET_HOME") or document.get("home", {}).get("path", ".ratchet")).resolve()
    gateway, model, up = (_table(document, name) for name in ("gateway", "model", "up"))
    if not isinstance(port := gateway.get("port", 8000), int) or not 0 < port < 65536:
        raise DeploymentError(f"gateway.port: {port!r} is not a port; give a number from 1 to 65535")
    known = {"prepare", "process", "disposable"}
    if unknown := set(up) - known:
        raise DeploymentError(
            f"{config}: [up] has no key '{min(unknown)}'; it takes {', '.join(sorted(known))}"
        )
    suffix = [part for override in overrides for part in ("--set", override)]
    fill = {"{python}": sys.executable, "{config}": str(config), "{home}": str(home)}
    return Deployment(
        config=config,
        overrides=overrides,
        home=home,
        host=gateway.get("host", "127.0.0.1"),
        port=port,
        model=model.get("name", "ratchet"),
        tiers=list(document.get("tiers", {})),
        prepare=[_filled(argv, fill) + suffix for argv in up.get("prepare", [])],
        processes=[_spec(table, fill, suffix, home) for table in up.get("process", [])],
        disposable=up.get("disposable", False),
    )


def _read(config: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(config.read_text())
    except FileNotFoundError:
        raise DeploymentError(
            f"{config}: no such file; name one with --config, as deploy/local.toml"
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise DeploymentError(f"{config}: {error}") from None


def _apply(document: dict[str, Any], override: str) -> None:
    key, found, text = override.partition("=")
    if not found:
        raise DeploymentError(f"--set {override}: expected KEY=VALUE")
    *tables, leaf = key.split(".")
    table = document
    for name in tables:
        table = _table(table, name)
    try:
        table[leaf] = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        table[leaf] = text


def _table(document: dict[str, Any], name: str) -> dict[str, Any]:
    table = document.setdefault(name, {})
    if not isinstance(table, dict):
        raise DeploymentError(f"{name} is a table of keys, not the value {table!r}")
    return table


def _spec(table: dict[str, Any], fill: dict[str, str], suffix: list[str], home: Path) -> Spec:
    if not {"name", "argv"} <= set(table) <= {"name", "argv", "env", "nice"}:
        raise DeploymentError(f"[[up.process]] takes name, argv, env and nice; got {', '.join(table)}")
    return Spec(
        name=table["name"],
        argv=_filled(table["argv"], fill) + suffix,
        env=table.get("env", {}),
        nice=table.get("nice", 0),
        log=home / "logs" / f"{table['name']}.log",
    )


def _filled(argv: list[str], fill: dict[str, str]) -> list[str]:
    filled = []
    for part in argv:
        for placeholder, value in fill.items():
            part = part.replace(placeholder, value)
        filled.append(part)
    return filled
