"""The gateway's own section of the TOML, ``[gateway]``."""

from __future__ import annotations

from pydantic import Field

from rollout.config import Section


class GatewayConfig(Section):
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=1, le=65535)
    keep_alive_s: int = 120
    """How long an idle connection is kept. Longer than clients keep theirs, or a request that they send just
    when it is closed is lost: the official client gives an idle connection up after 5 s."""
    max_connections: int = 4096
    """Connections at a time, fewer where the process may not open four files for each; idle ones yield."""
    max_body_mb: int = 32
    """Largest request, in millions of bytes."""
    policy_hold_s: float = 600.0
    """How long a trajectory stays on the policy it began with."""
    reconcile_s: float = 0.5
    """Pause between two looks at each replica."""
    drain_s: float = 300.0
    """How long a replica that is to be restarted may take over the requests it has."""
    retry_failed_s: float = 10.0
    """After a policy failed to load or verify on a replica, when to try again."""
    warm_prefixes: int = 8
    """Hottest prompt prefixes that are run through a policy before it is promoted."""
    warm_timeout_s: float = 20.0
    """A promotion waits this long for the warm-up at most."""
    key_cache_s: float = 5.0
    """How long a key that was looked up is believed; a revoked key works this much longer at most."""
    trajectories_in_memory: int = 20_000
    """Trajectories whose policy and replica are remembered without asking the store."""
    fingerprint_tolerance: float = 1e-3
    """Largest mean absolute difference in nats on a full-precision tier."""
