"""What an engine is started with: pure, nothing runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollout.config import ConfigError
from server.engine.launch import Host, Launch, launch, replica

CPU = Host(device="cpu", cores="0,1,2", preload=(Path("/lib/a.so"), Path("/lib/b.so")), missing=("libx",))
GPU = Host(device="gpu", cores="0,1,2", preload=(), missing=())


def document(tmp_path: Path, **engine: Any) -> dict[str, Any]:
    return {
        "home": {"path": str(tmp_path)},
        "model": {"path": "/models/m"},
        "engine": engine,
        "tiers": {
            "standard": {"recipe": "float32", "replicas": 2},
            "fast": {"recipe": "cpu-int8", "speculation": {"method": "ngram", "num_speculative_tokens": 4}},
        },
    }


def values(plan: Launch, flag: str) -> list[str]:
    rest = plan.argv[plan.argv.index(flag) + 1 :]
    return rest[: next((i for i, word in enumerate(rest) if word.startswith("--")), len(rest))]


def test_cpu_replica(tmp_path: Path) -> None:
    plan = launch(replica(document(tmp_path, threads="0-1"), "standard-1"), CPU)
    assert plan.socket == tmp_path / "run" / "standard-1.sock"
    assert values(plan, "--uds") == [str(plan.socket)]
    assert values(plan, "--max-loras") == ["4"]
    assert values(plan, "--max-cpu-loras") == ["6"]
    assert values(plan, "--lora-target-modules") == ["q_proj", "k_proj", "v_proj", "o_proj"]
    assert values(plan, "--logprobs-mode") == ["processed_logprobs"]
    assert values(plan, "--generation-config") == ["vllm"]
    assert values(plan, "--dtype") == ["float32"]
    assert "--enforce-eager" in plan.argv
    assert plan.env["LD_PRELOAD"] == "/lib/a.so:/lib/b.so"
    assert plan.env["VLLM_CPU_OMP_THREADS_BIND"] == "0-1"
    assert any("libx" in note for note in plan.notes)


@pytest.mark.parametrize(
    ("cores", "shares"),
    [
        ("0,1,2", ["0", "1", "2"]),
        ("4,5,6,7,8,9,10", ["4,5", "6,7", "8,9,10"]),
        ("0,1", ["0", "0", "1"]),
        ("3", ["3", "3", "3"]),
    ],
)
def test_threads_auto_divides_the_allowed_cores(tmp_path: Path, cores: str, shares: list[str]) -> None:
    host = Host(device="cpu", cores=cores, preload=(), missing=())
    plans = [
        launch(replica(document(tmp_path, threads="auto"), name), host)
        for name in ("standard-0", "standard-1", "fast-0")
    ]
    assert [plan.env["VLLM_CPU_OMP_THREADS_BIND"] for plan in plans] == shares


def test_a_lone_replica_has_every_allowed_core(tmp_path: Path) -> None:
    alone = document(tmp_path) | {"tiers": {"standard": {"recipe": "float32"}}}
    assert launch(replica(alone, "standard-0"), CPU).env["VLLM_CPU_OMP_THREADS_BIND"] == "0,1,2"


def test_gpu_replica_has_nothing_of_the_cpu(tmp_path: Path) -> None:
    plan = launch(replica(document(tmp_path, dtype="bfloat16", block_size=None), "standard-0"), GPU)
    assert "--enforce-eager" not in plan.argv
    assert "--block-size" not in plan.argv
    assert not [name for name in plan.env if name.startswith(("VLLM_CPU", "LD_"))]


def test_the_recipe_wins_over_the_deployment(tmp_path: Path) -> None:
    plan = launch(replica(document(tmp_path, dtype="bfloat16"), "fast-0"), CPU)
    assert plan.argv.count("--dtype") == 1
    assert values(plan, "--quantization") == ["cpu_int8"]
    assert values(plan, "--speculative-config") == ['{"method": "ngram", "num_speculative_tokens": 4}']


def test_a_recipe_of_another_device_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tiers\.fast\.recipe"):
        launch(replica(document(tmp_path), "fast-0"), GPU)


@pytest.mark.parametrize("name", ["standard-2", "fast-1", "slow-0", "standard", "standard-x"])
def test_unknown_replicas_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="standard-0, standard-1, fast-0"):
        replica(document(tmp_path), name)


def test_a_home_too_deep_for_a_socket_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"home\.path"):
        replica(document(tmp_path / ("x" * 120)), "standard-0")
