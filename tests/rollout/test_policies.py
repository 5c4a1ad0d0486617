"""Policies: what may follow what, and that one serves."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from sqlalchemy import delete, update
from sqlalchemy.exc import IntegrityError

from rollout import policies
from rollout.policies import TRANSITIONS, PolicyConflict, Serving, UnknownPolicy
from rollout.records import PolicyKind, PolicyState
from rollout.store import Store, tables
from tests.fixtures.rows import manifest

S = PolicyState
EVIDENCE = {"difference": 0.2, "interval": [0.1, 0.3], "n": 200}


def begin(store: Store) -> None:
    """The bare base and a warm start on top, as `seed` leaves them."""
    with store.write() as tx:
        base = manifest("p000000", kind=PolicyKind.FULL, parent=None, target_modules=[], rank=0)
        policies.register(tx, base, "/base", state=S.PROMOTED, reason="initial")
        policies.register(tx, manifest("p000001"), "/p1", state=S.PROMOTED, reason="initial")


def to_canary(store: Store, policy_id: str) -> None:
    with store.write() as tx:
        policies.register(tx, manifest(policy_id), f"/{policy_id}")
        policies.transition(tx, policy_id, S.CANDIDATE, S.GATE, actor="judge")
        policies.transition(tx, policy_id, S.GATE, S.CANARY, actor="judge", evidence=EVIDENCE)


def test_a_deployment_begins_with_base_and_warm_start(store: Store) -> None:
    with store.read() as tx:
        assert policies.serving(tx) == Serving(promoted=None, previous=None, epoch=0)
        assert policies.addressable(tx) == []
    begin(store)
    with store.read() as tx:
        assert policies.serving(tx) == Serving(promoted="p000001", previous="p000000", epoch=2)
        assert [p.id for p in policies.addressable(tx)] == ["p000000", "p000001"]
        assert policies.slots_free(tx, 4) == 3
    with pytest.raises(PolicyConflict, match="has to pass the gate"), store.write() as tx:
        policies.register(tx, manifest("p000002"), "/p2", state=S.PROMOTED, reason="initial")


def test_what_was_registered_comes_back(store: Store) -> None:
    begin(store)
    made = manifest("p000002", recipe={"lr": 1e-4}, files={"a": "b"})
    with store.write() as tx:
        policies.register(tx, made, "/p2")
        policies.register(tx, manifest("p000003"), "/p3", state=S.REJECTED, reason="truncated")
        with pytest.raises(PolicyConflict, match="registered already"):
            policies.register(tx, made, "/p2")
        with pytest.raises(PolicyConflict, match="begins as"):
            policies.register(tx, manifest("p000004"), "/p4", state=S.CANARY)
    with store.read() as tx:
        stored = policies.get(tx, "p000002")
        assert stored is not None
        assert (stored.manifest, stored.path, stored.state) == (made, "/p2", S.CANDIDATE)
        refused = policies.get(tx, "p000003")
        assert refused is not None
        assert (refused.state, refused.reason) == (S.REJECTED, "truncated")
        assert [p.id for p in policies.list_policies(tx, [S.CANDIDATE, S.RETIRED])] == ["p000000", "p000002"]
        assert len(policies.list_policies(tx)) == 4
        assert policies.get(tx, "p000009") is None


def test_ids_are_reserved_once_and_past_those_given_from_outside(store: Store) -> None:
    begin(store)
    with store.write() as tx:
        policies.register(tx, manifest("p000007"), "/p7")
        policies.register(tx, manifest("by-hand"), "/x")

    def reserve(_: int) -> str:
        with store.write() as tx:
            return policies.reserve(tx)

    with ThreadPoolExecutor(4) as pool:
        assert sorted(pool.map(reserve, range(8))) == [f"p{n:06d}" for n in range(8, 16)]


def test_promotion_and_rollback_move_everything_together(store: Store) -> None:
    begin(store)
    to_canary(store, "p000002")
    with store.write() as tx:
        now = policies.promote(tx, "p000002", expected="p000001", actor="judge", evidence=EVIDENCE)
    assert now == Serving(promoted="p000002", previous="p000001", epoch=3)
    with store.write() as tx:
        now = policies.rollback(tx, expected="p000002", actor="admin", reason="worse live")
    assert now == Serving(promoted="p000001", previous=None, epoch=4)
    with store.read() as tx:
        assert policies.serving(tx) == now
        states = {p.id: (p.state, p.reason) for p in policies.list_policies(tx)}
        assert states == {
            "p000000": (S.RETIRED, "succeeded by p000001"),
            "p000001": (S.PROMOTED, "p000002 rolled back"),
            "p000002": (S.ROLLED_BACK, "worse live"),
        }
        steps = policies.history(tx, "p000002")
        assert [(s.frm, s.to, s.actor) for s in steps] == [
            (None, S.CANDIDATE, "register"),
            (S.CANDIDATE, S.GATE, "judge"),
            (S.GATE, S.CANARY, "judge"),
            (S.CANARY, S.PROMOTED, "judge"),
            (S.PROMOTED, S.ROLLED_BACK, "admin"),
        ]
        assert steps[2].evidence == steps[3].evidence == EVIDENCE
        assert [p.id for p in policies.addressable(tx)] == ["p000001"]
    with pytest.raises(PolicyConflict, match="no previous"), store.write() as tx:
        policies.rollback(tx, actor="admin", reason="again")


def test_a_refused_promotion_changes_nothing_even_if_its_transaction_commits(store: Store) -> None:
    begin(store)
    with store.write() as tx:
        policies.register(tx, manifest("p000002"), "/p2")
        for attempt in ("p000002", "p000001", "p000000"):
            with pytest.raises(PolicyConflict, match="not canary"):
                policies.promote(tx, attempt, actor="judge")
        with pytest.raises(UnknownPolicy):
            policies.promote(tx, "p000099", actor="judge")
    to_canary(store, "p000003")
    with store.write() as tx, pytest.raises(PolicyConflict, match="p000001 is promoted now"):
        policies.promote(tx, "p000003", expected="p000000", actor="judge")
    with store.read() as tx:
        assert policies.serving(tx) == Serving(promoted="p000001", previous="p000000", epoch=2)


def test_steps_outside_the_table_are_refused(store: Store) -> None:
    begin(store)
    with store.write() as tx:
        policies.register(tx, manifest("p000002"), "/p2")
        for frm in S:
            for to in S:
                allowed = to in TRANSITIONS[frm] and S.PROMOTED not in (frm, to)
                if not allowed:
                    with pytest.raises(PolicyConflict):
                        policies.transition(tx, "p000002", frm, to, actor="t", evidence=EVIDENCE)
        policies.transition(tx, "p000002", S.CANDIDATE, S.GATE, actor="t")
        with pytest.raises(PolicyConflict, match="is gate, not candidate"):
            policies.transition(tx, "p000002", S.CANDIDATE, S.GATE, actor="t")
        with pytest.raises(PolicyConflict, match="evidence"):
            policies.transition(tx, "p000002", S.GATE, S.CANARY, actor="t")
        with pytest.raises(PolicyConflict, match="evidence"):
            policies.transition(tx, "p000002", S.GATE, S.CANARY, actor="t", evidence={})
        with pytest.raises(UnknownPolicy):
            policies.transition(tx, "p000099", S.CANDIDATE, S.GATE, actor="t")


def test_the_database_refuses_a_second_promoted_policy(store: Store) -> None:
    begin(store)
    with pytest.raises(IntegrityError), store.write() as tx:
        tx.execute(update(tables.policies).where(tables.policies.c.id == "p000000").values(state="promoted"))


def test_of_two_promotions_at_once_one_wins(store: Store) -> None:
    begin(store)
    rivals = ["p000002", "p000003", "p000004"]
    for rival in rivals:
        to_canary(store, rival)

    def promote(rival: str) -> bool:
        try:
            with store.write() as tx:
                policies.promote(tx, rival, expected="p000001", actor=rival)
        except PolicyConflict:
            return False
        return True

    with ThreadPoolExecutor(3) as pool:
        won = dict(zip(rivals, pool.map(promote, rivals), strict=True))
    assert sum(won.values()) == 1
    with store.read() as tx:
        now = policies.serving(tx)
        assert now.epoch == 3
        assert now.promoted is not None
        assert won[now.promoted]


class Lives(RuleBasedStateMachine):
    """Any order of steps by anybody: what must hold holds after each."""

    store: Store

    def __init__(self) -> None:
        super().__init__()
        with self.store.write() as tx:
            tx.execute(update(tables.serving).values(promoted=None, previous=None, epoch=0, last_reserved=0))
            tx.execute(delete(tables.policy_transitions))
            tx.execute(delete(tables.policies))
        begin(self.store)
        self.epoch = 2
        self.initial = {"p000000", "p000001"}
        self.known = sorted(self.initial)

    def attempt(self, call: object) -> None:
        assert callable(call)
        try:
            with self.store.write() as tx:
                call(tx)
        except PolicyConflict:
            pass

    @rule(initial=st.booleans())
    def register(self, initial: bool) -> None:
        with self.store.write() as tx:
            policy_id = policies.reserve(tx)
        self.known.append(policy_id)
        state = S.PROMOTED if initial else S.CANDIDATE
        self.attempt(lambda tx: policies.register(tx, manifest(policy_id), "/x", state=state))

    @rule(data=st.data(), frm=st.sampled_from(S), to=st.sampled_from(S), evidence=st.booleans())
    def step(self, data: st.DataObject, frm: S, to: S, evidence: bool) -> None:
        policy_id = data.draw(st.sampled_from(self.known))
        self.attempt(
            lambda tx: policies.transition(
                tx, policy_id, frm, to, actor="t", evidence=EVIDENCE if evidence else None
            )
        )

    @rule(data=st.data(), evidence=st.booleans())
    def advance(self, data: st.DataObject, evidence: bool) -> None:
        """A step that is allowed, so that runs get somewhere."""
        policy_id = data.draw(st.sampled_from(self.known))
        with self.store.read() as tx:
            policy = policies.get(tx, policy_id)
        if policy is not None and TRANSITIONS[policy.state]:
            to = data.draw(st.sampled_from(sorted(TRANSITIONS[policy.state])))
            self.attempt(
                lambda tx: policies.transition(
                    tx, policy_id, policy.state, to, actor="t", evidence=EVIDENCE if evidence else None
                )
            )

    @rule(data=st.data(), expect=st.booleans())
    def promote(self, data: st.DataObject, expect: bool) -> None:
        policy_id = data.draw(st.sampled_from(self.known))
        expected = data.draw(st.sampled_from(self.known)) if expect else None
        self.attempt(lambda tx: policies.promote(tx, policy_id, expected=expected, actor="t"))

    @rule()
    def rollback(self) -> None:
        self.attempt(lambda tx: policies.rollback(tx, actor="t", reason="r"))

    @invariant()
    def one_policy_serves_and_it_passed_the_gate(self) -> None:
        with self.store.read() as tx:
            now = policies.serving(tx)
            promoted = [p.id for p in policies.list_policies(tx, [S.PROMOTED])]
            assert promoted == [now.promoted]
            steps = policies.history(tx, promoted[0])
            held = {p.id for p in policies.addressable(tx)}
            moves = sum(
                s.to is S.PROMOTED for p in policies.list_policies(tx) for s in policies.history(tx, p.id)
            )
            previous = None if now.previous is None else policies.get(tx, now.previous)
        if promoted[0] not in self.initial:
            assert any(s.to is S.CANARY and s.evidence == EVIDENCE for s in steps)
        assert now.epoch == moves
        assert now.epoch >= self.epoch
        self.epoch = now.epoch
        assert previous is None or previous.state is S.RETIRED
        assert {promoted[0], *([now.previous] if now.previous else [])} <= held


def test_no_order_of_steps_breaks_the_invariants(store: Store) -> None:
    class Machine(Lives):
        pass

    Machine.store = store
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=15,
            stateful_step_count=30,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
