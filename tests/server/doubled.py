"""A real gateway process over the engine double: what most tests of the gateway need, without an engine."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.fixtures.engines import write_config
from tests.server.engine_double import EngineDouble, running_double
from tests.server.gateways import Deployment, running_gateway

HELLO = [{"role": "user", "content": "hi"}]


@dataclass(frozen=True)
class Doubled:
    """One deployment of one standard replica."""

    deployment: Deployment
    double: EngineDouble
    gateway: subprocess.Popen[bytes]

    def chat(self, **body: Any) -> httpx.Response:
        return chat(self.deployment, **body)

    def post(self, content: bytes, path: str = "/v1/chat/completions") -> httpx.Response:
        """A body that no JSON library would write."""
        headers = {"authorization": f"Bearer {self.deployment.key}", "content-type": "application/json"}
        return self.deployment.http.post(f"{self.deployment.url}{path}", content=content, headers=headers)

    def log(self) -> str:
        return (self.deployment.home / "gateway.log").read_text()


@contextmanager
def doubled(home: Path, model: Path, *overrides: str) -> Iterator[Doubled]:
    """`home` must not exist, or be empty."""
    home.mkdir(exist_ok=True)
    config = write_config(home / "deployment.toml", home, model, {"standard": "float32"})
    deployment = Deployment(config, home, ['model.warm_start=""', *overrides])
    deployment.prepare()
    with running_double(home, "standard-0") as double, running_gateway(deployment) as gateway:
        yield Doubled(deployment, double, gateway)


def chat(deployment: Deployment, **body: Any) -> httpx.Response:
    """A recorded chat request."""
    return deployment.call(
        "POST", "/v1/chat/completions", {"model": "ratchet", "messages": HELLO, "store": True} | body
    )


def say(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]
