"""Tasks: what a trajectory is an attempt at, generated from a seed.

``generate(seed, split)`` gives the same task on every machine for ever. Invariant: no task of the
``held_out`` split can also come out of ``train``: every argument value comes from a pool that belongs to
one split alone (numbers by their residue). The splits share their wordings.
"""

from __future__ import annotations

from typing import Any, Protocol

from rollout.tasks import tool_use
from rollout.tasks.task import SPLITS, Call, Goal, Task

__all__ = ["DOMAINS", "SPLITS", "Call", "Domain", "Goal", "Task", "demonstration", "from_id", "generate"]


class Domain(Protocol):
    """What a domain's module offers."""

    def generate(self, seed: int, split: str) -> Task: ...

    def demonstration(self, task: Task) -> list[dict[str, Any]]: ...


DOMAINS: dict[str, Domain] = {"tool_use": tool_use}


def generate(seed: int, split: str, domain: str = "tool_use") -> Task:
    """Task number `seed` of `split`. Raises ValueError for an unknown split or domain."""
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}: one of {', '.join(SPLITS)}")
    if domain not in DOMAINS:
        raise ValueError(f"unknown domain {domain!r}: one of {', '.join(DOMAINS)}")
    return DOMAINS[domain].generate(seed, split)


def from_id(task_id: str) -> Task:
    """The task that ``metadata.task`` names. Raises ValueError when it names none."""
    parts = task_id.split("/")
    if len(parts) != 4 or not parts[3].isdecimal():
        raise ValueError(f"{task_id!r} is not DOMAIN/SPLIT/FAMILY/SEED")
    domain, split, _, seed = parts
    task = generate(int(seed), split, domain)
    if task.id != task_id:
        raise ValueError(f"{task_id!r} is no task: number {seed} of {split} is of family {task.family}")
    return task


def demonstration(task: Task) -> list[dict[str, Any]]:
    """The gold continuation of ``task.messages``: assistant turns with tool calls, tool results, answer.

    ``task.messages + demonstration(task)`` with ``task.tools`` is one whole conversation; the assistant
    messages in it are what supervised training learns from. Arguments are JSON text, as the API has them.
    """
    return DOMAINS[task.domain].demonstration(task)
