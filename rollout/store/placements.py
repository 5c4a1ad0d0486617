"""Replicas and what each of them holds, as the reconciler last saw it.

Invariant: a placement belongs to one instance (one start) of a replica's engine. A replica that comes back as
another instance holds nothing until the reconciler says so again, so `heartbeat` drops what it held before.
"""

from __future__ import annotations

import time

import msgspec
from sqlalchemy import Connection, Table, delete, select
from sqlalchemy.dialects import postgresql, sqlite

from rollout.records import Placement
from rollout.store import tables


class PlacementRow(msgspec.Struct, frozen=True, kw_only=True):
    """One policy on one replica."""

    replica_id: str
    policy_id: str
    instance: str
    placement: Placement
    detail: str | None
    updated_at: float


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """One engine of a tier."""

    id: str
    tier: str
    instance: str
    ready: bool
    """Whether it is in rotation."""
    seen_at: float


def set_placement(
    tx: Connection,
    replica_id: str,
    instance: str,
    policy_id: str,
    placement: Placement,
    detail: str | None = None,
) -> None:
    upsert(
        tx,
        tables.placements,
        {"replica_id": replica_id, "policy_id": policy_id},
        {"instance": instance, "placement": placement.value, "detail": detail, "updated_at": time.time()},
    )


def placements(
    tx: Connection, policy_id: str | None = None, replica_id: str | None = None
) -> list[PlacementRow]:
    """Placements, of one policy or one replica when named."""
    table = tables.placements
    statement = select(table).order_by(table.c.replica_id, table.c.policy_id)
    if policy_id is not None:
        statement = statement.where(table.c.policy_id == policy_id)
    if replica_id is not None:
        statement = statement.where(table.c.replica_id == replica_id)
    return [
        PlacementRow(
            replica_id=row.replica_id,
            policy_id=row.policy_id,
            instance=row.instance,
            placement=Placement(row.placement),
            detail=row.detail,
            updated_at=row.updated_at,
        )
        for row in tx.execute(statement)
    ]


def clear_placement(tx: Connection, replica_id: str, policy_id: str) -> None:
    """The replica no longer holds the policy."""
    c = tables.placements.c
    tx.execute(delete(tables.placements).where(c.replica_id == replica_id, c.policy_id == policy_id))


def heartbeat(tx: Connection, replica_id: str, tier: str, instance: str, ready: bool) -> None:
    """Note that a replica answered; placements of its earlier instances go."""
    c = tables.placements.c
    tx.execute(delete(tables.placements).where(c.replica_id == replica_id, c.instance != instance))
    upsert(
        tx,
        tables.replicas,
        {"id": replica_id},
        {"tier": tier, "instance": instance, "ready": ready, "seen_at": time.time()},
    )


def replicas(tx: Connection) -> list[Replica]:
    """Every replica ever seen, by id; judge by `seen_at` which are there now."""
    rows = tx.execute(select(tables.replicas).order_by(tables.replicas.c.id))
    return [Replica(**row._mapping) for row in rows]


def upsert(tx: Connection, table: Table, key: dict[str, object], values: dict[str, object]) -> None:
    """Insert the row or overwrite `values` of the one that has `key`; no race on either database."""
    build = postgresql.insert if tx.dialect.name == "postgresql" else sqlite.insert
    tx.execute(
        build(table).values(**key, **values).on_conflict_do_update(index_elements=list(key), set_=values)
    )
