"""Divergence of two sides' distributions, against sums over the whole vocabulary."""

from __future__ import annotations

import math
import random

import pytest

from quant.divergence import compare, divergence


def logprobs(weights: list[float]) -> dict[int, float]:
    total = sum(weights)
    return {token: math.log(weight / total) for token, weight in enumerate(weights)}


def top(distribution: dict[int, float], count: int) -> dict[int, float]:
    return dict(sorted(distribution.items(), key=lambda item: -item[1])[:count])


@pytest.fixture
def two() -> tuple[dict[int, float], dict[int, float]]:
    chooser = random.Random(1)
    weights = [chooser.random() ** 4 for _ in range(200)]
    return logprobs(weights), logprobs([weight * chooser.uniform(0.8, 1.2) for weight in weights])


def test_over_the_whole_vocabulary_it_is_the_divergence(
    two: tuple[dict[int, float], dict[int, float]],
) -> None:
    reference, tier = two
    exact = sum(math.exp(reference[token]) * (reference[token] - tier[token]) for token in reference)
    assert divergence(reference, tier) == pytest.approx(exact, abs=1e-8)


@pytest.mark.parametrize("count", [1, 8, 64])
def test_with_the_rest_taken_together_it_is_a_lower_bound(
    two: tuple[dict[int, float], dict[int, float]], count: int
) -> None:
    reference, tier = two
    assert 0 <= divergence(top(reference, count), top(tier, count)) < divergence(reference, tier)


def test_agreement_and_perplexity_are_of_the_sampled_positions() -> None:
    reference = [logprobs([8, 1, 1]), logprobs([8, 1, 1])]
    tier = [logprobs([8, 1, 1]), logprobs([1, 8, 1])]
    found = compare(reference, tier, [0, 0])
    assert found.positions == 2
    assert found.top1 == 0.5
    assert found.perplexity_ratio == pytest.approx(math.sqrt(8))
    assert found.kl == pytest.approx(0.7 * math.log(8) / 2)
