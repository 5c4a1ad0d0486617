"""How far a tier's distributions are from full precision's, position by position. Pure functions.

Teacher-forced: full precision samples answers, and both sides give their likeliest tokens at every sampled
position. Log-probs are in nats.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MIN_REST = 1e-9
"""Smallest probability of the remainder: below it, rounding of the named log-probs decides its sign."""

Distribution = Mapping[int, float]
"""Log-probs of the likeliest tokens of one position, the token that follows among them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """One tier against full precision over `positions` sampled positions."""

    positions: int
    kl: float
    """Mean KL(full precision || tier) a token."""
    kl_99: float
    """Its 99th percentile."""
    top1: float
    """Share of positions whose likeliest token is the same."""
    perplexity_ratio: float
    """Perplexity of the sampled tokens under the tier over that under full precision."""


def divergence(reference: Distribution, tier: Distribution) -> float:
    """KL(reference || tier) over shared tokens and the remainder as one outcome: a lower bound of it.

    >>> divergence({1: math.log(0.5), 2: math.log(0.5)}, {1: math.log(0.5), 2: math.log(0.5)})
    0.0
    """
    shared = reference.keys() & tier.keys()
    total = sum(math.exp(reference[token]) * (reference[token] - tier[token]) for token in shared)
    rest = max(1 - sum(math.exp(reference[token]) for token in shared), MIN_REST)
    rest_tier = max(1 - sum(math.exp(tier[token]) for token in shared), MIN_REST)
    return total + rest * math.log(rest / rest_tier)


def compare(
    reference: Sequence[Distribution], tier: Sequence[Distribution], sampled: Sequence[int]
) -> Divergence:
    """Both sides' distributions of each position and the token that was sampled there, all in one order."""
    each = sorted(divergence(a, b) for a, b in zip(reference, tier, strict=True))
    agree = [likeliest(a) == likeliest(b) for a, b in zip(reference, tier, strict=True)]
    rises = [a[token] - b[token] for a, b, token in zip(reference, tier, sampled, strict=True)]
    return Divergence(
        positions=len(each),
        kl=statistics.fmean(each),
        kl_99=each[int(0.99 * len(each))],
        top1=statistics.fmean(agree),
        perplexity_ratio=math.exp(statistics.fmean(rises)),
    )


def likeliest(distribution: Distribution) -> int:
    return max(distribution, key=lambda token: distribution[token])
