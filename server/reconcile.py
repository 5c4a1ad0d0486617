"""Makes every replica hold what the store says, verified, and only then puts it in rotation.

One loop reads the store (which policies are addressable, which one is promoted), one loop a replica
compares that with the engine: what is missing is checked on disk, loaded and verified by fingerprint; what
is no longer wanted is unloaded once no request is in flight on it. A new engine start holds nothing until
it is seen again. The loops need nothing but the store and the engines, so a gateway that restarts, an
engine that restarts and a policy published meanwhile are all the same case.

Invariant: a policy id is in `Replica.verified` only if this engine start loaded it and answered with it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from rollout import policies
from rollout.artifacts import PolicyInvalid, read_fingerprint, verify_policy
from rollout.config import EngineConfig
from rollout.records import Fingerprint, Placement, Policy, PolicyKind, PolicyState
from rollout.store import Store, placements
from server.config import GatewayConfig
from server.engine.errors import EngineError, EngineRejected, EngineUnavailable
from server.engine.launch import BASE_MODEL
from server.fingerprint import Measured, Verdict, check, positions
from server.metrics import Metrics
from server.tiers import Fleet, Replica, Serving, engine_model
from server.writer import Writer

log = logging.getLogger(__name__)

HEARTBEAT_S = 5.0
MISSES = 6
"""Failed health checks in a row after which an engine in rotation is taken out of it."""
REJECTABLE = (PolicyState.CANDIDATE, PolicyState.GATE, PolicyState.CANARY)
"""States in which a policy that cannot be placed is given up; one that serves is tried again."""


@dataclass(slots=True, kw_only=True)
class Reconciler:
    config: GatewayConfig
    engine: EngineConfig
    base: str
    """Identity of the base weights that the engines serve."""
    store: Store
    writer: Writer
    fleet: Fleet
    metrics: Metrics

    async def run(self) -> None:
        """Until cancelled. Only a store that cannot be read at the very beginning ends it."""
        await self.read_desired()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch_store())
            for replica in self.fleet.replicas:
                group.create_task(self._watch_replica(replica))

    async def read_desired(self) -> None:
        """Take over from the store which policies there are and which is promoted."""
        addressable, serving = await asyncio.to_thread(self._read_desired)
        self.fleet.policies = {policy.id: policy for policy in addressable}
        self.apply(serving)

    def apply(self, serving: policies.Serving) -> None:
        """Make the alias mean what the store says; a stale answer never undoes a newer flip."""
        if serving.epoch > self.fleet.serving.epoch:
            self.fleet.serving = Serving(
                promoted=serving.promoted, previous=serving.previous, epoch=serving.epoch
            )

    async def pass_over(self, replica: Replica) -> None:
        """One comparison of a replica with what it should hold."""
        instance = replica.current_instance()
        if instance != replica.instance:
            replica.forget(instance, "starting" if instance else "not running")
            if instance is not None:
                await self._adopt(replica, instance)
        if instance is None:
            return
        if not await self._healthy(replica):
            return
        loaded = await replica.engine.models()
        replica.verified &= {
            policy.id for policy in self.fleet.policies.values() if engine_model(policy) in loaded
        }
        await self._unload(replica, loaded)
        for policy in self._wanted(replica):
            name = engine_model(policy)
            if name not in loaded and len(loaded - {BASE_MODEL}) >= self.engine.max_policies:
                continue  # a slot frees itself when the last request on an unwanted policy ends
            await self._place(replica, instance, policy, name in loaded)
            if policy.id in replica.verified:
                loaded.add(name)
            # What serves comes first: the tier need not wait for the candidates behind it.
            self._rotate(replica)
        self._rotate(replica)

    async def _healthy(self, replica: Replica) -> bool:
        """Whether the engine answers now. One in rotation that is merely slow stays there for a while:
        on a machine whose cores are all taken an API process can need seconds for a health check."""
        if await replica.engine.health():
            replica.misses = 0
            return True
        replica.misses += 1
        if not replica.ready or replica.misses >= MISSES:
            replica.ready, replica.why_not = False, "starting or dead"
        return False

    def _rotate(self, replica: Replica) -> None:
        promoted = self.fleet.serving.promoted
        if replica.draining:
            return
        replica.ready = promoted in replica.verified
        replica.why_not = "" if replica.ready else f"the promoted policy {promoted} is not verified"

    def _read_desired(self) -> tuple[list[Policy], policies.Serving]:
        with self.store.read() as tx:
            return policies.addressable(tx), policies.serving(tx)

    async def _watch_store(self) -> None:
        while True:
            await asyncio.sleep(self.config.reconcile_s)
            try:
                await self.read_desired()
            except SQLAlchemyError as error:
                log.warning("store: %s; going on with what was last read", error)
            except Exception:
                log.exception("what the store says cannot be used; going on with what was last read")

    async def _watch_replica(self, replica: Replica) -> None:
        told: tuple[Any, ...] = ()
        told_at = 0.0
        while True:
            try:
                await self.pass_over(replica)
                now = (replica.instance, replica.ready)
                if replica.instance and (now != told or time.monotonic() - told_at > HEARTBEAT_S):
                    await self._write(
                        placements.heartbeat, replica.id, replica.tier, replica.instance, replica.ready
                    )
                    told, told_at = now, time.monotonic()
            except EngineError as error:
                replica.ready, replica.why_not = False, str(error)
                log.warning("%s: %s", replica.id, error)
            except SQLAlchemyError as error:
                log.warning("%s: store: %s; trying again", replica.id, error)
            except Exception as error:
                replica.ready, replica.why_not = False, f"{type(error).__name__}: {error}"
                log.exception("%s: cannot be watched; trying again", replica.id)
            await asyncio.sleep(self.config.reconcile_s)

    async def _adopt(self, replica: Replica, instance: str) -> None:
        """Believe placements that an earlier gateway verified on this very engine start."""
        rows = await asyncio.to_thread(self._read_placements, replica.id)
        replica.verified = {
            row.policy_id for row in rows if row.instance == instance and row.placement is Placement.VERIFIED
        }

    def _read_placements(self, replica_id: str) -> list[placements.PlacementRow]:
        with self.store.read() as tx:
            return placements.placements(tx, replica_id=replica_id)

    async def _unload(self, replica: Replica, loaded: set[str]) -> None:
        wanted = {engine_model(policy) for policy in self.fleet.policies.values()} | {BASE_MODEL}
        for name in sorted(loaded - wanted):
            replica.verified.discard(name)
            if replica.in_flight[name] == 0:
                await replica.engine.unload_adapter(name)
                await self._write(placements.clear_placement, replica.id, name)
                loaded.discard(name)

    def _wanted(self, replica: Replica) -> list[Policy]:
        """Policies to place now, what serves first."""
        serving = self.fleet.serving
        first = (serving.promoted, serving.previous)
        missing = [
            policy
            for policy in self.fleet.policies.values()
            if policy.id not in replica.verified and replica.failed.get(policy.id, 0.0) <= time.monotonic()
        ]
        return sorted(missing, key=lambda p: (first.index(p.id) if p.id in first else len(first), p.id))

    async def _place(self, replica: Replica, instance: str, policy: Policy, loaded: bool) -> None:
        """Check, load, verify. Only an engine that goes away is raised; all else is a placement.

        A policy is given up for its own faults alone: what this process or machine lacks is tried again.
        """
        begun = time.monotonic()
        await self._write(placements.set_placement, replica.id, instance, policy.id, Placement.LOADING)
        try:
            detail = await self._verified(replica, policy, loaded)
        except EngineUnavailable:
            raise
        except Exception as error:
            guilty = isinstance(error, PolicyInvalid) or (
                isinstance(error, EngineRejected) and error.status < 500
            )
            if not guilty:
                log.exception("%s: %s could not be verified", replica.id, policy.id)
            await self._fail(replica, instance, policy, str(error), guilty)
            return
        replica.failed.pop(policy.id, None)
        replica.placed_ms[policy.id] = (time.monotonic() - begun) * 1e3
        await self._write(
            placements.set_placement, replica.id, instance, policy.id, Placement.VERIFIED, detail
        )
        replica.verified.add(policy.id)
        self.metrics.placements.labels("verified").inc()
        log.info("%s: %s verified: %s", replica.id, policy.id, detail)

    async def _verified(self, replica: Replica, policy: Policy, loaded: bool) -> str:
        """How the policy was verified. Raises PolicyInvalid when it cannot be trusted."""
        if policy.manifest.kind is PolicyKind.FULL:
            if policy.manifest.base != self.base:
                raise PolicyInvalid(f"{policy.id} is another base than the one these engines serve")
            return "the base that the engine was started with"
        path = Path(policy.path)
        await asyncio.to_thread(
            verify_policy, path, self.base, self.engine.target_modules, self.engine.max_lora_rank
        )
        fingerprint = await asyncio.to_thread(read_fingerprint, path)
        if fingerprint is None:
            raise PolicyInvalid(f"{policy.id}: fingerprint.json is missing, so nothing could be verified")
        if not loaded:
            await self._load(replica, policy.id, path)
        parent = self.fleet.policies.get(policy.manifest.parent or "")
        by_parent = parent is not None and parent.id in replica.verified
        reference = engine_model(parent) if parent is not None and by_parent else BASE_MODEL
        result = check(
            fingerprint,
            Measured(
                policy=await self._scores(replica, policy.id, fingerprint),
                reference=await self._scores(replica, reference, fingerprint),
                reference_is_parent=by_parent,
            ),
            self.config.fingerprint_tolerance if replica.full_precision else None,
        )
        if result.verdict is not Verdict.MATCH:
            raise PolicyInvalid(f"fingerprint {result.verdict.value}: {result.reason}")
        return result.reason

    async def _load(self, replica: Replica, policy_id: str, path: Path) -> None:
        begun = time.monotonic()
        replica.load_started_at[policy_id] = time.time()
        try:
            await replica.engine.load_adapter(policy_id, path)
        except EngineRejected as error:
            # Another gateway may have been faster, which is no fault of the policy.
            loaded = await replica.engine.models()
            if policy_id in loaded:
                return
            if len(loaded - {BASE_MODEL}) >= self.engine.max_policies:
                raise EngineRejected(503, {"message": "no place was left"}) from error
            raise
        replica.load_ms[policy_id] = (time.monotonic() - begun) * 1e3

    async def _scores(self, replica: Replica, model: str, fingerprint: Fingerprint) -> list[float]:
        # One after another: together they would hold the callers' requests up in one long step.
        scores = [await replica.engine.score(model, prompt.token_ids) for prompt in fingerprint.prompts]
        return positions(fingerprint, scores)

    async def _fail(self, replica: Replica, instance: str, policy: Policy, reason: str, guilty: bool) -> None:
        log.error("%s: %s not placed: %s", replica.id, policy.id, reason)
        self.metrics.placements.labels("failed").inc()
        replica.failed[policy.id] = time.monotonic() + self.config.retry_failed_s
        if policy.manifest.kind is PolicyKind.ADAPTER and policy.id in await replica.engine.models():
            await replica.engine.unload_adapter(policy.id)
        await self._write(placements.set_placement, replica.id, instance, policy.id, Placement.FAILED, reason)
        if guilty and await self.writer.run(lambda tx: _reject(tx, policy.id, f"{replica.id}: {reason}")):
            self.fleet.policies.pop(policy.id, None)

    async def _write(self, function: Callable[..., None], *arguments: Any) -> None:
        await self.writer.run(lambda tx: function(tx, *arguments))


def _reject(tx: Connection, policy_id: str, reason: str) -> bool:
    """Give up a policy that is not serving yet, whatever state it has reached; whether it was given up."""
    while (policy := policies.get(tx, policy_id)) is not None and policy.state in REJECTABLE:
        try:
            policies.transition(
                tx, policy_id, policy.state, PolicyState.REJECTED, actor="reconciler", reason=reason
            )
        except policies.PolicyConflict:
            continue  # the judge or another gateway moved it meanwhile: look again
        return True
    return False
