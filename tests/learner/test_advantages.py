"""Baselines and normalisation."""

from __future__ import annotations

import random

import pytest

from learner.advantages import KAPPA, Tracker, advantages
from learner.batch import Sample


def sample(reward: float, strata: tuple[str, ...] = ("",), group: str = "") -> Sample:
    return Sample(
        tokens=[1, 2], sampled=[False, True], behaviour=[0, -1], reward=reward, strata=strata, group=group
    )


def test_the_first_batch_is_its_own_baseline() -> None:
    values = advantages([sample(1), sample(0), sample(0), sample(0)], Tracker(0.2))
    assert sum(values) == pytest.approx(0)
    assert values[0] > 0 > values[1]


def test_the_baseline_is_from_before_the_batch() -> None:
    tracker = Tracker(0.2)
    for reward in (1, 0):
        tracker.observe([""], reward)
    before = dict(tracker.means)
    values = advantages([sample(1), sample(1)], tracker)
    assert tracker.means == before
    assert values == pytest.approx([1.0, 1.0], abs=1e-3), "0.5 above, and nothing centres it away"


def test_a_group_is_its_own_baseline() -> None:
    tracker = Tracker(0.2)
    tracker.observe([""], 0.0)
    batch = [sample(1, group="a"), sample(0, group="a"), sample(1, group="b")]
    values = advantages(batch, tracker)
    assert values[0] == pytest.approx(-values[1])
    assert values[2] == pytest.approx(2 * values[0]), "alone in its group: against the tracker, which says 0"


def test_a_group_without_difference_teaches_nothing() -> None:
    tracker = Tracker(0.2)
    tracker.observe([""], 0.3)
    values = advantages([sample(1, group="a"), sample(1, group="a"), sample(0, group="c")], tracker)
    assert values[:2] == [0, 0]


def test_narrow_strata_shrink_towards_wide_ones() -> None:
    tracker = Tracker(0.1)
    for _ in range(50):
        tracker.observe(["", "easy"], 1.0)
        tracker.observe(["", "hard"], 0.0)
    assert tracker.expected([""]) == pytest.approx(0.5, abs=0.1)
    wide = tracker.means[""]
    assert tracker.expected(["", "easy"]) == pytest.approx((10 * 1.0 + KAPPA * wide) / (10 + KAPPA))
    assert tracker.expected(["", "new"]) == wide
    assert Tracker(0.1).expected(["", "new"]) is None


def test_the_average_is_plain_until_its_memory_is_full() -> None:
    tracker = Tracker(0.25)
    for reward in (1.0, 0.0, 0.5):
        tracker.observe([""], reward)
    assert tracker.means[""] == pytest.approx(0.5)
    tracker.observe([""], 1.0)
    tracker.observe([""], 1.0)
    assert tracker.means[""] == pytest.approx((0.5 * 0.75 + 0.25) * 0.75 + 0.25)


def test_advantages_have_unit_spread() -> None:
    rng = random.Random(2)
    tracker = Tracker(0.2)
    tracker.observe([""], 0.4)
    for _ in range(20):
        batch = [sample(rng.choice([0, 1]), group=rng.choice(["", "x", "y"])) for _ in range(16)]
        values = advantages(batch, tracker)
        spread = (sum(v * v for v in values) / len(values)) ** 0.5
        assert spread == pytest.approx(1, abs=1e-2) or spread == 0


def test_what_did_worse_than_expected_counts_by_its_weight() -> None:
    batch = [sample(1), sample(0), sample(0), sample(0)]
    whole = advantages(batch, Tracker(0.2))
    assert advantages(batch, Tracker(0.2), 0.5) == [whole[0], *(value / 2 for value in whole[1:])]
    assert advantages(batch, Tracker(0.2), 0.0) == [whole[0], 0.0, 0.0, 0.0]
