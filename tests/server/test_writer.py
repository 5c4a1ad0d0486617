"""Group commit: order, failures of one and of all, a full disk, work that nobody waits for any more."""

from __future__ import annotations

import asyncio
import sqlite3
import threading

from sqlalchemy import Connection
from sqlalchemy.exc import OperationalError

from rollout.records import Project
from rollout.store import Store, projects
from server.writer import Writer


def add(name: str) -> object:
    return lambda tx: projects.create_project(tx, Project(id=name, name=name))


def names(store: Store) -> set[str]:
    with store.read() as tx:
        return {project.id for project in projects.list_projects(tx)}


def refuse(tx: Connection) -> None:
    projects.create_project(tx, Project(id="half", name="half"))
    raise KeyError("refused")


def test_work_is_committed_when_run_returns(store: Store) -> None:
    writer = Writer(store)
    writer.start()

    async def main() -> None:
        await asyncio.gather(*(writer.run(add(f"p{i}")) for i in range(200)))  # type: ignore[arg-type]
        assert names(store) == {f"p{i}" for i in range(200)}

    asyncio.run(main())
    writer.stop()


def test_a_refusal_fails_its_caller_and_leaves_nothing(store: Store) -> None:
    writer = Writer(store)
    results: list[object] = []

    async def main() -> None:
        work = [writer.run(add("a")), writer.run(refuse), writer.run(add("b"))]  # type: ignore[arg-type]
        waiting = [asyncio.ensure_future(w) for w in work]
        await asyncio.sleep(0)  # all three are queued before the thread begins: one group
        writer.start()
        results.extend(await asyncio.gather(*waiting, return_exceptions=True))

    asyncio.run(main())
    writer.stop()
    assert results[0] is None
    assert isinstance(results[1], KeyError)
    assert results[2] is None
    assert names(store) == {"a", "b"}


def test_a_lost_commit_fails_everyone_and_the_next_group_works(sqlite_store: Store) -> None:
    writer = Writer(sqlite_store)
    results: list[object] = []

    def away(tx: Connection) -> None:
        raw = tx.connection.driver_connection
        assert isinstance(raw, sqlite3.Connection)
        raw.rollback()  # the transaction is gone under the group, as when a server is

    async def main() -> None:
        work = [writer.run(add("before")), writer.run(away), writer.run(add("behind"))]  # type: ignore[arg-type]
        waiting = [asyncio.ensure_future(w) for w in work]
        await asyncio.sleep(0)
        writer.start()
        results.extend(await asyncio.gather(*waiting, return_exceptions=True))
        await writer.run(add("after"))  # type: ignore[arg-type]

    asyncio.run(main())
    writer.stop()
    assert [type(result) for result in results] == [OperationalError] * 3
    assert names(sqlite_store) == {"after"}


def test_work_nobody_waits_for_any_more_is_still_done(store: Store) -> None:
    writer = Writer(store)
    gate = threading.Event()

    def blocked(tx: Connection) -> None:
        gate.wait(10)

    async def main() -> None:
        first = asyncio.ensure_future(writer.run(blocked))
        left: asyncio.Future[None] = asyncio.ensure_future(writer.run(add("left")))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        writer.start()
        left.cancel()
        gate.set()
        await asyncio.gather(first, left, return_exceptions=True)
        await writer.run(add("after"))  # type: ignore[arg-type]

    asyncio.run(main())
    writer.stop()
    assert names(store) == {"left", "after"}
