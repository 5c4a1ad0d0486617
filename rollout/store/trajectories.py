"""Trajectories: one row for each, kept up to date by the insertion of its completions.

Invariant: after a transaction that inserts a completion, its trajectory's row counts it; nobody else writes.
The policy in the row is never one that a request pinned, unless every request so far pinned one.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from sqlalchemy import Connection, Insert, and_, case, func, or_, select, tuple_
from sqlalchemy.dialects import postgresql, sqlite

from rollout.records import Completion, Joint, pinned_policy
from rollout.store import tables

PINNED = 0.0
"""`policy_since` of a turn whose policy the caller chose."""


class Trajectory(msgspec.Struct, frozen=True, kw_only=True):
    """One agent run as the store knows it now."""

    project_id: str
    id: str
    task: str | None
    policy_id: str
    """The policy that answered last, requests that pinned one apart."""
    policy_since: float
    """When the trajectory first used `policy_id` in its present span; 0 while every request pinned one."""
    created_at: float
    last_at: float
    turns: int
    """The number of the next turn: one above the highest seen. Deletions do not lower it."""
    breaks: int
    """How many of its completions could not be joined to the turn before."""


def get(tx: Connection, project_id: str, trajectory_id: str) -> Trajectory | None:
    table = tables.trajectories
    row = tx.execute(
        select(table).where(table.c.project_id == project_id, table.c.id == trajectory_id)
    ).one_or_none()
    return None if row is None else Trajectory(**row._mapping)


class ContextTurn(msgspec.Struct, frozen=True, kw_only=True):
    """A turn by its ids alone; `choice` is an index into the completion's choices."""

    completion_id: str
    choice: int


def turn_with_context(
    tx: Connection, project_id: str, trajectory_id: str, context_hash: str
) -> ContextTurn | None:
    """The newest completion of the trajectory after which a conversation hashes to `context_hash`."""
    c, contexts = tables.completions.c, tables.completion_contexts.c
    row = tx.execute(
        select(c.id, contexts.choice)
        .join_from(tables.completion_contexts, tables.completions, contexts.completion_id == c.id)
        .where(
            contexts.project_id == project_id,
            contexts.context_hash == context_hash,
            c.trajectory_id == trajectory_id,
        )
        .order_by(c.seq.desc(), contexts.choice)
        .limit(1)
    ).one_or_none()
    return None if row is None else ContextTurn(completion_id=row.id, choice=row.choice)


def turn_ids(
    tx: Connection, project_id: str, trajectory_id: str, *, after: str | None, limit: int
) -> list[str] | None:
    """Ids of up to `limit` completions by turn, behind the completion `after`; None if it has none such."""
    c = tables.completions.c
    of_it = select(c.id).where(c.project_id == project_id, c.trajectory_id == trajectory_id)
    if after is not None:
        place = tx.execute(of_it.where(c.id == after).with_only_columns(c.turn, c.seq)).one_or_none()
        if place is None:
            return None
        of_it = of_it.where(tuple_(c.turn, c.seq) > tuple_(place.turn, place.seq))
    return list(tx.execute(of_it.order_by(c.turn, c.seq).limit(limit)).scalars())


def add_turns(tx: Connection, completions: Sequence[Completion]) -> None:
    """Count `completions` in their trajectories; `completions.insert_many` calls it."""
    # In one order everywhere: two gateways that upsert the same rows in different orders would deadlock.
    ordered = sorted(completions, key=lambda c: (c.project_id, c.trajectory_id))
    tx.execute(
        _upsert(tx.dialect.name),
        [
            {
                "project_id": c.project_id,
                "id": c.trajectory_id,
                "task": c.task,
                "policy_id": c.policy_id,
                "policy_since": PINNED if pinned_policy(c.model) else c.created_at,
                "created_at": c.created_at,
                "last_at": c.created_at,
                "turns": c.turn + 1,
                "breaks": int(c.joint is Joint.BREAK),
            }
            for c in ordered
        ],
    )


def _upsert(dialect: str) -> Insert:
    table = tables.trajectories
    old = table.c
    insert = (postgresql.insert if dialect == "postgresql" else sqlite.insert)(table)
    new = insert.excluded
    pinned = new.policy_since == PINNED
    goes_on = and_(old.policy_id == new.policy_id, old.policy_since != PINNED)
    return insert.on_conflict_do_update(
        index_elements=[old.project_id, old.id],
        set_={
            "task": func.coalesce(old.task, new.task),
            "policy_id": case((pinned, old.policy_id), else_=new.policy_id),
            "policy_since": case((or_(pinned, goes_on), old.policy_since), else_=new.policy_since),
            "last_at": case((old.last_at > new.last_at, old.last_at), else_=new.last_at),
            "turns": case((old.turns > new.turns, old.turns), else_=new.turns),
            "breaks": old.breaks + new.breaks,
        },
    )
