"""Trajectories: one row for each, kept up to date by the insertion of its completions.

Invariant: after a transaction that inserts a completion, its trajectory's row counts it; nobody else writes.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from sqlalchemy import Connection, Insert, case, func, select
from sqlalchemy.dialects import postgresql, sqlite

from rollout.records import Completion, Joint
from rollout.store import tables


class Trajectory(msgspec.Struct, frozen=True, kw_only=True):
    """One agent run as the store knows it now."""

    project_id: str
    id: str
    task: str | None
    policy_id: str
    """The policy that answered last."""
    policy_since: float
    """When the trajectory first used `policy_id` in its present span."""
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
                "policy_since": c.created_at,
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
    same_policy = old.policy_id == new.policy_id
    return insert.on_conflict_do_update(
        index_elements=[old.project_id, old.id],
        set_={
            "task": func.coalesce(old.task, new.task),
            "policy_id": new.policy_id,
            "policy_since": case((same_policy, old.policy_since), else_=new.policy_since),
            "last_at": case((old.last_at > new.last_at, old.last_at), else_=new.last_at),
            "turns": case((old.turns > new.turns, old.turns), else_=new.turns),
            "breaks": old.breaks + new.breaks,
        },
    )
