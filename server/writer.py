"""The gateway's only writer: one thread that commits what many requests wait for, in groups.

Invariant: `Writer.run` returns only after its work is committed. Work in one group is isolated by
savepoints, so a refused row (a conflict) fails its own caller and nobody else. Where the store failed under a
group, its members are committed one by one: whose work it was fails, and everyone only when the store itself
is what is broken.

Locks are taken in one order by every gateway: trajectories by name, then everything else, and outcomes last,
whose feed lock is one for all. Collisions that are left are tried again, so work may run more than once.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError, InterfaceError, InternalError, OperationalError

from rollout.store import Store

log = logging.getLogger(__name__)
T = TypeVar("T")
Order = tuple[Any, ...]
STORE_FAULTS = (OperationalError, InternalError, InterfaceError)
"""The database itself failed, as against a row that it refused."""
GROUP = 64
"""Most pieces of work in one transaction."""
ALONE_S = 5.0
"""A group that failed is committed one by one for so long; then the store is taken to be what is broken."""
COLLISIONS = ("40P01", "40001")
"""PostgreSQL's deadlock and serialization failure: nothing is wrong with the work, another was faster."""
TRIES = 5
OTHERS: Order = (1,)
OUTCOMES: Order = (2,)


def turn_of(project_id: str, trajectory_id: str) -> Order:
    """The place of work that adds a turn to this trajectory."""
    return (0, project_id, trajectory_id)


@dataclass(slots=True)
class _Work:
    function: Callable[[Connection], Any]
    order: Order
    future: Future[Any] = field(default_factory=Future)
    awaited: bool = True
    """False when nobody waits any more: the work is still done, since its answer may be half sent."""

    def begin(self) -> None:
        self.awaited = self.future.set_running_or_notify_cancel()

    def succeed(self, result: Any) -> None:
        if self.awaited:
            self.future.set_result(result)

    def fail(self, error: Exception) -> None:
        if self.awaited and not self.future.done():
            self.future.set_exception(error)


class Writer:
    """Start with `start`, end with `stop`, which commits what is still queued."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._queue: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._drain, name="store-writer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._queue.put(None)
        self._thread.join()

    async def run(self, function: Callable[[Connection], T], order: Order = OTHERS) -> T:
        """What `function` returned, once it is on disk. Raises what it raised, or what the store raised.

        `order` is its place in the group; `function` may be called again after its transaction was lost.
        """
        work = _Work(function, order)
        self._queue.put(work)
        result: T = await asyncio.wrap_future(work.future)
        return result

    def _drain(self) -> None:
        while (first := self._queue.get()) is not None:
            group, ended = [first], False
            while len(group) < GROUP and not self._queue.empty():
                work = self._queue.get()
                if work is None:
                    ended = True
                    break
                group.append(work)
            for work in group:
                work.begin()
            group.sort(key=lambda work: work.order)
            self._commit(group)
            if ended:
                return

    def _commit(self, group: list[_Work]) -> None:
        try:
            self._settle(group)
        except Exception as error:
            if len(group) == 1:
                group[0].fail(error)
                return
            log.exception("a group of %d was lost; committing one by one", len(group))
            self._one_by_one(group)

    def _one_by_one(self, group: list[_Work]) -> None:
        deadline = time.monotonic() + ALONE_S
        error: Exception | None = None
        for work in group:
            if error is not None and time.monotonic() > deadline:
                work.fail(error)
                continue
            try:
                self._settle([work])
            except Exception as alone:  # noqa: BLE001 - handed to the caller whose work it is
                error = alone
                work.fail(alone)

    def _settle(self, group: list[_Work]) -> None:
        """Commit `group` in one transaction and tell who waits; raises when the transaction is lost."""
        for attempt in range(1, TRIES + 1):
            try:
                settled = self._transaction(group)
            except DBAPIError as error:
                if attempt == TRIES or getattr(error.orig, "sqlstate", None) not in COLLISIONS:
                    raise
                time.sleep(random.uniform(0, 0.01 * attempt))
            else:
                for work, result, refusal in settled:
                    work.succeed(result) if refusal is None else work.fail(refusal)
                return

    def _transaction(self, group: list[_Work]) -> list[tuple[_Work, Any, Exception | None]]:
        """Each piece of work with what it returned, or with the error that undid it alone."""
        settled: list[tuple[_Work, Any, Exception | None]] = []
        with self._store.write() as tx:
            for work in group:
                savepoint = tx.begin_nested()
                try:
                    result = work.function(tx)
                except STORE_FAULTS:
                    # SQLite ends the whole transaction by itself on a full disk: going on would commit
                    # the rest and report as kept what was rolled back.
                    raise
                except Exception as error:  # noqa: BLE001 - handed to the caller who asked for it
                    savepoint.rollback()
                    settled.append((work, None, error))
                else:
                    savepoint.commit()
                    settled.append((work, result, None))
        return settled
