"""Group commit: order, failures of one and of all, a full disk, work that nobody waits for any more."""

from __future__ import annotations

import asyncio
import itertools
import random
import sqlite3
import string
import threading
from typing import Any

from sqlalchemy import Connection, text
from sqlalchemy.exc import OperationalError

from rollout.records import Project
from rollout.store import Store, completions, projects
from server.writer import OTHERS, OUTCOMES, Order, Writer, turn_of
from tests.fixtures import rows


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


def together(store: Store, *functions: Any) -> list[Any]:
    """What each got when all were one group."""
    writer = Writer(store)

    async def main() -> list[Any]:
        waiting = [asyncio.ensure_future(writer.run(function)) for function in functions]
        await asyncio.sleep(0)  # all are queued before the thread begins
        writer.start()
        return await asyncio.gather(*waiting, return_exceptions=True)

    results = asyncio.run(main())
    writer.stop()
    return results


def test_whose_work_ends_the_transaction_fails_alone(sqlite_store: Store) -> None:
    def away(tx: Connection) -> None:
        raw = tx.connection.driver_connection
        assert isinstance(raw, sqlite3.Connection)
        raw.rollback()  # the transaction is gone under the group, as on a full disk

    results = together(sqlite_store, add("before"), away, refuse, add("behind"))
    assert [type(result) for result in results] == [type(None), OperationalError, KeyError, type(None)]
    assert names(sqlite_store) == {"before", "behind"}


def test_what_no_index_can_hold_fails_alone(postgresql_store: Store) -> None:
    long = "".join(random.Random(1).choices(string.ascii_letters, k=6000))
    results = together(postgresql_store, *(add(name) for name in ("a", "b", long, "c", "d")))
    assert [type(result) for result in results if result is not None] == [OperationalError]
    assert names(postgresql_store) == {"a", "b", "c", "d"}


def test_a_store_that_is_away_fails_everyone_soon(postgresql_store: Store, monkeypatch: Any) -> None:
    monkeypatch.setattr("server.writer.ALONE_S", 0.0)
    calls = 0

    def away(tx: Connection) -> None:
        nonlocal calls
        calls += 1
        tx.execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))

    results = together(postgresql_store, *[away] * 10)
    assert {type(result) for result in results} == {OperationalError}
    assert calls == 2, "the group, then the first alone"


def test_trajectories_come_in_their_order_and_outcomes_last(sqlite_store: Store) -> None:
    writer, seen = Writer(sqlite_store), []
    orders = [OUTCOMES, turn_of("p", "y"), OTHERS, turn_of("p", "x"), OTHERS]

    async def main() -> None:
        waiting = [
            asyncio.ensure_future(writer.run(lambda tx, at=at: seen.append(at), order))  # type: ignore[misc]
            for at, order in enumerate(orders)
        ]
        await asyncio.sleep(0)
        writer.start()
        await asyncio.gather(*waiting)

    asyncio.run(main())
    writer.stop()
    assert seen == [3, 1, 2, 4, 0]


def test_two_gateways_add_to_the_same_trajectories(postgresql_store: Store) -> None:
    rows.add_project(postgresql_store)
    writers = [Writer(postgresql_store), Writer(postgresql_store)]
    numbers = itertools.count()

    async def put(writer: Writer, name: str, order: Order) -> None:
        completion = rows.completion(f"c{next(numbers)}", trajectory_id=name)
        await writer.run(lambda tx: completions.insert(tx, completion), order)

    async def main(orderly: bool) -> None:
        def order(name: str) -> Order:
            return turn_of("default", name) if orderly else OTHERS  # as it comes: these collide

        for _ in range(4):
            await asyncio.gather(
                *(put(writers[0], name, order(name)) for name in ["x", "y"] * 10),
                *(put(writers[1], name, order(name)) for name in ["y", "x"] * 10),
            )

    for writer in writers:
        writer.start()
    asyncio.run(main(orderly=True))
    asyncio.run(main(orderly=False))
    for writer in writers:
        writer.stop()
    with postgresql_store.read() as tx:
        assert completions.counts(tx).total == 2 * 4 * 40


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
