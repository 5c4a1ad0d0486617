"""Statistics of successes and of paired successes, as pure functions.

Everything here is about binary results. In a paired comparison of policy A with baseline B on the same
tasks, ``b`` counts the tasks that A alone solved and ``c`` those that B alone solved; tasks that both or
neither solved say nothing about the difference.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist


@dataclass(frozen=True, slots=True)
class Interval:
    estimate: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.estimate:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True, slots=True)
class Pairs:
    """Counts of a paired comparison of A with B on n tasks."""

    n: int
    both: int
    a_only: int
    b_only: int

    @property
    def a(self) -> int:
        """Successes of A."""
        return self.both + self.a_only

    @property
    def b(self) -> int:
        """Successes of B."""
        return self.both + self.b_only

    @property
    def difference(self) -> float:
        """Success rate of A less that of B."""
        return (self.a_only - self.b_only) / self.n if self.n else 0.0


def pairs(a: Sequence[bool], b: Sequence[bool]) -> Pairs:
    """Counts from two lists of results in the same order of tasks. [n], [n]"""
    if len(a) != len(b):
        raise ValueError(f"{len(a)} results against {len(b)}: not pairs")
    return Pairs(
        n=len(a),
        both=sum(x and y for x, y in zip(a, b, strict=True)),
        a_only=sum(x and not y for x, y in zip(a, b, strict=True)),
        b_only=sum(y and not x for x, y in zip(a, b, strict=True)),
    )


def wilson(successes: int, n: int, confidence: float = 0.95) -> Interval:
    """Wilson's score interval of a proportion; [0, 1] for no data. (Wilson 1927)"""
    if n == 0:
        return Interval(0.0, 0.0, 1.0)
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    p = successes / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    # In exact arithmetic p is inside; of no or only successes rounding can leave it outside by 1e-17.
    return Interval(p, max(0.0, min(p, centre - half)), min(1.0, max(p, centre + half)))


def paired_difference(counts: Pairs, confidence: float = 0.95) -> Interval:
    """Interval of the difference of paired proportions, Wald with the Bonett-Price adjustment.

    One pseudo-task is added to each kind of discordance, which keeps the coverage where the plain Wald
    interval collapses (few or one-sided discordances). (Bonett and Price 2012)
    """
    if counts.n == 0:
        return Interval(0.0, -1.0, 1.0)
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    n = counts.n + 2
    p, q = (counts.a_only + 1) / n, (counts.b_only + 1) / n
    half = z * math.sqrt((p + q - (p - q) ** 2) / n)
    return Interval(counts.difference, max(-1.0, p - q - half), min(1.0, p - q + half))


def mcnemar_mid_p(a_only: int, b_only: int) -> float:
    """One-sided mid-p of "A is no better than B": how surprising this many wins of A would be.

    Under the null each discordant task is a fair coin: P(X > a_only) + P(X = a_only) / 2. The mid-p variant
    of the exact test keeps its level in practice and loses little power. (Fagerland, Lydersen, Laake 2013)
    """
    n = a_only + b_only
    more = sum(math.comb(n, k) for k in range(a_only + 1, n + 1))
    return (2 * more + math.comb(n, a_only)) / (1 << (n + 1))


def mcnemar_exact(a_only: int, b_only: int) -> float:
    """Two-sided exact McNemar p-value."""
    n, larger = a_only + b_only, max(a_only, b_only)
    tail = sum(math.comb(n, k) for k in range(larger, n + 1)) / (1 << n)
    return min(1.0, 2 * tail)


def bootstrap_difference(
    differences: Sequence[float], clusters: Sequence[str], confidence: float = 0.95, draws: int = 2000
) -> Interval:
    """Percentile interval of the mean of per-task differences, re-sampling whole clusters. [n], [n]

    Tasks of one family rise and fall together, so tasks are not the independent unit: families are.
    Seeded, so the same data give the same interval.
    """
    if not differences:
        return Interval(0.0, -1.0, 1.0)
    grouped: dict[str, list[float]] = {}
    for difference, cluster in zip(differences, clusters, strict=True):
        grouped.setdefault(cluster, []).append(difference)
    sums = [(sum(values), len(values)) for values in grouped.values()]
    rng = random.Random(0)
    means = []
    for _ in range(draws):
        drawn = rng.choices(sums, k=len(sums))
        means.append(sum(total for total, _ in drawn) / sum(size for _, size in drawn))
    means.sort()
    tail = (1 - confidence) / 2
    return Interval(
        sum(differences) / len(differences), _percentile(means, tail), _percentile(means, 1 - tail)
    )


def quantile(values: Sequence[float], q: float) -> float:
    """The q-quantile, linearly interpolated; nan for no values."""
    return _percentile(sorted(values), q) if values else math.nan


def _percentile(ordered: Sequence[float], q: float) -> float:
    position = q * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)
