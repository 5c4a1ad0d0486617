"""Promotion and rollback: one row in the store, after everything that could fail has been done.

Invariant: the alias never means a policy that some replica in rotation has not verified. Flips of one
gateway happen one after another; between gateways the store decides (compare-and-set, 412 for the loser).
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field
from typing import Any

from rollout import policies
from rollout.records import Policy, PolicyState
from rollout.store import Store
from server import errors
from server.config import GatewayConfig
from server.engine.errors import EngineRejected, EngineUnavailable
from server.metrics import Metrics
from server.reconcile import Reconciler
from server.tiers import Fleet, Replica
from server.warm import PRIORITY, Prefixes
from server.writer import Writer

log = logging.getLogger(__name__)
REMEMBERED = 64


@dataclass(slots=True, kw_only=True)
class Flips:
    config: GatewayConfig
    store: Store
    writer: Writer
    fleet: Fleet
    reconciler: Reconciler
    prefixes: Prefixes
    metrics: Metrics
    recent: list[dict[str, Any]] = field(default_factory=list)
    """The last flips with their timings, newest last."""
    _one_at_a_time: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def promote(self, policy_id: str, expected: str | None, actor: str) -> policies.Serving:
        """Serve `policy_id` on every tier. 404 unknown, 409 unverified, 412 lost race."""
        async with self._one_at_a_time:
            policy = await asyncio.to_thread(self._read, policy_id)
            if policy is None:
                raise errors.not_found("policy", policy_id)
            if policy.state is not PolicyState.CANARY:
                raise errors.lost_race(
                    f"Policy {policy_id} is '{policy.state}'; only one that passed the gate can be promoted."
                )
            await self.reconciler.read_desired()
            self._require_verified(policy_id)
            begun = time.time()
            warmed = await self._warm(policy_id)
            self._require_verified(policy_id)
            serving = await self._write_flip(
                lambda tx: policies.promote(tx, policy_id, expected=expected, actor=actor)
            )
            self._done("promote", policy_id, {"warm_started_at": begun, "warmed_prefixes": warmed})
            return serving

    async def rollback(self, expected: str | None, actor: str, reason: str) -> policies.Serving:
        """Serve the previous policy again. 409 when it is not verified everywhere, 412 without one."""
        async with self._one_at_a_time:
            await self.reconciler.read_desired()
            previous = self.fleet.serving.previous
            if previous is not None:
                self._require_verified(previous)
            serving = await self._write_flip(
                lambda tx: policies.rollback(tx, expected=expected, actor=actor, reason=reason)
            )
            self._done("rollback", serving.promoted or "", {"reason": reason})
            return serving

    async def _write_flip(self, flip: Any) -> policies.Serving:
        try:
            serving: policies.Serving = await self.writer.run(flip)
        except policies.PolicyConflict as error:
            raise errors.lost_race(f"{error}; read /v1/rl/tiers and decide again.") from None
        # What was verified for all replicas in rotation is served from this very moment on.
        self.reconciler.apply(serving)
        await self.reconciler.read_desired()
        return serving

    def _require_verified(self, policy_id: str) -> None:
        if missing := self.fleet.verified_everywhere(policy_id):
            raise errors.not_verified(policy_id, missing)

    async def _warm(self, policy_id: str) -> int:
        """Run the hottest prefixes through the policy on every replica; how many were run."""
        bodies = [body | {"model": policy_id} for body in self.prefixes.hottest(self.config.warm_prefixes)]
        replicas = [replica for replica in self.fleet.replicas if replica.ready]
        try:
            async with asyncio.timeout(self.config.warm_timeout_s):
                counts = await asyncio.gather(*(_run(replica, policy_id, bodies) for replica in replicas))
        except TimeoutError:
            log.warning("warm-up of %s ran out of time; flipping without it", policy_id)
            return 0
        return sum(counts)

    def _done(self, kind: str, policy_id: str, facts: dict[str, Any]) -> None:
        self.metrics.flips.labels(kind).inc()
        replicas = {
            replica.id: {
                "load_ms": replica.load_ms.get(policy_id),
                "load_started_at": replica.load_started_at.get(policy_id),
                "placed_ms": replica.placed_ms.get(policy_id),
            }
            for replica in self.fleet.replicas
        }
        self.recent.append(
            {"kind": kind, "policy": policy_id, "flipped_at": time.time(), "replicas": replicas, **facts}
        )
        del self.recent[:-REMEMBERED]
        log.info("%s: %s is served (epoch %d)", kind, policy_id, self.fleet.serving.epoch)

    def _read(self, policy_id: str) -> Policy | None:
        with self.store.read() as tx:
            return policies.get(tx, policy_id)


async def _run(replica: Replica, policy_id: str, bodies: list[dict[str, Any]]) -> int:
    with replica.carrying(policy_id):
        done = 0
        for body in bodies:
            try:
                await replica.engine.chat(body, priority=PRIORITY)
            except EngineRejected as error:
                log.warning("%s: warm-up of %s leaves one prefix out: %s", replica.id, policy_id, error)
            except EngineUnavailable as error:
                log.warning("%s: warm-up of %s stopped: %s", replica.id, policy_id, error)
                break
            else:
                done += 1
    return done
