"""Which replica answers. Pure functions of what the fleet looks like at that moment."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

from rollout.records import PRIORITY_HEADER
from server import errors
from server.engine.launch import BATCH_PRIORITY
from server.tiers import AUTO, FLEX, STANDARD, Replica

BOUND = 1.25
"""A replica's largest part of the load, over an even one, when it is chosen for its cache."""
NOT_WITH_DRAFTS = ("min_p", "logit_bias")
"""Request fields that vLLM refuses on an engine that drafts."""
PRIORITIES = {"interactive": 0, "evaluation": 5, "batch": BATCH_PRIORITY}
"""Header value -> the engine's priority; a smaller number is served earlier. An evaluation waits its turn
like batch work, but is not put aside once it runs: what is served next depends on it."""


def priority(headers: Mapping[str, str], service_tier: str | None) -> int:
    """The engine's priority that a request asks for. Raises 400 for a word that is none."""
    asked = headers.get(PRIORITY_HEADER, "batch" if service_tier == FLEX else "interactive")
    if asked not in PRIORITIES:
        known = " or ".join(f"'{name}'" for name in PRIORITIES)
        raise errors.invalid(f"The header {PRIORITY_HEADER} must be {known}, not '{asked}'.", PRIORITY_HEADER)
    return PRIORITIES[asked]


def without_drafts(tier: str, replicas: Sequence[Replica], params: Mapping[str, Any]) -> list[Replica]:
    """Those of `replicas` that can apply `params`: "auto" leaves out the ones that draft.

    Raises 400 when the tier that was asked for drafts, and "auto" has nothing left.
    """
    field = next((name for name in NOT_WITH_DRAFTS if params.get(name)), None)
    able = [replica for replica in replicas if field is None or not replica.drafts]
    if field is not None and replicas and not able:
        drafting = tier if tier != AUTO else "every tier"
        raise errors.invalid(
            f"{field} cannot be applied by tier '{drafting}', which drafts (speculative decoding); leave it "
            f"out or ask for a tier that does not draft.",
            field,
        )
    return able


def load(replica: Replica) -> int:
    """Requests in flight."""
    return replica.in_flight.total()


def able(replicas: Sequence[Replica], policy_id: str) -> list[Replica]:
    """Replicas in rotation that hold the policy verified."""
    return [replica for replica in replicas if replica.ready and policy_id in replica.verified]


def choose(replicas: Sequence[Replica], sticky: str | None, prefix: bytes | None) -> Replica | None:
    """The replica that served the trajectory so far where it is able, else one that may know its prefix.

    Requests that begin alike go to the same replica, whose cache holds what they share, as long as it carries
    no more than its part of the load: highest random weight (Thaler and Ravishankar, 1998) with bounded loads
    (Mirrokni et al., 2018). Nothing is remembered, so every gateway chooses alike, and a replica that leaves
    moves only what was its own. Without a prefix the least loaded is chosen.
    """
    for replica in replicas:
        if replica.id == sticky:
            return replica
    if prefix is not None:
        most = math.ceil(BOUND * (sum(map(load, replicas)) + 1) / max(len(replicas), 1))
        for replica in sorted(replicas, key=lambda replica: _weight(prefix, replica), reverse=True):
            if load(replica) < most:
                return replica
    return min(replicas, key=load, default=None)


def _weight(prefix: bytes, replica: Replica) -> bytes:
    return hashlib.sha256(prefix + replica.id.encode()).digest()


def choose_tier(tier: str, replicas: Sequence[Replica]) -> str:
    """`tier`, or for "auto" the tier of the least loaded able replica, standard on a tie."""
    if tier != AUTO:
        return tier
    least = min(replicas, key=lambda replica: (load(replica), replica.tier != STANDARD), default=None)
    return least.tier if least is not None else STANDARD
