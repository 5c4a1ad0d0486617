"""``python -m rollout judge``: takes candidates to the gate and promotes what passes.

One loop. Each round: promote what waits in CANARY -> choose the newest candidate that all replicas hold
verified -> lease its gate job -> judge it. Older candidates are rejected in favour of the newest: they are
steps on the way to it, and an evaluation costs minutes. Whatever happens is in the store, so a judge that is
killed is simply started again.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
import uuid
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

import openai
from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from clients.client import AsyncRatchet
from rollout import config, gateway, jobs, policies
from rollout.policies import PolicyConflict
from rollout.promotion import ACTOR, Decision, EvaluationFault, Gate, JudgeConfig
from rollout.records import Placement, Policy, PolicyState
from rollout.store import Store, placements

log = logging.getLogger(__name__)
JOB = "gate"
RETRIES = 4
"""Of the client, per request: an engine that restarts must not cost an evaluation."""
RETRY_DELAY_S = 5.0
REPLICA_GONE_S = 60.0
"""A replica that the gateway has not seen for so long holds no candidate up. It is seen every few seconds."""


def main(args: argparse.Namespace) -> None:
    """Run until SIGTERM."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    logging.getLogger("httpx2").setLevel(logging.WARNING)
    document = config.read(args.config, args.overrides)
    settings = config.section(document, "judge", JudgeConfig)
    store = Store.open(config.section(document, "store", config.StoreConfig).url)
    client = gateway.client(document, retries=RETRIES)
    model = config.section(document, "model", config.ModelConfig).name
    tiers = settings.gate_tiers or list(config.tiers(document))
    gate = Gate(store=store, client=client, config=settings, model=model, tiers=tiers)
    judge = Judge(store=store, client=client, gate=gate)
    try:
        asyncio.run(_until_stopped(judge))
    finally:
        store.close()


async def _until_stopped(judge: Judge) -> None:
    running = asyncio.create_task(judge.run())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, running.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await running


@dataclass(slots=True, kw_only=True)
class Judge:
    store: Store
    client: AsyncRatchet
    gate: Gate
    owner: str = field(default_factory=lambda: f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}")
    gone: set[str] = field(default_factory=set)
    """Replicas that are left out at present."""

    async def run(self) -> None:
        """Rounds for ever. The service's failures are waited out; a broken store ends the process."""
        while True:
            if not await self.round():
                await asyncio.sleep(self.gate.config.poll_s)

    async def round(self) -> bool:
        """One look at the store; True when something was done."""
        with self.store.read() as tx:
            waiting = policies.list_policies(tx, [PolicyState.CANARY])
            left = policies.list_policies(tx, [PolicyState.GATE])
            chosen, older = _choose(tx, self._replicas(tx))
        promoted = [await self._promote(policy) for policy in waiting]
        for policy in left:
            self._reject_if_hopeless(policy.id)
        # What passed is promoted first: the next candidate has to beat it, not the one before it.
        if not left and not waiting and chosen is not None:
            self._enqueue(chosen, older)
        job = self._lease()
        if job is not None:
            await self._judge(job)
        return job is not None or any(promoted)

    def _replicas(self, tx: Connection) -> set[str]:
        """Those that are there now. One that left the configuration, or lies dead, is left out."""
        seen_at = {replica.id: replica.seen_at for replica in placements.replicas(tx)}
        gone = {replica for replica, at in seen_at.items() if at < time.time() - REPLICA_GONE_S}
        for replica in sorted(gone - self.gone):
            log.warning("%s was not seen for %.0f s: candidates need not be on it", replica, REPLICA_GONE_S)
        self.gone = gone
        return seen_at.keys() - gone

    def _enqueue(self, chosen: Policy, older: list[Policy]) -> None:
        with self.store.write() as tx:
            for policy in older:
                policies.transition(
                    tx,
                    policy.id,
                    PolicyState.CANDIDATE,
                    PolicyState.REJECTED,
                    actor=ACTOR,
                    reason=f"superseded by {chosen.id} before its evaluation began",
                )
            # A queued row of an earlier round is found again by its key.
            jobs.enqueue(tx, JOB, {"policy": chosen.id}, key=chosen.id)

    def _reject_if_hopeless(self, policy_id: str) -> None:
        """A job whose every attempt ended in silence fails by itself; its candidate must not wait on."""
        with self.store.write() as tx:
            job = jobs.get(tx, jobs.enqueue(tx, JOB, {"policy": policy_id}, key=policy_id))
        if job is not None and job.state is jobs.JobState.FAILED:
            self.gate.give_up(policy_id, f"could not be judged: {job.error}")

    def _lease(self) -> jobs.Job | None:
        with self.store.write() as tx:
            return jobs.lease(tx, JOB, self.owner, self.gate.config.lease_s)

    async def _judge(self, job: jobs.Job) -> None:
        policy_id: str = job.spec["policy"]
        try:
            baseline = self.gate.enter(policy_id)
            log.info("%s enters the gate against %s", policy_id, baseline)
            decision = await self._while_leased(job, self.gate.judge(policy_id, baseline))
        except jobs.LeaseLost as lost:
            log.warning("%s: %s", policy_id, lost)
        except PolicyConflict as conflict:
            # The reconciler rejected it, or another judge was faster: nothing is left to judge.
            with self.store.write() as tx:
                jobs.fail(tx, job, str(conflict), retry=False)
        except EvaluationFault as fault:
            self._retry(job, policy_id, str(fault))
        except asyncio.CancelledError:
            # Told to stop: the next judge begins at once, and this attempt is not held against the candidate.
            with self.store.write() as tx:
                jobs.fail(tx, job, "judge stopped", retry=True, max_attempts=job.max_attempts + 1)
            raise
        except SQLAlchemyError:
            raise
        except Exception as error:  # a fault of ours: it must end neither the judge nor the candidate
            log.exception("%s: the evaluation died", policy_id)
            self._retry(job, policy_id, _reason(error))
        else:
            with self.store.write() as tx:
                jobs.finish(tx, job, {"passes": decision.passes, "reason": decision.reason})

    async def _while_leased(self, job: jobs.Job, judging: Coroutine[Any, Any, Decision]) -> Decision:
        """The result of `judging`, with the lease kept up; raises LeaseLost as soon as it is lost."""

        async def renew() -> None:
            held = job
            while True:
                await asyncio.sleep(self.gate.config.lease_s / 3)
                with self.store.write() as tx:
                    held = jobs.renew(tx, held, self.gate.config.lease_s)

        both = (asyncio.create_task(judging), asyncio.create_task(renew()))
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if both[1].done():
                both[1].result()
            return both[0].result()
        finally:
            for task in both:
                task.cancel()
            await asyncio.wait(both)

    def _retry(self, job: jobs.Job, policy_id: str, fault: str) -> None:
        log.warning("%s could not be judged: %s", policy_id, fault)
        with self.store.write() as tx:
            failed = jobs.fail(tx, job, fault, retry=True, delay_s=RETRY_DELAY_S)
        if failed.state is jobs.JobState.FAILED:
            self.gate.give_up(policy_id, f"could not be judged in {job.attempts} attempts: {fault}")

    async def _promote(self, policy: Policy) -> bool:
        """Ask the gateway to flip; False when it cannot yet, which is tried again at the next round."""
        with self.store.read() as tx:
            passed = policies.history(tx, policy.id)[-1].evidence or {}
        baseline = passed.get("baseline")
        try:
            await self.client.rl.tiers.promote(policy.id, expected=baseline)
        except openai.APIStatusError as error:
            if error.status_code != 412:
                log.warning("%s cannot be promoted yet: %s", policy.id, error.message)
                return False
            self._lost(policy.id, baseline, error.message)
        except openai.APIConnectionError as error:
            log.warning("%s cannot be promoted yet: %s", policy.id, error)
            return False
        return True

    def _lost(self, policy_id: str, baseline: str | None, message: str) -> None:
        """Something else is promoted than what it was compared with: its evidence is about the past."""
        with self.store.write() as tx:
            policy = policies.get(tx, policy_id)
            if policy is not None and policy.state is PolicyState.CANARY:
                reason = f"beat {baseline}, which no longer serves: {message}"
                policies.transition(
                    tx, policy_id, PolicyState.CANARY, PolicyState.REJECTED, actor=ACTOR, reason=reason
                )


def _reason(error: Exception) -> str:
    """What an evaluation died of; of several tasks that died at once, the first one's."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


def _choose(tx: Connection, replicas: set[str]) -> tuple[Policy | None, list[Policy]]:
    """The newest candidate that all `replicas` hold verified, and the candidates older than it."""
    candidates = policies.list_policies(tx, [PolicyState.CANDIDATE])
    for position in reversed(range(len(candidates))):
        rows = placements.placements(tx, policy_id=candidates[position].id)
        held = {row.replica_id for row in rows if row.placement is Placement.VERIFIED}
        if replicas and replicas <= held:
            return candidates[position], candidates[:position]
    return None, []
