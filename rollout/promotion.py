"""The gate: a candidate is compared with the policy that serves, on tasks of its own, and passes or not.

`decide` is the rule, a pure function. `Gate` carries one candidate through it. Invariants: the policy that
enters the gate and the one it is compared with are asked by pinned names, whatever is promoted meanwhile; the
evaluation row and the step out of the gate are one transaction; a judge that dies leaves the candidate
in GATE under a lease that runs out, and whoever takes the lease next begins again.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import openai
from sqlalchemy import Connection

from rollout import policies
from rollout.config import Section
from rollout.evals import suites
from rollout.evals.paired import Comparison, Result, Side, compare, evaluate
from rollout.records import PolicyState
from rollout.store import Store, evaluations
from rollout.tasks import Task

log = logging.getLogger(__name__)
ACTOR = "judge"
MAX_FAULTS = 0.05
"""Share of pairs that may be lost to the infrastructure; above it the evaluation is tried again."""


class JudgeConfig(Section):
    """``[judge]``."""

    gate_tasks: int = 64
    """Paired tasks before the first look at the result; as many again before each further look."""
    gate_max_tasks: int = 192
    """A candidate that is undecided after so many is rejected."""
    gate_confidence: float = 0.9
    """One-sided, over all looks together: 1 - this is the chance that a policy no better passes."""
    min_difference: float = 0.0
    """Smallest observed gain in success that passes, significant or not."""
    gate_tiers: list[str] = []
    """Tiers that evaluations run on, each with its share of the tasks; empty: every tier."""
    concurrency: int = 24
    """Episodes of an evaluation in flight on each tier."""
    poll_s: float = 1.0
    lease_s: float = 60.0
    """A judge that has not renewed its lease for so long is taken for dead."""


class EvaluationFault(Exception):
    """The evaluation could not be run; the candidate has not been judged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """`passes` is None while more tasks are needed."""

    passes: bool | None
    reason: str


def looks(config: JudgeConfig) -> list[int]:
    """Numbers of tasks at which the result is looked at."""
    steps = list(range(config.gate_tasks, config.gate_max_tasks, config.gate_tasks))
    return [*steps, config.gate_max_tasks]


def decide(comparison: Comparison, look: int, config: JudgeConfig) -> Decision:
    """The rule at look number `look` (from 0).

    The candidate passes when the chance of so many wins under "no better" is below its share of the error;
    the error is split evenly over the looks (Bonferroni), so looking early does not raise it. It fails at
    the last look, and earlier when it is behind: stopping early for failure cannot let a bad one pass.
    """
    number = len(looks(config))
    allowed = (1 - config.gate_confidence) / number
    gain = comparison.difference.estimate
    figures = f"{comparison}, allowed p {allowed:.3f} at look {look + 1} of {number}"
    if comparison.p_better <= allowed and gain >= config.min_difference:
        return Decision(passes=True, reason=f"better: {figures}")
    if gain < 0:
        return Decision(passes=False, reason=f"behind: {figures}")
    if look + 1 == number:
        return Decision(passes=False, reason=f"not shown to be better: {figures}")
    return Decision(passes=None, reason=f"undecided: {figures}")


@dataclass(slots=True, kw_only=True)
class Gate:
    """Judges one candidate after another."""

    store: Store
    client: openai.AsyncOpenAI
    config: JudgeConfig
    model: str
    """The name callers use; ``MODEL@POLICY`` pins one."""
    tiers: Sequence[str]
    """Tiers that evaluations run on."""

    def enter(self, policy_id: str) -> str:
        """Put the candidate (or one that a dead judge left in the gate) into GATE; returns the baseline."""
        with self.store.write() as tx:
            policy = policies.get(tx, policy_id)
            if policy is not None and policy.state is PolicyState.GATE:
                _step(tx, policy_id, PolicyState.GATE, PolicyState.CANDIDATE, "its evaluation was abandoned")
            _step(tx, policy_id, PolicyState.CANDIDATE, PolicyState.GATE, "all replicas hold it verified")
            baseline = policies.serving(tx).promoted
        assert baseline is not None
        return baseline

    async def judge(self, policy_id: str, baseline: str) -> Decision:
        """Evaluate until decided and write the outcome. Raises EvaluationFault, PolicyConflict."""
        tasks = suites.gate(policy_id, self.config.gate_max_tasks)
        results: dict[str, list[Result]] = {policy_id: [], baseline: []}
        for look, n in enumerate(looks(self.config)):
            fresh = await self._run(tasks[len(results[policy_id]) : n], policy_id, baseline)
            for policy, more in fresh.items():
                results[policy] += more
            comparison = compare(policy_id, results[policy_id], baseline, results[baseline])
            if comparison.faults > MAX_FAULTS * n:
                faults = [r.fault for row in results.values() for r in row if r.fault is not None]
                raise EvaluationFault(f"{comparison.faults} of {n} pairs could not be judged: {faults[0]}")
            decision = decide(comparison, look, self.config)
            log.info("%s: %s", policy_id, decision.reason)
            if decision.passes is not None:
                self._leave(policy_id, comparison, decision)
                return decision
        raise AssertionError("the last look decides")

    def give_up(self, policy_id: str, reason: str) -> None:
        """Reject a policy in the gate that could not be judged."""
        with self.store.write() as tx:
            _step(tx, policy_id, PolicyState.GATE, PolicyState.REJECTED, reason)

    async def _run(self, tasks: list[Task], policy_id: str, baseline: str) -> dict[str, list[Result]]:
        sides = [Side(policy=policy, model=f"{self.model}@{policy}") for policy in (policy_id, baseline)]
        return await evaluate(self.client, tasks, sides, self.tiers, self.config.concurrency)

    def _leave(self, policy_id: str, comparison: Comparison, decision: Decision) -> None:
        evidence: dict[str, Any] = {
            "evaluation": f"eval-{uuid.uuid4().hex}",
            "suite": suites.GATE,
            "tiers": list(self.tiers),
            "confidence": self.config.gate_confidence,
            **comparison.evidence(),
        }
        to = PolicyState.CANARY if decision.passes else PolicyState.REJECTED
        with self.store.write() as tx:
            evaluation = evaluations.Evaluation(
                id=evidence["evaluation"],
                policy_id=policy_id,
                baseline_id=comparison.baseline,
                suite=suites.GATE,
                n=comparison.counts.n,
                results=evidence,
                created_at=time.time(),
            )
            evaluations.insert(tx, evaluation)
            policies.transition(
                tx, policy_id, PolicyState.GATE, to, actor=ACTOR, reason=decision.reason, evidence=evidence
            )


def _step(tx: Connection, policy_id: str, frm: PolicyState, to: PolicyState, reason: str) -> None:
    policies.transition(tx, policy_id, frm, to, actor=ACTOR, reason=reason)
