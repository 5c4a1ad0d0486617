"""Drafting on a CPU leaves the distribution alone: what is sampled is as likely as its log-probs say."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import pytest
import torch

from server.engine.client import ChatResult
from tests.fixtures.engines import RunningEngine, running_engine, write_config

ALLOWED = list(range(1000, 1012))
"""Few tokens, so that most continuations have been seen before and are drafted."""
TEMPERATURE = 0.7


@pytest.mark.parametrize("counts", [[1], [2, 0, 3], [0, 0]])
def test_values_are_repeated_for_each_token_of_their_request(counts: list[int]) -> None:
    from server.engine.worker.drafting import expand_batch_to_tokens

    values = [0.5, 0.0, 2.0][: len(counts)]
    total = torch.tensor(counts).cumsum(0).to(torch.int32)
    expanded = expand_batch_to_tokens(torch.tensor(values), total, sum(counts), 0, 1)
    assert expanded.tolist() == [
        value or 1.0 for value, count in zip(values, counts, strict=True) for _ in range(count)
    ]


async def _sample(running: RunningEngine) -> tuple[ChatResult, dict[str, float]]:
    body = {
        "model": "base",
        "messages": [{"role": "user", "content": "one two three one two three"}],
        "max_tokens": 96,
        "n": 8,
        "temperature": TEMPERATURE,
        "top_logprobs": len(ALLOWED),
        "allowed_token_ids": ALLOWED,
        "ignore_eos": True,
        "seed": 1,
    }
    async with running.client() as engine:
        return await engine.chat(body), await engine.metrics()


@pytest.mark.engine
@pytest.mark.long
def test_sampling_with_drafts_follows_the_reported_distribution(tmp_path: Path, tiny_moe: Path) -> None:
    config = write_config(tmp_path / "deployment.toml", tmp_path, tiny_moe, {"fast": "cpu-int8"})
    with config.open("a") as file:
        file.write(
            'speculation = { method = "ngram", num_speculative_tokens = 3, prompt_lookup_min = 1, '
            "prompt_lookup_max = 2 }\n"
        )
    with running_engine(config, tmp_path, "fast-0") as running:
        result, metrics = asyncio.run(_sample(running))

    drafted = metrics["vllm:spec_decode_num_draft_tokens_total"]
    accepted = metrics["vllm:spec_decode_num_accepted_tokens_total"]
    assert drafted > 100
    surprise = spread = 0.0
    for piece in result.choices:
        assert set(piece.token_ids) <= set(ALLOWED)
        for logprob, entry in zip(piece.logprobs, piece.logprobs_content, strict=True):
            likeliest = max(alternative["logprob"] for alternative in entry["top_logprobs"])
            p = math.exp(likeliest)
            surprise += (logprob == likeliest) - p
            spread += p * (1 - p)
    # How often the likeliest token was sampled, against how often it should have been, in deviations.
    assert abs(surprise) / math.sqrt(spread) < 5, (drafted, accepted)
    assert accepted > 0
