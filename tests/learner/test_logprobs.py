"""What the engine logs as a sampled token's log-prob is what the trainer computes for it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from learner import model as models
from learner.batch import Sample, micro_batches
from learner.model import Loading, PolicyModel
from rollout import positions
from rollout.config import ModelConfig, RopeConfig
from server.engine.client import ChatResult, Engine
from tests.fixtures.engines import RunningEngine, running_engine, write_config
from tests.learner.training import ADAPTER

pytestmark = pytest.mark.engine


async def sample(engine: Engine, policies: dict[str, Path]) -> dict[str, list[ChatResult]]:
    """A few answers of the base and of each policy, all asked at once."""
    for policy_id, folder in policies.items():
        await engine.load_adapter(policy_id, folder)
    try:

        async def ask(model: str, number: int) -> ChatResult:
            question = f"Question {number}: " + "why? " * number
            body = {
                "model": model,
                "messages": [{"role": "user", "content": question}],
                "temperature": 1.0,
                "max_tokens": 24,
                "n": 2,
            }
            return await engine.chat(body)

        asked = {model: [ask(model, n) for n in range(3)] for model in ("base", *policies)}
        flat = await asyncio.gather(*(one for several in asked.values() for one in several))
        return {model: flat[3 * i : 3 * i + 3] for i, model in enumerate(asked)}
    finally:
        for policy_id in policies:
            await engine.unload_adapter(policy_id)


def as_samples(results: list[ChatResult]) -> list[Sample]:
    return [
        Sample(
            tokens=[*result.prompt_token_ids, *piece.token_ids],
            sampled=[False] * len(result.prompt_token_ids) + [True] * len(piece.token_ids),
            behaviour=[0.0] * len(result.prompt_token_ids) + piece.logprobs,
        )
        for result in results
        for piece in result.choices
    ]


def worst_difference(model: PolicyModel, results: list[ChatResult]) -> float:
    """Largest |trainer - engine| over all sampled tokens; samples of one prompt share it."""
    batches = micro_batches(as_samples(results), max_tokens=200, pad_id=2)
    return max(float((model(batch).detach() - batch.behaviour_N).abs().max()) for batch in batches)


def test_trainer_and_engine_agree(
    engine_standard: RunningEngine, tiny_moe: Path, tiny_adapters: dict[str, Path]
) -> None:
    policies = dict(list(tiny_adapters.items())[:2])

    async def collect() -> dict[str, list[ChatResult]]:
        async with engine_standard.client() as engine:
            return await sample(engine, policies)

    results = asyncio.run(collect())
    model = models.load(str(tiny_moe), ADAPTER, Loading(), seed=0)
    assert worst_difference(model, results["base"]) < 1e-4, "a fresh adapter has no effect"
    for policy_id, folder in policies.items():
        models.set_adapter_weights(model, models.read_adapter(folder, ADAPTER))
        assert worst_difference(model, results[policy_id]) < 1e-4
        others = [name for name in results if name != policy_id]
        assert all(worst_difference(model, results[name]) > 1e-2 for name in others)


@pytest.mark.long
@pytest.mark.parametrize("method", ["ntk", "yarn"])
def test_trainer_and_engine_agree_on_scaled_positions(tmp_path: Path, tiny_moe: Path, method: str) -> None:
    served = ModelConfig(path=str(tiny_moe), rope=RopeConfig.model_validate({"method": method, "factor": 2}))
    config = write_config(tmp_path / "deployment.toml", tmp_path, tiny_moe, {"standard": "float32"})
    scaled = f'[model]\nrope = {{ method = "{method}", factor = 2.0 }}\n'
    config.write_text(config.read_text().replace("[model]\n", scaled))

    async def collect(running: RunningEngine) -> dict[str, list[ChatResult]]:
        async with running.client() as engine:
            return await sample(engine, {})

    with running_engine(config, tmp_path, "standard-0") as running:
        results = asyncio.run(collect(running))
    same = models.load(str(tiny_moe), ADAPTER, Loading(overrides=positions.overrides(served)), seed=0)
    assert worst_difference(same, results["base"]) < 1e-4
    unscaled = models.load(str(tiny_moe), ADAPTER, Loading(), seed=0)
    assert worst_difference(unscaled, results["base"]) > 1e-3
