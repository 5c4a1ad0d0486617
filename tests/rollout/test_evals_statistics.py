"""The statistics against published values and against simulation."""

from __future__ import annotations

import math
import random

import pytest

from rollout.evals.statistics import (
    Interval,
    Pairs,
    bootstrap_difference,
    mcnemar_exact,
    mcnemar_mid_p,
    paired_difference,
    pairs,
    quantile,
    wilson,
)


def test_wilson_known_values() -> None:
    # Newcombe 1998, table I (81/263, 15/148, 0/20, 1/29), 95 %.
    for successes, n, low, high in [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ]:
        interval = wilson(successes, n)
        assert (round(interval.low, 4), round(interval.high, 4)) == (low, high)
    assert wilson(0, 0) == Interval(0.0, 0.0, 1.0)


def test_wilson_holds_the_estimate_it_is_of() -> None:
    for n in range(1, 400):
        for successes in (0, 1, n // 2, n - 1, n):
            interval = wilson(successes, n)
            assert 0.0 <= interval.low <= interval.estimate <= interval.high <= 1.0


def test_pairs_counts() -> None:
    counts = pairs([True, True, False, False], [True, False, True, False])
    assert counts == Pairs(n=4, both=1, a_only=1, b_only=1)
    assert (counts.a, counts.b, counts.difference) == (2, 2, 0.0)
    with pytest.raises(ValueError, match="not pairs"):
        pairs([True], [])


def test_mcnemar_known_values() -> None:
    # Fagerland et al. 2013, airway hyper-responsiveness: 1 against 7 discordant of 21.
    # Exact conditional p = 0.0703, mid-p = 0.0391 (two-sided).
    assert round(mcnemar_exact(7, 1), 4) == 0.0703
    assert round(2 * mcnemar_mid_p(7, 1), 4) == 0.0391
    assert mcnemar_mid_p(0, 0) == 0.5
    assert mcnemar_exact(0, 0) == 1.0


def test_mcnemar_is_symmetric() -> None:
    for a, b in [(3, 9), (10, 2), (5, 5)]:
        assert math.isclose(mcnemar_mid_p(a, b), 1 - mcnemar_mid_p(b, a))
        assert mcnemar_exact(a, b) == mcnemar_exact(b, a)


def test_paired_difference_known_value() -> None:
    # Fagerland et al. 2014, same data: the Bonett-Price interval of -6/21 is (-0.508, -0.014).
    interval = paired_difference(Pairs(n=21, both=1, a_only=1, b_only=7))
    assert round(interval.estimate, 4) == round(-6 / 21, 4)
    assert abs(interval.low + 0.508) < 0.004
    assert abs(interval.high + 0.014) < 0.004


def test_paired_difference_covers() -> None:
    rng = random.Random(1)
    covered = 0
    for _ in range(1000):
        draws = rng.choices(["a", "b", "none"], [0.2, 0.1, 0.7], k=200)
        interval = paired_difference(Pairs(200, 0, draws.count("a"), draws.count("b")))
        covered += interval.low <= 0.1 <= interval.high
    assert 930 <= covered <= 975


def test_bootstrap_widens_with_clusters() -> None:
    differences = [1.0] * 50 + [0.0] * 50 + [-1.0] * 10 + [0.0] * 90
    alone = bootstrap_difference(differences, [str(i) for i in range(200)])
    clustered = bootstrap_difference(differences, [str(i // 20) for i in range(200)])
    assert alone.estimate == clustered.estimate == 0.2
    assert clustered.high - clustered.low > 1.5 * (alone.high - alone.low)
    assert bootstrap_difference(differences, ["x"] * 200) == Interval(0.2, 0.2, 0.2)


def test_quantile() -> None:
    assert quantile([3, 1, 2], 0.5) == 2
    assert quantile([0, 10], 0.99) == pytest.approx(9.9)
    assert math.isnan(quantile([], 0.5))
