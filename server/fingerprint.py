"""Is what the replica answers with really this policy? Decided by difference, before any flip.

A policy was published with the log-probs of itself, its parent and the bare base at positions where they
differ most. The replica gives its own for the policy and for a reference (the parent where it is loaded,
else the base). Its difference (policy - reference) must be closer to the stored difference than to no
difference at all, which is what a silently ignored adapter gives, and closer than to the differences of
the other known weights. The difference cancels what a tier does to every policy alike, such as rounding.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from rollout.records import Fingerprint

CLEARLY = 0.8
"""The nearest weights must be nearer than this share of the distance to the second nearest. A silent no-op
measures a difference of 0; with rounding noise as large as the change itself the ratio is still 0.71."""
SEPARATION = 1e-3
"""Root mean square difference in nats below which two sets of weights cannot be told apart."""


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
    """Compare; `tolerance` (nats, median absolute) holds on a full-precision tier and is None elsewhere."""
    policy = [value for prompt in fingerprint.prompts for value in prompt.policy]
    parent = [value for prompt in fingerprint.prompts for value in prompt.parent]
    base = [value for prompt in fingerprint.prompts for value in prompt.base]
    reference = parent if measured.reference_is_parent else base
    if not policy:
        return Check(Verdict.CANNOT_TELL, "the fingerprint has no positions")
    seen = _minus(measured.policy, measured.reference)
    wanted = _minus(policy, reference)
    others = {"its parent": _minus(parent, reference), "the base": _minus(base, reference)}
    apart = {name: _distance(wanted, other) for name, other in others.items()}
    nearest = min(apart, key=lambda name: apart[name])
    if apart[nearest] < SEPARATION:
        return Check(
            Verdict.CANNOT_TELL,
            f"the policy is only {apart[nearest]:.1e} nats from {nearest}, too little to tell",
        )
    off = _distance(seen, wanted)
    name, other = min(
        ((name, _distance(seen, other)) for name, other in others.items()), key=lambda pair: pair[1]
    )
    facts = f"answers are {off:.1e} nats from the policy and {other:.1e} from {name}"
    if off >= CLEARLY * other:
        return Check(Verdict.MISMATCH if other < off else Verdict.CANNOT_TELL, facts)
    if tolerance is not None and (error := _typical(_minus(measured.policy, policy))) > tolerance:
        return Check(Verdict.MISMATCH, f"log-probs are off by {error:.1e} nats, {tolerance:.0e} is allowed")
    return Check(Verdict.MATCH, facts)


def _distance(a: Sequence[float], b: Sequence[float]) -> float:
    """Root mean square difference: rounding noise, which is independent, adds at a right angle."""
    return math.sqrt(sum(d * d for d in _minus(a, b)) / len(a))


def _minus(a: Sequence[float], b: Sequence[float]) -> list[float]:
    return [x - y for x, y in zip(a, b, strict=True)]


def _typical(differences: Sequence[float]) -> float:
    """Median absolute difference.

    Not the mean: where two experts' scores are a rounding error apart, trainer and engine may route a token
    differently, and its log-prob is then off by much while the weights are right.
    """
    return statistics.median(abs(difference) for difference in differences)
