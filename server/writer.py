"""The gateway's only writer: one thread that commits what many requests wait for, in groups.

Invariant: `Writer.run` returns only after its work is committed. Work in one group is isolated by
savepoints, so a refused row (a conflict) fails its own caller and nobody else; a fault of the store fails
everyone in the group.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import InterfaceError, InternalError, OperationalError

from rollout.store import Store

T = TypeVar("T")
STORE_FAULTS = (OperationalError, InternalError, InterfaceError)
"""The database itself failed, as against a row that it refused."""
GROUP = 64
"""Most pieces of work in one transaction."""


@dataclass(slots=True)
class _Work:
    function: Callable[[Connection], Any]
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

    async def run(self, function: Callable[[Connection], T]) -> T:
        """What `function` returned, once it is on disk. Raises what it raised, or what the store raised."""
        work = _Work(function)
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
            self._commit(group)
            if ended:
                return

    def _commit(self, group: list[_Work]) -> None:
        done: list[tuple[_Work, Any]] = []
        for work in group:
            work.begin()
        try:
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
                        work.fail(error)
                    else:
                        savepoint.commit()
                        done.append((work, result))
        except Exception as error:  # noqa: BLE001 - the group is lost: everyone who waits must hear it
            for work in group:
                work.fail(error)
            return
        for work, result in done:
            work.succeed(result)
