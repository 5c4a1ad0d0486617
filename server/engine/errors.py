"""How an engine fails: `EngineUnavailable` is about the engine, `EngineRejected` about what it was asked."""

from __future__ import annotations

from typing import Any


class EngineError(Exception):
    """Base of both."""


class EngineUnavailable(EngineError):
    """Starting, dead, overloaded, or gone in the middle of an answer: ask again later."""


class EngineRejected(EngineError):
    """A living engine refused: `status` as HTTP, `error` as OpenAI's error object."""

    def __init__(self, status: int, error: dict[str, Any]) -> None:
        super().__init__(f"{status}: {error.get('message')}")
        self.status = status
        self.error = error
