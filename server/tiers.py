"""Which replicas there are, what each holds, and which policy is served: the gateway's live state.

One `Fleet` a gateway, changed only by the reconciler and by a flip, read by every request. It is a view of
the store and of the engines: a gateway that restarts builds it anew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rollout.records import PIN, Policy, PolicyKind, PolicyState, pinned_policy
from server import errors
from server.engine.client import Engine
from server.engine.launch import BASE_MODEL
from server.engine.supervisor import read_state

STANDARD, FAST = "standard", "fast"
AUTO = "auto"
FLEX = "flex"
"""OpenAI's name of work that may wait: the fast tier, behind everybody who waits for an answer."""
_TIER_OF = {
    "default": STANDARD,
    "standard": STANDARD,
    "fast": FAST,
    "priority": FAST,
    FLEX: FAST,
    "auto": AUTO,
}
_WIRE = {STANDARD: "default"}
"""Tier -> ``service_tier`` in responses, which the official client's types allow."""


@dataclass(slots=True)
class Replica:
    """One engine as the gateway sees it now."""

    id: str
    tier: str
    engine: Engine
    state_file: Path
    full_precision: bool
    drafts: bool = False
    """Whether the engine drafts (speculative decoding)."""
    instance: str | None = None
    """The engine start that everything below is true of."""
    ready: bool = False
    """In rotation: healthy, and holding the promoted policy verified."""
    why_not: str = "starting"
    draining: bool = False
    """Out of rotation until its engine has been started anew."""
    misses: int = 0
    """Failed health checks in a row."""
    verified: set[str] = field(default_factory=set)
    failed: dict[str, float] = field(default_factory=dict)
    """Policy -> monotonic time at which to try it again."""
    in_flight: Counter[str] = field(default_factory=Counter)
    load_started_at: dict[str, float] = field(default_factory=dict)
    """Policy -> unix seconds at which its load was begun."""
    load_ms: dict[str, float] = field(default_factory=dict)
    """Policy -> how long the engine took to load it."""
    placed_ms: dict[str, float] = field(default_factory=dict)
    """Policy -> from the check of its folder to verified."""

    def forget(self, instance: str | None, why: str) -> None:
        """A new engine start (or none): nothing is loaded until it is seen and verified."""
        self.instance, self.ready, self.why_not = instance, False, why
        self.draining = False
        self.verified.clear()
        self.failed.clear()

    def drain(self) -> None:
        """Take no more requests; those in flight go on."""
        self.draining, self.ready, self.why_not = True, False, "draining"

    def current_instance(self) -> str | None:
        """The engine start that the supervisor names; None when there is none, or no readable file."""
        state = read_state(self.state_file)
        return None if state is None else state.instance

    @contextmanager
    def carrying(self, policy_id: str) -> Iterator[None]:
        """A request in flight: while inside, the policy is not unloaded."""
        self.in_flight[policy_id] += 1
        try:
            yield
        finally:
            self.in_flight[policy_id] -= 1


@dataclass(slots=True, kw_only=True)
class Serving:
    """What the alias means."""

    promoted: str | None = None
    previous: str | None = None
    epoch: int = -1


@dataclass(slots=True, frozen=True)
class Named:
    """What a request's model name and service_tier ask for. `tier` may be "auto"."""

    tier: str
    policy: str | None


@dataclass(slots=True)
class Fleet:
    model: str
    """The name callers use."""
    tiers: list[str]
    replicas: list[Replica]
    serving: Serving = field(default_factory=Serving)
    policies: dict[str, Policy] = field(default_factory=dict)
    """Addressable policies by id."""

    def of(self, tier: str) -> list[Replica]:
        return [replica for replica in self.replicas if replica.tier == tier]

    def names(self) -> list[str]:
        """Model names a caller can use now: aliases first, then pinned policies."""
        aliases = [self.model, *(f"{self.model}-{tier}" for tier in self.tiers if tier != STANDARD)]
        return aliases + [f"{alias}{PIN}{policy}" for alias in aliases for policy in sorted(self.policies)]

    def named(self, model: str, service_tier: str | None, default: str) -> Named:
        """Raises 404 for an unknown model, 400 for an unknown tier or one that contradicts the alias."""
        alias, policy = model.partition(PIN)[0], pinned_policy(model)
        by_alias = next((tier for tier in self.tiers if alias == f"{self.model}-{tier}"), None)
        if by_alias is None and alias != self.model:
            raise errors.unknown_model(model, self.names())
        if policy and policy not in self.policies:
            raise errors.unknown_model(model, self.names())
        if service_tier is not None and service_tier not in _TIER_OF:
            raise errors.unknown_tier(service_tier)
        asked = _TIER_OF[service_tier] if service_tier else None
        if by_alias and asked not in (None, AUTO, by_alias):
            raise errors.invalid(
                f"The model '{model}' names tier '{by_alias}' and service_tier names '{asked}'; drop one.",
                "service_tier",
            )
        tier = by_alias or asked or default
        if tier != AUTO and tier not in self.tiers:
            raise errors.unknown_tier(tier)
        return Named(tier=tier, policy=policy)

    def has_served(self, policy_id: str | None) -> bool:
        """Whether the policy has passed the gate: what callers who pinned nothing may be given."""
        policy = self.policies.get(policy_id or "")
        return policy is not None and policy.state in (PolicyState.PROMOTED, PolicyState.RETIRED)

    def answered_by(self, policy_id: str) -> str:
        return f"{self.model}{PIN}{policy_id}"

    def verified_everywhere(self, policy_id: str) -> str | None:
        """None when every replica in rotation holds `policy_id` verified; else what is missing."""
        rotating = [replica for replica in self.replicas if replica.ready]
        lacking = [replica.id for replica in rotating if policy_id not in replica.verified]
        if lacking:
            return f"not verified on {', '.join(lacking)}"
        missing = [tier for tier in self.tiers if not any(r.tier == tier for r in rotating)]
        return f"no replica in rotation in tier {', '.join(missing)}" if missing else None


def engine_model(policy: Policy) -> str:
    """The name under which an engine serves `policy`."""
    return BASE_MODEL if policy.manifest.kind is PolicyKind.FULL else policy.id


def wire_tier(tier: str) -> str:
    return _WIRE.get(tier, tier)
