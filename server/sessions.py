"""Which policy and replica each running trajectory is on, and how many turns it has.

Remembered in memory for trajectories seen lately, read from the store for others, so a gateway that
restarts goes on where it stopped. Bounded: the least recently used are forgotten.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field

from rollout.store import Store, trajectories


@dataclass(slots=True)
class Session:
    """One trajectory as the gateway remembers it."""

    policy: str | None = None
    """What answered last, requests that pinned a policy apart."""
    since: float = 0.0
    """Unix seconds since which it has been on `policy`."""
    turns: int = 0
    """Number of the next turn."""
    replica_of_tier: dict[str, str] = field(default_factory=dict)

    def held(self, now: float, hold_s: float) -> str | None:
        """The policy it stays on, while the hold lasts."""
        return self.policy if self.policy is not None and now - self.since <= hold_s else None

    def answered(self, policy: str, now: float) -> None:
        """A request that pinned no policy was given `policy`."""
        if policy != self.policy:
            self.policy, self.since = policy, now

    def on_replica(self, tier: str, replica: str) -> None:
        self.replica_of_tier[tier] = replica


class Sessions:
    def __init__(self, store: Store, limit: int) -> None:
        self._store = store
        self._limit = limit
        self._known: OrderedDict[tuple[str, str], Session] = OrderedDict()

    def new(self, project_id: str, trajectory_id: str) -> Session:
        """A trajectory that cannot be in the store yet."""
        return self._remember(project_id, trajectory_id, Session())

    async def get(self, project_id: str, trajectory_id: str) -> Session:
        session = self._known.get((project_id, trajectory_id))
        if session is None:
            read = await asyncio.to_thread(self._read, project_id, trajectory_id)
            # Another request of the trajectory may have been first; its object is the one to share.
            session = self._known.get((project_id, trajectory_id), read)
        return self._remember(project_id, trajectory_id, session)

    def _read(self, project_id: str, trajectory_id: str) -> Session:
        with self._store.read() as tx:
            row = trajectories.get(tx, project_id, trajectory_id)
        if row is None:
            return Session()
        return Session(policy=row.policy_id, since=row.policy_since, turns=row.turns)

    def _remember(self, project_id: str, trajectory_id: str, session: Session) -> Session:
        self._known[project_id, trajectory_id] = session
        self._known.move_to_end((project_id, trajectory_id))
        while len(self._known) > self._limit:
            self._known.popitem(last=False)
        return session
