"""A real gateway process over the engine double: what most tests of the gateway need, without an engine."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec

from rollout import artifacts, config, policies
from rollout.artifacts import Artifacts
from rollout.records import Fingerprint, FingerprintPrompt, PolicyKind, PolicyManifest
from tests.fixtures.engines import write_config
from tests.fixtures.models import RANK, TARGETS, write_adapter
from tests.server.engine_double import ADAPTED, BASE, EngineDouble, running_double
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
    toml = write_config(home / "deployment.toml", home, model, {"standard": "float32"})
    deployment = Deployment(toml, home, ['model.warm_start=""', *overrides])
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


def publish(deployment: Deployment, **marks: Any) -> str:
    """A candidate whose fingerprint is the double's, except for `marks`."""
    values: dict[str, Any] = {
        "token_ids": [5, 6, 7, 8],
        "positions": [1, 2],
        "policy": [ADAPTED] * 2,
        "parent": [BASE] * 2,
        "base": [BASE] * 2,
    }
    with deployment.store() as store:
        with store.write() as tx:
            policy_id = policies.reserve(tx)
        prompt = FingerprintPrompt(**(values | marks))
        fingerprint = Fingerprint(policy=policy_id, parent="p000000", prompts=[prompt])
        manifest = PolicyManifest(
            id=policy_id,
            parent="p000000",
            base=artifacts.base_id(deployment.model_dir),
            kind=PolicyKind.ADAPTER,
            target_modules=list(TARGETS),
            rank=RANK,
            job="test",
            step=1,
            recipe={},
            files={},
            created_at=time.time(),
        )

        def write(folder: Path) -> None:
            write_adapter(folder / "made", 1)
            for file in list((folder / "made").iterdir()):
                file.rename(folder / file.name)
            (folder / "made").rmdir()
            (folder / "fingerprint.json").write_bytes(msgspec.json.encode(fingerprint))

        root = config.section(deployment.document, "artifacts", config.ArtifactsConfig).root
        path = Artifacts(root).write_policy(manifest, write)
        with store.write() as tx:
            policies.register(tx, artifacts.read_manifest(path), str(path))
    return policy_id
