"""Run by alembic for each command; takes the connection that `upgrade` was given."""

from alembic import context

from rollout.store.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    transactional_ddl=True,  # SQLite can do it too; alembic assumes not
)
with context.begin_transaction():
    context.run_migrations()
