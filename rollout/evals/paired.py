"""Runs of policies on a suite, and their comparison task by task.

Both policies get the same tasks with the same sampling seed, so that they differ only where the policies
do: common random numbers take most of the noise out of the difference. Invariant: a pair counts only when
both sides were judged; what failed for reasons outside the model is counted apart and is never a zero.
"""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

import msgspec
import openai

from rollout import episodes
from rollout.episodes import Ask, Episode
from rollout.evals.statistics import (
    Interval,
    Pairs,
    bootstrap_difference,
    mcnemar_exact,
    mcnemar_mid_p,
    paired_difference,
    pairs,
    wilson,
)
from rollout.tasks import Task


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One task attempted by one policy."""

    task: str
    family: str
    success: bool | None
    """None when it could not be judged; `fault` says why."""
    fault: str | None
    reason: str
    turns: int
    completion_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """A policy as it is asked in an evaluation."""

    policy: str
    model: str
    """The name that pins it: ``ratchet@p000041``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Policy against baseline on the tasks that both were judged on."""

    policy: str
    baseline: str
    counts: Pairs
    difference: Interval
    clustered: Interval
    """The same difference with task families as the unit of resampling."""
    p_better: float
    """One-sided mid-p of "the policy is no better"."""
    p_differ: float
    """Two-sided exact McNemar."""
    faults: int
    """Pairs left out because a side could not be judged."""

    def evidence(self) -> dict[str, Any]:
        """As JSON for the store."""
        return {
            "policy": self.policy,
            "baseline": self.baseline,
            "n": self.counts.n,
            "policy_success": self.counts.a,
            "baseline_success": self.counts.b,
            "policy_only": self.counts.a_only,
            "baseline_only": self.counts.b_only,
            "difference": self.difference.estimate,
            "difference_95": [self.difference.low, self.difference.high],
            "difference_95_clustered": [self.clustered.low, self.clustered.high],
            "p_better": self.p_better,
            "p_differ": self.p_differ,
            "faults": self.faults,
        }

    def __str__(self) -> str:
        a, b = wilson(self.counts.a, self.counts.n), wilson(self.counts.b, self.counts.n)
        return (
            f"{self.policy} {a.estimate:.3f} against {self.baseline} {b.estimate:.3f} on {self.counts.n} "
            f"paired tasks: {self.difference.estimate:+.3f} [{self.difference.low:+.3f}, "
            f"{self.difference.high:+.3f}], wins {self.counts.a_only}, losses {self.counts.b_only}, "
            f"p {self.p_better:.3f}"
        )


async def evaluate(
    client: openai.AsyncOpenAI,
    tasks: Sequence[Task],
    sides: Sequence[Side],
    tiers: Sequence[str],
    concurrency: int,
    progress: Callable[[Side, Episode], None] | None = None,
) -> dict[str, list[Result]]:
    """Results by policy, in the order of `tasks`; of each task all sides are asked before the next.

    Tasks are dealt out to `tiers` in turn, so that both sides of a pair run on the same one. `concurrency`
    is the number of episodes in flight on each tier.
    """
    rooms = {tier: asyncio.Semaphore(concurrency) for tier in tiers}

    async def attempt(task: Task, side: Side, tier: str) -> Result:
        async with rooms[tier]:
            episode = await episodes.run(client, task, ask_for(task, side, tier), f"eval-{uuid.uuid4().hex}")
        if progress is not None:
            progress(side, episode)
        return _result(episode)

    async with asyncio.TaskGroup() as group:
        running = [
            [group.create_task(attempt(task, side, tier)) for side in sides]
            for task, tier in zip(tasks, cycle(tiers), strict=False)
        ]
    results = defaultdict(list)
    for row in running:
        for side, done in zip(sides, row, strict=True):
            results[side.policy].append(done.result())
    return dict(results)


def compare(policy: str, results: Sequence[Result], baseline: str, against: Sequence[Result]) -> Comparison:
    """`results` of `policy` paired with those of `baseline`; both in the same order of tasks."""
    if [r.task for r in results] != [r.task for r in against]:
        raise ValueError("results of different tasks cannot be paired")
    judged = [
        (a, b)
        for a, b in zip(results, against, strict=True)
        if a.success is not None and b.success is not None
    ]
    counts = pairs([bool(a.success) for a, _ in judged], [bool(b.success) for _, b in judged])
    differences = [float(bool(a.success)) - float(bool(b.success)) for a, b in judged]
    return Comparison(
        policy=policy,
        baseline=baseline,
        counts=counts,
        difference=paired_difference(counts),
        clustered=bootstrap_difference(differences, [a.family for a, _ in judged]),
        p_better=mcnemar_mid_p(counts.a_only, counts.b_only),
        p_differ=mcnemar_exact(counts.a_only, counts.b_only),
        faults=len(results) - len(judged),
    )


def by_family(results: Sequence[Result]) -> dict[str, tuple[int, int]]:
    """(successes, judged) of each family."""
    table: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for result in results:
        if result.success is not None:
            table[result.family][0] += result.success
            table[result.family][1] += 1
    return {family: (good, n) for family, (good, n) in sorted(table.items())}


def ask_for(task: Task, side: Side, tier: str) -> Ask:
    """What `side` is asked on `tier`, its sampling seed a function of the task alone."""
    digest = hashlib.sha256(task.id.encode()).digest()
    return replace(
        Ask(store=False, evaluation=True),
        model=side.model,
        service_tier=tier,
        seed=int.from_bytes(digest[:4], "big") >> 1,
    )


def _result(episode: Episode) -> Result:
    verdict = episode.verdict
    assert verdict is not None
    return Result(
        task=episode.task.id,
        family=episode.task.family,
        success=episode.success,
        fault=verdict.error,
        reason=verdict.reason,
        turns=len(episode.requests),
        completion_tokens=episode.completion_tokens,
    )
