"""Acceptance of a recipe: which findings refuse it, and that an engine then refuses to serve it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from safetensors.torch import load_file, save_file

from learner import build
from quant import acceptance
from quant.accept import well_formed
from quant.acceptance import Finding
from quant.recipes import Limits
from rollout.artifacts import base_id
from rollout.config import ConfigError, ModelConfig
from rollout.episodes import Episode
from rollout.evals.statistics import Interval
from rollout.tasks import generate
from server.engine import launch
from tests.fixtures.engines import write_config

GOOD = Finding(
    recipe="cpu-int8",
    kv_bytes=100,
    base="b",
    policy=None,
    tokens=5000,
    kl=0.0001,
    kl_99=0.001,
    top1=0.99,
    perplexity_ratio=1.0001,
    tasks=800,
    reference_success=0.5,
    success=0.5,
    score=Interval(0.0, -0.01, 0.01),
    validity=Interval(0.0, -0.01, 0.01),
    limits=Limits(),
    tested_at=0.0,
)


def test_within_all_limits_a_recipe_is_accepted() -> None:
    assert GOOD.failures == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kl": 0.02}, "KL 0.02 nats a token is above 0.01"),
        ({"kl": float("nan")}, "KL nan nats a token is above 0.01"),
        ({"top1": 0.97}, "top-1 agreement 0.9700 is below 0.98"),
        ({"perplexity_ratio": 1.05}, "perplexity rises by a factor 1.0500, above 1.01"),
        (
            {"score": Interval(-0.1, -0.13, -0.07)},
            "task success falls by 0.100 [-0.130, -0.070], more than 0.02",
        ),
        ({"score": Interval(-0.01, -0.05, 0.03)}, "task success may fall by more than 0.02"),
        ({"validity": Interval(-0.1, -0.13, -0.07)}, "validity of tool calls falls by 0.100"),
    ],
)
def test_each_limit_refuses_by_its_name(change: dict[str, Any], said: str) -> None:
    (failure,) = msgspec.structs.replace(GOOD, **change).failures
    assert failure.startswith(said)


def test_a_gain_is_not_a_failure() -> None:
    assert msgspec.structs.replace(GOOD, score=Interval(0.1, 0.05, 0.15)).failures == []


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"content": "hello"}, True),
        ({"content": '<tool_call>{"name"'}, False),
        ({"tool_calls": [{"function": {"name": "OFFERED", "arguments": "{}"}}]}, True),
        ({"tool_calls": [{"function": {"name": "OFFERED", "arguments": "{"}}]}, False),
        ({"tool_calls": [{"function": {"name": "unheard_of", "arguments": "{}"}}]}, False),
    ],
)
def test_well_formed_calls_parse_and_name_an_offered_tool(message: dict[str, Any], expected: bool) -> None:
    task = generate(1, "held_out")
    name = task.tools[0]["function"]["name"]
    filled = json.loads(json.dumps({"role": "assistant"} | message).replace("OFFERED", name))
    episode = Episode(task=task, trajectory_id="t", tier="default", messages=[filled])
    assert well_formed(episode) is expected


def _replica(tmp_path: Path, model: Path) -> launch.Replica:
    tiers = {"fast": {"recipe": "cpu-int8"}, "standard": {"recipe": "float32"}}
    document = {"home": {"path": str(tmp_path)}, "model": {"path": str(model)}, "tiers": tiers}
    return launch.replica(document, "fast-0")


def test_an_engine_is_told_what_is_known_of_its_recipe(tmp_path: Path, tiny_moe: Path) -> None:
    replica = _replica(tmp_path, tiny_moe)
    (note,) = launch.check_accepted(replica)
    assert "was not tested on this model" in note
    accepted = msgspec.structs.replace(GOOD, base=base_id(tiny_moe))
    acceptance.write(tmp_path, accepted)
    assert launch.check_accepted(replica) == []
    refused = msgspec.structs.replace(accepted, kl=1.0)
    acceptance.write(tmp_path, refused)
    with pytest.raises(ConfigError, match=r"failed its acceptance test: KL 1 nats a token is above 0.01"):
        launch.check_accepted(replica)
    acceptance.write(tmp_path, msgspec.structs.replace(refused, base="another model"))
    assert "was not tested" in launch.check_accepted(replica)[0]


def test_full_precision_needs_no_test(tmp_path: Path, tiny_moe: Path) -> None:
    document = {"home": {"path": str(tmp_path)}, "model": {"path": str(tiny_moe)}}
    replica = launch.replica(document | {"tiers": {"standard": {"recipe": "float32"}}}, "standard-0")
    assert launch.check_accepted(replica) == []


def test_a_damaged_finding_says_what_to_do(tmp_path: Path, tiny_moe: Path) -> None:
    acceptance.write(tmp_path, GOOD).write_text("{")
    with pytest.raises(ConfigError, match="test the recipe again or delete the file"):
        launch.check_accepted(_replica(tmp_path, tiny_moe))


def _break_one_expert(model: Path, folder: Path) -> None:
    """`model` with the down matrix of one expert twice what it should be, as a wrong scale makes it."""
    folder.mkdir()
    for file in model.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    (weights,) = model.glob("*.safetensors")
    tensors = load_file(weights)
    broken = "model.layers.0.block_sparse_moe.experts.1.w2.weight"
    tensors[broken] = tensors[broken] * 2
    save_file(tensors, folder / weights.name, metadata={"format": "pt"})


def _accept(config: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "quant", "accept", "--config", str(config), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.engine
@pytest.mark.long
def test_the_fast_recipe_is_accepted_and_with_a_wrong_scale_in_one_expert_neither_accepted_nor_served(
    tmp_path: Path,
) -> None:
    """On the default model: what a random one would answer next hangs on a hair, so it tells nothing."""
    model = tmp_path / "models" / "default"
    build.ensure(ModelConfig(path=str(model)), print)
    config = write_config(
        tmp_path / "deployment.toml", tmp_path, model, {"standard": "float32", "fast": "cpu-int8"}
    )
    done = _accept(config, "--tokens", "1500", "--tasks", "600")
    assert done.returncode == 0, done.stdout + done.stderr
    found = acceptance.read(tmp_path, "cpu-int8")
    assert found is not None
    assert found.base == base_id(model)
    assert 0 < found.kl < 0.001

    broken = tmp_path / "broken"
    _break_one_expert(model, broken)
    done = _accept(config, "--weights", str(broken), "--tokens", "1500", "--tasks", "32")
    assert done.returncode == 1, done.stderr
    assert "not kept: KL" in done.stdout
    assert "recipe cpu-int8 is refused" in done.stdout
    engine = [sys.executable, "-m", "server.engine", "--config", str(config), "--replica", "fast-0"]
    refused = subprocess.run(engine, capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "cpu-int8 failed its acceptance test: KL" in refused.stderr


@pytest.mark.engine
def test_an_engine_that_does_not_start_is_said_at_once(tmp_path: Path, tiny_moe: Path) -> None:
    config = write_config(
        tmp_path / "deployment.toml", tmp_path, tiny_moe, {"standard": "float32", "fast": "cpu-int8"}
    )
    done = _accept(config, "--set", 'engine.extra_args=["--no-such-argument"]')
    assert done.returncode == 1
    assert "standard-0 did not start" in done.stderr
    assert "--no-such-argument" in done.stderr
