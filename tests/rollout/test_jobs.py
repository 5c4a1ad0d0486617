"""The queue: one owner at a time, bounded attempts, no late finish."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from rollout import jobs
from rollout.jobs import JobState, LeaseLost
from rollout.store import Store

NOW = time.time() + 3600.0  # after everything that these tests enqueue


def test_jobs_are_taken_oldest_first_and_by_kind(store: Store) -> None:
    with store.write() as tx:
        first = jobs.enqueue(tx, "evaluate", {"policy": "p000002"})
        second = jobs.enqueue(tx, "evaluate", {})
        jobs.enqueue(tx, "verify", {})
        taken = [jobs.lease(tx, "evaluate", "a", 60, now=NOW) for _ in range(3)]
        assert taken[0] is not None
        assert taken[1] is not None
        assert [taken[0].id, taken[1].id, taken[2]] == [first, second, None]
        assert taken[0].spec == {"policy": "p000002"}
        assert jobs.lease(tx, "unknown", "a", 60, now=NOW) is None
        done = jobs.finish(tx, taken[0], {"passed": True})
    with store.read() as tx:
        assert jobs.get(tx, first) == done
        assert (done.state, done.result) == (JobState.DONE, {"passed": True})
        assert jobs.get(tx, 999) is None


def test_a_key_makes_enqueueing_idempotent(store: Store) -> None:
    def enqueue(_: int) -> int:
        with store.write() as tx:
            return jobs.enqueue(tx, "evaluate", {}, key="p000002")

    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(enqueue, range(8)))) == 1
    with store.write() as tx:
        assert jobs.enqueue(tx, "evaluate", {}, key="p000003") != jobs.enqueue(
            tx, "evaluate", {}, key="p000002"
        )
        assert jobs.lease(tx, "evaluate", "a", 60, now=NOW) is not None


def test_an_expired_lease_passes_on_and_its_first_owner_is_refused(store: Store) -> None:
    with store.write() as tx:
        jobs.enqueue(tx, "k", {})
        early = jobs.lease(tx, "k", "same-name", 60, now=NOW)
        assert early is not None
        assert jobs.lease(tx, "k", "same-name", 60, now=NOW + 59) is None
        renewed = jobs.renew(tx, early, 60, now=NOW + 50)
        assert jobs.lease(tx, "k", "same-name", 60, now=NOW + 100) is None
        late = jobs.lease(tx, "k", "same-name", 60, now=NOW + 111)
        assert late is not None
        assert late.attempts == 2
        for stale in (early, renewed):
            with pytest.raises(LeaseLost):
                jobs.finish(tx, stale)
            with pytest.raises(LeaseLost):
                jobs.renew(tx, stale, 60)
            with pytest.raises(LeaseLost):
                jobs.fail(tx, stale, "no", retry=True)
        assert jobs.finish(tx, late).state is JobState.DONE
        with pytest.raises(LeaseLost):
            jobs.finish(tx, late)


def test_a_finish_after_the_time_counts_while_nobody_took_over(store: Store) -> None:
    with store.write() as tx:
        jobs.enqueue(tx, "k", {})
        held = jobs.lease(tx, "k", "a", 60, now=NOW - 7200.0)
        assert held is None
        held = jobs.lease(tx, "k", "a", -1.0, now=NOW)
        assert held is not None
        assert jobs.finish(tx, held).state is JobState.DONE


def test_retries_are_bounded(store: Store) -> None:
    with store.write() as tx:
        job_id = jobs.enqueue(tx, "k", {}, max_attempts=2)
        first = jobs.lease(tx, "k", "a", 60, now=NOW)
        assert first is not None
        assert jobs.fail(tx, first, "socket", retry=True).state is JobState.QUEUED
        second = jobs.lease(tx, "k", "a", 60, now=NOW)
        assert second is not None
        failed = jobs.fail(tx, second, "socket again", retry=True)
        assert (failed.state, failed.error) == (JobState.FAILED, "socket again")
        assert jobs.lease(tx, "k", "a", 60, now=NOW) is None
        other = jobs.enqueue(tx, "k", {})
        third = jobs.lease(tx, "k", "a", 60, now=NOW)
        assert third is not None
        assert (other, third.id) == (third.id, other)
        assert jobs.fail(tx, third, "bad spec", retry=False).state is JobState.FAILED
        assert jobs.get(tx, job_id) == failed


def test_a_job_that_silences_its_owners_fails_after_its_attempts(store: Store) -> None:
    with store.write() as tx:
        job_id = jobs.enqueue(tx, "k", {}, max_attempts=2)
        later = jobs.enqueue(tx, "k", {})
        for attempt in range(2):
            taken = jobs.lease(tx, "k", "a", 10, now=NOW + 20 * attempt)
            assert taken is not None
            assert taken.id == job_id
        following = jobs.lease(tx, "k", "a", 10, now=NOW + 60)
        assert following is not None
        assert following.id == later
        silent = jobs.get(tx, job_id)
    assert silent is not None
    assert silent.state is JobState.FAILED
    assert "attempt 2 of 2" in (silent.error or "")


def test_a_delayed_retry_waits(store: Store) -> None:
    with store.write() as tx:
        jobs.enqueue(tx, "k", {})
        first = jobs.lease(tx, "k", "a", 60, now=NOW)
        assert first is not None
        jobs.fail(tx, first, "busy", retry=True, delay_s=7200.0)
        assert jobs.lease(tx, "k", "a", 60, now=NOW) is None
        assert jobs.lease(tx, "k", "a", 60, now=NOW + 7200.0) is not None


def test_no_job_has_two_owners_at_once(store: Store) -> None:
    count, owners = 60, 5
    with store.write() as tx:
        expected = [jobs.enqueue(tx, "k", {"n": n}) for n in range(count)]

    def work(owner: int) -> list[int]:
        done: list[int] = []
        while True:
            with store.write() as tx:
                job = jobs.lease(tx, "k", f"owner-{owner}", 60)
            if job is None:
                return done
            assert job.attempts == 1
            with store.write() as tx:
                jobs.finish(tx, job)
            done.append(job.id)

    with ThreadPoolExecutor(owners) as pool:
        shares = list(pool.map(work, range(owners)))
    assert sorted(job_id for share in shares for job_id in share) == expected


def test_a_lease_in_progress_is_skipped_not_waited_for(postgresql_store: Store) -> None:
    with postgresql_store.write() as tx:
        first, second = (jobs.enqueue(tx, "k", {}) for _ in range(2))
    with postgresql_store.write() as holding:
        held = jobs.lease(holding, "k", "a", 60)
        with postgresql_store.write() as tx:
            other = jobs.lease(tx, "k", "b", 60)
        assert held is not None
        assert other is not None
        assert (held.id, other.id) == (first, second)
