"""Ids of outcomes are unique among trusted and among untrusted ones: the latter block no id of the former."""

from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    # SQLite cannot change a constraint: there the table is made anew, row for row, and `seq` goes on.
    with op.batch_alter_table("outcomes", table_kwargs={"sqlite_autoincrement": True}) as table:
        table.drop_constraint(op.f("uq_outcomes_project_id_id"), type_="unique")
        table.create_unique_constraint(
            op.f("uq_outcomes_project_id_trusted_id"), ["project_id", "trusted", "id"]
        )
