"""The database behind every process: SQLite in one file, or PostgreSQL, through the same calls.

`Store` owns the connections. ``read()`` gives a snapshot that cannot write; ``write()`` gives a transaction
that commits when the block ends and rolls back when it raises. Row functions (`completions`, `outcomes`,
`policies`, ...) take that connection first and never commit.

Invariant: what ``write()`` committed survives ``kill -9`` and power loss (SQLite: WAL with synchronous=FULL;
PostgreSQL: its default), and nothing of a transaction that did not commit is ever visible.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, make_url, text
from sqlalchemy.engine import URL

BUSY_TIMEOUT_S = 30.0
"""How long a SQLite writer waits for the one before it."""

POOL: dict[str, Any] = {"pool_size": 8, "max_overflow": 24, "hide_parameters": True}
"""Parameters are users' data and hashes of keys: an error that is logged names the statement alone."""

MIGRATION_LOCK = 0x52415443
"""Key of the PostgreSQL advisory lock that lets one process migrate at a time."""


class StoreError(Exception):
    """The store cannot be opened; the message says what to change."""


class Store:
    """A pool of connections to one database. Thread-safe: each block has a connection of its own."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.dialect: str = engine.dialect.name

    @classmethod
    def open(cls, url: str) -> Store:
        """Connect to ``sqlite:///FILE`` or ``postgresql+psycopg://...``; raises StoreError for other URLs."""
        parsed = make_url(url)
        backend = parsed.get_backend_name()
        if backend == "sqlite":
            return cls(_open_sqlite(parsed))
        if backend == "postgresql":
            # psycopg 3 whatever spelling was used; a ping first, so a restarted server costs no failed call.
            url_psycopg = parsed.set(drivername="postgresql+psycopg")
            return cls(create_engine(url_psycopg, pool_pre_ping=True, **POOL))
        raise StoreError(
            f"store.url: {backend} is not supported; use sqlite:///FILE or postgresql+psycopg://"
        )

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A consistent snapshot; writing in it is an error on both databases."""
        options: dict[str, Any] = {"ratchet_mode": "read"}
        if self.dialect == "postgresql":
            options |= {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}
        with self._engine.connect().execution_options(**options) as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """One transaction. Keep it short and await nothing in it: SQLite has one writer at a time."""
        with (
            self._engine.connect().execution_options(ratchet_mode="write") as connection,
            connection.begin(),
        ):
            yield connection

    def migrate(self) -> None:
        """Bring the schema to the newest version. Safe when several processes call it at once."""
        from rollout.store.migrations import upgrade  # alembic is needed here and nowhere else

        with self.write() as tx:
            # On SQLite BEGIN IMMEDIATE already keeps others out.
            if self.dialect == "postgresql":
                tx.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": MIGRATION_LOCK})
            upgrade(tx)

    def close(self) -> None:
        self._engine.dispose()


def _open_sqlite(url: URL) -> Engine:
    if not url.database or url.database == ":memory:":
        raise StoreError("store.url: SQLite needs a file, since several processes share it: sqlite:///FILE")
    _switch_to_wal(url.database)
    engine = create_engine(
        url,
        **POOL,
        connect_args={"timeout": BUSY_TIMEOUT_S, "check_same_thread": False},
    )
    event.listen(engine, "connect", _configure_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _switch_to_wal(path: str) -> None:
    """WAL is a property of the file. The switch ignores the busy time-out, so retry while others hold it."""
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    try:
        connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S)
    except sqlite3.OperationalError as error:
        raise StoreError(
            f"store.url: {path}: {error}; where there is no store yet, `python -m rollout migrate` makes it"
        ) from None
    try:
        while True:
            try:
                (mode,) = connection.execute("PRAGMA journal_mode=WAL").fetchone()
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
                continue
            if mode != "wal":
                raise StoreError(f"{path}: SQLite cannot use WAL here ({mode}); put the file on a local disk")
            return
    finally:
        connection.close()


def _configure_sqlite(connection: sqlite3.Connection, _record: Any) -> None:
    connection.isolation_level = None  # transactions are begun by _begin_sqlite, not guessed by the driver
    connection.execute(f"PRAGMA busy_timeout={int(BUSY_TIMEOUT_S * 1000)}")
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("PRAGMA foreign_keys=ON")


def _begin_sqlite(connection: Connection) -> None:
    # IMMEDIATE: a writer takes its place in the queue at once. A deferred transaction that first reads and
    # then writes fails with "database is locked" at once, whatever the busy time-out.
    if connection.get_execution_options().get("ratchet_mode") == "write":
        connection.exec_driver_sql("PRAGMA query_only=OFF")
        connection.exec_driver_sql("BEGIN IMMEDIATE")
    else:
        connection.exec_driver_sql("PRAGMA query_only=ON")
        connection.exec_driver_sql("BEGIN")
