"""Policies: their states, what may follow what, and which one serves.

Invariants, kept in the database and not only here: at most one policy is promoted, and it is the one that
`serving` names; each promotion and rollback raises the epoch by one; every change leaves a row with actor,
reason and evidence; past the initial policies nothing is promoted that did not pass the gate with evidence.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection
from typing import Any

import msgspec
from sqlalchemy import Connection, Row, func, insert, select, update

from rollout.records import Policy, PolicyKind, PolicyManifest, PolicyState
from rollout.store import tables

S = PolicyState

TRANSITIONS: dict[PolicyState, frozenset[PolicyState]] = {
    S.CANDIDATE: frozenset({S.GATE, S.REJECTED}),
    S.GATE: frozenset({S.CANARY, S.REJECTED, S.CANDIDATE}),
    S.CANARY: frozenset({S.PROMOTED, S.REJECTED}),
    S.PROMOTED: frozenset({S.RETIRED, S.ROLLED_BACK}),
    S.RETIRED: frozenset({S.PROMOTED}),
    S.REJECTED: frozenset(),
    S.ROLLED_BACK: frozenset(),
}

ADDRESSABLE = (S.CANDIDATE, S.GATE, S.CANARY, S.PROMOTED)
"""States whose policies replicas hold; the previous one is held too, for the way back."""

SERVING_ROW = 1


class PolicyConflict(Exception):
    """The policy is not in the state that the caller took it to be in, or the step is not allowed."""


class UnknownPolicy(PolicyConflict):
    """No policy has this id."""


class Serving(msgspec.Struct, frozen=True, kw_only=True):
    """What callers get who name no policy."""

    promoted: str | None
    previous: str | None
    """Where a rollback leads."""
    epoch: int
    """Raised by one at every promotion and rollback."""


class Transition(msgspec.Struct, frozen=True, kw_only=True):
    """One step in the life of a policy."""

    policy_id: str
    frm: PolicyState | None
    """None for the registration."""
    to: PolicyState
    actor: str
    reason: str | None = None
    evidence: dict[str, Any] | None = None
    at: float = 0.0
    """Set by the store."""


def reserve(tx: Connection) -> str:
    """A policy id that nobody had before (``p000041``)."""
    table = tables.serving
    number = tx.execute(
        update(table)
        .where(table.c.id == SERVING_ROW)
        .values(last_reserved=table.c.last_reserved + 1)
        .returning(table.c.last_reserved)
    ).scalar_one()
    return f"p{number:06d}"


def register(
    tx: Connection,
    manifest: PolicyManifest,
    path: str,
    state: PolicyState = S.CANDIDATE,
    reason: str | None = None,
) -> Policy:
    """Make a published folder known: as a candidate, or as rejected with the reason.

    ``state=PROMOTED`` is for the policies that a deployment begins with: allowed while nothing is promoted,
    and once more on top of the bare base while that is the only policy. Raises PolicyConflict otherwise.
    """
    current = _lock_serving(tx)
    if get(tx, manifest.id) is not None:
        raise PolicyConflict(f"policy {manifest.id} is registered already")
    if state not in (S.CANDIDATE, S.REJECTED, S.PROMOTED):
        raise PolicyConflict(f"a policy begins as candidate, rejected or (initially) promoted, not {state}")
    if state is S.PROMOTED:
        _check_initial(tx, current)
        _retire(tx, current.promoted, manifest.id, actor="register")
    now = time.time()
    tx.execute(
        insert(tables.policies).values(
            id=manifest.id,
            state=state.value,
            manifest=msgspec.json.encode(manifest).decode(),
            path=path,
            reason=reason,
            created_at=now,
            updated_at=now,
        )
    )
    _note(tx, Transition(policy_id=manifest.id, frm=None, to=state, actor="register", reason=reason), now)
    _skip_reserved(tx, manifest.id)
    if state is S.PROMOTED:
        _serve(tx, promoted=manifest.id, previous=current.promoted, epoch=current.epoch + 1)
    return _must_get(tx, manifest.id)


def get(tx: Connection, policy_id: str) -> Policy | None:
    table = tables.policies
    row = tx.execute(select(table).where(table.c.id == policy_id)).one_or_none()
    return None if row is None else _policy(row)


def list_policies(tx: Connection, states: Collection[PolicyState] | None = None) -> list[Policy]:
    """All policies, or those in `states`, by id."""
    table = tables.policies
    statement = select(table).order_by(table.c.id)
    if states is not None:
        statement = statement.where(table.c.state.in_([state.value for state in states]))
    return [_policy(row) for row in tx.execute(statement)]


def transition(  # noqa: PLR0913 - a compare-and-set with its evidence is one call
    tx: Connection,
    policy_id: str,
    frm: PolicyState,
    to: PolicyState,
    *,
    actor: str,
    reason: str | None = None,
    evidence: dict[str, Any] | None = None,
) -> Policy:
    """Compare-and-set a policy's state and leave a row that says who, why and on what evidence.

    Steps into and out of PROMOTED are `promote` and `rollback`, which change what serves in the same breath.
    Passing the gate needs evidence. Raises PolicyConflict, UnknownPolicy.
    """
    if to not in TRANSITIONS[frm]:
        raise PolicyConflict(f"a policy does not go from {frm} to {to}")
    if S.PROMOTED in (frm, to):
        raise PolicyConflict(f"{frm} to {to} is done by promote or rollback")
    if to is S.CANARY and not evidence:
        raise PolicyConflict(f"policy {policy_id} passes the gate only with evidence")
    _move(
        tx,
        Transition(policy_id=policy_id, frm=frm, to=to, actor=actor, reason=reason, evidence=evidence),
    )
    return _must_get(tx, policy_id)


def history(tx: Connection, policy_id: str) -> list[Transition]:
    """Every step of a policy, oldest first."""
    table = tables.policy_transitions
    rows = tx.execute(select(table).where(table.c.policy_id == policy_id).order_by(table.c.seq))
    return [
        Transition(
            policy_id=row.policy_id,
            frm=None if row.frm is None else S(row.frm),
            to=S(row.to),
            at=row.at,
            actor=row.actor,
            reason=row.reason,
            evidence=row.evidence,
        )
        for row in rows
    ]


def serving(tx: Connection) -> Serving:
    row = tx.execute(select(tables.serving).where(tables.serving.c.id == SERVING_ROW)).one()
    return _serving(row)


def promote(
    tx: Connection,
    policy_id: str,
    *,
    expected: str | None = None,
    actor: str,
    evidence: dict[str, Any] | None = None,
) -> Serving:
    """Serve `policy_id`, which is in CANARY; the one before is retired and kept as the way back.

    `expected` is the policy that the caller takes to be promoted now (None: any). Raises PolicyConflict.
    """
    current = _lock_serving(tx)
    _check_expected(current, expected)
    _lock(tx, policy_id, S.CANARY)  # refuse before the first write, not half-way
    _retire(tx, current.promoted, policy_id, actor=actor)
    _move(tx, Transition(policy_id=policy_id, frm=S.CANARY, to=S.PROMOTED, actor=actor, evidence=evidence))
    return _serve(tx, promoted=policy_id, previous=current.promoted, epoch=current.epoch + 1)


def rollback(tx: Connection, *, expected: str | None = None, actor: str, reason: str) -> Serving:
    """Serve the previous policy again; the promoted one is rolled back for good, with the reason.

    `expected` as in `promote`. Raises PolicyConflict when there is no way back.
    """
    current = _lock_serving(tx)
    _check_expected(current, expected)
    if current.promoted is None or current.previous is None:
        raise PolicyConflict("there is no previous policy to go back to")
    _lock(tx, current.previous, S.RETIRED)
    _move(
        tx,
        Transition(policy_id=current.promoted, frm=S.PROMOTED, to=S.ROLLED_BACK, actor=actor, reason=reason),
    )
    why = f"{current.promoted} rolled back"
    _move(
        tx,
        Transition(policy_id=current.previous, frm=S.RETIRED, to=S.PROMOTED, actor=actor, reason=why),
    )
    return _serve(tx, promoted=current.previous, previous=None, epoch=current.epoch + 1)


def addressable(tx: Connection) -> list[Policy]:
    """The policies that every replica should hold, by id."""
    policies = list_policies(tx, ADDRESSABLE)
    previous = serving(tx).previous
    if previous is not None:
        policies.append(_must_get(tx, previous))
    return sorted(policies, key=lambda policy: policy.id)


def slots_free(tx: Connection, max_policies: int) -> int:
    """How many more adapters may become candidates. The bare base takes no slot."""
    taken = sum(policy.manifest.kind is PolicyKind.ADAPTER for policy in addressable(tx))
    return max(0, max_policies - taken)


def _check_expected(current: Serving, expected: str | None) -> None:
    if expected is not None and current.promoted != expected:
        raise PolicyConflict(f"{current.promoted} is promoted now, not {expected}")


def _check_initial(tx: Connection, current: Serving) -> None:
    if current.promoted is None:
        return
    known = tx.execute(select(func.count()).select_from(tables.policies)).scalar_one()
    if known > 1 or _must_get(tx, current.promoted).manifest.kind is not PolicyKind.FULL:
        raise PolicyConflict(f"{current.promoted} is promoted; a later policy has to pass the gate")


def _lock_serving(tx: Connection) -> Serving:
    """The serving row, held until the transaction ends: promotions happen one after another."""
    table = tables.serving
    row = tx.execute(select(table).where(table.c.id == SERVING_ROW).with_for_update()).one()
    return _serving(row)


def _serve(tx: Connection, *, promoted: str, previous: str | None, epoch: int) -> Serving:
    table = tables.serving
    tx.execute(
        update(table)
        .where(table.c.id == SERVING_ROW)
        .values(promoted=promoted, previous=previous, epoch=epoch)
    )
    return Serving(promoted=promoted, previous=previous, epoch=epoch)


def _skip_reserved(tx: Connection, policy_id: str) -> None:
    """An id that was given from outside (a warm start's) is never reserved afterwards."""
    match = re.fullmatch(r"p(\d+)", policy_id)
    if match is None:
        return
    table, number = tables.serving, int(match[1])
    tx.execute(
        update(table)
        .where(table.c.id == SERVING_ROW, table.c.last_reserved < number)
        .values(last_reserved=number)
    )


def _lock(tx: Connection, policy_id: str, state: PolicyState) -> None:
    """Hold the policy in `state` until the transaction ends; raises PolicyConflict when it is in another."""
    table = tables.policies
    row = tx.execute(select(table.c.state).where(table.c.id == policy_id).with_for_update()).one_or_none()
    if row is None:
        raise UnknownPolicy(f"there is no policy {policy_id}")
    if row.state != state.value:
        raise PolicyConflict(f"policy {policy_id} is {row.state}, not {state}")


def _retire(tx: Connection, policy_id: str | None, successor: str, *, actor: str) -> None:
    if policy_id is not None:
        reason = f"succeeded by {successor}"
        _move(
            tx,
            Transition(policy_id=policy_id, frm=S.PROMOTED, to=S.RETIRED, actor=actor, reason=reason),
        )


def _move(tx: Connection, step: Transition) -> None:
    """Take one step if the policy is where the step begins, and note it; raises PolicyConflict."""
    assert step.frm is not None
    assert step.to in TRANSITIONS[step.frm]
    table, now = tables.policies, time.time()
    changed = tx.execute(
        update(table)
        .where(table.c.id == step.policy_id, table.c.state == step.frm.value)
        .values(state=step.to.value, reason=step.reason, updated_at=now)
    )
    if changed.rowcount != 1:
        raise PolicyConflict(
            f"policy {step.policy_id} is {_must_get(tx, step.policy_id).state}, not {step.frm}"
        )
    _note(tx, step, now)


def _note(tx: Connection, step: Transition, now: float) -> None:
    values = msgspec.structs.asdict(step) | {
        "frm": None if step.frm is None else step.frm.value,
        "to": step.to.value,
        "at": now,
    }
    tx.execute(insert(tables.policy_transitions).values(values))


def _must_get(tx: Connection, policy_id: str) -> Policy:
    policy = get(tx, policy_id)
    if policy is None:
        raise UnknownPolicy(f"there is no policy {policy_id}")
    return policy


def _serving(row: Row[*tuple[Any, ...]]) -> Serving:
    return Serving(promoted=row.promoted, previous=row.previous, epoch=row.epoch)


def _policy(row: Row[*tuple[Any, ...]]) -> Policy:
    return Policy(
        id=row.id,
        state=S(row.state),
        manifest=msgspec.json.decode(row.manifest, type=PolicyManifest),
        path=row.path,
        reason=row.reason,
        created_at=row.created_at,
        updated_at=row.updated_at,
    )
