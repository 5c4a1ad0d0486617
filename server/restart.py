"""An engine started anew without losing a request: out of rotation until it is idle, then by its supervisor.

The reconciler verifies what the new engine holds before it is in rotation again, as after any start.
"""

from __future__ import annotations

import asyncio
import os
import signal

from server import errors, routing
from server.engine.supervisor import read_state
from server.tiers import Fleet, Replica

POLL_S = 0.05


async def restart(fleet: Fleet, replica_id: str, *, force: bool, wait_s: float) -> None:
    """Return once the supervisor was told. Raises ApiError, with the replica in rotation as before."""
    replica = next((replica for replica in fleet.replicas if replica.id == replica_id), None)
    if replica is None:
        known = ", ".join(replica.id for replica in fleet.replicas)
        raise errors.invalid(f"There is no replica '{replica_id}'; there are {known}.", "replica")
    state = read_state(replica.state_file)
    if state is None or replica.draining:
        why = "has no engine running" if state is None else "is being restarted already"
        raise errors.invalid(f"Replica '{replica_id}' {why}; see GET /v1/rl/tiers.", "replica")
    if not force and not any(other.ready for other in fleet.of(replica.tier) if other is not replica):
        raise errors.invalid(
            f"Replica '{replica_id}' is the only one of tier '{replica.tier}' in rotation, so callers would "
            f"be refused while it starts; send 'force': true to restart it all the same.",
            "force",
        )
    replica.drain()
    try:
        await _until_idle(replica, wait_s)
        os.kill(state.supervisor, signal.SIGHUP)
    except ProcessLookupError:
        replica.draining = False
        raise errors.invalid(
            f"Nothing supervises '{replica_id}' any more; start it again.", "replica"
        ) from None
    except BaseException:
        replica.draining = False
        raise


async def _until_idle(replica: Replica, wait_s: float) -> None:
    try:
        async with asyncio.timeout(wait_s):
            while routing.load(replica):
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise errors.still_busy(replica.id, routing.load(replica), wait_s) from None
