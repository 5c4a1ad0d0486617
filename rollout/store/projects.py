"""Projects and their API keys. Invariant: only the sha256 of a key's secret is ever stored."""

from __future__ import annotations

import hashlib
import time

from sqlalchemy import Connection, Row, insert, select, update

from rollout.records import ApiKey, Capture, Learn, Project, Scope
from rollout.store import tables


def hash_secret(secret: str) -> str:
    """What is stored of a key. Secrets are 256 random bits, so a plain hash cannot be searched."""
    return hashlib.sha256(secret.encode()).hexdigest()


def create_project(tx: Connection, project: Project) -> None:
    tx.execute(
        insert(tables.projects).values(
            id=project.id,
            name=project.name,
            capture=project.capture.value,
            learn=project.learn.value,
            default_tier=project.default_tier,
            inference_outcomes=project.inference_outcomes,
        )
    )


def get_project(tx: Connection, project_id: str) -> Project | None:
    row = tx.execute(select(tables.projects).where(tables.projects.c.id == project_id)).one_or_none()
    return None if row is None else _project(row)


def list_projects(tx: Connection) -> list[Project]:
    return [_project(row) for row in tx.execute(select(tables.projects).order_by(tables.projects.c.id))]


def create_key(tx: Connection, key: ApiKey, secret_hash: str) -> None:
    """Store `key`; `secret_hash` is ``hash_secret`` of what the caller will send."""
    tx.execute(
        insert(tables.api_keys).values(
            id=key.id,
            project_id=key.project_id,
            secret_hash=secret_hash,
            scopes=[scope.value for scope in key.scopes],
            created_at=key.created_at,
            revoked_at=key.revoked_at,
        )
    )


def find_key(tx: Connection, secret_hash: str) -> tuple[ApiKey, Project] | None:
    """The key with this secret and its project; None when there is none or it was revoked."""
    keys = tables.api_keys
    row = tx.execute(
        select(keys).where(keys.c.secret_hash == secret_hash, keys.c.revoked_at.is_(None))
    ).one_or_none()
    if row is None:
        return None
    project = get_project(tx, row.project_id)
    assert project is not None  # a foreign key holds it
    return _key(row), project


def list_keys(tx: Connection, project_id: str) -> list[ApiKey]:
    """Every key of a project, revoked ones too, oldest first."""
    keys = tables.api_keys
    rows = tx.execute(select(keys).where(keys.c.project_id == project_id).order_by(keys.c.created_at))
    return [_key(row) for row in rows]


def revoke_key(tx: Connection, key_id: str) -> bool:
    """Whether there was a live key to revoke."""
    keys = tables.api_keys
    statement = update(keys).where(keys.c.id == key_id, keys.c.revoked_at.is_(None))
    return tx.execute(statement.values(revoked_at=time.time())).rowcount == 1


def _project(row: Row[*tuple[object, ...]]) -> Project:
    return Project(
        id=row.id,
        name=row.name,
        capture=Capture(row.capture),
        learn=Learn(row.learn),
        default_tier=row.default_tier,
        inference_outcomes=row.inference_outcomes,
    )


def _key(row: Row[*tuple[object, ...]]) -> ApiKey:
    return ApiKey(
        id=row.id,
        project_id=row.project_id,
        scopes=[Scope(scope) for scope in row.scopes],
        created_at=row.created_at,
        revoked_at=row.revoked_at,
    )
