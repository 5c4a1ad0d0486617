"""Outcomes: idempotent, append-only, which one counts, and a feed without gaps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

from rollout import outcomes
from rollout.outcomes import OutcomeConflict, OutcomeInvalid
from rollout.records import Outcome, Source
from rollout.store import Store, completions
from rollout.store.migrations import upgrade
from tests.fixtures.rows import PROJECT, add_project, completion, outcome

DEADLINE_S = 60.0


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_every_field_comes_back(store: Store) -> None:
    add_project(store)
    judgements = [
        outcome("o1", choice=2, value=0.1, verifier="tool_use", verifier_version="3", supersedes="o0"),
        outcome("o2", trajectory_id="t", error="sandbox did not start", trusted=False, source=Source.USER),
    ]
    with store.write() as tx:
        for judgement in judgements:
            assert outcomes.record(tx, judgement) is judgement
    with store.read() as tx:
        assert [o for _, o in outcomes.judged(tx, 0, 10)] == judgements


def test_a_replay_gives_the_stored_outcome_and_other_content_conflicts(store: Store) -> None:
    add_project(store)
    add_project(store, "other")
    first = outcome("o1", created_at=1.0)
    with store.write() as tx:
        outcomes.record(tx, first)
        assert outcomes.record(tx, outcome("o1", created_at=9.0)) == first
        outcomes.record(tx, outcome("o1", project_id="other", value=0.0))
        for fields in ({"value": 0.5}, {"completion_id": "c2"}, {"choice": 1}):
            with pytest.raises(OutcomeConflict, match="o1"):
                outcomes.record(tx, outcome("o1", **fields))
    with store.read() as tx:
        assert outcomes.judged(tx, 0, 10)[0][1] == first
        assert len(outcomes.judged(tx, 0, 10)) == 2


@pytest.mark.parametrize("trusted_first", [True, False])
def test_an_untrusted_outcome_takes_no_id_from_a_trusted_one(store: Store, trusted_first: bool) -> None:
    add_project(store)
    real = outcome("o1", value=0.0)
    claimed = outcome("o1", value=1.0, source=Source.USER, trusted=False)
    with store.write() as tx:
        for made in (real, claimed) if trusted_first else (claimed, real):
            assert outcomes.record(tx, made) is made
        for made in (real, claimed):
            assert outcomes.record(tx, msgspec.structs.replace(made, created_at=9.0)) == made
        for trusted in (True, False):
            with pytest.raises(OutcomeConflict, match="o1"):
                outcomes.record(tx, outcome("o1", value=0.5, trusted=trusted))
    with store.read() as tx:
        assert outcomes.effective(outcomes.for_completion(tx, PROJECT, "c1")) == real


def test_outcomes_of_the_schema_before_stay_in_order(store_url: str) -> None:
    old = Store.open(store_url)
    with old.write() as tx:
        upgrade(tx, "0001")
    add_project(old)
    judgements = [outcome(f"o{n}", trusted=n != 1) for n in range(3)]
    with old.write() as tx:
        for judgement in judgements:
            outcomes.record(tx, judgement)
        before = outcomes.judged(tx, 0, 10)
    old.migrate()
    with old.write() as tx:
        outcomes.record(tx, outcome("o1"))
        after = outcomes.judged(tx, 0, 10)
    assert after[:3] == before
    assert after[3][0] > before[2][0]
    assert [o for _, o in after] == [*judgements, outcome("o1")]
    with pytest.raises(IntegrityError), old.write() as tx:
        outcomes.record(tx, outcome("o4", project_id="nobody"))
    old.close()


@pytest.mark.parametrize(
    "fields",
    [
        {"completion_id": None},
        {"completion_id": "c", "trajectory_id": "t"},
        {"value": None},
        {"value": 1.0, "error": "and a value"},
        {"value": float("nan")},
        {"value": float("inf")},
        {"value": 1000.5},
        {"value": -1e308},
        {"supersedes": "o"},
    ],
)
def test_an_outcome_that_contradicts_itself_is_refused(sqlite_store: Store, fields: dict[str, Any]) -> None:
    with pytest.raises(OutcomeInvalid), sqlite_store.write() as tx:
        outcomes.record(tx, outcome("o", **fields))


def test_outcomes_are_found_by_what_they_judge(store: Store) -> None:
    add_project(store)
    with store.write() as tx:
        completions.insert(tx, completion("c1", trajectory_id="t"))
        for made in (
            outcome("o1", choice=0),
            outcome("o2", choice=1),
            outcome("o3", trajectory_id="t"),
            outcome("o4", completion_id="c2"),
        ):
            outcomes.record(tx, made)
    with store.read() as tx:

        def ids(found: list[Outcome]) -> list[str]:
            return [o.id for o in found]

        assert ids(outcomes.for_completion(tx, PROJECT, "c1")) == ["o1", "o2"]
        assert ids(outcomes.for_completion(tx, PROJECT, "c1", choice=1)) == ["o2"]
        assert ids(outcomes.for_trajectory(tx, PROJECT, "t")) == ["o3"]
        assert ids(outcomes.for_trajectory(tx, PROJECT, "t", with_completions=True)) == ["o1", "o2", "o3"]
        assert ids(outcomes.for_trajectory(tx, "other", "t", with_completions=True)) == []


VERIFIER, GRADER, USER = Source.VERIFIER, Source.GRADER, Source.USER


@pytest.mark.parametrize(
    ("judgements", "counts"),
    [
        ([], None),
        ([outcome("a", trusted=False)], None),
        ([outcome("a", error="verifier died")], None),
        ([outcome("a", metric="latency")], None),
        ([outcome("a"), outcome("b")], "b"),
        ([outcome("a", created_at=3.0), outcome("b", created_at=2.0)], "a"),
        ([outcome("a", source=VERIFIER), outcome("b", source=GRADER), outcome("c", source=USER)], "a"),
        ([outcome("a", source=USER), outcome("b", source=GRADER)], "b"),
        ([outcome("a", source=VERIFIER, trusted=False), outcome("b", source=USER)], "b"),
        ([outcome("a", created_at=9.0), outcome("b", supersedes="a")], "b"),
        # A user cannot strike out a verifier, nor an untrusted key a trusted one.
        ([outcome("a"), outcome("b", source=USER, supersedes="a")], "a"),
        ([outcome("a"), outcome("b", trusted=False, supersedes="a")], "a"),
        # A judge that takes its value back leaves the next source.
        ([outcome("u", source=USER), outcome("a"), outcome("b", error="wrong", supersedes="a")], "u"),
        ([outcome("a", supersedes="unknown")], "a"),
        ([outcome("a", trajectory_id="t"), outcome("b", trajectory_id="t", choice=3)], "b"),
        ([outcome("a"), outcome("b", supersedes="a"), outcome("c", supersedes="b")], "c"),
    ],
)
def test_the_outcome_that_counts(judgements: list[Outcome], counts: str | None) -> None:
    winner = outcomes.effective(judgements)
    assert (None if winner is None else winner.id) == counts


def test_outcomes_of_several_subjects_are_not_mixed() -> None:
    with pytest.raises(ValueError, match="one subject"):
        outcomes.effective([outcome("a", choice=0), outcome("b", choice=1)])


def test_the_feed_is_read_in_pages(store: Store) -> None:
    add_project(store)
    with store.write() as tx:
        for n in range(5):
            fields = {"trajectory_id": "t"} if n % 2 else {"completion_id": "c"}
            outcomes.record(tx, outcome(f"o{n}", **fields))
    seen, cursor = [], 0
    while True:
        with store.read() as tx:
            page = outcomes.judged(tx, cursor, 2)
        if not page:
            break
        seen += [o.id for _, o in page]
        cursor = page[-1][0]
    assert seen == [f"o{n}" for n in range(5)]


def test_the_feed_misses_nothing_while_many_write(store: Store) -> None:
    add_project(store)
    writers, each = 6, 40
    writing = threading.Event()
    writing.set()

    def write(writer: int) -> None:
        for n in range(each):
            with store.write() as tx:
                outcomes.record(tx, outcome(f"{writer}-{n}-a"))
                # Room between the number and the commit, where a lower seq could be overtaken.
                completions.insert(tx, completion(f"{writer}-{n}", trajectory_id=f"{writer}"))
                outcomes.record(tx, outcome(f"{writer}-{n}-b", trajectory_id=f"{writer}"))

    def read() -> list[str]:
        seen, cursor = [], 0
        while True:
            still_writing = writing.is_set()
            with store.read() as tx:
                page = outcomes.judged(tx, cursor, 7)
            if page:
                assert [seq for seq, _ in page] == sorted({seq for seq, _ in page})
                seen += [o.id for _, o in page]
                cursor = page[-1][0]
            elif not still_writing:
                return seen

    with ThreadPoolExecutor(writers + 2) as pool:
        readers = [pool.submit(read) for _ in range(2)]
        tasks = [pool.submit(write, writer) for writer in range(writers)]
        try:
            for task in tasks:
                task.result(DEADLINE_S)
        finally:
            writing.clear()
        orders = [reader.result(DEADLINE_S) for reader in readers]
    expected = {f"{w}-{n}-{part}" for w in range(writers) for n in range(each) for part in "ab"}
    assert orders[0] == orders[1]
    assert len(orders[0]) == len(expected)
    assert set(orders[0]) == expected


def test_a_later_number_waits_for_an_earlier_commit(postgresql_store: Store) -> None:
    store = postgresql_store
    add_project(store)

    def second() -> None:
        with store.write() as tx:
            outcomes.record(tx, outcome("second"))

    def blocked() -> bool:
        with store.read() as tx:
            waiting = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
            return bool(tx.execute(text(waiting)).scalar_one())

    with ThreadPoolExecutor(1) as pool:
        with store.write() as tx:
            outcomes.record(tx, outcome("first"))
            overtaking = pool.submit(second)
            until(lambda: blocked() or overtaking.done())
            with store.read() as reader:
                assert outcomes.judged(reader, 0, 10) == []
        overtaking.result(DEADLINE_S)
    with store.read() as tx:
        assert [o.id for _, o in outcomes.judged(tx, 0, 10)] == ["first", "second"]


def test_one_id_written_by_many_at_once_is_one_outcome(store: Store) -> None:
    add_project(store)

    def write(_: int) -> str:
        with store.write() as tx:
            return outcomes.record(tx, outcome("same")).id

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(write, range(12))) == ["same"] * 12
    with store.read() as tx:
        assert len(outcomes.judged(tx, 0, 20)) == 1
