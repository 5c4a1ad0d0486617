"""Evaluations: what was measured of a policy, on which suite, against which baseline. Append-only."""

from __future__ import annotations

from typing import Any

import msgspec
from sqlalchemy import Connection, Row, select
from sqlalchemy import insert as sql_insert

from rollout.store import tables


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    policy_id: str
    baseline_id: str | None
    suite: str
    n: int
    """Number of tasks (pairs, when there is a baseline)."""
    results: dict[str, Any]
    created_at: float


def insert(tx: Connection, evaluation: Evaluation) -> None:
    tx.execute(sql_insert(tables.evaluations).values(msgspec.structs.asdict(evaluation)))


def get(tx: Connection, evaluation_id: str) -> Evaluation | None:
    table = tables.evaluations
    row = tx.execute(select(table).where(table.c.id == evaluation_id)).one_or_none()
    return None if row is None else _evaluation(row)


def list_evaluations(tx: Connection, policy_id: str | None = None) -> list[Evaluation]:
    """All evaluations, or those of one policy, oldest first."""
    table = tables.evaluations
    statement = select(table).order_by(table.c.seq)
    if policy_id is not None:
        statement = statement.where(table.c.policy_id == policy_id)
    return [_evaluation(row) for row in tx.execute(statement)]


def _evaluation(row: Row[*tuple[Any, ...]]) -> Evaluation:
    return Evaluation(**{name: value for name, value in row._mapping.items() if name != "seq"})
