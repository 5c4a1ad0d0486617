"""Which replica answers. Pure functions of what the fleet looks like at that moment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rollout.records import PRIORITY_HEADER
from server import errors
from server.tiers import AUTO, STANDARD, Replica

PRIORITIES = {"interactive": 0, "batch": 10}
"""Header value -> the engine's priority; a smaller number is served earlier."""


def priority(headers: Mapping[str, str]) -> int:
    """The engine's priority that a request asks for. Raises 400 for a word that is none."""
    asked = headers.get(PRIORITY_HEADER, "interactive")
    if asked not in PRIORITIES:
        known = " or ".join(f"'{name}'" for name in PRIORITIES)
        raise errors.invalid(f"The header {PRIORITY_HEADER} must be {known}, not '{asked}'.", PRIORITY_HEADER)
    return PRIORITIES[asked]


def load(replica: Replica) -> int:
    """Requests in flight."""
    return replica.in_flight.total()


def able(replicas: Sequence[Replica], policy_id: str) -> list[Replica]:
    """Replicas in rotation that hold the policy verified."""
    return [replica for replica in replicas if replica.ready and policy_id in replica.verified]


def choose(replicas: Sequence[Replica], sticky: str | None) -> Replica | None:
    """The replica that served the trajectory so far where it is able, else the least loaded."""
    for replica in replicas:
        if replica.id == sticky:
            return replica
    return min(replicas, key=load, default=None)


def choose_tier(tier: str, replicas: Sequence[Replica]) -> str:
    """`tier`, or for "auto" the tier of the least loaded able replica, standard on a tie."""
    if tier != AUTO:
        return tier
    least = min(replicas, key=lambda replica: (load(replica), replica.tier != STANDARD), default=None)
    return least.tier if least is not None else STANDARD
