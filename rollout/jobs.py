"""A durable queue with leases: work that must be done once, by whoever is alive.

Invariants: at any time at most one lease of a job is valid; a job is tried `max_attempts` times at most,
whether an attempt ended in a retryable failure or in silence; only the holder of the newest lease can finish
or fail it.
Times are the callers' clocks: leases should be much longer than clocks differ between hosts.
"""

from __future__ import annotations

import time
from enum import StrEnum
from typing import Any

import msgspec
from sqlalchemy import Connection, Row, and_, insert, or_, select, update
from sqlalchemy.dialects import postgresql, sqlite

from rollout.store import tables


class JobState(StrEnum):
    QUEUED = "queued"
    LEASED = "leased"
    DONE = "done"
    FAILED = "failed"


class Job(msgspec.Struct, frozen=True, kw_only=True):
    id: int
    kind: str
    spec: dict[str, Any]
    state: JobState
    attempts: int
    """Number of this attempt, from 1; with `owner` it is what a finish is checked against."""
    max_attempts: int
    owner: str | None
    lease_until: float | None
    result: dict[str, Any] | None
    error: str | None


class LeaseLost(Exception):
    """The lease ran out and the job is no longer the caller's; what it did must not count."""


def enqueue(
    tx: Connection, kind: str, spec: dict[str, Any], *, key: str | None = None, max_attempts: int = 3
) -> int:
    """Add a job and return its id; with a `key`, the job of that kind and key that is there already."""
    now = time.time()
    values = {
        "kind": kind,
        "key": key,
        "spec": spec,
        "state": JobState.QUEUED.value,
        "attempts": 0,
        "max_attempts": max_attempts,
        "not_before": now,
        "enqueued_at": now,
        "updated_at": now,
    }
    table = tables.jobs
    if key is None:
        return int(tx.execute(insert(table).values(values).returning(table.c.id)).scalar_one())
    build = postgresql.insert if tx.dialect.name == "postgresql" else sqlite.insert
    tx.execute(build(table).values(values).on_conflict_do_nothing(index_elements=["kind", "key"]))
    return int(tx.execute(select(table.c.id).where(table.c.kind == kind, table.c.key == key)).scalar_one())


def get(tx: Connection, job_id: int) -> Job | None:
    row = tx.execute(select(tables.jobs).where(tables.jobs.c.id == job_id)).one_or_none()
    return None if row is None else _job(row)


def lease(tx: Connection, kind: str, owner: str, seconds: float, *, now: float | None = None) -> Job | None:
    """Take the oldest job of `kind` that is queued, or whose lease ran out; None when there is none.

    A job whose last allowed attempt ran out fails here, with the reason.
    """
    now = time.time() if now is None else now
    table = tables.jobs
    c = table.c
    free = and_(c.state == JobState.QUEUED.value, c.not_before <= now)
    expired = and_(c.state == JobState.LEASED.value, c.lease_until < now)
    while True:
        row = tx.execute(
            select(table)
            .where(c.kind == kind, or_(free, expired))
            .order_by(c.id)
            .limit(1)
            # Others skip the row while we hold it. SQLite ignores this: BEGIN IMMEDIATE has no others.
            .with_for_update(skip_locked=True)
        ).one_or_none()
        if row is None:
            return None
        if row.attempts >= row.max_attempts:
            reason = f"no answer before the lease of attempt {row.attempts} of {row.max_attempts} ran out"
            values = {"state": JobState.FAILED.value, "error": reason, "updated_at": now}
            tx.execute(update(table).where(c.id == row.id).values(values))
            continue
        values = {
            "state": JobState.LEASED.value,
            "owner": owner,
            "attempts": row.attempts + 1,
            "lease_until": now + seconds,
            "updated_at": now,
        }
        taken = tx.execute(update(table).where(c.id == row.id).values(values).returning(*c))
        return _job(taken.one())


def renew(tx: Connection, job: Job, seconds: float, *, now: float | None = None) -> Job:
    """Hold the lease for `seconds` from now; raises LeaseLost."""
    now = time.time() if now is None else now
    return _settle(tx, job, {"lease_until": now + seconds, "updated_at": now})


def finish(tx: Connection, job: Job, result: dict[str, Any] | None = None) -> Job:
    """The job is done; raises LeaseLost when another owner has it, or had it, since."""
    return _settle(tx, job, {"state": JobState.DONE.value, "result": result, "updated_at": time.time()})


def fail(
    tx: Connection,
    job: Job,
    error: str,
    *,
    retry: bool,
    max_attempts: int | None = None,
    delay_s: float = 0.0,
) -> Job:
    """The attempt failed: back into the queue after `delay_s` if `retry` and attempts are left, else failed.

    `max_attempts` overrides the job's own bound. Raises LeaseLost.
    """
    now = time.time()
    bound = job.max_attempts if max_attempts is None else max_attempts
    values: dict[str, Any] = {"error": error, "updated_at": now, "max_attempts": bound}
    if retry and job.attempts < bound:
        values |= {"state": JobState.QUEUED.value, "not_before": now + delay_s, "lease_until": None}
    else:
        values |= {"state": JobState.FAILED.value}
    return _settle(tx, job, values)


def _settle(tx: Connection, job: Job, values: dict[str, Any]) -> Job:
    """Update the job if this lease still holds it: `attempts` rises with every lease, so it is the fence."""
    table = tables.jobs
    c = table.c
    row = tx.execute(
        update(table)
        .where(
            c.id == job.id,
            c.state == JobState.LEASED.value,
            c.owner == job.owner,
            c.attempts == job.attempts,
        )
        .values(values)
        .returning(*c)
    ).one_or_none()
    if row is None:
        raise LeaseLost(f"job {job.id}: the lease of {job.owner} (attempt {job.attempts}) is over")
    return _job(row)


def _job(row: Row[*tuple[Any, ...]]) -> Job:
    return Job(
        id=row.id,
        kind=row.kind,
        spec=row.spec,
        state=JobState(row.state),
        attempts=row.attempts,
        max_attempts=row.max_attempts,
        owner=row.owner,
        lease_until=row.lease_until,
        result=row.result,
        error=row.error,
    )
