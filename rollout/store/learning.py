"""What the learner must not forget: samples used, its checkpoint, its switch and its status.

Invariant: a sample (a completion or a joined trajectory, and the choice) is marked by a job at most once, in
the transaction that moves the job's checkpoint row; so a restart neither repeats nor skips an update.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec
from sqlalchemy import Connection, insert, select
from sqlalchemy.exc import IntegrityError

from rollout.store import tables
from rollout.store.placements import upsert

LOOKUP = 500
"""Keys per query; SQLite allows a bounded number of variables."""

STATUS_KEY = "learner_status"


class AlreadyUsed(Exception):
    """A sample was used by this job before."""


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Where a job stands; `path` was complete on disk before this row was written."""

    job: str
    update: int
    path: str
    cursor: int
    """Last seq read from `outcomes.judged`."""
    state: dict[str, Any] = {}
    updated_at: float = 0.0
    """Set by the store."""


def trajectory_key(project_id: str, trajectory_id: str) -> str:
    """The key of a sample that is a whole trajectory. Callers choose those ids: the project is part of it."""
    return f"trajectory:{project_id}:{trajectory_id}"


def mark_used(tx: Connection, job: str, update: int, samples: Sequence[tuple[str, int]]) -> None:
    """Mark (completion id or trajectory key, choice) as trained on; raises AlreadyUsed, then roll back."""
    if not samples:
        return
    rows = [{"job": job, "key": key, "choice": choice, "update": update} for key, choice in samples]
    try:
        tx.execute(insert(tables.used_samples), rows)
    except IntegrityError as error:
        raise AlreadyUsed(f"job {job}: a sample of update {update} was used before") from error


def used_keys(tx: Connection, job: str, keys: Sequence[tuple[str, int]]) -> set[tuple[str, int]]:
    """Those of `keys` that the job has used."""
    c = tables.used_samples.c
    wanted, used = set(keys), set()
    names = sorted({key for key, _ in keys})
    for start in range(0, len(names), LOOKUP):
        rows = tx.execute(
            select(c.key, c.choice).where(c.job == job, c.key.in_(names[start : start + LOOKUP]))
        )
        used |= {(row.key, row.choice) for row in rows}
    return used & wanted


def get_checkpoint(tx: Connection, job: str) -> Checkpoint | None:
    table = tables.checkpoints
    row = tx.execute(select(table).where(table.c.job == job)).one_or_none()
    return None if row is None else Checkpoint(**row._mapping)


def set_checkpoint(tx: Connection, checkpoint: Checkpoint) -> None:
    values = msgspec.structs.asdict(checkpoint) | {"updated_at": time.time()}
    upsert(tx, tables.checkpoints, {"job": values.pop("job")}, values)


def get_setting(tx: Connection, key: str, default: Any = None) -> Any:
    """A setting as JSON; ``learning`` (bool) is the learner's switch."""
    table = tables.settings
    row = tx.execute(select(table.c.value).where(table.c.key == key)).one_or_none()
    return default if row is None else row.value


def set_setting(tx: Connection, key: str, value: Any) -> None:
    upsert(tx, tables.settings, {"key": key}, {"value": value, "updated_at": time.time()})


def get_learner_status(tx: Connection) -> dict[str, Any] | None:
    """What `set_learner_status` wrote last, with `updated_at`."""
    status: dict[str, Any] | None = get_setting(tx, STATUS_KEY)
    return status


def set_learner_status(tx: Connection, status: dict[str, Any]) -> None:
    """Counters (seen, kept, judged, trained), `why_not` by reason and `state` in words, for people."""
    set_setting(tx, STATUS_KEY, {**status, "updated_at": time.time()})
