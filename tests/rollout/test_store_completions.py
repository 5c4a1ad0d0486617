"""Completions and the trajectories they make up."""

from __future__ import annotations

import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy.exc import IntegrityError

from rollout.records import CompletionStatus, Joint
from rollout.store import Store, completions, payload, trajectories
from tests.fixtures.rows import PROJECT, add_project, choice, completion

float32 = st.floats(width=32, allow_nan=False)


def test_every_field_comes_back(store: Store) -> None:
    add_project(store)
    full = completion(
        "c1",
        turn=3,
        task="weather",
        status=CompletionStatus.ERROR,
        error="capture_mismatch",
        tools=[{"type": "function", "function": {"name": "f", "parameters": {"x": [1, None, 2.5]}}}],
        choices=[choice(0), choice(1, [7]), choice(2, [])],
        joint=Joint.BREAK,
        break_reason="tools changed",
        trainable=False,
        untrainable_reason="top_p",
        metadata={"a": "b", "nul": "\u0000"},
        ttft_ms=3.25,
        created_at=1764510000.123456,
    )
    with store.write() as tx:
        completions.insert(tx, full)
    with store.read() as tx:
        assert completions.get(tx, "c1") == full
        assert completions.get(tx, "c2") is None


@given(st.lists(st.tuples(st.integers(0, 2**31 - 1), float32)))
def test_ids_and_float32_logprobs_come_back_exactly(pairs: list[tuple[int, float]]) -> None:
    sampled = msgspec.structs.replace(
        choice(), token_ids=[i for i, _ in pairs], logprobs=[p for _, p in pairs]
    )
    record = completion("c", choices=[sampled], prompt_token_ids=[i for i, _ in pairs])
    body = payload.unpack(payload.pack(record))
    assert payload.prompt_token_ids(body) == record.prompt_token_ids
    assert payload.choices(body) == [sampled]
    assert body.choices[0].logprobs == struct.pack(f"<{len(pairs)}f", *(p for _, p in pairs))


def test_unequal_counts_and_ids_outside_int32_are_refused() -> None:
    torn = msgspec.structs.replace(choice(), logprobs=[-1.0])
    with pytest.raises(ValueError, match="3 ids with 1 log-probs"):
        payload.pack(completion("c", choices=[torn]))
    with pytest.raises(OverflowError):
        payload.pack(completion("c", prompt_token_ids=[2**31]))


def test_a_batch_is_whole_or_absent(store: Store) -> None:
    add_project(store)
    with store.write() as tx:
        completions.insert(tx, completion("c1"))
    with pytest.raises(IntegrityError), store.write() as tx:
        completions.insert_many(tx, [(completion("c2"), ["h"]), (completion("c1"), [])])
    with store.read() as tx:
        assert completions.get(tx, "c2") is None
        assert completions.by_context(tx, PROJECT, "h") is None
        assert trajectories.get(tx, PROJECT, "trajectory-of-c2") is None


def test_a_context_finds_the_newest_completion_and_the_choice(store: Store) -> None:
    add_project(store)
    add_project(store, "other")
    two = completion("c1", choices=[choice(0), choice(1)])
    with store.write() as tx:
        completions.insert_many(
            tx,
            [
                (two, ["first", "second"]),
                (completion("c2"), ["first"]),
                (completion("c3", project_id="other"), ["second"]),
            ],
        )
    with store.read() as tx:
        newest = completions.by_context(tx, PROJECT, "first")
        match = completions.match_context(tx, PROJECT, "second")
        assert newest is not None
        assert newest.id == "c2"
        assert match == completions.ContextMatch(completion=two, choice=1)
        assert completions.by_context(tx, "other", "first") is None


def test_a_trajectory_is_ordered_and_belongs_to_its_project(store: Store) -> None:
    add_project(store)
    add_project(store, "other")
    turns = [completion(f"c{n}", trajectory_id="t", turn=n) for n in (2, 0, 1)]
    with store.write() as tx:
        completions.insert_many(tx, [(turn, []) for turn in turns])
        completions.insert(tx, completion("again", trajectory_id="t", turn=1))
        completions.insert(tx, completion("foreign", trajectory_id="t", project_id="other"))
    with store.read() as tx:
        ids = [c.id for c in completions.of_trajectory(tx, PROJECT, "t")]
        assert ids == ["c0", "c1", "again", "c2"]


def test_a_trajectory_row_follows_its_completions(store: Store) -> None:
    add_project(store)
    steps = [
        completion("c0", trajectory_id="t", turn=0, created_at=10.0, policy_id="p000001"),
        completion("c1", trajectory_id="t", turn=1, created_at=20.0, policy_id="p000001", task="later"),
        completion("c2", trajectory_id="t", turn=2, created_at=30.0, policy_id="p000002", joint=Joint.BREAK),
        completion("c3", trajectory_id="t", turn=3, created_at=25.0, policy_id="p000002", task="other"),
    ]
    with store.write() as tx:
        completions.insert_many(tx, [(step, []) for step in steps])
    with store.read() as tx:
        assert trajectories.get(tx, PROJECT, "t") == trajectories.Trajectory(
            project_id=PROJECT,
            id="t",
            task="later",
            policy_id="p000002",
            policy_since=30.0,
            created_at=10.0,
            last_at=30.0,
            turns=4,
            breaks=1,
        )
        assert trajectories.get(tx, PROJECT, "u") is None


def test_counts_say_why_records_do_not_train(store: Store) -> None:
    add_project(store)
    batch = [
        completion("a", created_at=1.0),
        completion("b", created_at=2.0, trainable=False, untrainable_reason="top_p", joint=Joint.BREAK),
        completion("c", created_at=3.0, trainable=False, status=CompletionStatus.CANCELLED, policy_id="p2"),
    ]
    with store.write() as tx:
        completions.insert_many(tx, [(record, []) for record in batch])
    with store.read() as tx:
        assert completions.counts(tx) == completions.Counts(
            total=3,
            trainable=1,
            breaks=1,
            by_status={"completed": 2, "cancelled": 1},
            by_policy={"p000001": 2, "p2": 1},
            untrainable={"top_p": 1, "unstated": 1},
        )
        assert completions.counts(tx, since=3.0).total == 1
        assert completions.counts(tx, since=4.0).total == 0


def test_deletion_takes_the_contexts_and_never_reuses_a_seq(store: Store) -> None:
    add_project(store)
    with store.write() as tx:
        completions.insert(tx, completion("c1", trajectory_id="t"), ["h"])
        assert completions.delete(tx, "c1")
        assert not completions.delete(tx, "c1")
        completions.insert(tx, completion("c2", trajectory_id="t", turn=1), ["g"])
    with store.read() as tx:
        assert completions.by_context(tx, PROJECT, "h") is None
        assert [c.id for c in completions.of_trajectory(tx, PROJECT, "t")] == ["c2"]
        assert tx.exec_driver_sql("SELECT seq FROM completions").scalar_one() == 2


def test_a_pinned_policy_is_not_what_the_trajectory_is_on(store: Store) -> None:
    add_project(store)
    steps = [
        # what was asked for, what answered, when -> what the row says
        ("ratchet@p000007", "p000007", 10.0, ("p000007", 0.0)),
        ("ratchet", "p000001", 20.0, ("p000001", 20.0)),
        ("ratchet@p000007", "p000007", 30.0, ("p000001", 20.0)),
        ("ratchet-fast", "p000001", 40.0, ("p000001", 20.0)),
        ("ratchet", "p000002", 50.0, ("p000002", 50.0)),
    ]
    for i, (model, policy, at, expected) in enumerate(steps):
        with store.write() as tx:
            turn = completion(f"c{i}", trajectory_id="t", model=model, policy_id=policy, created_at=at)
            completions.insert(tx, turn)
            row = trajectories.get(tx, PROJECT, "t")
        assert row is not None
        assert (row.policy_id, row.policy_since) == expected


def test_a_turn_is_found_by_context_within_its_trajectory(store: Store) -> None:
    add_project(store)
    with store.write() as tx:
        for i, name in enumerate(("a", "b", "a", "b")):
            completions.insert(tx, completion(f"c{i}", trajectory_id=name), ["other", "same"])
        found = [trajectories.turn_with_context(tx, PROJECT, name, "same") for name in ("a", "b", "c")]
    expected = [trajectories.ContextTurn(completion_id=i, choice=1) for i in ("c2", "c3")]
    assert found == [*expected, None]
