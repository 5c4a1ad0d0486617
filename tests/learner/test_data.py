"""The judged feed to samples: what trains, what does not and why."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import msgspec
import pytest
from sqlalchemy import Connection, update

from learner.data import Counts, Feed, Limits, served_policies, staleness, strata
from rollout import outcomes, policies
from rollout.records import CompletionStatus, Joint, Learn, PolicyState, Project, Source
from rollout.store import Store, completions, learning, projects, tables
from tests.fixtures import rows

LIMITS = Limits(max_staleness=4, max_tokens=100)


def feed(store: Store, cursor: int = 0, counts: Counts | None = None) -> Feed:
    return Feed(store, "job", LIMITS, cursor, counts or Counts())


def add(store: Store, completion_id: str, outcome: dict[str, Any] | None = None, **fields: Any) -> None:
    """A completion, with an outcome of its own unless None."""
    with store.write() as tx:
        completions.insert(tx, rows.completion(completion_id, **fields))
        if outcome is not None:
            outcomes.record(
                tx, rows.outcome(f"o-{completion_id}", **{"completion_id": completion_id, **outcome})
            )


def candidate(tx: Connection, number: int) -> str:
    """A candidate that passed the gate."""
    made = policies.register(tx, rows.manifest(f"p{number:06d}"), "/policies")
    evidence = {"by": "test"}
    policies.transition(tx, made.id, PolicyState.CANDIDATE, PolicyState.GATE, actor="test")
    policies.transition(tx, made.id, PolicyState.GATE, PolicyState.CANARY, actor="test", evidence=evidence)
    return made.id


def promote(store: Store, last: int) -> None:
    """Policies from the first to `last`, each promoted in its turn."""
    with store.write() as tx:
        policies.register(tx, rows.manifest("p000001"), "/policies", state=PolicyState.PROMOTED)
        for number in range(2, last + 1):
            policies.promote(tx, candidate(tx, number), actor="test")


@pytest.fixture
def filled(store: Store) -> Store:
    rows.add_project(store)
    return store


def reasons(reader: Feed) -> dict[str, int]:
    reader.take(100)
    return dict(reader.status().dropped)


def test_a_completion_is_its_prompt_and_its_sampled_ids(filled: Store) -> None:
    add(filled, "c1", {"value": 0.5}, task="tool_use/train/7")
    samples = feed(filled).take(1)
    assert samples is not None
    (sample,) = samples
    assert sample.tokens == [1, 2, 3, 4, 11, 12, 13]
    assert sample.sampled == [False] * 4 + [True] * 3
    assert sample.behaviour == [0, 0, 0, 0, -0.5, -1.0, -1.5]
    assert (sample.reward, sample.keys, sample.policies) == (0.5, (("c1", 0),), ("p000001",))
    assert sample.strata == ("", "tool_use", "tool_use/train")


def test_joined_turns_are_one_sequence_with_tool_results_masked(filled: Store) -> None:
    add(filled, "c1", trajectory_id="t")
    turn: dict[str, Any] = {"trajectory_id": "t", "turn": 1, "joint": Joint.JOINED}
    add(filled, "c2", **turn, prompt_token_ids=[1, 2, 3, 4, 11, 12, 13, 50, 51])
    with filled.write() as tx:
        outcomes.record(tx, rows.outcome("o", trajectory_id="t", value=1.0))
    samples = feed(filled).take(1)
    assert samples is not None
    (sample,) = samples
    assert sample.tokens == [1, 2, 3, 4, 11, 12, 13, 50, 51, 11, 12, 13]
    assert sample.sampled == [False] * 4 + [True] * 3 + [False] * 2 + [True] * 3
    assert sample.keys == (("c1", 0), ("c2", 0))


def test_a_break_begins_another_sequence(filled: Store) -> None:
    add(filled, "c1", trajectory_id="t")
    add(filled, "c2", trajectory_id="t", turn=1, joint=Joint.BREAK, prompt_token_ids=[9, 9])
    with filled.write() as tx:
        outcomes.record(tx, rows.outcome("o", trajectory_id="t", value=1.0))
    samples = feed(filled).take(1)
    assert samples is not None
    assert [sample.keys for sample in samples] == [(("c1", 0),), (("c2", 0),)]
    assert {sample.reward for sample in samples} == {1.0}


def test_the_choice_that_the_conversation_took_is_trained(filled: Store) -> None:
    choices = [rows.choice(0, [11]), rows.choice(1, [21, 22])]
    add(filled, "c1", trajectory_id="t", choices=choices)
    joined: dict[str, Any] = {"turn": 1, "joint": Joint.JOINED, "prompt_token_ids": [1, 2, 3, 4, 21, 22, 5]}
    add(filled, "c2", trajectory_id="t", **joined)
    with filled.write() as tx:
        outcomes.record(tx, rows.outcome("o", trajectory_id="t", value=1.0))
    samples = feed(filled).take(1)
    assert samples is not None
    assert samples[0].keys == (("c1", 1), ("c2", 0))
    assert samples[0].tokens[:7] == [1, 2, 3, 4, 21, 22, 5]


def test_an_untrainable_turn_stays_as_context(filled: Store) -> None:
    add(filled, "c1", trajectory_id="t", trainable=False, untrainable_reason="top_p")
    joined: dict[str, Any] = {
        "turn": 1,
        "joint": Joint.JOINED,
        "prompt_token_ids": [1, 2, 3, 4, 11, 12, 13, 5],
    }
    add(filled, "c2", trajectory_id="t", **joined)
    with filled.write() as tx:
        outcomes.record(tx, rows.outcome("o", trajectory_id="t", value=1.0))
    samples = feed(filled).take(1)
    assert samples is not None
    assert samples[0].sampled == [False] * 8 + [True] * 3


def test_what_does_not_train_is_counted_with_its_reason(filled: Store) -> None:
    with filled.write() as tx:
        projects.create_project(tx, Project(id="private", name="private", learn=Learn.NONE))
    add(filled, "c1", {"trusted": False})
    add(filled, "c2", {"error": "the sandbox died"})
    add(filled, "c3", {"metric": "tone"})
    add(filled, "c4", {"project_id": "private"}, project_id="private")
    add(filled, "c5", {}, trainable=False, untrainable_reason="top_p")
    add(filled, "c6", {}, status=CompletionStatus.CANCELLED)
    add(filled, "c7", {}, choices=[rows.choice(0, list(range(3, 120)))])
    add(filled, "c8", {})
    add(filled, "c9", {}, choices=[msgspec.structs.replace(rows.choice(), logprobs=[-1.0, nan, -inf])])
    with filled.write() as tx:
        # As an older version stored it.
        tx.execute(update(tables.outcomes).where(tables.outcomes.c.id == "o-c8").values(value=-1e308))
        outcomes.record(tx, rows.outcome("gone", completion_id="c-unknown"))
    reader = feed(filled)
    assert reasons(reader) == {
        "untrusted": 1,
        "judge failed": 1,
        "another metric": 1,
        "learn is none": 1,
        "untrainable: top_p": 1,
        "not completed": 1,
        "too long": 1,
        "not kept": 1,
        "out of range": 1,
        "broken": 1,
    }
    assert reader.status().judged == 10
    assert reader.waiting == 0


def test_the_outcome_that_counts_trains_and_the_others_are_superseded(filled: Store) -> None:
    add(filled, "c1", {"value": 0.0})
    with filled.write() as tx:
        outcomes.record(
            tx, rows.outcome("later", completion_id="c1", value=1.0, supersedes="o-c1", created_at=3000.0)
        )
    reader = feed(filled)
    samples = reader.take(1)
    assert samples is not None
    assert [sample.reward for sample in samples] == [1.0]
    assert reader.status().dropped == {"superseded": 1}


@pytest.mark.parametrize("read", [False, True], ids=["unread", "read"])
def test_a_later_judgement_replaces_the_one_that_waits(filled: Store, read: bool) -> None:
    """Whether the feed has met the later one or not, when the sample is handed out."""
    add(filled, "c1", {"value": 1.0, "source": Source.USER})
    add(filled, "c2", {"value": 1.0})
    reader = feed(filled)
    assert reader.fill(2) == 2
    add(filled, "c3", {"value": 0.25})
    with filled.write() as tx:
        outcomes.record(tx, rows.outcome("verifier", completion_id="c1", value=0.0))
        outcomes.record(tx, rows.outcome("wrong", completion_id="c2", error="wrong", supersedes="o-c2"))
    if read:
        assert reader.fill(4) == 3
    samples = reader.take(2)
    assert samples is not None
    assert [(sample.keys[0][0], sample.reward) for sample in samples] == [("c1", 0.0), ("c3", 0.25)]
    assert reasons(reader) == {"superseded": 1, "duplicate": 1, "judge failed": 1}
    assert (reader.counts.judged, reader.counts.trained) == (5, 2)
    with filled.write() as tx:
        outcomes.record(tx, rows.outcome("right", completion_id="c2", value=0.5, created_at=3000.0))
    again = reader.take(1)
    assert again is not None
    assert [(sample.keys[0][0], sample.reward) for sample in again] == [("c2", 0.5)]


def test_a_project_that_withdraws_takes_along_what_waits(filled: Store) -> None:
    add(filled, "c1", {})
    reader = feed(filled)
    assert reader.fill(1) == 1
    with filled.write() as tx:
        tx.execute(update(tables.projects).values(learn=Learn.NONE.value))
    assert reasons(reader) == {}
    assert reader.take(1) is None
    assert reader.status().dropped == {"learn is none": 1}


def test_no_turn_is_used_twice(filled: Store) -> None:
    add(filled, "c1", {}, trajectory_id="t")
    with filled.write() as tx:
        outcomes.record(tx, rows.outcome("whole", trajectory_id="t", value=1.0))
    reader = feed(filled)
    samples = reader.take(1)
    assert samples is not None
    assert len(samples) == 1
    assert reader.status().dropped == {"duplicate": 1}
    with filled.write() as tx:
        learning.mark_used(tx, "job", 1, [key for sample in samples for key in sample.keys])
    again = feed(filled)
    assert reasons(again) == {"duplicate": 2}


def test_samples_of_old_policies_are_stale(filled: Store) -> None:
    add(filled, "c1", {}, policy_id="p000001")
    add(filled, "c2", {}, policy_id="p000003")
    promote(filled, 7)
    reader = feed(filled)
    samples = reader.take(1)
    assert samples is not None
    assert samples[0].policies == ("p000003",)
    with filled.read() as tx:
        assert staleness(samples, served_policies(tx)) == 4
    assert reader.status().dropped == {"stale": 1}


def test_samples_of_the_promoted_policy_are_never_stale(filled: Store) -> None:
    """Whatever number of candidates was rejected, or promoted and taken back."""
    with filled.write() as tx:
        policies.register(tx, rows.manifest("p000001"), "/p", state=PolicyState.PROMOTED)
    reader = Feed(filled, "job", Limits(max_staleness=0, max_tokens=100), 0, Counts())
    for number in range(2, 8):
        with filled.write() as tx:
            made = candidate(tx, number)
            if number % 2:
                policies.promote(tx, made, actor="test")
                policies.rollback(tx, actor="test", reason="worse")
            else:
                policies.transition(tx, made, PolicyState.CANARY, PolicyState.REJECTED, actor="test")
        add(filled, f"c{number}", {}, policy_id="p000001")
        assert reader.take(1) is not None, number
    assert reader.status().dropped == {}


def test_the_cursor_never_passes_what_still_waits(filled: Store) -> None:
    for number in range(5):
        add(filled, f"c{number}", {"trusted": number != 1})
    reader = feed(filled)
    first = reader.take(2)
    assert first is not None
    assert [sample.keys[0][0] for sample in first] == ["c0", "c2"]
    assert (reader.counts.judged, reader.counts.trained) == (1 + 2, 2)
    resumed = feed(filled, reader.cursor)
    assert resumed.take(3) is None
    rest = resumed.take(2)
    assert rest is not None
    assert [sample.keys[0][0] for sample in rest] == ["c3", "c4"]
    assert resumed.take(1) is None


def test_groups_are_of_one_prompt_and_policy(filled: Store) -> None:
    choices = [rows.choice(0), rows.choice(1)]
    add(filled, "c1", {"choice": 0}, choices=choices)
    with filled.write() as tx:
        outcomes.record(tx, rows.outcome("second", completion_id="c1", choice=1))
    add(filled, "c2", {}, policy_id="p000002")
    samples = feed(filled).take(3)
    assert samples is not None
    assert samples[0].group == samples[1].group != samples[2].group


def test_strata_go_from_wide_to_narrow() -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("b", "a")]
    turn = rows.completion("c", task="shop/refunds/17", tools=tools)
    assert strata(turn) == ("", "shop", "shop/refunds", "shop/refunds a,b")
    assert strata(rows.completion("c")) == ("",)
    assert strata(rows.completion("c", task="invoice")) == ("",)
