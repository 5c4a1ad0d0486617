"""Which tasks an evaluation uses.

Everything here is of the `held_out` split, which no training ever sees. The `sealed` suite reports results
and decides nothing; each gate draws tasks of its own, so no policy is chosen for luck on tasks that report.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from itertools import count

from rollout.tasks import Task, generate

SPLIT = "held_out"
SEALED = "sealed"
SEALED_SIZE = 200
GATE = "gate"
GATE_FIRST_SEED = 1_000_000
GATE_SEEDS = 10_000
"""Seeds that one gate may draw from."""


def sealed(n: int = SEALED_SIZE) -> list[Task]:
    """The first `n` tasks of the sealed suite, no two with the same question."""
    return _distinct(map(_task, count()), n, set())


def gate(policy_id: str, n: int) -> list[Task]:
    """`n` tasks for the gate of one policy: the same at every attempt, none of them sealed."""
    digest = hashlib.sha256(policy_id.encode()).digest()
    first = GATE_FIRST_SEED + int.from_bytes(digest[:4], "big") % 100_000 * GATE_SEEDS
    sealed_questions = {question(task) for task in sealed()}
    return _distinct(map(_task, range(first, first + GATE_SEEDS)), n, sealed_questions)


def question(task: Task) -> str:
    return str(task.messages[-1]["content"])


def _task(seed: int) -> Task:
    return generate(seed, SPLIT)


def _distinct(tasks: Iterable[Task] | Iterator[Task], n: int, seen: set[str]) -> list[Task]:
    """The first `n` tasks whose question is not in `seen` nor among those before."""
    chosen: list[Task] = []
    for task in tasks:
        if question(task) not in seen:
            seen.add(question(task))
            chosen.append(task)
            if len(chosen) == n:
                return chosen
    raise ValueError(f"{n} distinct tasks were asked for and only {len(chosen)} exist")
