"""The schema: every table, in one place.

Invariant: `migrations/` builds exactly this on SQLite and on PostgreSQL (a test compares the two). Times
are unix seconds as floats. JSON lies in TEXT. Heavy parts of a completion lie in one msgpack `payload`.
"""

from __future__ import annotations

from typing import Any

import msgspec
from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    TypeDecorator,
    UniqueConstraint,
    text,
)
from sqlalchemy.engine import Dialect


class Json(TypeDecorator[Any]):
    """A JSON value in TEXT; the same bytes on both databases, readable in a shell."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        return None if value is None else msgspec.json.encode(value).decode()

    def process_result_value(self, value: str | None, dialect: Dialect) -> Any:
        return None if value is None else msgspec.json.decode(value)


# SQLite gives only INTEGER PRIMARY KEY the rowid; PostgreSQL needs 64 bits said out loud.
Seq = BigInteger().with_variant(Integer(), "sqlite")

metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    }
)


def _project() -> Column[str]:
    return Column("project_id", String, ForeignKey("projects.id"), nullable=False)


projects = Table(
    "projects",
    metadata,
    Column("id", String, primary_key=True),
    Column("name", String, nullable=False),
    Column("capture", String, nullable=False),
    Column("learn", String, nullable=False),
    Column("default_tier", String, nullable=False),
    Column("inference_outcomes", Boolean, nullable=False),
)

api_keys = Table(
    "api_keys",
    metadata,
    Column("id", String, primary_key=True),
    _project(),
    Column("secret_hash", String, nullable=False, unique=True),
    Column("scopes", Json, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("revoked_at", Double),
)

completions = Table(
    "completions",
    metadata,
    Column("seq", Seq, primary_key=True, autoincrement=True),
    Column("id", String, nullable=False, unique=True),
    _project(),
    Column("key_id", String, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("trajectory_id", String, nullable=False),
    Column("turn", Integer, nullable=False),
    Column("task", String),
    Column("model", String, nullable=False),
    Column("policy_id", String, nullable=False),
    Column("tier", String, nullable=False),
    Column("replica_id", String, nullable=False),
    Column("status", String, nullable=False),
    Column("error", Text),
    Column("joint", String, nullable=False),
    Column("break_reason", Text),
    Column("trainable", Boolean, nullable=False),
    Column("untrainable_reason", Text),
    Column("metadata", Json, nullable=False),
    Column("ttft_ms", Double),
    Column("latency_ms", Double, nullable=False),
    Column("prompt_tokens", Integer, nullable=False),
    Column("completion_tokens", Integer, nullable=False),
    Column("cached_tokens", Integer, nullable=False),
    Column("payload", LargeBinary, nullable=False),
    Index(None, "project_id", "trajectory_id", "turn"),
    Index(None, "created_at"),
    # Without AUTOINCREMENT SQLite would give the seq of a deleted last row to the next one.
    sqlite_autoincrement=True,
)

completion_contexts = Table(
    "completion_contexts",
    metadata,
    Column("completion_id", String, ForeignKey("completions.id", ondelete="CASCADE"), primary_key=True),
    Column("choice", Integer, primary_key=True),
    Column("project_id", String, nullable=False),
    Column("context_hash", String, nullable=False),
    Index(None, "project_id", "context_hash"),
)

trajectories = Table(
    "trajectories",
    metadata,
    Column("project_id", String, ForeignKey("projects.id"), primary_key=True),
    Column("id", String, primary_key=True),
    Column("task", String),
    Column("policy_id", String, nullable=False),
    Column("policy_since", Double, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("last_at", Double, nullable=False),
    Column("turns", Integer, nullable=False),
    Column("breaks", Integer, nullable=False),
)

outcomes = Table(
    "outcomes",
    metadata,
    Column("seq", Seq, primary_key=True, autoincrement=True),
    Column("id", String, nullable=False),
    _project(),
    Column("created_at", Double, nullable=False),
    Column("completion_id", String),
    Column("choice", Integer, nullable=False),
    Column("trajectory_id", String),
    Column("metric", String, nullable=False),
    Column("value", Double),
    Column("error", Text),
    Column("source", String, nullable=False),
    Column("verifier", String),
    Column("verifier_version", String),
    Column("trusted", Boolean, nullable=False),
    Column("supersedes", String),
    # Whoever may not write what counts must not take an id from whoever may.
    UniqueConstraint("project_id", "trusted", "id"),
    Index(None, "project_id", "completion_id"),
    Index(None, "project_id", "trajectory_id"),
    sqlite_autoincrement=True,
)

policies = Table(
    "policies",
    metadata,
    Column("id", String, primary_key=True),
    Column("state", String, nullable=False, index=True),
    Column("manifest", Text, nullable=False),
    Column("path", Text, nullable=False),
    Column("reason", Text),
    Column("created_at", Double, nullable=False),
    Column("updated_at", Double, nullable=False),
    # The database itself refuses a second promoted policy.
    Index(
        "uq_policies_promoted",
        "state",
        unique=True,
        sqlite_where=text("state = 'promoted'"),
        postgresql_where=text("state = 'promoted'"),
    ),
)

policy_transitions = Table(
    "policy_transitions",
    metadata,
    Column("seq", Seq, primary_key=True, autoincrement=True),
    Column("policy_id", String, ForeignKey("policies.id"), nullable=False, index=True),
    Column("frm", String),
    Column("to", String, nullable=False),
    Column("at", Double, nullable=False),
    Column("actor", String, nullable=False),
    Column("reason", Text),
    Column("evidence", Json),
    sqlite_autoincrement=True,
)

# One row, made by the migration. Whoever changes what is served locks it first.
serving = Table(
    "serving",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("promoted", String, ForeignKey("policies.id")),
    Column("previous", String, ForeignKey("policies.id")),
    Column("epoch", Integer, nullable=False),
    Column("last_reserved", Integer, nullable=False),
)

replicas = Table(
    "replicas",
    metadata,
    Column("id", String, primary_key=True),
    Column("tier", String, nullable=False),
    Column("instance", String, nullable=False),
    Column("ready", Boolean, nullable=False),
    Column("seen_at", Double, nullable=False),
)

placements = Table(
    "placements",
    metadata,
    Column("replica_id", String, primary_key=True),
    Column("policy_id", String, primary_key=True),
    Column("instance", String, nullable=False),
    Column("placement", String, nullable=False),
    Column("detail", Text),
    Column("updated_at", Double, nullable=False),
)

jobs = Table(
    "jobs",
    metadata,
    Column("id", Seq, primary_key=True, autoincrement=True),
    Column("kind", String, nullable=False),
    Column("key", String),
    Column("spec", Json, nullable=False),
    Column("state", String, nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("max_attempts", Integer, nullable=False),
    Column("not_before", Double, nullable=False),
    Column("owner", String),
    Column("lease_until", Double),
    Column("result", Json),
    Column("error", Text),
    Column("enqueued_at", Double, nullable=False),
    Column("updated_at", Double, nullable=False),
    UniqueConstraint("kind", "key"),
    Index(None, "kind", "state", "id"),
    sqlite_autoincrement=True,
)

used_samples = Table(
    "used_samples",
    metadata,
    Column("job", String, primary_key=True),
    Column("key", String, primary_key=True),
    Column("choice", Integer, primary_key=True, autoincrement=False),
    Column("update", Integer, nullable=False),
)

checkpoints = Table(
    "checkpoints",
    metadata,
    Column("job", String, primary_key=True),
    Column("update", Integer, nullable=False),
    Column("path", Text, nullable=False),
    Column("cursor", BigInteger, nullable=False),
    Column("state", Json, nullable=False),
    Column("updated_at", Double, nullable=False),
)

settings = Table(
    "settings",
    metadata,
    Column("key", String, primary_key=True),
    Column("value", Json),
    Column("updated_at", Double, nullable=False),
)

evaluations = Table(
    "evaluations",
    metadata,
    Column("seq", Seq, primary_key=True, autoincrement=True),
    Column("id", String, nullable=False, unique=True),
    Column("policy_id", String, nullable=False, index=True),
    Column("baseline_id", String),
    Column("suite", String, nullable=False),
    Column("n", Integer, nullable=False),
    Column("results", Json, nullable=False),
    Column("created_at", Double, nullable=False),
    sqlite_autoincrement=True,
)
