"""The first schema."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

SEQ = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "checkpoints",
        sa.Column("job", sa.String(), nullable=False),
        sa.Column("update", sa.Integer(), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("cursor", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("job", name=op.f("pk_checkpoints")),
    )
    op.create_table(
        "evaluations",
        sa.Column("seq", SEQ, autoincrement=True, nullable=False),
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("policy_id", sa.String(), nullable=False),
        sa.Column("baseline_id", sa.String(), nullable=True),
        sa.Column("suite", sa.String(), nullable=False),
        sa.Column("n", sa.Integer(), nullable=False),
        sa.Column("results", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_evaluations")),
        sa.UniqueConstraint("id", name=op.f("uq_evaluations_id")),
        sqlite_autoincrement=True,
    )
    op.create_index(op.f("ix_evaluations_policy_id"), "evaluations", ["policy_id"], unique=False)
    op.create_table(
        "jobs",
        sa.Column("id", SEQ, autoincrement=True, nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("key", sa.String(), nullable=True),
        sa.Column("spec", sa.Text(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("max_attempts", sa.Integer(), nullable=False),
        sa.Column("not_before", sa.Double(), nullable=False),
        sa.Column("owner", sa.String(), nullable=True),
        sa.Column("lease_until", sa.Double(), nullable=True),
        sa.Column("result", sa.Text(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("enqueued_at", sa.Double(), nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_jobs")),
        sa.UniqueConstraint("kind", "key", name=op.f("uq_jobs_kind_key")),
        sqlite_autoincrement=True,
    )
    op.create_index(op.f("ix_jobs_kind_state_id"), "jobs", ["kind", "state", "id"], unique=False)
    op.create_table(
        "placements",
        sa.Column("replica_id", sa.String(), nullable=False),
        sa.Column("policy_id", sa.String(), nullable=False),
        sa.Column("instance", sa.String(), nullable=False),
        sa.Column("placement", sa.String(), nullable=False),
        sa.Column("detail", sa.Text(), nullable=True),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("replica_id", "policy_id", name=op.f("pk_placements")),
    )
    op.create_table(
        "policies",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("manifest", sa.Text(), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_policies")),
    )
    op.create_index(op.f("ix_policies_state"), "policies", ["state"], unique=False)
    op.create_index(
        "uq_policies_promoted",
        "policies",
        ["state"],
        unique=True,
        sqlite_where=sa.text("state = 'promoted'"),
        postgresql_where=sa.text("state = 'promoted'"),
    )
    op.create_table(
        "projects",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("capture", sa.String(), nullable=False),
        sa.Column("learn", sa.String(), nullable=False),
        sa.Column("default_tier", sa.String(), nullable=False),
        sa.Column("inference_outcomes", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_projects")),
    )
    op.create_table(
        "replicas",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("tier", sa.String(), nullable=False),
        sa.Column("instance", sa.String(), nullable=False),
        sa.Column("ready", sa.Boolean(), nullable=False),
        sa.Column("seen_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_replicas")),
    )
    op.create_table(
        "settings",
        sa.Column("key", sa.String(), nullable=False),
        sa.Column("value", sa.Text(), nullable=True),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("key", name=op.f("pk_settings")),
    )
    op.create_table(
        "used_samples",
        sa.Column("job", sa.String(), nullable=False),
        sa.Column("key", sa.String(), nullable=False),
        sa.Column("choice", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("update", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("job", "key", "choice", name=op.f("pk_used_samples")),
    )
    op.create_table(
        "api_keys",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("project_id", sa.String(), nullable=False),
        sa.Column("secret_hash", sa.String(), nullable=False),
        sa.Column("scopes", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("revoked_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_api_keys_project_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_api_keys")),
        sa.UniqueConstraint("secret_hash", name=op.f("uq_api_keys_secret_hash")),
    )
    op.create_table(
        "completions",
        sa.Column("seq", SEQ, autoincrement=True, nullable=False),
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("project_id", sa.String(), nullable=False),
        sa.Column("key_id", sa.String(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("trajectory_id", sa.String(), nullable=False),
        sa.Column("turn", sa.Integer(), nullable=False),
        sa.Column("task", sa.String(), nullable=True),
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("policy_id", sa.String(), nullable=False),
        sa.Column("tier", sa.String(), nullable=False),
        sa.Column("replica_id", sa.String(), nullable=False),
        sa.Column("status", sa.String(), nullable=False),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("joint", sa.String(), nullable=False),
        sa.Column("break_reason", sa.Text(), nullable=True),
        sa.Column("trainable", sa.Boolean(), nullable=False),
        sa.Column("untrainable_reason", sa.Text(), nullable=True),
        sa.Column("metadata", sa.Text(), nullable=False),
        sa.Column("ttft_ms", sa.Double(), nullable=True),
        sa.Column("latency_ms", sa.Double(), nullable=False),
        sa.Column("prompt_tokens", sa.Integer(), nullable=False),
        sa.Column("completion_tokens", sa.Integer(), nullable=False),
        sa.Column("cached_tokens", sa.Integer(), nullable=False),
        sa.Column("payload", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_completions_project_id")),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_completions")),
        sa.UniqueConstraint("id", name=op.f("uq_completions_id")),
        sqlite_autoincrement=True,
    )
    op.create_index(op.f("ix_completions_created_at"), "completions", ["created_at"], unique=False)
    op.create_index(
        op.f("ix_completions_project_id_trajectory_id_turn"),
        "completions",
        ["project_id", "trajectory_id", "turn"],
        unique=False,
    )
    op.create_table(
        "outcomes",
        sa.Column("seq", SEQ, autoincrement=True, nullable=False),
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("project_id", sa.String(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("completion_id", sa.String(), nullable=True),
        sa.Column("choice", sa.Integer(), nullable=False),
        sa.Column("trajectory_id", sa.String(), nullable=True),
        sa.Column("metric", sa.String(), nullable=False),
        sa.Column("value", sa.Double(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("source", sa.String(), nullable=False),
        sa.Column("verifier", sa.String(), nullable=True),
        sa.Column("verifier_version", sa.String(), nullable=True),
        sa.Column("trusted", sa.Boolean(), nullable=False),
        sa.Column("supersedes", sa.String(), nullable=True),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_outcomes_project_id")),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_outcomes")),
        sa.UniqueConstraint("project_id", "id", name=op.f("uq_outcomes_project_id_id")),
        sqlite_autoincrement=True,
    )
    op.create_index(
        op.f("ix_outcomes_project_id_completion_id"),
        "outcomes",
        ["project_id", "completion_id"],
        unique=False,
    )
    op.create_index(
        op.f("ix_outcomes_project_id_trajectory_id"),
        "outcomes",
        ["project_id", "trajectory_id"],
        unique=False,
    )
    op.create_table(
        "policy_transitions",
        sa.Column("seq", SEQ, autoincrement=True, nullable=False),
        sa.Column("policy_id", sa.String(), nullable=False),
        sa.Column("frm", sa.String(), nullable=True),
        sa.Column("to", sa.String(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("actor", sa.String(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("evidence", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["policy_id"], ["policies.id"], name=op.f("fk_policy_transitions_policy_id")),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_policy_transitions")),
        sqlite_autoincrement=True,
    )
    op.create_index(
        op.f("ix_policy_transitions_policy_id"), "policy_transitions", ["policy_id"], unique=False
    )
    op.create_table(
        "serving",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("promoted", sa.String(), nullable=True),
        sa.Column("previous", sa.String(), nullable=True),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("last_reserved", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["previous"], ["policies.id"], name=op.f("fk_serving_previous")),
        sa.ForeignKeyConstraint(["promoted"], ["policies.id"], name=op.f("fk_serving_promoted")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_serving")),
    )
    op.create_table(
        "trajectories",
        sa.Column("project_id", sa.String(), nullable=False),
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("task", sa.String(), nullable=True),
        sa.Column("policy_id", sa.String(), nullable=False),
        sa.Column("policy_since", sa.Double(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("last_at", sa.Double(), nullable=False),
        sa.Column("turns", sa.Integer(), nullable=False),
        sa.Column("breaks", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name=op.f("fk_trajectories_project_id")),
        sa.PrimaryKeyConstraint("project_id", "id", name=op.f("pk_trajectories")),
    )
    op.create_table(
        "completion_contexts",
        sa.Column("completion_id", sa.String(), nullable=False),
        sa.Column("choice", sa.Integer(), nullable=False),
        sa.Column("project_id", sa.String(), nullable=False),
        sa.Column("context_hash", sa.String(), nullable=False),
        sa.ForeignKeyConstraint(
            ["completion_id"],
            ["completions.id"],
            name=op.f("fk_completion_contexts_completion_id"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("completion_id", "choice", name=op.f("pk_completion_contexts")),
    )
    op.create_index(
        op.f("ix_completion_contexts_project_id_context_hash"),
        "completion_contexts",
        ["project_id", "context_hash"],
        unique=False,
    )
    op.execute(
        "INSERT INTO serving (id, promoted, previous, epoch, last_reserved) VALUES (1, NULL, NULL, 0, 0)"
    )
