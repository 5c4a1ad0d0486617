"""The store when processes are killed, the disk is full, or the server goes away."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack

import pytest
from sqlalchemy import select, text
from sqlalchemy.exc import OperationalError, SQLAlchemyError

from rollout import outcomes
from rollout.store import Store, completions, tables
from tests.fixtures.rows import PROJECT, add_project, choice, completion, outcome

WRITERS = 3
ROUNDS = 2
COMMITS = 12
"""Commits of each writer before the kill."""

GROUP = 3
"""Completions in each transaction, with one outcome."""

WRITER = """
import sys
from rollout import outcomes
from rollout.store import Store, completions
from tests.fixtures.rows import choice, completion, outcome
from tests.rollout.test_store_faults import GROUP
url, name = sys.argv[1:]
store = Store.open(url)
n = 0
while True:
    whole, choices = f"{name}-{n}", [choice(0, list(range(500)))]
    group = [
        (completion(f"{whole}-{i}", trajectory_id=whole, turn=i, choices=choices), [f"{whole}-{i}"])
        for i in range(GROUP)
    ]
    with store.write() as tx:
        completions.insert_many(tx, group)
        outcomes.record(tx, outcome(f"{name}-{n}", trajectory_id=f"{name}-{n}"))
    print(n, flush=True)
    n += 1
"""


def kill_while_writing(url: str, round_number: int) -> dict[str, int]:
    """Start the writers, kill all once each has committed enough; the last commit each one told of."""
    told: dict[str, int] = {}
    with ExitStack() as stack:
        children = {}
        for writer in range(WRITERS):
            name = f"r{round_number}w{writer}"
            child = subprocess.Popen(
                [sys.executable, "-c", WRITER, url, name], stdout=subprocess.PIPE, text=True
            )
            stack.enter_context(child)
            stack.callback(child.kill)
            children[name] = child
        for child in children.values():
            assert child.stdout is not None
            for line in child.stdout:
                if int(line) >= COMMITS:
                    break
            else:
                pytest.fail(f"a writer ended by itself with {child.wait()}")
        for child in children.values():
            child.kill()
        for name, child in children.items():
            assert child.stdout is not None
            # A kill may fall inside a line; only whole lines were said.
            rest = [line for line in child.stdout.read().splitlines(keepends=True) if line.endswith("\n")]
            told[name] = int(rest[-1]) if rest else COMMITS
    return told


def test_killed_writers_lose_nothing_committed_and_tear_nothing(store: Store, store_url: str) -> None:
    add_project(store)
    for round_number in range(ROUNDS):
        told = kill_while_writing(store_url, round_number)
        with store.read() as tx:
            if store.dialect == "sqlite":
                assert tx.exec_driver_sql("PRAGMA integrity_check").scalars().all() == ["ok"]
                assert tx.exec_driver_sql("PRAGMA foreign_key_check").all() == []
            judged = {o.id for _, o in outcomes.judged(tx, 0, 100_000)}
            for name, last in told.items():
                written = {i for i in judged if i.startswith(f"{name}-")}
                assert written >= {f"{name}-{n}" for n in range(last + 1)}
                # At most the commit that the kill kept it from telling.
                assert len(written) <= last + 2
                for trajectory in written:
                    turns = completions.of_trajectory(tx, PROJECT, trajectory)
                    assert [turn.id for turn in turns] == [f"{trajectory}-{i}" for i in range(GROUP)]
                    for turn in turns:
                        assert turn.choices == [choice(0, list(range(500)))]
                        assert completions.by_context(tx, PROJECT, turn.id) == turn
            c = tables.completions.c
            stored = tx.execute(select(c.trajectory_id).where(c.project_id == PROJECT)).scalars()
            assert set(stored) == judged
    with store.write() as tx:
        completions.insert(tx, completion("after"))


def test_a_full_disk_is_an_error_and_leaves_no_torn_record(sqlite_store: Store) -> None:
    store = sqlite_store
    add_project(store)
    with store.write() as tx:
        completions.insert(tx, completion("before"), ["before"])
    big = completion("big", choices=[choice(0, list(range(200_000)))])

    def insert_with_a_full_disk() -> None:
        with store.write() as tx:
            pages = tx.exec_driver_sql("PRAGMA page_count").scalar_one()
            tx.exec_driver_sql(f"PRAGMA max_page_count={pages + 20}")
            outcomes.record(tx, outcome("o-big", completion_id="big"))
            completions.insert(tx, big, ["big"])

    with pytest.raises(OperationalError, match="full"):
        insert_with_a_full_disk()
    with store.read() as tx:
        assert completions.get(tx, "big") is None
        assert completions.by_context(tx, PROJECT, "big") is None
        assert outcomes.judged(tx, 0, 10) == []
        assert completions.get(tx, "before") is not None
        assert tx.exec_driver_sql("PRAGMA integrity_check").scalars().all() == ["ok"]
    with store.write() as tx:  # there is room again
        tx.exec_driver_sql("PRAGMA max_page_count=1073741823")
        completions.insert(tx, big, ["big"])
    with store.read() as tx:
        assert completions.get(tx, "big") == big


def test_a_lost_connection_is_an_error_once_and_leaves_no_torn_record(postgresql_store: Store) -> None:
    store = postgresql_store
    add_project(store)

    def insert_and_lose_the_server() -> None:
        with store.write() as tx:
            completions.insert(tx, completion("lost"), ["lost"])
            with store.read() as other:
                other.execute(
                    text(
                        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                        "WHERE datname = current_database() AND pid <> pg_backend_pid()"
                    )
                )
            completions.insert(tx, completion("never"))

    with pytest.raises(OperationalError):
        insert_and_lose_the_server()
    with store.write() as tx:
        completions.insert(tx, completion("next"))
    with store.read() as tx:
        assert completions.counts(tx).total == 1
        assert completions.by_context(tx, PROJECT, "lost") is None


def test_an_error_of_the_store_says_nothing_of_the_values(store: Store) -> None:
    with store.write() as tx:
        tx.execute(text("DROP TABLE outcomes"))

    def fail() -> None:
        with store.write() as tx:
            outcomes.record(tx, outcome("o", error="patient Jane Doe"))

    def find() -> None:
        with store.read() as tx:
            outcomes.for_completion(tx, PROJECT, "Jane Doe")

    for what in (fail, find):
        with pytest.raises(SQLAlchemyError) as caught:
            what()
        assert "outcomes" in str(caught.value)
        assert "Jane" not in str(caught.value)
