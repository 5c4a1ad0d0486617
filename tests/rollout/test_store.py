"""The store itself: schema, transactions, what it refuses to open."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from rollout.store import Store, StoreError, projects, tables
from tests.fixtures.rows import PROJECT, add_project

MIGRATE = "import sys; from rollout.store import Store; s = Store.open(sys.argv[1]); s.migrate(); s.close()"


def test_migrations_build_exactly_the_tables(store: Store) -> None:
    with store.write() as tx:
        context = MigrationContext.configure(tx, opts={"compare_type": True, "compare_server_default": True})
        assert compare_metadata(context, tables.metadata) == []


def test_migrating_again_changes_nothing(store: Store) -> None:
    add_project(store)
    store.migrate()
    with store.read() as tx:
        assert projects.get_project(tx, PROJECT) is not None


def test_processes_may_migrate_at_once(store_url: str) -> None:
    children = [
        subprocess.Popen([sys.executable, "-c", MIGRATE, store_url], stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    for child in children:
        _, errors = child.communicate(timeout=60)
        assert child.returncode == 0, errors
    store = Store.open(store_url)
    with store.read() as tx:
        assert tx.execute(text("SELECT version_num FROM alembic_version")).scalars().all() == ["0002"]
        assert tx.execute(text("SELECT count(*) FROM serving")).scalar_one() == 1
    store.close()


def test_a_write_that_raises_leaves_nothing(store: Store) -> None:
    def write_and_raise() -> None:
        with store.write() as tx:
            tx.execute(tables.settings.insert().values(key="k", value=1, updated_at=0.0))
            raise RuntimeError("half-way")

    with pytest.raises(RuntimeError, match="half-way"):
        write_and_raise()
    with store.read() as tx:
        assert tx.execute(tables.settings.select()).all() == []


def test_a_read_cannot_write_and_does_not_spoil_its_connection(store: Store) -> None:
    with pytest.raises(DBAPIError), store.read() as tx:
        tx.execute(tables.settings.insert().values(key="k", value=1, updated_at=0.0))
    add_project(store)


def test_a_read_sees_one_snapshot(store: Store) -> None:
    with store.read() as tx:
        assert projects.list_projects(tx) == []
        add_project(store)
        assert projects.list_projects(tx) == []
    with store.read() as tx:
        assert len(projects.list_projects(tx)) == 1


def test_sqlite_runs_as_promised(sqlite_store: Store) -> None:
    with sqlite_store.read() as tx:
        pragmas = {
            name: tx.exec_driver_sql(f"PRAGMA {name}").scalar_one()
            for name in ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
        }
    assert pragmas == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1, "busy_timeout": 30000}


@pytest.mark.parametrize("url", ["mysql://localhost/x", "sqlite://", "sqlite:///:memory:"])
def test_unusable_urls_are_refused(url: str) -> None:
    with pytest.raises(StoreError, match=r"store\.url"):
        Store.open(url)


def test_a_percent_sign_in_the_path_is_no_interpolation(tmp_path: Path) -> None:
    folder = tmp_path / "50%x"
    folder.mkdir()
    store = Store.open(f"sqlite:///{folder}/store.db")
    store.migrate()
    store.close()
