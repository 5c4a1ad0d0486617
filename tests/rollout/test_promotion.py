"""The gate's rule, and candidates carried through it on a real store by a real judge."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter, defaultdict
from collections.abc import Sequence

import pytest
from sqlalchemy import text, update
from sqlalchemy.exc import OperationalError

from rollout import jobs, policies
from rollout.evals import suites
from rollout.evals.paired import Comparison, Result, compare
from rollout.judge import JOB, REPLICA_GONE_S, Judge
from rollout.promotion import Gate, JudgeConfig, decide, looks
from rollout.records import Placement, PolicyState
from rollout.store import Store, evaluations, placements, tables
from rollout.tasks.world import World
from tests.fixtures import rows
from tests.rollout.scripted import TIERS, Service

FAST = JudgeConfig(gate_tasks=32, gate_max_tasks=96, lease_s=30.0, poll_s=0.01)


def results(successes: Sequence[bool | None]) -> list[Result]:
    return [
        Result(
            task=f"t{i}",
            family=f"f{i % 5}",
            success=success,
            fault=None if success is not None else "engine gone",
            reason="",
            turns=1,
            completion_tokens=9,
        )
        for i, success in enumerate(successes)
    ]


def comparison(wins: int, losses: int, n: int) -> Comparison:
    a = [True] * wins + [False] * losses + [True] * (n - wins - losses)
    b = [False] * wins + [True] * losses + [True] * (n - wins - losses)
    return compare("p2", results(a), "p1", results(b))


def test_looks_end_at_the_most_tasks() -> None:
    assert looks(JudgeConfig()) == [64, 128, 192]
    assert looks(JudgeConfig(gate_tasks=50, gate_max_tasks=120)) == [50, 100, 120]
    assert looks(JudgeConfig(gate_tasks=64, gate_max_tasks=64)) == [64]


@pytest.mark.parametrize(
    ("wins", "losses", "look", "passes"),
    [
        (14, 3, 0, True),
        (5, 4, 0, None),
        (3, 5, 0, False),
        (5, 4, 2, False),
        (30, 15, 2, True),
        (0, 0, 0, None),
    ],
)
def test_the_rule(wins: int, losses: int, look: int, passes: bool | None) -> None:
    config = JudgeConfig()
    decision = decide(comparison(wins, losses, looks(config)[look]), look, config)
    assert decision.passes is passes
    assert "p2" in decision.reason
    assert "p1" in decision.reason


def test_a_gain_below_the_smallest_does_not_pass() -> None:
    config = JudgeConfig(min_difference=0.3)
    assert decide(comparison(14, 3, 64), 0, config).passes is None


def test_no_better_policies_pass_as_rarely_as_promised() -> None:
    rng = random.Random(3)
    config = JudgeConfig()
    passed = 0
    for _ in range(200):
        draws = [rng.choices("wl=", [0.12, 0.12, 0.76])[0] for _ in range(config.gate_max_tasks)]
        for look, n in enumerate(looks(config)):
            seen = draws[:n]
            decision = decide(comparison(seen.count("w"), seen.count("l"), n), look, config)
            if decision.passes is not None:
                passed += decision.passes
                break
    assert passed / 200 <= 1 - config.gate_confidence


def test_pairs_without_a_judgement_are_left_out_and_counted() -> None:
    made = compare("p2", results([True, None, True]), "p1", results([False, True, None]))
    assert (made.counts.n, made.faults, made.counts.a_only) == (1, 2, 1)
    with pytest.raises(ValueError, match="different tasks"):
        compare("p2", results([True]), "p1", [])


def test_gate_tasks_are_not_sealed_and_differ_between_policies() -> None:
    sealed = {suites.question(task) for task in suites.sealed()}
    assert len(sealed) == suites.SEALED_SIZE
    first, second = suites.gate("p000002", 192), suites.gate("p000003", 192)
    assert first == suites.gate("p000002", 192)
    assert all(task.split == "held_out" for task in first)
    assert not sealed & {suites.question(task) for task in first + second}
    assert {task.id for task in first} != {task.id for task in second}


@pytest.fixture
def deployed(sqlite_store: Store) -> Store:
    """A store with a base, a promoted warm start, and two replicas that hold whatever is addressable."""
    with sqlite_store.write() as tx:
        policies.register(tx, rows.manifest("p000001"), "/p1", state=PolicyState.PROMOTED, reason="initial")
        for replica, tier in (("standard-0", "standard"), ("fast-0", "fast")):
            placements.heartbeat(tx, replica, tier, "i1", True)
    return sqlite_store


def publish(store: Store, policy_id: str, *held_by: str) -> None:
    with store.write() as tx:
        policies.register(tx, rows.manifest(policy_id, parent="p000001"), f"/{policy_id}")
        for replica in held_by or ("standard-0", "fast-0"):
            placements.set_placement(tx, replica, "i1", policy_id, Placement.VERIFIED)


def judge(store: Store, api: Service, config: JudgeConfig = FAST) -> Judge:
    client = api.client()
    gate = Gate(store=store, client=client, config=config, model="ratchet", tiers=TIERS)
    return Judge(store=store, client=client, gate=gate)


def state(store: Store, policy_id: str) -> tuple[PolicyState, str | None]:
    with store.read() as tx:
        policy = policies.get(tx, policy_id)
    assert policy is not None
    return policy.state, policy.reason


def service(store: Store, candidate: float) -> Service:
    skills = {"p000001": 0.4, "p000002": candidate, "p000003": candidate}
    return Service(skills=skills, promoted="p000001", store=store)


def rounds(store: Store, api: Service, number: int, config: JudgeConfig = FAST) -> None:
    async def play() -> None:
        made = judge(store, api, config)
        for _ in range(number):
            await made.round()

    asyncio.run(play())


def test_a_better_candidate_is_promoted_with_evidence(deployed: Store) -> None:
    publish(deployed, "p000002")
    api = service(deployed, 0.8)
    rounds(deployed, api, 2)
    assert state(deployed, "p000002")[0] is PolicyState.PROMOTED
    assert state(deployed, "p000001")[0] is PolicyState.RETIRED
    with deployed.read() as tx:
        assert policies.serving(tx).promoted == "p000002"
        (evaluation,) = evaluations.list_evaluations(tx, "p000002")
        passed = policies.history(tx, "p000002")[-2]
    assert (evaluation.baseline_id, evaluation.suite) == ("p000001", "gate")
    assert passed.to is PolicyState.CANARY
    assert passed.evidence is not None
    assert passed.evidence["evaluation"] == evaluation.id
    # Stopped at the first look, every task asked of both, all at the priority of evaluations and not stored.
    assert evaluation.n == 32
    assert all(body["store"] is False for body in api.bodies)
    assert all(headers["x-ratchet-priority"] == "evaluation" for headers in api.headers)
    assert passed.evidence["tiers"] == list(TIERS)


def test_each_tier_gets_its_share_of_whole_pairs(deployed: Store) -> None:
    publish(deployed, "p000002")
    api = service(deployed, 0.8)
    rounds(deployed, api, 1)
    asked: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for body in api.bodies:
        asked[body["metadata"]["task"]].add((body["service_tier"], body["model"]))
    shares = Counter(tier for sides in asked.values() for tier in {tier for tier, _ in sides})
    assert shares == {"standard": 16, "fast": 16}
    assert all(len({model for _, model in sides}) == 2 for sides in asked.values())


@pytest.mark.parametrize("skill", [0.4, 0.1])
def test_a_candidate_that_is_no_better_is_rejected_with_figures(deployed: Store, skill: float) -> None:
    publish(deployed, "p000002")
    rounds(deployed, service(deployed, skill), 2)
    rejected, reason = state(deployed, "p000002")
    assert rejected is PolicyState.REJECTED
    assert reason is not None
    assert "paired tasks" in reason
    assert state(deployed, "p000001")[0] is PolicyState.PROMOTED


def test_a_candidate_waits_until_every_replica_holds_it(deployed: Store) -> None:
    publish(deployed, "p000002", "standard-0")
    api = service(deployed, 0.9)
    rounds(deployed, api, 2)
    assert state(deployed, "p000002")[0] is PolicyState.CANDIDATE
    assert not api.bodies


def test_a_replica_that_is_gone_holds_no_candidate_up(
    deployed: Store, caplog: pytest.LogCaptureFixture
) -> None:
    publish(deployed, "p000002", "standard-0")
    with deployed.write() as tx:
        gone = time.time() - REPLICA_GONE_S - 1
        tx.execute(update(tables.replicas).where(tables.replicas.c.id == "fast-0").values(seen_at=gone))
    rounds(deployed, service(deployed, 0.8), 3)
    assert state(deployed, "p000002")[0] is PolicyState.PROMOTED
    told = [record.getMessage() for record in caplog.records if "fast-0" in record.getMessage()]
    assert told == ["fast-0 was not seen for 60 s: candidates need not be on it"]


def test_while_no_replica_is_there_nothing_is_judged(deployed: Store) -> None:
    publish(deployed, "p000002")
    with deployed.write() as tx:
        tx.execute(update(tables.replicas).values(seen_at=0.0))
    rounds(deployed, service(deployed, 0.8), 1)
    assert state(deployed, "p000002")[0] is PolicyState.CANDIDATE


def test_the_newest_candidate_supersedes_older_ones(deployed: Store) -> None:
    publish(deployed, "p000002")
    publish(deployed, "p000003")
    rounds(deployed, service(deployed, 0.8), 2)
    assert state(deployed, "p000003")[0] is PolicyState.PROMOTED
    assert state(deployed, "p000002") == (
        PolicyState.REJECTED,
        "superseded by p000003 before its evaluation began",
    )


def test_an_evaluation_that_a_dead_judge_left_is_taken_up_again(deployed: Store) -> None:
    publish(deployed, "p000002")
    with deployed.write() as tx:
        jobs.enqueue(tx, JOB, {"policy": "p000002"}, key="p000002")
        # As a judge leaves it that is killed right after its policy entered the gate.
        assert jobs.lease(tx, JOB, "dead", -1.0) is not None
        policies.transition(tx, "p000002", PolicyState.CANDIDATE, PolicyState.GATE, actor="judge")
    rounds(deployed, service(deployed, 0.8), 2)
    assert state(deployed, "p000002")[0] is PolicyState.PROMOTED


def test_a_policy_that_passed_is_promoted_by_the_next_judge(deployed: Store) -> None:
    publish(deployed, "p000002")
    with deployed.write() as tx:
        policies.transition(tx, "p000002", PolicyState.CANDIDATE, PolicyState.GATE, actor="judge")
        evidence = {"baseline": "p000001"}
        policies.transition(
            tx, "p000002", PolicyState.GATE, PolicyState.CANARY, actor="judge", evidence=evidence
        )
    rounds(deployed, service(deployed, 0.8), 1)
    assert state(deployed, "p000002")[0] is PolicyState.PROMOTED


def test_a_lost_race_rejects_with_the_reason(deployed: Store) -> None:
    publish(deployed, "p000002")
    with deployed.write() as tx:
        policies.transition(tx, "p000002", PolicyState.CANDIDATE, PolicyState.GATE, actor="judge")
        evidence = {"baseline": "p000000"}
        policies.transition(
            tx, "p000002", PolicyState.GATE, PolicyState.CANARY, actor="judge", evidence=evidence
        )
    rounds(deployed, service(deployed, 0.8), 1)
    rejected, reason = state(deployed, "p000002")
    assert rejected is PolicyState.REJECTED
    assert reason is not None
    assert reason.startswith("beat p000000, which no longer serves")


def test_a_service_that_fails_is_not_held_against_the_candidate(deployed: Store) -> None:
    publish(deployed, "p000002")
    api = service(deployed, 0.8)
    api.failing = 10
    rounds(deployed, api, 1)
    assert state(deployed, "p000002")[0] is PolicyState.GATE
    with deployed.write() as tx:
        # The delay before the next attempt is over.
        job = jobs.lease(tx, JOB, "me", 1.0, now=time.time() + 60)
        assert job is not None
        assert "no engine" in (job.error or "")
        jobs.fail(tx, job, "not now", retry=True)
    rounds(deployed, api, 2)
    assert state(deployed, "p000002")[0] is PolicyState.PROMOTED


def test_an_evaluation_that_dies_is_tried_again_with_its_reason(
    deployed: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    publish(deployed, "p000002")

    def die(world: World, name: str, arguments: object) -> dict[str, object]:
        raise ZeroDivisionError("by design")

    with monkeypatch.context() as broken:
        broken.setattr(World, "execute", die)
        rounds(deployed, service(deployed, 0.8), 1)
    assert state(deployed, "p000002")[0] is PolicyState.GATE
    with deployed.write() as tx:
        job = jobs.lease(tx, JOB, "me", 1.0, now=time.time() + 60)
        assert job is not None
        assert job.error == "ZeroDivisionError: by design"
        jobs.fail(tx, job, "not now", retry=True)
    (logged,) = [record for record in caplog.records if record.exc_info]
    assert "in die" in str(logged.exc_text)
    rounds(deployed, service(deployed, 0.8), 2)
    assert state(deployed, "p000002")[0] is PolicyState.PROMOTED


def test_a_broken_store_ends_the_judge(deployed: Store) -> None:
    publish(deployed, "p000002")
    with deployed.write() as tx:
        tx.execute(text("DROP TABLE evaluations"))
    with pytest.raises(OperationalError, match="evaluations"):
        rounds(deployed, service(deployed, 0.8), 1)


def test_a_candidate_that_can_never_be_judged_is_rejected(deployed: Store) -> None:
    publish(deployed, "p000002")
    api = service(deployed, 0.8)
    with deployed.write() as tx:
        jobs.enqueue(tx, JOB, {"policy": "p000002"}, key="p000002", max_attempts=1)
    api.failing = 10_000
    rounds(deployed, api, 1)
    rejected, reason = state(deployed, "p000002")
    assert rejected is PolicyState.REJECTED
    assert reason is not None
    assert "no engine" in reason


def test_a_judge_told_to_stop_leaves_the_job_to_the_next(deployed: Store) -> None:
    publish(deployed, "p000002")
    api = service(deployed, 0.8)

    async def stop_midway() -> None:
        running = asyncio.create_task(judge(deployed, api).run())
        while len(api.bodies) < 5:
            await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(stop_midway())
    assert state(deployed, "p000002")[0] is PolicyState.GATE
    rounds(deployed, api, 2)
    assert state(deployed, "p000002")[0] is PolicyState.PROMOTED
