"""Verifiers: one a domain, each says whether an attempt did what its task asked.

Invariant: a verdict has a value or an error, never both. What went wrong outside the model (the service,
the harness, the verifier itself) is an error, and never a value of zero; what the model did wrong, and
running out of turns or tokens, is a zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from rollout.tasks import Task
from rollout.verifiers.tool_use import ToolUse

__all__ = ["VERIFIERS", "Attempt", "Verdict", "Verifier", "verify"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """What happened after ``task.messages``."""

    messages: list[dict[str, Any]]
    """Assistant messages (with `tool_calls` as the API gave them) and tool messages, in order."""
    fault: str | None = None
    """Why the episode could not be run to its end; None when it was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    verifier: str
    version: str
    value: float | None
    """In [0, 1]; None when there is an error."""
    error: str | None = None
    reason: str = ""
    """In a few words, what decided."""


class Verifier(Protocol):
    """Pure: the same attempt gets the same verdict, whatever ran before."""

    name: str
    version: str

    def check(self, task: Task, messages: list[dict[str, Any]]) -> str | None:
        """What the attempt did wrong in a few words; None when it is right."""
        ...


VERIFIERS: dict[str, Verifier] = {"tool_use": ToolUse()}


def verify(task: Task, attempt: Attempt, verifier: Verifier | None = None) -> Verdict:
    """Judge `attempt` by `verifier`, or by the one of the task's domain."""
    verifier = verifier or VERIFIERS[task.domain]
    error, wrong = attempt.fault, None
    if error is None:
        try:
            wrong = verifier.check(task, attempt.messages)
        except Exception as fault:  # noqa: BLE001 - whatever a verifier dies of must not become a zero
            error = f"{verifier.name} failed: {type(fault).__name__}: {fault}"
    return Verdict(
        verifier=verifier.name,
        version=verifier.version,
        value=None if error is not None else float(wrong is None),
        error=error,
        reason="" if error is not None else (wrong or "right"),
    )
