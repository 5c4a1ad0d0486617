"""Completions: what was asked and answered, token for token, with the contexts that let a next turn find it.

Invariant: a completion, its contexts and its trajectory's counters are written in one transaction or not at
all. `seq` gives the order of insertion; on PostgreSQL a lower one may become visible after a higher one, so
it is not a cursor to read a feed by (`outcomes.judged` is).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from sqlalchemy import Connection, Row, func, select
from sqlalchemy import delete as sql_delete
from sqlalchemy import insert as sql_insert

from rollout.records import Completion, CompletionStatus, Joint, Usage
from rollout.store import payload, tables, trajectories


class ContextMatch(msgspec.Struct, frozen=True, kw_only=True):
    """The completion and the choice of it that a conversation goes on from."""

    completion: Completion
    choice: int
    """Index into ``completion.choices``."""


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """How many completions were kept, and why some do not train."""

    total: int
    trainable: int
    breaks: int
    by_status: dict[str, int]
    by_policy: dict[str, int]
    untrainable: dict[str, int]
    """By reason."""


def insert(tx: Connection, completion: Completion, contexts: Sequence[str] = ()) -> None:
    """Store `completion`; ``contexts[i]`` is the context hash after ``completion.choices[i]``, if any."""
    insert_many(tx, [(completion, contexts)])


def insert_many(tx: Connection, batch: Sequence[tuple[Completion, Sequence[str]]]) -> None:
    """Store many in three statements; what the gateway's group commit calls."""
    if not batch:
        return
    tx.execute(sql_insert(tables.completions), [_values(completion) for completion, _ in batch])
    contexts = [
        {
            "completion_id": completion.id,
            "choice": choice,
            "project_id": completion.project_id,
            "context_hash": context,
        }
        for completion, hashes in batch
        for choice, context in enumerate(hashes)
    ]
    if contexts:
        tx.execute(sql_insert(tables.completion_contexts), contexts)
    trajectories.add_turns(tx, [completion for completion, _ in batch])


def get(tx: Connection, completion_id: str) -> Completion | None:
    table = tables.completions
    row = tx.execute(select(table).where(table.c.id == completion_id)).one_or_none()
    return None if row is None else _completion(row)


def of_trajectory(tx: Connection, project_id: str, trajectory_id: str) -> list[Completion]:
    """Its completions by turn, and by insertion among those that claim the same turn."""
    table = tables.completions
    rows = tx.execute(
        select(table)
        .where(table.c.project_id == project_id, table.c.trajectory_id == trajectory_id)
        .order_by(table.c.turn, table.c.seq)
    )
    return [_completion(row) for row in rows]


def by_context(tx: Connection, project_id: str, context_hash: str) -> Completion | None:
    """The newest completion after which a conversation hashes to `context_hash`."""
    match = match_context(tx, project_id, context_hash)
    return None if match is None else match.completion


def match_context(tx: Connection, project_id: str, context_hash: str) -> ContextMatch | None:
    """As `by_context`, with the choice that the conversation took."""
    table, contexts = tables.completions, tables.completion_contexts
    row = tx.execute(
        select(table, contexts.c.choice.label("context_choice"))
        .join(contexts, contexts.c.completion_id == table.c.id)
        .where(contexts.c.project_id == project_id, contexts.c.context_hash == context_hash)
        .order_by(table.c.seq.desc(), contexts.c.choice)
        .limit(1)
    ).one_or_none()
    return None if row is None else ContextMatch(completion=_completion(row), choice=row.context_choice)


def counts(tx: Connection, since: float | None = None) -> Counts:
    """Totals over all completions, or those created at or after `since` (unix seconds)."""
    c = tables.completions.c
    dimensions = (c.status, c.policy_id, c.joint, c.trainable, c.untrainable_reason)
    statement = select(*dimensions, func.count().label("n")).group_by(*dimensions)
    if since is not None:
        statement = statement.where(c.created_at >= since)
    rows = tx.execute(statement).all()
    return Counts(
        total=sum(row.n for row in rows),
        trainable=sum(row.n for row in rows if row.trainable),
        breaks=sum(row.n for row in rows if row.joint == Joint.BREAK),
        by_status=_sums((row.status, row.n) for row in rows),
        by_policy=_sums((row.policy_id, row.n) for row in rows),
        untrainable=_sums((row.untrainable_reason or "unstated", row.n) for row in rows if not row.trainable),
    )


def delete(tx: Connection, completion_id: str) -> bool:
    """Remove the record and its contexts; whether there was one. Its outcomes stay and find nothing."""
    table = tables.completions
    return tx.execute(sql_delete(table).where(table.c.id == completion_id)).rowcount == 1


def _sums(pairs: Any) -> dict[str, int]:
    totals: dict[str, int] = {}
    for key, n in pairs:
        totals[key] = totals.get(key, 0) + n
    return totals


def _values(c: Completion) -> dict[str, Any]:
    return {
        "id": c.id,
        "project_id": c.project_id,
        "key_id": c.key_id,
        "created_at": c.created_at,
        "trajectory_id": c.trajectory_id,
        "turn": c.turn,
        "task": c.task,
        "model": c.model,
        "policy_id": c.policy_id,
        "tier": c.tier,
        "replica_id": c.replica_id,
        "status": c.status.value,
        "error": c.error,
        "joint": c.joint.value,
        "break_reason": c.break_reason,
        "trainable": c.trainable,
        "untrainable_reason": c.untrainable_reason,
        "metadata": c.metadata,
        "ttft_ms": c.ttft_ms,
        "latency_ms": c.latency_ms,
        "prompt_tokens": c.usage.prompt_tokens,
        "completion_tokens": c.usage.completion_tokens,
        "cached_tokens": c.usage.cached_tokens,
        "payload": payload.pack(c),
    }


def _completion(row: Row[*tuple[Any, ...]]) -> Completion:
    body = payload.unpack(row.payload)
    return Completion(
        id=row.id,
        project_id=row.project_id,
        key_id=row.key_id,
        created_at=row.created_at,
        trajectory_id=row.trajectory_id,
        turn=row.turn,
        task=row.task,
        model=row.model,
        policy_id=row.policy_id,
        tier=row.tier,
        replica_id=row.replica_id,
        status=CompletionStatus(row.status),
        error=row.error,
        messages=body.messages,
        tools=body.tools,
        params=body.params,
        prompt_token_ids=payload.prompt_token_ids(body),
        choices=payload.choices(body),
        usage=Usage(
            prompt_tokens=row.prompt_tokens,
            completion_tokens=row.completion_tokens,
            cached_tokens=row.cached_tokens,
        ),
        joint=Joint(row.joint),
        break_reason=row.break_reason,
        trainable=row.trainable,
        untrainable_reason=row.untrainable_reason,
        metadata=row._mapping["metadata"],
        ttft_ms=row.ttft_ms,
        latency_ms=row.latency_ms,
    )
