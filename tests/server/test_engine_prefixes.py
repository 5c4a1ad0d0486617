"""Cached prefixes on a real engine: reused where they are the same, and never across a swap.

An adapter's cache is its own by vLLM's keys. That of the base is kept apart from older weights by the salt:
taken away, the test sees an answer computed on the old weights' cache, so it would be seen if it happened.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from server.engine.client import Engine, Piece
from server.engine.launch import BASE_MODEL
from tests.fixtures.engines import RunningEngine
from tests.server.test_engine import loaded, run

pytestmark = pytest.mark.engine

PROMPT = " ".join(f"Line {number} of a text that fills some blocks of the cache." for number in range(30))


async def ask(engine: Engine, model: str, salt: str, prompt: str = PROMPT) -> tuple[Piece, int]:
    """The greedy answer, and how many tokens of the prompt came from the cache."""
    body: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": prompt}]}
    found = await engine.chat(body | {"temperature": 0, "max_tokens": 8, "cache_salt": salt})
    details = found.body["usage"].get("prompt_tokens_details") or {}
    (piece,) = found.choices
    return piece, details.get("cached_tokens") or 0


def close(found: Sequence[float], wanted: Sequence[float]) -> bool:
    return all(abs(a - b) < 1e-4 for a, b in zip(found, wanted, strict=True))


def test_a_prefix_is_reused_by_its_tenant_alone(engine_standard: RunningEngine) -> None:
    async def test(engine: Engine) -> None:
        first, cold = await ask(engine, BASE_MODEL, "tenant a")
        again, warm = await ask(engine, BASE_MODEL, "tenant a")
        _, other = await ask(engine, BASE_MODEL, "tenant b")
        assert (cold, other) == (0, 0)
        assert warm > 200
        assert again.token_ids == first.token_ids
        assert close(again.logprobs, first.logprobs)

    run(engine_standard, test)


def test_a_policy_never_computes_on_the_cache_of_another(
    engine_standard: RunningEngine, tiny_adapters: dict[str, Path]
) -> None:
    older, newer = list(tiny_adapters.values())[:2]

    async def test(engine: Engine) -> None:
        async with loaded(engine, {"older": older, "newer": newer}):
            await ask(engine, "older", "adapter swap")
            truth, cached = await ask(engine, "newer", "adapter swap")
            assert cached == 0
        # Nor when the newer one is given the older one's name.
        async with loaded(engine, {"older": newer}):
            renamed, cached = await ask(engine, "older", "adapter swap")
            assert cached == 0
            assert close(renamed.logprobs, truth.logprobs)
            _, cached = await ask(engine, "older", "adapter swap")
            assert cached > 200

    run(engine_standard, test)


def test_new_weights_never_compute_on_the_cache_of_the_old(
    engine_standard: RunningEngine, tiny_moe: Path, tiny_moe_b: Path
) -> None:
    async def test(engine: Engine) -> None:
        await ask(engine, BASE_MODEL, "base a")
        await engine.reload_weights(tiny_moe_b)
        try:
            # The same salt: the cache was emptied.
            truth, cached = await ask(engine, BASE_MODEL, "base a")
            assert cached == 0
            # Weights replaced, the cache kept: the new base's salt keeps them apart, the old one's does not.
            await engine._worker("replace_weights", str(tiny_moe))
            await engine._worker("replace_weights", str(tiny_moe_b))
            salted, cached = await ask(engine, BASE_MODEL, "base b")
            assert cached == 0
            assert close(salted.logprobs, truth.logprobs)
            await engine._worker("replace_weights", str(tiny_moe))
            stale, cached = await ask(engine, BASE_MODEL, "base b")
            fresh, _ = await ask(engine, BASE_MODEL, "base a again")
            assert cached > 200
            assert not close(stale.logprobs, fresh.logprobs)
        finally:
            await engine.reload_weights(tiny_moe)

    run(engine_standard, test)
