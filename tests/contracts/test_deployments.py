"""Every TOML of deploy/ is one that every process accepts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clients import deployment
from learner.config import LearnerConfig
from quant.recipes import RECIPES
from rollout import config
from rollout.promotion import JudgeConfig
from server.config import GatewayConfig
from server.engine import launch

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "deploy").glob("*.toml"))
SECTIONS: dict[str, type[config.Section]] = {
    "store": config.StoreConfig,
    "artifacts": config.ArtifactsConfig,
    "model": config.ModelConfig,
    "engine": config.EngineConfig,
    "gateway": GatewayConfig,
    "judge": JudgeConfig,
    "learner": LearnerConfig,
}


@pytest.fixture(params=FILES, ids=lambda path: path.name)
def file(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


@pytest.fixture
def document(file: Path) -> dict[str, Any]:
    return config.read(file)


def test_there_are_deployments() -> None:
    assert {"local.toml", "demo.toml"} <= {path.name for path in FILES}


def test_every_section_parses(document: dict[str, Any]) -> None:
    for name, model in SECTIONS.items():
        config.section(document, name, model)


def test_a_misspelt_table_is_refused(file: Path) -> None:
    with pytest.raises(config.ConfigError, match="'lerner' is not a table"):
        config.read(file, ["lerner.rank=8"])


def test_every_replica_can_be_launched(document: dict[str, Any]) -> None:
    gpu = document["engine"].get("device") == "gpu"
    host = launch.Host(device="gpu" if gpu else "cpu", cores="0,1", preload=(), missing=())
    for tier, settings in config.tiers(document).items():
        assert settings.recipe in RECIPES
        for index in range(settings.replicas):
            launch.launch(launch.replica(document, f"{tier}-{index}"), host)


def test_up_starts_every_replica_and_every_process(file: Path, document: dict[str, Any]) -> None:
    names = [spec.name for spec in deployment.load(file, []).processes]
    replicas = [f"{tier}-{i}" for tier, c in config.tiers(document).items() for i in range(c.replicas)]
    assert sorted(names) == sorted([*replicas, "gateway", "judge", "learner"])


def test_ratchet_reads_a_file_as_the_processes_do(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RATCHET_HOME", raising=False)
    overrides = ["gateway.port=9001", "home.path=elsewhere", "model.name=mine"]
    document = config.read(file, overrides)
    read = deployment.load(file, overrides)
    assert read.home == config.home(document)
    assert (read.host, read.port) == (document["gateway"]["host"], 9001)
    assert read.model == config.section(document, "model", config.ModelConfig).name == "mine"
    assert read.tiers == list(config.tiers(document))
