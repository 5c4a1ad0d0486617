"""Key -> caller. Keys are stored as SHA-256 only; a looked-up key is believed for a few seconds."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from rollout.records import ApiKey, Project, Scope
from rollout.store import Store, projects
from server import errors

PREFIX = "sk-ratchet-"


@dataclass(slots=True, frozen=True)
class Caller:
    key: ApiKey
    project: Project

    def require(self, scope: Scope) -> None:
        """Raises 403 unless the key has `scope`; admin keys have every scope."""
        if scope not in self.key.scopes and Scope.ADMIN not in self.key.scopes:
            raise errors.missing_scope(scope.value)


def new_secret() -> str:
    return PREFIX + secrets.token_urlsafe(32)


class Auth:
    """Looks keys up in the store. Bounded: unknown keys are never cached."""

    def __init__(self, store: Store, ttl_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._ttl_s = ttl_s
        self._clock = clock
        self._known: dict[str, tuple[float, Caller]] = {}

    async def caller(self, authorization: str | None, scope: Scope | None = None) -> Caller:
        """Who sent this ``Authorization`` header. Raises 401, or 403 without `scope`."""
        scheme, _, secret = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not secret:
            raise errors.bad_key()
        hashed = projects.hash_secret(secret.strip())
        entry = self._known.get(hashed)
        if entry is None or entry[0] < self._clock():
            self._known.pop(hashed, None)
            entry = (self._clock() + self._ttl_s, await asyncio.to_thread(self._look_up, hashed))
            self._known[hashed] = entry
        if scope is not None:
            entry[1].require(scope)
        return entry[1]

    def _look_up(self, hashed: str) -> Caller:
        with self._store.read() as tx:
            found = projects.find_key(tx, hashed)
        if found is None:
            raise errors.bad_key()
        return Caller(key=found[0], project=found[1])
