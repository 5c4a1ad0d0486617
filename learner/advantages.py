"""How much better a sample did than was to be expected: pure functions of samples and a tracker.

Production gives one sample per prompt, so what was to be expected comes from a tracker: an exponential moving
average of the reward per stratum (everything, the task's domain, its tools), each shrunk towards the wider
one. Samples of one task instance by one policy form a group, and a group is its own baseline.

Invariant: a baseline never contains rewards of the batch it is applied to, except a group's own mean and the
very first batch of all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from learner.batch import Sample

KAPPA = 8.0
"""Weight of the wider stratum, in samples: a narrow one needs this many to count for half."""
MIN_STD = 1e-4


@dataclass(slots=True)
class Tracker:
    """Reward to expect by stratum."""

    step: float
    """Step of the moving average; a stratum's memory is about 1 / step samples."""
    means: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def expected(self, strata: Sequence[str]) -> float | None:
        """Reward to expect, each stratum shrunk towards the one before; None when nothing was seen.

        v = (n v_stratum + kappa v_wider) / (n + kappa), n at most the memory of the average.
        """
        value: float | None = None
        for stratum in strata:
            if stratum not in self.means:
                continue
            seen = min(float(self.counts[stratum]), 1 / self.step)
            mean = self.means[stratum]
            value = mean if value is None else (seen * mean + KAPPA * value) / (seen + KAPPA)
        return value

    def observe(self, strata: Sequence[str], reward: float) -> None:
        """Move each stratum's average: a plain mean at first, exponential once its memory is full."""
        for stratum in strata:
            count = self.counts.get(stratum, 0) + 1
            mean = self.means.get(stratum, 0.0)
            self.means[stratum] = mean + (reward - mean) * max(self.step, 1 / count)
            self.counts[stratum] = count


def advantages(samples: Sequence[Sample], tracker: Tracker, negative_weight: float = 1.0) -> list[float]:
    """Reward minus baseline of each sample, in units of the batch's spread. The tracker is only read.

    Divided by the root mean square, not centred again: a batch that did well as a whole is reinforced as a
    whole (REINFORCE++, arXiv 2501.03262, normalises over the batch; SPO, arXiv 2509.13232, by a tracker).
    What did worse than expected counts `negative_weight` times: 1 is REINFORCE, 0 imitates what went better
    than expected (self-imitation, arXiv 1806.05635).
    """
    groups: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        if sample.group:
            groups[sample.group].append(sample.reward)
    mean = fmean(sample.reward for sample in samples)
    raw = []
    for sample in samples:
        group = groups.get(sample.group, [])
        expected = fmean(group) if len(group) > 1 else tracker.expected(sample.strata)
        raw.append(sample.reward - (mean if expected is None else expected))
    spread = fmean(value * value for value in raw) ** 0.5
    return [(value if value > 0 else value * negative_weight) / (spread + MIN_STD) for value in raw]
