"""The fast tier on the tiny mixture: close to standard, with adapters on top, right after a reload."""

from __future__ import annotations

import asyncio
import statistics
from pathlib import Path

import pytest

from server.engine.client import Engine
from tests.fixtures.engines import RunningEngine, running_engine, write_config

TEXTS = [list(range(100 + 40 * text, 4000, 97 + text)) for text in range(6)]
"""Ids without meaning: the tiny model has none either."""


async def scores(engine: Engine, model: str) -> list[float]:
    """Log-probs of all positions of all texts but the first of each."""
    answers = await asyncio.gather(*(engine.score(model, ids) for ids in TEXTS))
    return [value for answer in answers for value in answer[1:] if value is not None]


def distance(first: list[float], second: list[float]) -> float:
    """Mean absolute difference in nats."""
    return statistics.fmean(abs(a - b) for a, b in zip(first, second, strict=True))


async def scored_with(running: RunningEngine, adapters: dict[str, Path]) -> dict[str, list[float]]:
    """Scores of the base and of each adapter, asked for at the same time; the adapters are unloaded again."""
    async with running.client() as engine:
        for name, folder in adapters.items():
            await engine.load_adapter(name, folder)
        names = ["base", *adapters]
        found = await asyncio.gather(*(scores(engine, name) for name in names))
        for name in adapters:
            await engine.unload_adapter(name)
        return dict(zip(names, found, strict=True))


@pytest.mark.engine
def test_fast_stays_close_to_standard_for_the_base_and_for_each_adapter(
    engine_standard: RunningEngine, engine_fast: RunningEngine, tiny_adapters: dict[str, Path]
) -> None:
    standard = asyncio.run(scored_with(engine_standard, tiny_adapters))
    fast = asyncio.run(scored_with(engine_fast, tiny_adapters))
    for name, wanted in standard.items():
        others = [distance(wanted, standard[other]) for other in standard if other != name]
        error = distance(wanted, fast[name])
        assert 0 < error < 0.1 * min(others), f"{name}: {error} nats, adapters differ by {others}"


@pytest.mark.engine
def test_fast_returns_to_the_same_bits_after_other_weights(
    engine_fast: RunningEngine, tiny_moe: Path, tiny_moe_b: Path
) -> None:
    async def there_and_back() -> tuple[list[float], list[float], list[float]]:
        async with engine_fast.client() as engine:
            before = await scores(engine, "base")
            await engine.reload_weights(tiny_moe_b)
            other = await scores(engine, "base")
            await engine.reload_weights(tiny_moe)
            return before, other, await scores(engine, "base")

    before, other, after = asyncio.run(there_and_back())
    assert distance(before, other) > 1
    assert after == before


@pytest.mark.engine
@pytest.mark.long
def test_reloaded_weights_answer_as_an_engine_started_with_them(
    engine_fast: RunningEngine, tiny_moe: Path, tiny_moe_b: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    async def reloaded() -> list[float]:
        async with engine_fast.client() as engine:
            await engine.reload_weights(tiny_moe_b)
            found = await scores(engine, "base")
            await engine.reload_weights(tiny_moe)
            return found

    async def fresh(running: RunningEngine) -> list[float]:
        async with running.client() as engine:
            return await scores(engine, "base")

    home = tmp_path_factory.mktemp("fresh")
    config = write_config(home / "deployment.toml", home, tiny_moe_b, {"fast": "cpu-int8"})
    with running_engine(config, home, "fast-0") as running:
        wanted = asyncio.run(fresh(running))
    assert asyncio.run(reloaded()) == wanted
