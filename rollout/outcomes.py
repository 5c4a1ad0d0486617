"""Outcomes: judgements of completions and trajectories, and which of several counts.

Invariants: append-only; an id names, for good, one trusted outcome of its project and one untrusted, so that
neither takes an id from the other; `judged` gives every outcome exactly once and in an order that never
changes, whatever number of processes write at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from sqlalchemy import Connection, Row, insert, or_, select, text

from rollout.records import Outcome, Source
from rollout.store import tables

MAX_VALUE = 1000.0
"""Largest value of an outcome, either side of zero: sums and squares of values stay finite."""

PRECEDENCE = {Source.USER: 0, Source.GRADER: 1, Source.VERIFIER: 2}

FEED_LOCK = 0x4F555443
"""Key of the PostgreSQL advisory lock that makes the order of `seq` the order of commits."""


class OutcomeInvalid(ValueError):
    """The outcome contradicts itself; the message says how."""


class OutcomeConflict(Exception):
    """An outcome of the project, as trusted as this one, has its id already, with other content."""


def record(tx: Connection, outcome: Outcome) -> Outcome:
    """Store `outcome`. Returns the very object when it is new, the stored one when this is a replay.

    Raises OutcomeConflict when the id is taken by an outcome with other content, OutcomeInvalid when it
    names both or neither of completion and trajectory, or both or neither of an error and a value within
    MAX_VALUE.
    """
    _check(outcome)
    if tx.dialect.name == "postgresql":
        # A sequence hands out numbers before their transactions commit: a reader could see 8, move its cursor
        # past 7 and never read 7, which commits a moment later. The lock is held from before the number is
        # drawn until the commit is visible, so numbers become visible in their order. SQLite has one writer.
        tx.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": FEED_LOCK})
    table = tables.outcomes
    same = (
        table.c.project_id == outcome.project_id,
        table.c.trusted == outcome.trusted,
        table.c.id == outcome.id,
    )
    row = tx.execute(select(table).where(*same)).one_or_none()
    if row is None:
        tx.execute(insert(table).values(_values(outcome)))
        return outcome
    stored = _outcome(row)
    # The time of arrival differs between a call and its replay; everything else is content.
    if msgspec.structs.replace(outcome, created_at=stored.created_at) != stored:
        raise OutcomeConflict(f"outcome {outcome.id} exists with other content; choose another id")
    return stored


def for_completion(
    tx: Connection, project_id: str, completion_id: str, choice: int | None = None
) -> list[Outcome]:
    """Outcomes of one completion (of one choice when given), oldest first."""
    c = tables.outcomes.c
    statement = select(tables.outcomes).where(c.project_id == project_id, c.completion_id == completion_id)
    if choice is not None:
        statement = statement.where(c.choice == choice)
    return [_outcome(row) for row in tx.execute(statement.order_by(c.seq))]


def for_trajectory(
    tx: Connection, project_id: str, trajectory_id: str, *, with_completions: bool = False
) -> list[Outcome]:
    """Outcomes of a trajectory as a whole, oldest first; `with_completions` adds those of its turns."""
    c = tables.outcomes.c
    about = c.trajectory_id == trajectory_id
    if with_completions:
        completions = tables.completions.c
        turns = select(completions.id).where(
            completions.project_id == project_id, completions.trajectory_id == trajectory_id
        )
        about = or_(about, c.completion_id.in_(turns))
    rows = tx.execute(select(tables.outcomes).where(c.project_id == project_id, about).order_by(c.seq))
    return [_outcome(row) for row in rows]


def effective(outcomes: Sequence[Outcome], metric: str = "reward") -> Outcome | None:
    """The one that counts among outcomes of one subject: trusted, not superseded, with a value.

    A verifier outranks a grader, a grader a user; the latest wins within a source. An outcome supersedes only
    what does not outrank it, so a user cannot strike out a verifier. A superseding error strikes out too.
    Raises ValueError when `outcomes` are of several subjects (completion and choice, or trajectory).
    """
    if len({_subject(outcome) for outcome in outcomes}) > 1:
        raise ValueError("effective() judges one subject; these outcomes are of several")
    trusted = [o for o in outcomes if o.trusted and o.metric == metric]
    by_id = {o.id: o for o in trusted}
    struck = {
        o.supersedes
        for o in trusted
        if o.supersedes in by_id and PRECEDENCE[by_id[o.supersedes].source] <= PRECEDENCE[o.source]
    }
    counting = [o for o in trusted if o.id not in struck and o.value is not None]
    if not counting:
        return None
    _, winner = max(
        enumerate(counting), key=lambda item: (PRECEDENCE[item[1].source], item[1].created_at, item[0])
    )
    return winner


def judged(tx: Connection, after_seq: int, limit: int) -> list[tuple[int, Outcome]]:
    """Up to `limit` outcomes with seq above `after_seq`, in order; the last seq is the next cursor.

    Carries every outcome, of completions and of trajectories, trusted or not: a reader that skips one counts
    it. Nothing ever appears below a seq that was read.
    """
    c = tables.outcomes.c
    rows = tx.execute(select(tables.outcomes).where(c.seq > after_seq).order_by(c.seq).limit(limit))
    return [(row.seq, _outcome(row)) for row in rows]


def _subject(outcome: Outcome) -> tuple[str, str | None, int, str | None]:
    choice = 0 if outcome.completion_id is None else outcome.choice  # a trajectory has no choices
    return outcome.project_id, outcome.completion_id, choice, outcome.trajectory_id


def _check(outcome: Outcome) -> None:
    if (outcome.completion_id is None) == (outcome.trajectory_id is None):
        raise OutcomeInvalid("an outcome judges one completion or one trajectory: give exactly one id")
    if (outcome.value is None) == (outcome.error is None):
        raise OutcomeInvalid("an outcome has either a value or the error that kept the judge from one")
    if outcome.value is not None and not abs(outcome.value) <= MAX_VALUE:
        raise OutcomeInvalid(
            f"an outcome's value is a number from -{MAX_VALUE:.0f} to {MAX_VALUE:.0f}, not {outcome.value}"
        )
    if outcome.supersedes == outcome.id:
        raise OutcomeInvalid("an outcome cannot supersede itself")


def _values(outcome: Outcome) -> dict[str, Any]:
    return {**msgspec.structs.asdict(outcome), "source": outcome.source.value}


def _outcome(row: Row[*tuple[Any, ...]]) -> Outcome:
    fields = {name: value for name, value in row._mapping.items() if name != "seq"}
    return Outcome(**{**fields, "source": Source(row.source)})
