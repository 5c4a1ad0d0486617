"""Is what the replica answers with really this policy? Decided by difference, before any flip.

A policy was published with the log-probs of itself, its parent and the bare base at positions where they
differ most. The replica gives its own for the policy and for a reference (the parent where it is loaded,
else the base). Its difference (policy - reference) must be closer to the stored difference than to no
difference at all, which is what a silently ignored adapter gives, and closer than to the differences of
the other known weights. The difference cancels what a tier does to every policy alike, such as rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from rollout.records import Fingerprint

MARGIN = 0.5
"""The measured difference must be nearer than this share of the distance to the next candidate."""
SEPARATION = 1e-3
"""Mean absolute difference in nats below which two sets of weights cannot be told apart."""


class Verdict(StrEnum):
    MATCH = "match"
    MISMATCH = "mismatch"
    CANNOT_TELL = "cannot tell"


@dataclass(slots=True, frozen=True)
class Check:
    verdict: Verdict
    reason: str


@dataclass(slots=True, frozen=True, kw_only=True)
class Measured:
    """What the replica says at the fingerprint's positions, all prompts in a row."""

    policy: Sequence[float]
    reference: Sequence[float]
    reference_is_parent: bool


def positions(fingerprint: Fingerprint, scores: Sequence[Sequence[float | None]]) -> list[float]:
    """The log-probs of full prompts `scores`, one list a prompt, at the fingerprint's positions."""
    values = []
    for prompt, score in zip(fingerprint.prompts, scores, strict=True):
        for position in prompt.positions:
            value = score[position]
            if value is None:
                raise ValueError(f"no log-prob at position {position}")
            values.append(value)
    return values


def check(fingerprint: Fingerprint, measured: Measured, tolerance: float | None) -> Check:
    """Compare; `tolerance` (nats, mean absolute) holds on a full-precision tier and is None elsewhere."""
    policy = [value for prompt in fingerprint.prompts for value in prompt.policy]
    parent = [value for prompt in fingerprint.prompts for value in prompt.parent]
    base = [value for prompt in fingerprint.prompts for value in prompt.base]
    reference = parent if measured.reference_is_parent else base
    if not policy:
        return Check(Verdict.CANNOT_TELL, "the fingerprint has no positions")
    measured_difference = _minus(measured.policy, measured.reference)
    wanted = _minus(policy, reference)
    distance = _mean(_minus(measured_difference, wanted))
    name, other = min(
        (
            (name, _mean(_minus(wanted, _minus(weights, reference))))
            for name, weights in (("its parent", parent), ("the base", base))
        ),
        key=lambda pair: pair[1],
    )
    if other < SEPARATION:
        return Check(
            Verdict.CANNOT_TELL,
            f"the policy differs from {name} by {other:.1e} nats only, too little to tell",
        )
    if distance > MARGIN * other:
        return Check(
            Verdict.MISMATCH,
            f"answers are {distance:.1e} nats from the policy, which is only {other:.1e} from {name}",
        )
    if tolerance is not None and (off := _mean(_minus(measured.policy, policy))) > tolerance:
        return Check(
            Verdict.MISMATCH, f"log-probs are off by {off:.1e} nats on average, {tolerance:.0e} is allowed"
        )
    return Check(Verdict.MATCH, f"{distance:.1e} nats from the policy, {other:.1e} between it and {name}")


def _minus(a: Sequence[float], b: Sequence[float]) -> list[float]:
    return [x - y for x, y in zip(a, b, strict=True)]


def _mean(values: Sequence[float]) -> float:
    return sum(abs(value) for value in values) / len(values)
